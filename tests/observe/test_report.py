"""The table of a collector's rates and shares."""

import io

from rich.console import Console

from trawl import Collector, MultiSyncCollector
from trawl.observe import Report
from trawl.testing import NumberedEnv


def test_a_collector_has_one_row():
    with Collector(NumberedEnv, frames_per_batch=10, total_frames=40) as collector:
        assert str(collector.report()) == "No batch has been collected yet."
        for _ in collector:
            pass
        lines = str(collector.report()).splitlines()
        report = Report(collector.stats())
    expected = "frames frames/s env policy overhead weights idle restarts memory"
    assert lines[0].split() == expected.split()
    assert lines[1].split()[:2] == ["collector", "40"]
    assert any(line.startswith("Episodes: ") for line in lines)
    assert "limits the rate" in " ".join(lines)
    for color in (True, False):
        file = io.StringIO()
        Console(file=file, force_terminal=color, width=120).print(report)
        assert "collector" in file.getvalue()
        assert ("\x1b[" in file.getvalue()) == color


def test_each_worker_has_a_row():
    options = {"num_workers": 2, "frames_per_batch": 10, "total_frames": 40}
    options["start_method"] = "inline"
    with MultiSyncCollector(NumberedEnv, **options) as collector:
        for _ in collector:
            pass
        lines = str(collector.report()).splitlines()
    rows = [line.split()[:3] for line in lines[1:3]]
    assert rows == [["worker", "0", "20"], ["worker", "1", "20"]]
    assert lines[3].split()[:2] == ["all", "40"]
    assert "batches ready" in " ".join(lines)
