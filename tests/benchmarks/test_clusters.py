"""How the benchmarks of clusters measure, and what they calculate from that."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("importable")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_nothing_is_not_compared() -> None:
    from clusters.cases import images
    from multi.race import Result

    result = Result(images())
    for name, own in (("Trawl", 0.0), ("TorchRL", 56.0)):
        result.add(name, {"speed": 4.0 if own == 0 else 1.0, "cpu": 1.0, "own": own})
    assert result.ratios("own", "TorchRL") == []
    assert [verdict.met for verdict in result.verdicts()] == [True, True]


class Silent:
    """A contestant whose turns take too long."""

    def __init__(self) -> None:
        self.facts: dict[str, float] = {}
        self.layout: dict[str, str] = {}

    def turn(self, seconds: float) -> dict[str, float]:
        time.sleep(3600)
        return {"speed": 1.0}

    def close(self) -> None:
        pass


def broken() -> Silent:
    raise ValueError("out of order")


def test_a_peer_that_fails_or_hangs_is_left_out_and_named() -> None:
    from test_clusters import Silent as Found  # as its process finds it
    from test_clusters import broken as failing

    from multi.race import Contender, Race, Result, measure

    def measured(build: Any, patience: float) -> Result:
        contenders = (Contender("peer", build, may_fail=True),)
        return measure(Race("name", "title", contenders, patience=patience), 1, 0.01)

    hangs, breaks = measured(Found, 2.0), measured(failing, 300.0)
    assert hangs.missing == {"peer": "failed: no answer within 2 s"}
    assert breaks.missing == {"peer": "failed: ValueError: out of order"}
    assert hangs.values == breaks.values == {}


def test_what_is_in_the_store_is_told_from_what_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from tensordict import TensorDict

    from clusters import contestants

    maps = (
        "7f2c84000000-7f2ce4000000 rw-s 00000000 00:1b 133488   /dev/shm/plasmakBoL3D (deleted)\n"
        "7f2ce4000000-7f2ce5000000 rw-p 00000000 00:00 0 \n"
    )
    assert contestants.stores(maps) == [(0x7F2C84000000, 0x7F2CE4000000)]
    batch = TensorDict({"there": torch.zeros(4), "here": torch.zeros(10)}, [])
    address = batch["there"].data_ptr()
    monkeypatch.setattr(contestants, "stores", lambda: [(address, address + 16), (1, 2)])
    assert contestants.own_bytes(batch) == 40


# --- what a driver costs


def test_costs_are_explained_by_parts_and_bytes() -> None:
    from clusters.costs import Cost, fit

    known = [(1, 0.0), (1, 10.0), (2, 5.0), (4, 20.0)]
    found = fit([Cost(0.002 * parts + 0.0003 * size, parts, size) for parts, size in known])
    assert found.part == pytest.approx(0.002)
    assert found.megabyte == pytest.approx(0.0003)
    assert found.error[1] < 1e-9
    falling = fit([Cost(0.002, 1, 0.0), Cost(0.001, 1, 10.0)])
    assert falling.megabyte == 0.0
    assert falling.part > 0.0


def test_what_a_driver_costs_is_measured() -> None:
    from clusters.costs import Costs, Point

    point = Point("async", 1, 1024)
    costs = Costs("process", [point])
    found = costs.turn(0.0)
    costs.close()
    assert found[f"{point.name}: MB"] == pytest.approx(32 * 2 * 1024 / 1e6, rel=0.2)
    assert found[f"{point.name}: cpu"] > 0.0


# --- the simulation


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("workers", [1, 2, 3, 8, 20])
def test_events_agree_with_the_formula(kind: str, workers: int) -> None:
    from clusters.simulate import Driver, Work, events, formula

    work = Work(frames=100, frame_bytes=10_000, speed=1000.0)
    for driver in (Driver(0.0, 0.0), Driver(0.001, 0.0005), Driver(0.06, 0.01)):
        played = events(kind, workers, work, driver)  # type: ignore[arg-type]
        assert played.speed == pytest.approx(
            formula(kind, workers, work, driver),  # type: ignore[arg-type]
            rel=0.02,
        )


def test_it_plays_what_real_workers_do() -> None:
    """Two workers in this process are too few, and too close, to be timed: their turns are not."""
    import work as kinds
    from clusters.simulate import AHEAD, Driver, Work, events
    from trawl.collectors import MultiAsyncCollector, MultiSyncCollector
    from trawl.collectors.workers import scheduler

    assert AHEAD == scheduler._AHEAD
    made = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}
    for kind, cls in made.items():
        collector = cls(
            [kinds.ConstantEnv] * 2,
            kinds.acting(kinds.Constant()),
            frames_per_batch=8,
            total_frames=80,
            start_method="inline",
        )
        taken: list[int] = []
        note = collector.parts.weights.note_batches
        collector.parts.weights.note_batches = lambda parts, note=note, taken=taken: (  # type: ignore[method-assign]
            taken.extend(part.index for part in parts),
            note(parts),
        )[1]
        frames = sum(batch.numel() for batch in collector)
        collector.shutdown()
        parts = 10 * (2 if kind == "sync" else 1)
        work = Work(frames=frames // parts, frame_bytes=1, speed=1.0)
        played = events(kind, 2, work, Driver(0.01, 0.0), parts // 2)  # type: ignore[arg-type]
        # Each of them delivers as often as the other; in step, one of each makes a batch.
        assert taken.count(0) == taken.count(1) == played.served.count(0) == parts // 2
        if kind == "sync":
            assert [sorted(taken[i : i + 2]) for i in range(0, parts, 2)] == [[0, 1]] * 10
            assert [sorted(played.served[i : i + 2]) for i in range(0, parts, 2)] == [[0, 1]] * 10


def test_curves_and_the_page_are_made_of_what_was_measured(tmp_path: Path) -> None:
    from clusters.simulate import Options, planning

    cost = {"part": 0.001, "megabyte": 0.0001, "error": [0.05, 0.1]}
    both = {"title": "workers", "fits": {"async": cost, "sync": cost}}
    measured = {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"processor": "a processor", "cores": 4, "python": "3.11.7"},
        "places": {"ray": both, "tree": {"title": "branches", "fits": {"async": cost}}},
    }
    costs = tmp_path / "driver_cost.json"
    costs.write_text(json.dumps(measured))
    found = json.loads(json.dumps(planning(Options(costs=costs, frames=100, frame_bytes=10_000))))
    assert set(found["curves"]) == {"ray, async", "ray, sync", "ray, written", "tree, async"}
    alone, tree = found["curves"]["ray, async"], found["curves"]["tree, async"]
    assert alone["most_workers"] == pytest.approx(0.2 / 0.0011)
    assert alone["most_workers"] < tree["most_workers"] < 16 * alone["most_workers"]
    assert len(alone["events"]) < len(alone["workers"]) == len(alone["formula"])

    sys.path.insert(0, str(BENCHMARKS.parent / "docs" / "scripts"))
    try:
        import planning_page
    finally:
        sys.path.pop(0)
    page = tmp_path / "docs" / "planning-clusters.md"
    (tmp_path / "docs" / "assets").mkdir(parents=True)
    marks = "<!-- {0}:begin -->\nold\n<!-- {0}:end -->\n"
    page.write_text(marks.format("costs") + marks.format("limits"))
    planning_page.write(found, tmp_path)
    text = page.read_text()
    assert "| workers | at their own pace | 1,000 | 100 |" in text
    assert "| workers | at their own pace | 182 | 90,909 | 0.9 |" in text
    assert "old" not in text
    assert (tmp_path / "docs" / "assets" / "planning.svg").read_text().startswith("<svg")
