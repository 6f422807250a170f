"""Weight updates at full speed and during kills: complete, with the right version, never lost.

That a reader which dies is in nobody's way, and that memory is used again and given back, is tested
with the stores of weights.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos_parts import PATIENCE, Crew, Lives, Scored, collector_of, replaced, strike
from modes import ASYNC, SYNC
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from trawl.collectors import MultiCollector
from trawl.testing import NumberedEnv
from trawl.weight_update import (
    MultiProcessedWeightUpdater,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
)

pytestmark = pytest.mark.usefixtures("nobody_is_left")
# Seconds of updates at full speed; TRAWL_CHAOS_SECONDS=30 in the environment makes them longer.
STORM = float(os.environ.get("TRAWL_CHAOS_SECONDS", "0.3"))
# Each storm goes on until so many versions were seen, however slow the machine is.
VERSIONS = 30
#: The class, and how weights get to its workers.
_WAYS = {
    "sync": (True, {}),
    "async": (False, {}),
    "shared": (False, {"weight_sync_schemes": SharedMemWeightSyncScheme}),
    "process": (True, {"weight_sync_schemes": MultiProcessWeightSyncScheme}),
    "updater": (False, {"weight_updater": MultiProcessedWeightUpdater}),
}


def ways(*long: str) -> Any:
    """Returns the ways as parameters, some of them those of long tests."""
    marks = {name: [pytest.mark.long] if name in long else [] for name in _WAYS}
    each = [pytest.param(*way, id=name, marks=marks[name]) for name, way in _WAYS.items()]
    return pytest.mark.parametrize(("sync", "way"), each)


KILLED = r"worker \d was killed by SIGKILL"
SIZES = (5_000, 1, 20_000, 300, 5_000)


class Even(nn.Module):
    """Policy whose weights all have one value; it returns the smallest and the largest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in SIZES])
        self.register_buffer("own", torch.zeros(3, dtype=torch.int64))
        self.said = 0

    def become(self, number: int) -> None:
        """Sets all weights to another number in place, as an optimiser's step does."""
        with torch.no_grad():
            for tensor in (*self.parts, self.own):
                tensor.fill_(number)
        self.said = number

    def get_extra_state(self) -> Any:
        return {"said": self.said}

    def set_extra_state(self, state: Any) -> None:
        self.said = state["said"]

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = observation.shape[:-1]
        action = nn.functional.one_hot(torch.tensor(0), 4).expand(*shape, 4)
        numbers = [bound for part in self.parts for bound in part.aminmax()]
        found = torch.stack([*numbers, self.own.min(), self.own.max(), torch.tensor(self.said)])
        return action, found.min().expand(*shape, 1), found.max().expand(*shape, 1)


class Storm:
    """Updates the weights of a collector as fast as possible, in a thread.

    Args:
        collector: the collector.
        policy: policy of the collector, whose weights are set to the number of each update.

    Attributes:
        updates: number of updates.
    """

    def __init__(self, collector: MultiCollector, policy: Even) -> None:
        self.updates = 0
        self.error: BaseException | None = None
        self._collector, self._policy = collector, policy
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _update(self) -> None:
        self._policy.become(self.updates + 1)
        self._collector.update_policy_weights_()
        self.updates += 1

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._update()
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Storm:
        # A collector that was never sent weights warns.
        self._update()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        assert self.error is None, self.error


class Versions:
    """Checks that each frame was collected with all weights of its version; records versions."""

    def __init__(self, sync: bool) -> None:
        self._sync = sync
        self._latest: dict[int, int] = {}
        self.seen: set[int] = set()

    def add(self, batch: TensorDictBase) -> None:
        """Checks a batch.

        Raises:
            AssertionError: if a frame is wrong.
        """
        least, most = batch["least"], batch["most"]
        assert torch.equal(least, most), "two versions in one forward pass"
        versions = batch["policy_version"]
        assert torch.equal(least[..., 0].long(), versions), "a version that did not act"
        for row in batch if self._sync else [batch]:
            worker = int(NumberedEnv.numbers(row)[0, 0]) % 100 // 10
            (version,) = set(row["policy_version"].tolist())
            assert version >= self._latest.get(worker, 0), "an older version than before"
            self._latest[worker] = version
            self.seen.add(version)


def collector_with(way: dict[str, Any], crew: Crew, sync: bool, policy: Any, **more: Any) -> Any:
    """Returns a collector to which weights are sent in the given way."""
    options = {
        name: {"policy": kind()} if name == "weight_sync_schemes" else kind()
        for name, kind in way.items()
    }
    return collector_of(crew, sync, policy, track_policy_version=True, **options, **more)


@contextmanager
def even(way: dict[str, Any], crew: Crew, sync: bool, **more: Any) -> Iterator[Any]:
    policy = Even()
    module = TensorDictModule(policy, ["observation"], ["action", "least", "most"])
    with collector_with(way, crew, sync, module, **more) as collector:
        yield collector, Storm(collector, policy)


# --- as fast as possible


