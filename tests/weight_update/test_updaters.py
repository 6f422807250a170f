"""Weight updaters: the older way, with all that a subclass may do in its own way."""

from __future__ import annotations

import gc
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from weight_parts import Chosen, Uniform, numbers

from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from trawl.testing import NumberedEnv
from trawl.weight_update import (
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    VanillaWeightUpdater,
    WeightStrategy,
    WeightUpdaterBase,
)

KINDS = pytest.mark.parametrize(
    "kind", [Collector, MultiSyncCollector, MultiAsyncCollector], ids=["one", "sync", "async"]
)
FLEETS = pytest.mark.parametrize(
    "kind", [MultiSyncCollector, MultiAsyncCollector], ids=["sync", "async"]
)


def make(kind: Any, updater: Any = None, policy: Any = None, **options: Any) -> Any:
    """A collector, of two workers in this process if it has workers."""
    options |= {"weight_updater": updater, "track_policy_version": True, "frames_per_batch": 4}
    policy = Chosen(1) if policy is None else policy
    if kind is Collector:
        return kind(NumberedEnv, policy, **options)
    envs = [partial(NumberedEnv, number) for number in range(2)]
    return kind(envs, policy, start_method="inline", **options)


def settled(collector: Any) -> tuple[list[set[int]], list[set[int]]]:
    """The actions and the versions of each worker once new weights are in use."""
    found: dict[int, tuple[set[int], set[int]]] = {}
    for _ in range(6):
        batch = collector.next()
        for row in batch if batch.ndim > 1 else [batch]:
            (worker,) = set(NumberedEnv.numbers(row)[..., 0].tolist())
            actions = set(NumberedEnv.action_numbers(row).tolist())
            found[worker] = actions, set(row["policy_version"].tolist())
    return [found[i][0] for i in sorted(found)], [found[i][1] for i in sorted(found)]


def everywhere(kind: Any, value: int) -> list[set[int]]:
    return [{value}] * (1 if kind is Collector else 2)


def own(**body: Any) -> Any:
    """A user's subclass."""
    with pytest.warns(DeprecationWarning, match="Own: weight updaters are deprecated. Use a"):
        return type("Own", (WeightUpdaterBase,), {"__module__": __name__, **body})


# --- subclasses


def test_to_subclass_is_deprecated():
    with pytest.warns(DeprecationWarning, match="weight updaters are deprecated") as caught:

        class Own(WeightUpdaterBase):
            pass

    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="Vanilla: weight updaters are deprecated"):
        type("Vanilla", (VanillaWeightUpdater,), {"__module__": __name__})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Own()
    assert WeightUpdaterBase.from_policy(Chosen()) is None


@KINDS
def test_a_subclass_has_its_own_way_with_weights(kind):
    def one_more(self: Any, given: Any) -> Any:
        return {"choice": given["choice"] + 1}

    server = WeightStrategy("state_dict").extract_weights(Chosen(1))
    body = {"_maybe_map_weights": one_more, "_get_server_weights": lambda self: server}
    with make(kind, own(**body)()) as collector:
        collector.update_policy_weights_()
        assert settled(collector) == (everywhere(kind, 2), everywhere(kind, 1))
        collector.update_policy_weights_({"choice": torch.tensor(0.0)})
        assert settled(collector) == (everywhere(kind, 1), everywhere(kind, 2))


@FLEETS
@pytest.mark.parametrize(
    ("body", "actions", "versions"),
    [
        ({"_skip_update": lambda self, worker: worker == 1}, [{2}, {1}], [{1}, {0}]),
        ({"_skip_update": lambda self, worker: True}, [{1}, {1}], [{0}, {0}]),
        ({"all_worker_ids": lambda self: [1]}, [{1}, {2}], [{0}, {1}]),
    ],
    ids=["some", "all", "workers"],
)
def test_a_subclass_may_leave_workers_out_which_keep_their_version(kind, body, actions, versions):
    with make(kind, own(**body)()) as collector:
        collector.update_policy_weights_(Chosen(2))
        assert settled(collector) == (actions, versions)


