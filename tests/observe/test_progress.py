import contextlib
import io
import os
import signal
import sys
import threading

import gymnasium
import numpy as np
import nursery
import pytest
from rich.console import Console

from trawl import Collector, MultiAsyncCollector, MultiSyncCollector
from trawl.backends import InlineBackend
from trawl.observe import Bottleneck, CollectionProgress
from trawl.observe.formats import short
from trawl.testing import NumberedEnv


def terminal_of(text, terminal=True):
    return Console(file=text, force_terminal=terminal, width=100)


def shown(cls, terminal, **options):
    """What is shown of a collection on a terminal, or elsewhere; and the progress."""
    output = io.StringIO()
    with (
        cls("CartPole-v1", frames_per_batch=30, total_frames=1200, **options) as collector,
        CollectionProgress(collector, "a title", terminal_of(output, terminal)) as progress,
    ):
        for batch in collector:
            progress.update(batch)
    assert progress.episodes.frames == 1200
    assert progress.episodes.count > 10
    assert progress.seconds > 0
    assert progress.rate > 0
    return output.getvalue(), progress


def test_without_a_terminal_there_are_few_plain_lines():
    text, progress = shown(Collector, False)
    lines = text.splitlines()
    # 40 batches, but a line for each tenth only.
    assert len(lines) == 10
    assert "\x1b" not in text
    assert lines[-1].startswith("a title  1,200/1,200 frames  ")
    # Their shares are those of the panel.
    stats = progress.stats
    shares = {part: stats[f"{part}_share"] for part in ("env", "policy", "overhead")}
    assert (
        ", ".join(f"{part} {share:.0%}" for part, share in shares.items()) in progress.figures()[1]
    )
    for words in ("frames/s", "env ", "policy ", "episodes", "return ", "length "):
        assert words in lines[-1]
    assert "  bottleneck " in lines[-1]


def test_a_caller_that_limits_the_rate_has_its_own_name():
    output = io.StringIO()
    with (
        Collector("CartPole-v1", frames_per_batch=30, total_frames=60) as collector,
        CollectionProgress(
            collector,
            console=Console(file=output),
            find_bottleneck=lambda stats: Bottleneck("learner", 0.9, "Writing limits the rate."),
            learner="writing",
        ) as progress,
    ):
        for batch in collector:
            progress.update(batch)
    assert output.getvalue().splitlines()[-1].endswith("  bottleneck writing")
    assert progress.bottleneck.part == "learner"


def test_on_a_terminal_a_bar_shows_the_same():
    text, _ = shown(Collector, True)
    for words in ("a title", "1,200/1,200 frames", "100%", "frames/s", "episodes", "return "):
        assert words in text
    assert "\x1b" in text


def test_an_endless_collection_shows_no_total():
    output = io.StringIO()
    with Collector("CartPole-v1", frames_per_batch=25) as collector:
        progress = CollectionProgress(collector, console=Console(file=output, force_terminal=True))
        with progress:
            progress.update(next(iter(collector)))
    assert "25 frames" in output.getvalue()
    assert "/" not in output.getvalue().split(" frames ")[0]


def test_numbers_are_short():
    assert short(123456.7) == "123,457"
    assert short(float("inf")) == "inf"


# --- with workers


class WithPid(gymnasium.Env):
    """Its observations tell the process that it is in."""

    observation_space = gymnasium.spaces.Box(0, 2**31, (1,), "float64")
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([os.getpid()], "float64"), {}

    def step(self, action):
        return np.array([os.getpid()], "float64"), 0.0, False, False, {}


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_on_a_terminal_each_worker_has_a_line(cls):
    options = {"num_workers": 3, "start_method": "inline"}
    text, progress = shown(cls, True, **options)
    for words in ("1,200/1,200 frames", "worker 0", "worker 1", "worker 2"):
        assert words in text
    numbers = [int(line[1].split()[0]) for line in progress.workers()]
    assert sum(numbers) == 1200
    assert all(numbers)
    for line in progress.workers():
        assert line[2].endswith(" frames/s")
        assert line[2] != "0 frames/s"
        assert line[3].startswith("env ")
        assert line[4] == ""
    text, _ = shown(cls, False, **options)
    assert len(text.splitlines()) == 10
    assert "worker" not in text
    assert "restart" not in text


@pytest.mark.filterwarnings("ignore:worker 1 was killed:RuntimeWarning")
def test_a_worker_that_was_replaced_is_shown():
    panel, lines = io.StringIO(), io.StringIO()
    with (
        MultiSyncCollector(
            WithPid, num_workers=3, frames_per_batch=30, total_frames=300
        ) as collector,
        CollectionProgress(collector, "a title", terminal_of(lines, False)) as plain,
        CollectionProgress(collector, "a title", terminal_of(panel)) as progress,
    ):
        for batch in collector:
            for one in (plain, progress):
                one.update(batch)
            if progress.episodes.frames == 120:
                os.kill(int(batch["observation"][1, 0, 0]), signal.SIGKILL)
    assert "restarts" in panel.getvalue()
    assert "1 restart" in lines.getvalue()
    for one in (plain, progress):
        assert [line[4] for line in one.workers()] == ["", "1 restart", ""]
        assert "1 restart" in one.figures()
        assert [line[2] for line in one.workers()] != ["dead"] * 3
        one.update(batch)
        assert [line[2] for line in one.workers()] == ["dead"] * 3


