"""The panel, rendered at several sizes."""

import io
import re
from contextlib import contextmanager

import pytest
from monitor_parts import panel_of
from rich.console import Console

from trawl import Collector, MultiSyncCollector
from trawl.backends import InlineBackend
from trawl.extras.monitors.panel import table_lines, worker_rows
from trawl.extras.monitors.progress_state import ProgressState
from trawl.observe import CollectionProgress
from trawl.observe.bottleneck import bottleneck_of
from trawl.testing import NumberedEnv

LONG = "my_company.environments.manufacturing.lines:AssemblyLineWithManyStations-v12"


class InlineCollector(MultiSyncCollector):
    """Its workers are in this process, so that there may be many."""

    def _new_backend(self):
        return InlineBackend()


@contextmanager
def running(collector, title="a title", batches=3, **options):
    """A progress on a terminal, after some batches."""
    options = {"width": 100, "height": 40, "force_terminal": True} | options
    console = Console(file=io.StringIO(), **options)
    with collector, CollectionProgress(collector, title, console) as progress:
        for _, batch in zip(range(batches), collector, strict=False):
            progress.update(batch)
        yield progress


def lines_of(progress, width):
    """The lines of the panel, without trailing blanks."""
    return [line.rstrip() for line in panel_of(progress, width).splitlines()]


def alone(**options):
    return Collector("Pendulum-v1", **{"frames_per_batch": 100, "total_frames": 1000} | options)


def many(count, **options):
    options = {"frames_per_batch": 10 * count, "total_frames": 100 * count} | options
    return InlineCollector([NumberedEnv] * count, **options)


@pytest.mark.parametrize("workers", [0, 2, 32])
@pytest.mark.parametrize("batches", [0, 3, 10])
def test_every_line_fits(workers, batches):
    collector = many(workers) if workers else alone()
    with running(collector, LONG, batches) as progress:
        panels = {width: lines_of(progress, width) for width in (40, 60, 80, 100, 200)}
    for width, lines in panels.items():
        assert max(map(len, lines)) <= width
        text = "\n".join(lines)
        assert f"{100 * batches * max(1, workers) // (10 if workers else 1):,}/" in text
        assert f"{10 * batches}%" in lines[0]
        assert "my_comp" in lines[0]
        assert ("worker 1" in text) == bool(workers)
        assert ("limits the rate" in " ".join(lines)) == bool(batches)


def test_a_row_has_what_there_is_room_for():
    with running(many(3)) as progress:
        panels = {width: lines_of(progress, width) for width in (60, 70, 120)}
    for (width, lines), expected in zip(panels.items(), (3, 4, 5), strict=True):
        (heading,) = [line for line in lines if "frames/s" in line and "/300" not in line]
        titles = ("env", "policy", "idle", "overhead", "weights")
        assert [name in heading for name in titles] == [n < expected for n in range(5)]
        row = next(line for line in lines if line.startswith("worker 2"))
        shares = re.findall(r"(\d+)%", row)
        assert len(shares) == expected
        assert width < 120 or 97 <= sum(map(int, shares)) <= 103
        assert "".join(lines).count("all  ") == 1


@pytest.mark.parametrize("height", [5, 8, 12, 20, 30, 60])
def test_workers_that_do_not_fit_are_summed_up(height):
    with running(many(32), height=height) as progress:
        lines = lines_of(progress, 100)
        assert len(lines) <= height
        own = sum(line.startswith("worker ") for line in lines)
        more = [line for line in lines if re.match(r"\d+ more ", line)]
    if height == 60:
        assert (own, more) == (32, [])
    elif height >= 12:
        assert own > 0
        assert more[0].startswith(f"{32 - own} more ")
    assert lines[0].startswith("a title")


class WithDeadWorkers(InlineCollector):
    """Two of its workers have died, and have no replacement yet."""

    def stats(self, *view):
        return super().stats(*view) | {"worker_3/alive": False, "worker_5/alive": False}


@pytest.mark.parametrize(
    ("room", "labels", "note"),
    [
        (1, ["6 more"], "mean, 2 dead"),
        (3, ["worker 3", "5 more", "all"], "mean, 1 dead"),
        (5, ["worker 0", "worker 3", "worker 5", "3 more", "all"], "mean"),
    ],
)
def test_dead_workers_have_a_row_in_preference_to_others(room, labels, note):
    with WithDeadWorkers([NumberedEnv] * 6, frames_per_batch=60, total_frames=600) as collector:
        state = ProgressState(collector, bottleneck_of)
        rows = worker_rows(state, room)
    assert [row.label for row in rows] == labels
    assert [row.label for row in rows if row.dead] == [
        name for name in labels if name in ("worker 3", "worker 5")
    ]
    (more,) = [row for row in rows if " more" in row.label]
    assert more.note == note
    cells = [line.plain for line in table_lines(rows, 100)]
    assert sum(" dead " in line for line in cells[1:]) == len([row for row in rows if row.dead])


def test_an_endless_collection_has_no_bar_and_no_time_left():
    with running(many(2, total_frames=-1)) as progress:
        lines = lines_of(progress, 80)
    assert lines[0] == "a title"
    assert lines[1].startswith("60 frames in ")
    assert " left" not in "".join(lines)
    assert "/60" not in lines[1]


def test_the_time_left_is_shown_until_the_end_of_a_collection_that_went_on():
    with alone() as collector:
        for _ in range(5):
            collector.next()
        console = Console(file=io.StringIO(), force_terminal=True)
        with CollectionProgress(collector, console=console) as progress:
            assert progress.throughput == [(0.0, 0)]
            for count in range(6, 11):
                progress.update(collector.next())
                lines = lines_of(progress, 80)
                assert f"{count}00/1,000 frames" in "".join(lines) or count == 10
                assert lines[0].endswith(" left" if count < 10 else "100%")
                # The rate is that of its own frames.
                assert progress.throughput[-1][1] == 100 * (count - 5)
            assert progress.rate == pytest.approx(500 / progress.seconds)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_that_cant_show_bars_gets_lines(encoding):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    console = Console(file=file, force_terminal=True, width=80, height=20)
    with many(32) as collector, CollectionProgress(collector, f"é{LONG}", console) as progress:
        for batch in collector:
            progress.update(batch)
    written = file.buffer.getvalue()
    assert written.isascii() == (encoding != "utf-8")
    assert (b"\x1b[?25l" in written) == (encoding == "utf-8")  # hides the cursor
    assert b"3,200/3,200 frames" in written
