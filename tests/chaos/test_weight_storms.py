"""Weight updates at full speed and during kills: complete, with the right version, never lost.

That a reader which dies is in nobody's way, and that memory is used again and given back, is tested
with the stores of weights.
"""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos_parts import PATIENCE, Crew, Lives, Scored, collector_of, parts, replaced
from killing import strike
from modes import ASYNC, SYNC
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from trawl.testing import NumberedEnv
from trawl.weight_update import (
    MultiProcessedWeightUpdater,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
)

pytestmark = pytest.mark.usefixtures("nobody_is_left")
# Versions that are seen, and workers that are killed.
VERSIONS, DEATHS = 30, 5
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


@ASYNC
def test_no_frame_is_of_a_false_version_though_workers_are_killed(
    tmp_path: Path, sync: bool
) -> None:
    """No forward pass sees two versions while weights are updated as fast as possible."""
    crew, chance = Crew(tmp_path, workers=4, lives=100), random.Random(0)
    policy, over, updates, kills = Even(), threading.Event(), 0, 0
    seen, latest = set[int](), dict[int, int]()

    def update() -> None:
        nonlocal updates
        policy.become(updates + 1)
        collector.update_policy_weights_()
        updates += 1

    def update_all_the_time() -> None:
        while not over.is_set():
            update()

    def check(worker: int, part: TensorDictBase) -> None:
        least, most, versions = part["least"], part["most"], part["policy_version"]
        assert torch.equal(least, most), "two versions in one forward pass"
        assert torch.equal(least[..., 0].long(), versions), "a version that did not act"
        (version,) = set(versions.tolist())
        assert version >= latest.get(worker, 0), "an older version than before"
        latest[worker] = version
        seen.add(version)

    module = TensorDictModule(policy, ["observation"], ["action", "least", "most"])
    options = {"max_restarts": 1000, "max_total_restarts": 1000, "track_policy_version": True}
    with (
        replaced(KILLED),
        collector_of(crew, sync, module, **options) as collector,
        ThreadPoolExecutor() as pool,
    ):
        # A collector that was never sent weights warns.
        update()
        updating, collected = pool.submit(update_all_the_time), parts(collector, crew, sync)
        try:
            while len(seen) < VERSIONS or kills < DEATHS:
                # This worker may be dead already, and not replaced yet.
                with suppress(ProcessLookupError):
                    strike(crew.pid(chance.randrange(4)))
                    kills += 1
                for _, worker, part in islice(collected, 12):
                    check(worker, part)
        finally:
            over.set()
        updating.result(PATIENCE)
        assert collector.policy_version_tracker.version == updates
        # In the end, each worker has the last version.
        while min(latest.values()) < updates:
            _, worker, part = next(collected)
            check(worker, part)
        stats = collector.stats()
        assert stats["workers_alive"] == 4
        assert 0 < stats["restarts"] <= kills
    assert updates > len(seen) / 4


# --- a worker that takes the place of one that died


def of_lives(collector: Any, crew: Crew, sync: bool, lives: dict[int, int]) -> dict[int, Any]:
    """Collects until workers are in these lives; returns the actions and versions of each."""
    found: dict[int, Any] = {}
    for life, worker, part in parts(collector, crew, sync):
        if lives.get(worker) == life and worker not in found:
            actions = set(NumberedEnv.action_numbers(part).tolist())
            found[worker] = actions, set(part["policy_version"].tolist())
        if len(found) == len(lives):
            break
    return found


#: The class, how weights get to its workers, and whether it is a long test.
WAYS = {
    "sync": (True, {}, True),
    "async": (False, {}, False),
    "shared": (False, {"weight_sync_schemes": {"policy": SharedMemWeightSyncScheme}}, True),
    "process": (True, {"weight_sync_schemes": {"policy": MultiProcessWeightSyncScheme}}, False),
    "updater": (False, {"weight_updater": MultiProcessedWeightUpdater}, False),
}


@pytest.mark.parametrize(
    ("sync", "way"),
    [
        pytest.param(sync, way, id=name, marks=[pytest.mark.long] if long else [])
        for name, (sync, way, long) in WAYS.items()
    ],
)
def test_who_takes_a_place_begins_with_the_newest_weights(
    tmp_path: Path, sync: bool, way: dict[str, Any]
) -> None:
    crew, policy = Crew(tmp_path), Scored(0)
    made: dict[str, Any] = {
        name: {model: scheme() for model, scheme in kind.items()}
        if isinstance(kind, dict)
        else kind()
        for name, kind in way.items()
    }
    with collector_of(crew, sync, policy, track_policy_version=True, **made) as collector:
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
