"""The parts that a collector is made of."""

from __future__ import annotations

import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule

from trawl.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    RandomPolicy,
)
from trawl.envs import GymEnv
from trawl.rollout.normalization import Normalization
from trawl.weight_update import SharedMemWeightSyncScheme


def batched(**options: Any) -> Any:
    policy = RandomPolicy(GymEnv("Pendulum-v1").full_action_spec.expand(2))
    return AsyncBatchedCollector(["Pendulum-v1"] * 2, policy=policy, **options)


KINDS: dict[str, Callable[..., Any]] = {
    "here": lambda **options: Collector("Pendulum-v1", **options),
    "ready": batched,
    "sync": lambda **options: MultiSyncCollector(["Pendulum-v1"] * 2, prefetch=1, **options),
    "async": lambda **options: MultiAsyncCollector(
        ["Pendulum-v1"] * 2, worker_snapshots=1, max_policy_lag=2, **options
    ),
}


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_the_garbage_collector(kind, closed, tmp_path):
    """Memory and sockets are freed when the last reference to a collector goes."""
    collector = KINDS[kind](
        frames_per_batch=20,
        total_frames=-1,
        normalize_observations=True,
        track_policy_version=True,
        trace=tmp_path / "trace.json",
    )
    collector.next()
    collector.stats("both")
    if closed:
        collector.shutdown()
    found = {name: part for name, part in vars(collector.parts).items() if _is_ours(part)}
    parts = {name: weakref.ref(part) for name, part in found.items()}
    parts["collector"] = weakref.ref(collector)
    assert {"lifetime", "budget", "weights", "timeline", "figures", "outbox"} <= parts.keys()
    gc.collect()
    gc.disable()
    try:
        del found, collector
        assert [name for name, part in parts.items() if part() is not None] == []
    finally:
        gc.enable()


def _is_ours(part: Any) -> bool:
    # The statistics are shared with nobody, but have no place for weak references.
    return type(part).__module__.startswith("trawl.") and not isinstance(part, Normalization)


def test_methods_of_parts_say_what_they_take():
    for name in ("start", "sample", "trace", "checkpoint", "update_policy_weights_", "log"):
        method = getattr(MultiSyncCollector, name)
        assert next(iter(inspect.signature(method).parameters)) == "self"
        assert method.__name__ == name
        assert method.__doc__


class Named(Collector):
    """A collector with attributes and methods of its own, some of them set early."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.env = "replaced by the constructor"
        self.post_collect_hook = self.pre_collect_hook = None
        self.state, self.weights = {"phase": 1}, [1.0]
        super().__init__(*args, **options)
        self.background, self.turns = "mine", 3

    def budget(self) -> str:
        return "mine"


def test_attributes_of_subclasses_are_theirs():
    hook: list[Any] = []
    with Named(
        "Pendulum-v1", frames_per_batch=10, total_frames=20, post_collect_hook=hook.append
    ) as collector:
        assert [batch.numel() for batch in collector] == [10, 10] == [len(one) for one in hook]
        assert (collector.state, collector.weights) == ({"phase": 1}, [1.0])
        assert (collector.background, collector.turns, collector.budget()) == ("mine", 3, "mine")
        assert collector.state_dict()["frames"] == 20


class Hooking(RandomPolicy):
    """A policy that sets a hook of the collector that it is told of."""

    def register_collector(self, collector: Any) -> None:
        self.calls: list[int] = []
        collector.pre_collect_hook = lambda: self.calls.append(1)


def test_a_policy_may_set_a_hook_when_it_is_told_of_its_collector():
    policy = Hooking(GymEnv("Pendulum-v1").full_action_spec)
    with Collector("Pendulum-v1", policy, frames_per_batch=10, total_frames=20) as collector:
        list(collector)
    assert policy.calls == [1, 1]


class Counted:
    """Counts the calls of ``update_policy_weights_``."""

    calls = 0

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        super().update_policy_weights_(*args, **kwargs)  # type: ignore[misc]


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_schemes_call_the_methods_of_subclasses(kind):
    cls = type("Own", (Counted, kind), {})
    net = torch.nn.Linear(3, 1)
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    scheme = SharedMemWeightSyncScheme()
    source = "Pendulum-v1" if kind is Collector else ["Pendulum-v1"]
    options = {"frames_per_batch": 10, "weight_sync_schemes": {"policy": scheme}}
    with cls(source, policy, **options) as collector:
        collector.next()
        scheme.send(policy)
        assert collector.calls == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_collector_in_a_cycle_tells_everything_at_its_end(kind, tmp_path):
    collector = KINDS[kind](frames_per_batch=20, total_frames=-1)
    collector.next()
    known, told = set(collector.stats("both")), list[set[str]]()
    collector.add_close_callback(lambda one: told.append(set(one.stats("both"))))
    collector.cycle = collector
    del collector
    gc.collect()
    (found,) = told
    assert known <= found


def test_paths_lead_from_a_collector_in_a_cycle_at_its_end():
    collector, found = Collector("Pendulum-v1", frames_per_batch=10), list[object]()
    collector.add_close_callback(lambda one: found.extend(one.map_fn("env.set_seed", [(3,)])))
    collector.add_close_callback(lambda one: found.append(one.get_distant_attr("closed")))
    collector.cycle = collector
    del collector
    gc.collect()
    assert found[1:] == [True]


def test_another_profile_replaces_the_first(tmp_path):
    with Collector("Pendulum-v1", frames_per_batch=10, total_frames=40) as collector:
        collector.enable_profile(workers=[0], save_path=tmp_path / "first.json")
        collector.enable_profile(workers=[1], save_path=tmp_path / "second.json")
        list(collector)
    assert not list(tmp_path.iterdir())


def test_methods_are_pickled_by_their_class():
    assert pickle.loads(pickle.dumps(Collector.start)) is Collector.start