# --- what an update costs


class CountedCollector(MultiSyncCollector):
    """Counts how often its statistics are taken: by the thread that collects, and by others."""

    taken = elsewhere = 0

    def _new_backend(self):
        return InlineBackend()

    def stats(self, *view):
        if threading.current_thread() is threading.main_thread():
            self.taken += 1
        else:
            self.elsewhere += 1
        return super().stats(*view)


class CountedProgress(CollectionProgress):
    """Counts the panels that it renders."""

    panels = 0

    def render(self):
        self.panels += 1
        return super().render()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_statistics_are_not_taken_with_every_batch(terminal):
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=terminal, width=100)
    options = {"num_workers": 2, "frames_per_batch": 20, "total_frames": 8000}
    # An iteration of the collector takes none.
    with (
        CountedCollector(NumberedEnv, **options) as collector,
        CountedProgress(collector, "a title", console) as progress,
    ):
        for batch in collector:
            progress.update(batch)
        lines = 0 if terminal else printed.getvalue().count("\n")
        # Four hundred batches: once for each line, once a second, and the first and the last time.
        assert max(2, lines) <= collector.taken + collector.elsewhere
        assert collector.taken <= lines + 2 + int(progress.seconds)
    # A thread renders panels, a few times a second.
    assert collector.elsewhere <= progress.panels
    if not terminal:
        assert 10 <= lines <= 11 + progress.seconds / 30
    assert progress.stats["frames"] == 8000
    assert progress.stats["workers_alive"] == 2
    # The throughput has a bounded number of points, however many batches there are.
    assert 100 <= len(progress.throughput) <= 200
    assert progress.throughput[-1][1] == 8000


def test_it_shows_the_frames_of_every_batch():
    """Whether or not a thread draws a panel before the latest batch is counted."""
    with Collector("CartPole-v1", frames_per_batch=25, total_frames=1000) as collector:
        progress = CollectionProgress(collector, console=Console(file=io.StringIO()))
        for number, batch in enumerate(collector, 1):
            if number % 2:
                progress.render()
            progress.update(batch)
            assert progress.stats["frames"] == progress.throughput[-1][1] == 25 * number
    assert [frames for _, frames in progress.throughput] == list(range(0, 1001, 25))


def test_batches_that_were_not_shown_are_counted_at_the_end():
    options = {"frames_per_batch": 25, "total_frames": 100}
    with Collector("CartPole-v1", **options) as collector:
        progress = CollectionProgress(collector, console=Console(file=io.StringIO()))
        with progress:
            for number, batch in enumerate(collector):
                if number != 1:
                    progress.update(batch)
    assert progress.stats["frames"] == 100


def test_the_bottleneck_is_that_of_the_collector_unless_another_is_given():
    options = {"frames_per_batch": 100, "total_frames": 300}
    with Collector("CartPole-v1", **options) as collector:
        progress = CollectionProgress(collector, console=Console(file=io.StringIO()))
        own = CollectionProgress(
            collector,
            console=Console(file=io.StringIO()),
            find_bottleneck=lambda stats: Bottleneck("policy", 0.5, f"{stats['frames']} frames"),
        )
        assert progress.bottleneck.part == "unknown"
        for batch in collector:
            progress.update(batch)
            own.update(batch)
        assert progress.bottleneck == collector.bottleneck()
        assert str(own.bottleneck) == "300 frames"


# --- the terminal stays sane


class InterruptedFile(io.StringIO):
    """A terminal on which Ctrl-C arrives while something certain is written to it."""

    def __init__(self, words):
        super().__init__()
        self.words = words

    def write(self, text):
        super().write(text)
        if self.words in text:
            self.words = "\0"
            raise KeyboardInterrupt
        return len(text)


@pytest.mark.parametrize("words", ["\x1b[?25l", "frames/s", "\x1b[?25h", "300/300"])
def test_ctrl_c_leaves_the_cursor_visible(words):
    file = InterruptedFile(words)
    before = sys.stderr
    with (
        Collector("CartPole-v1", frames_per_batch=100, total_frames=300) as collector,
        contextlib.suppress(KeyboardInterrupt),
        CollectionProgress(
            collector, "a title", Console(file=file, force_terminal=True, width=100)
        ) as progress,
    ):
        for batch in collector:
            progress.update(batch)
    assert file.words == "\0", "it was not written"
    text = file.getvalue()
    assert text.rfind("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert sys.stderr is before


def test_color_that_is_forced_makes_no_panel_in_a_file(tmp_path):
    code = (
        "from trawl import Collector\n"
        "from trawl.observe import CollectionProgress\n"
        "with (\n"
        "    Collector('CartPole-v1', frames_per_batch=100, total_frames=300) as collector,\n"
        "    CollectionProgress(collector) as progress,\n"
        "):\n"
        "    for batch in collector:\n"
        "        progress.update(batch)\n"
    )
    done = nursery.run(code, env={"FORCE_COLOR": "1"})
    assert done.returncode == 0
    assert "\x1b" not in done.stderr
    assert len(done.stderr.splitlines()) == 3