@KINDS
def test_a_subclass_may_send_weights_in_its_own_way(kind):
    sent = []

    def send(self: Any, worker_id: Any = None, server_weights: Any = None) -> None:
        sent.append(worker_id)
        if worker_id is None:
            WeightStrategy().apply_weights(self.collector.policy, server_weights)
        else:
            more = {"choice": server_weights["choice"] + worker_id}
            WeightUpdaterBase._sync_weights_with_worker(self, worker_id, more)

    with make(kind, own(_sync_weights_with_worker=send)()) as collector:
        collector.update_policy_weights_(Chosen(2))
        actions = [{2}] if kind is Collector else [{2}, {3}]
        assert sent == ([None] if kind is Collector else [0, 1])
        assert settled(collector) == (actions, everywhere(kind, 1))


@KINDS
def test_an_updater_is_initialised_and_closed_with_its_collector(kind):
    closed = []

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.given = args, kwargs

    def close(self: Any) -> None:
        closed.append(self.collector.stats()["frames"])
        raise ArithmeticError("not sent")

    collector = make(kind, own(init=init, close=close)())
    collector.init_updater(1, two=2)
    assert collector.weight_updater.given == ((1,), {"two": 2})
    collector.next()
    with pytest.raises(ArithmeticError, match="not sent"):
        collector.shutdown()
    collector.shutdown()
    assert closed == [4]
    # Nothing is left open by its error.
    if kind is Collector:
        assert collector.env.is_closed
    # By default there is nothing to initialise, or nobody.
    MultiProcessedWeightUpdater().init(1, two=2)
    with make(kind) as collector:
        collector.init_updater(1, two=2)
        assert collector.weight_updater is None


def test_a_subclass_needs_not_call_the_constructor_of_its_base():
    updater = own(__init__=lambda self, number: setattr(self, "number", number))(3)
    updater.register_post_hook(list)
    with make(Collector, updater) as collector:
        collector.update_policy_weights_(Chosen(2))
        assert updater.collector is collector
        assert settled(collector)[0] == [{2}]


# --- collectors


@KINDS
def test_an_updater_may_be_given_or_made(kind):
    for given in (
        MultiProcessedWeightUpdater(),
        MultiProcessedWeightUpdater,
        lambda: MultiProcessedWeightUpdater(),
    ):
        with make(kind, given) as collector:
            assert isinstance(collector.weight_updater, MultiProcessedWeightUpdater)
            assert collector.weight_updater.collector is collector
    for given in (3, "updater", lambda: 3):
        with pytest.raises(TypeError, match="weight_updater must be a WeightUpdaterBase, or a fun"):
            make(kind, given)
    if kind is not Collector:
        with pytest.raises(ValueError, match=r"VanillaWeightUpdater .* its workers"):
            make(kind, VanillaWeightUpdater.from_policy(Chosen(1)))


@KINDS
def test_each_push_makes_one_version_on_all_workers_and_calls_the_hooks(kind):
    called: list[Any] = []
    policy, updater = Chosen(1), MultiProcessedWeightUpdater()
    updater.register_post_hook(lambda: called.append("first"))
    updater.register_post_hook(lambda: called.append("second"))
    assert len(updater.post_hooks) == 2
    with make(kind, updater, policy) as collector:
        assert settled(collector) == (everywhere(kind, 1), everywhere(kind, 0))
        for version in (1, 2):
            collector.update_policy_weights_(Chosen(version + 1))
            assert collector.policy_version_tracker.version == version
            assert settled(collector) == (everywhere(kind, version + 1), everywhere(kind, version))
        # Without weights, those of the policy are pushed; a single collector has them already.
        policy.choice.data.fill_(0)
        collector.update_policy_weights_()
        assert settled(collector) == (everywhere(kind, 0), everywhere(kind, 3))
        assert called == ["first", "second"] * 3
        # Nobody says that what the updater itself pushes is another version.
        for push, choice in ((updater.push_weights, 2), (updater, 3)):
            push(Chosen(choice))
            assert settled(collector)[0] == everywhere(kind, choice)
        assert called == ["first", "second"] * 5
        assert collector.policy_version_tracker.version == 3
        updater.increment_version()
        assert collector.policy_version_tracker.version == 4
        assert settled(collector)[1] == everywhere(kind, 4)


@FLEETS
@pytest.mark.parametrize(
    ("ids", "found"), [(0, [{2}, {1}]), ([1], [{1}, {2}]), ((0, 1), [{2}] * 2)]
)
def test_weights_may_be_pushed_to_some_workers(kind, ids, found):
    with make(kind, MultiProcessedWeightUpdater()) as collector:
        collector.update_policy_weights_(Chosen(2), worker_ids=ids)
        actions, versions = settled(collector)
        assert actions == found
        # What nobody changed is of the version that it was.
        assert versions == [{choice - 1 for choice in own} for own in found]


