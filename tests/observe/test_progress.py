import contextlib
import io
import os
import signal
import sys
import threading

import nursery
import pytest
from monitor_parts import panel_of
from rich.console import Console

from trawl import Collector, MultiAsyncCollector, MultiSyncCollector
from trawl.backends import InlineBackend
from trawl.observe import Bottleneck, CollectionProgress
from trawl.testing import NumberedEnv


def terminal_of(text, terminal=True):
    return Console(file=text, force_terminal=terminal, width=100)


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_a_panel_on_a_terminal_and_few_plain_lines_elsewhere_show_the_same(cls):
    workers = 0 if cls is Collector else 3
    options = {"num_workers": workers, "start_method": "inline"} if workers else {}
    panel, printed = io.StringIO(), io.StringIO()
    with (
        cls("CartPole-v1", frames_per_batch=30, total_frames=1200, **options) as collector,
        CollectionProgress(collector, "a title", terminal_of(panel)) as progress,
        CollectionProgress(collector, "a title", terminal_of(printed, False)) as plain,
    ):
        for batch in collector:
            progress.update(batch)
            plain.update(batch)
    for one in (progress, plain):
        assert one.episodes.frames == 1200
        assert one.episodes.count > 10
        assert one.seconds > 0
        assert one.rate > 0
    text, lines = panel.getvalue(), printed.getvalue().splitlines()
    names = [f"worker {index}" for index in range(workers)]
    words = ("a title", "1,200/1,200 frames", "100%", "frames/s", "episodes", "return ", *names)
    assert [word for word in words if word not in text] == []
    assert "\x1b" in text
    # 40 batches, but a line for each tenth only.
    assert len(lines) == 10
    assert "\x1b" not in printed.getvalue()
    assert lines[-1].startswith("a title  1,200/1,200 frames  ")
    words = ("frames/s", "env ", "policy ", "episodes", "return ", "length ", "  bottleneck ")
    assert [word for word in words if word not in lines[-1]] == []
    assert "worker" not in printed.getvalue()
    assert "restart" not in printed.getvalue()
    # Their shares are those of the panel.
    shares = {part: plain.stats[f"{part}_share"] for part in ("env", "policy", "overhead")}
    told = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
    assert told in plain.figures()[1]
    rows = progress.workers()
    assert sum(int(row[1].split()[0]) for row in rows) == (1200 if workers else 0)
    assert len(rows) == workers
    for row in rows:
        assert not row[1].startswith("0 ")
        assert row[2].endswith(" frames/s")
        assert row[2] != "0 frames/s"
        assert row[3].startswith("env ")
        assert row[4] == ""


@pytest.mark.filterwarnings("ignore:worker 1 was killed:RuntimeWarning")
def test_a_worker_that_was_replaced_is_shown():
    panel, lines = io.StringIO(), io.StringIO()
    options = {"num_workers": 3, "frames_per_batch": 30, "total_frames": 300}
    with (
        MultiSyncCollector(NumberedEnv, **options) as collector,
        CollectionProgress(collector, "a title", terminal_of(lines, False)) as plain,
        CollectionProgress(collector, "a title", terminal_of(panel)) as progress,
    ):
        for batch in collector:
            for one in (plain, progress):
                one.update(batch)
            if progress.episodes.frames == 120:
                assert "restarts" not in panel_of(progress)
                os.kill(collector._pool.slots[1].worker.pid, signal.SIGKILL)
        shown = panel_of(progress).splitlines()
    (heading,) = [line for line in shown if "restarts" in line]
    place = heading.index("restarts") + len("restarts")
    for name, restarted in (("worker 0", False), ("worker 1", True), ("all", True)):
        (row,) = [line for line in shown if line.startswith(name)]
        assert row[:place].endswith(" 1") == restarted
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


def test_the_bottleneck_is_that_of_the_collector_unless_another_is_given():
    printed = io.StringIO()

    def find(stats):
        return Bottleneck("learner", 0.5, f"{stats['frames']} frames")

    with Collector("CartPole-v1", frames_per_batch=100, total_frames=300) as collector:
        progress = CollectionProgress(collector, console=Console(file=io.StringIO()))
        own = CollectionProgress(
            collector, console=Console(file=printed), find_bottleneck=find, learner="writing"
        )
        assert progress.bottleneck.part == "unknown"
        with own:
            for number, batch in enumerate(collector):
                progress.update(batch)
                # A batch that was not shown is counted with the next.
                if number != 1:
                    own.update(batch)
        assert progress.bottleneck == collector.bottleneck()
    assert (own.stats["frames"], str(own.bottleneck)) == (300, "300 frames")
    # A caller that limits the rate has its own name.
    assert printed.getvalue().splitlines()[-1].endswith("  bottleneck writing")


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