def check_storm(folder: Path, sync: bool, way: dict[str, Any], deaths: int = 0) -> None:
    """Checks that no forward pass sees two versions, nor a frame a false one, amid deaths."""
    crew, versions, kills = Crew(folder, workers=4, lives=100), Versions(sync), 0
    chance = random.Random(0)
    options = {"max_restarts": 1000, "max_total_restarts": 1000}
    with even(way, crew, sync, **options) as (collector, storm):
        end = time.monotonic() + STORM
        with storm:
            while time.monotonic() < end or len(versions.seen) < VERSIONS or kills < deaths:
                # This worker may be dead already, and not replaced yet.
                with suppress(ProcessLookupError):
                    if deaths:
                        strike(crew.pid(chance.randrange(4)))
                        kills += 1
                for _ in range(12):
                    batch = collector.next()
                    versions.add(batch)
                    crew.add(batch)
        assert collector.policy_version_tracker.version == storm.updates
        # In the end, each worker has the last version.
        while min(versions._latest.values()) < storm.updates:
            versions.add(collector.next())
        stats = collector.stats()
    assert storm.updates > len(versions.seen) / 4
    assert (stats["workers_alive"], stats["restarts"] > 0) == (4, deaths > 0)
    assert stats["restarts"] <= kills


@ways("async", "process")
def test_no_forward_pass_sees_two_versions_nor_a_frame_a_false_one(
    tmp_path: Path, sync: bool, way: dict[str, Any]
) -> None:
    check_storm(tmp_path, sync, way)


@ASYNC
def test_no_frame_is_of_a_false_version_though_workers_are_killed(
    tmp_path: Path, sync: bool
) -> None:
    with replaced(KILLED):
        check_storm(tmp_path, sync, {}, deaths=5)


# --- a worker that takes the place of one that died


def of_lives(collector: Any, crew: Crew, sync: bool, lives: dict[int, int]) -> dict[int, Any]:
    """Collects until workers are in these lives; returns the actions and versions of each."""
    found: dict[int, Any] = {}
    while len(found) < len(lives):
        batch = collector.next()
        crew.add(batch)
        for row in batch if sync else [batch]:
            life, worker = divmod(int(NumberedEnv.numbers(row)[0, 0]) // 10, 10)
            if lives.get(worker) == life and worker not in found:
                actions = set(NumberedEnv.action_numbers(row).tolist())
                found[worker] = actions, set(row["policy_version"].tolist())
    return found


@ways("sync", "shared")
def test_who_takes_a_place_begins_with_the_newest_weights(
    tmp_path: Path, sync: bool, way: dict[str, Any]
) -> None:
    crew, policy = Crew(tmp_path), Scored(0)
    with collector_with(way, crew, sync, policy) as collector:
        crew.add(collector.next())
        for version, choice in enumerate((1, 2, 3), start=1):
            collector.update_policy_weights_(policy.choose(choice))
            assert collector.policy_version_tracker.version == version
        # Changes only the learner's weights, which no worker may have before the next update.
        policy.choose(0)
        for life in (1, 2):
            strike(*map(crew.pid, range(2)))
            with replaced(KILLED, times=2):
                found = of_lives(collector, crew, sync, {0: life, 1: life})
            assert found == {0: ({3}, {2 + life}), 1: ({3}, {2 + life})}
            collector.increment_version()


@SYNC
def test_who_takes_a_place_begins_with_the_weights_of_that_place(
    tmp_path: Path, sync: bool
) -> None:
    crew, policy = Crew(tmp_path), Scored(0)
    with collector_of(crew, sync, policy, track_policy_version=True) as collector:
        for worker, choice in ((0, 1), (1, 2), (0, 3)):
            collector.update_policy_weights_(Scored(choice), worker_ids=worker)
        strike(*map(crew.pid, range(2)))
        with replaced(KILLED, times=2):
            found = of_lives(collector, crew, sync, {0: 1, 1: 1})
        assert found == {0: ({3}, {3}), 1: ({2}, {2})}


@ASYNC
def test_weights_that_come_while_a_place_is_being_taken_are_used_there_first(
    tmp_path: Path, sync: bool
) -> None:
    crew, lives = Crew(tmp_path), Lives(tmp_path / "late")
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    os.mkfifo(begun)
    os.mkfifo(go_on)
    make = crew.makers[0][0]

    def make_late() -> Any:
        if lives.begin() > 0:
            # A named pipe waits until the other side opens it.
            begun.write_bytes(b"")
            go_on.read_bytes()
        return make()

    crew.makers[0][0] = make_late  # type: ignore[call-overload]
    collector = collector_of(crew, sync, Scored(0), track_policy_version=True)
    crew.makers[0][0] = make
    with collector:
        collector.update_policy_weights_(Scored(1))
        crew.add(collector.next())

        def update() -> None:
            begun.read_bytes()
            collector.update_policy_weights_(Scored(2))
            go_on.write_bytes(b"")

        thread = threading.Thread(target=update)
        thread.start()
        strike(crew.pid(0))
        with replaced(KILLED, times=1):
            found = of_lives(collector, crew, sync, {0: 1})
        thread.join(PATIENCE)
        assert found == {0: ({2}, {2})}