@KINDS
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        ({"weights_dict": {"policy": Chosen(2)}}, ValueError, "can't be used with a weight_upd"),
        ({"policy": Chosen(2), "model_id": "policy"}, ValueError, "can't be used with a weight_u"),
        ({"policy": {"chance": torch.ones(())}}, KeyError, "chance"),
        ({"policy": {"choice": torch.ones(2)}}, ValueError, "shape"),
        ({"policy": 3}, TypeError, "weights must be a module"),
    ],
    ids=["several", "named", "name", "shape", "type"],
)
def test_weights_that_do_not_fit_are_refused(kind, call, error, match):
    updater, called = MultiProcessedWeightUpdater(), []
    updater.register_post_hook(lambda: called.append(1))
    with make(kind, updater) as collector:
        with pytest.raises(error, match=match):
            collector.update_policy_weights_(**call)
        assert settled(collector) == (everywhere(kind, 1), everywhere(kind, 0))
    assert called == []


@FLEETS
def test_one_updater_may_serve_several_collectors(kind):
    updater = MultiProcessedWeightUpdater()
    with make(kind, updater) as one, make(kind) as other:
        updater.register_collector(other)
        updater.register_collector(other)
        assert updater.collectors == [one, other]
        with pytest.raises(ValueError, match="2 collectors are registered: use `collectors`"):
            _ = updater.collector
        updater.push_weights(Chosen(2))
        assert settled(one)[0] == settled(other)[0] == [{2}] * 2
        updater.increment_version()
        assert one.policy_version_tracker.version == other.policy_version_tracker.version == 1


def test_collectors_are_not_kept():
    updater = MultiProcessedWeightUpdater()
    collector = make(Collector, updater)
    collector.shutdown()
    assert updater.collector is collector
    del collector
    gc.collect()
    assert updater.collectors == []
    assert updater.collector is None


# --- those that there are


def test_a_vanilla_updater_writes_to_the_policys_own_weights():
    policy = Chosen(1)
    updater = VanillaWeightUpdater.from_policy(policy)
    assert updater.all_worker_ids() is None
    with make(Collector, updater, policy) as collector:
        collector.update_policy_weights_(Chosen(2))
        assert policy.choice == 2
        assert settled(collector) == ([{2}], [{1}])
    weights = TensorDict.from_module(Uniform(1)).data
    updater = VanillaWeightUpdater(weight_getter=lambda: Uniform(2), policy_weights=weights)
    updater.push_weights()
    assert numbers(weights) == {2}
    updater.push_weights(Uniform(3))
    assert numbers(weights) == {3}
    with pytest.raises(RuntimeError, match="VanillaWeightUpdater has no weights to push: pass"):
        VanillaWeightUpdater(policy_weights=TensorDict()).push_weights()


def test_an_updater_for_processes_writes_to_the_weights_of_devices():
    cpu = torch.device("cpu")
    weights = {cpu: TensorDict.from_module(Chosen(0)).data}
    updater = MultiProcessedWeightUpdater(
        policy_weights=weights, get_server_weights=lambda: Chosen(3)
    )
    assert updater.all_worker_ids() == [cpu]
    updater.push_weights(Chosen(2))
    assert weights[cpu]["choice"] == 2
    with make(MultiSyncCollector, updater) as collector:
        assert updater.all_worker_ids() == [cpu, 0, 1]
        collector.update_policy_weights_()
        assert weights[cpu]["choice"] == 3
        assert settled(collector)[0] == [{3}] * 2
        updater.push_weights(Chosen(2), worker_ids=[cpu, 1])
        assert weights[cpu]["choice"] == 2
        assert settled(collector)[0] == [{3}, {2}]


def test_weights_that_would_reach_nobody_or_are_none_are_refused():
    for kind in (MultiProcessedWeightUpdater, WeightUpdaterBase):
        with pytest.raises(RuntimeError, match=f"{kind.__name__} has no collector to send weights"):
            kind().push_weights(Chosen(2))
        with pytest.raises(TypeError, match="weights must be a module"):
            kind().push_weights(3)


def test_weights_of_nested_modules_are_no_weights_by_device():
    weights = TensorDict.from_module(torch.nn.Sequential(torch.nn.Linear(2, 1)))
    assert RayWeightUpdater(weights).policy_weights is weights
    assert RayWeightUpdater({torch.device("cpu"): weights}).policy_weights is weights
