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


def make(kind: Any, policy: Any = None, **options: Any) -> Any:
    """A collector, of two workers in this process if it has workers."""
    options.setdefault("track_policy_version", True)
    if "policy_factory" not in options and policy is None:
        policy = Chosen(1)
    if kind is Collector:
        return kind(NumberedEnv, policy, frames_per_batch=4, **options)
    envs = [partial(NumberedEnv, number) for number in range(2)]
    return kind(envs, policy, frames_per_batch=4, start_method="inline", **options)


def settled(collector: Any) -> tuple[list[set[int]], list[set[int]]]:
    """The actions and the versions of each worker once new weights are in use."""
    found: dict[int, tuple[set[int], set[int]]] = {}
    for _ in range(8):
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


@KINDS
def test_a_subclass_may_map_weights_in_its_own_way(kind):
    def one_more(self: Any, given: Any) -> Any:
        return {"choice": given["choice"] + 1}

    with make(kind, weight_updater=own(_maybe_map_weights=one_more)()) as collector:
        for version, choice in enumerate((0, 2), start=1):
            collector.update_policy_weights_({"choice": torch.tensor(float(choice))})
            assert settled(collector) == (everywhere(kind, choice + 1), everywhere(kind, version))


@KINDS
def test_a_subclass_may_take_weights_from_elsewhere(kind):
    server = Chosen(2)
    updater = own(_get_server_weights=lambda self: server)()
    with make(kind, weight_updater=updater) as collector:
        collector.update_policy_weights_()
        assert settled(collector)[0] == everywhere(kind, 2)


@FLEETS
def test_a_subclass_may_send_weights_in_its_own_way(kind):
    sent = []

    def send(self: Any, worker_id: Any = None, server_weights: Any = None) -> None:
        sent.append(worker_id)
        WeightUpdaterBase._sync_weights_with_worker(
            self, worker_id, {"choice": server_weights["choice"] + worker_id}
        )

    updater = own(_sync_weights_with_worker=send)()
    with make(kind, weight_updater=updater) as collector:
        collector.update_policy_weights_(Chosen(2))
        assert sent == [0, 1]
        assert settled(collector) == ([{2}, {3}], [{1}, {1}])


def test_a_subclass_may_send_weights_in_its_own_way_within_this_process():
    sent = []

    def send(self: Any, worker_id: Any = None, server_weights: Any = None) -> None:
        sent.append(worker_id)
        WeightStrategy().apply_weights(self.collector.policy, server_weights)

    with make(Collector, weight_updater=own(_sync_weights_with_worker=send)()) as collector:
        collector.update_policy_weights_(Chosen(2))
        assert sent == [None]
        assert settled(collector) == ([{2}], [{1}])


@FLEETS
def test_a_subclass_may_leave_workers_out(kind):
    updater = own(_skip_update=lambda self, worker: worker == 1)()
    with make(kind, weight_updater=updater) as collector:
        collector.update_policy_weights_(Chosen(2))
        assert settled(collector)[0] == [{2}, {1}]


@KINDS
def test_it_is_closed_with_its_collector(kind):
    closed = []

    def close(self: Any) -> None:
        closed.append(self.collector.stats()["frames"])
        raise ArithmeticError("not sent")

    collector = make(kind, weight_updater=own(close=close)())
    collector.next()
    with pytest.raises(ArithmeticError, match="not sent"):
        collector.shutdown()
    collector.shutdown()
    assert closed == [4]
    # Nothing is left open by its error.
    if kind is Collector:
        assert collector.env.is_closed


@FLEETS
def test_who_is_left_out_keeps_its_version(kind):
    updater = own(_skip_update=lambda self, worker: True)()
    with make(kind, weight_updater=updater) as collector:
        collector.update_policy_weights_(Chosen(2))
        assert settled(collector) == ([{1}, {1}], [{0}, {0}])


@FLEETS
def test_a_subclass_may_say_who_the_workers_are(kind):
    updater = own(all_worker_ids=lambda self: [1])()
    with make(kind, weight_updater=updater) as collector:
        collector.update_policy_weights_(Chosen(2))
        assert settled(collector)[0] == [{1}, {2}]


def test_a_subclass_needs_not_call_the_constructor_of_its_base():
    updater = own(__init__=lambda self, number: setattr(self, "number", number))(3)
    updater.register_post_hook(list)
    with make(Collector, weight_updater=updater) as collector:
        collector.update_policy_weights_(Chosen(2))
        assert updater.collector is collector
        assert settled(collector)[0] == [{2}]


# --- collectors


@KINDS
@pytest.mark.parametrize("how", ["instance", "class", "function"])
def test_an_updater_may_be_given_or_made(kind, how):
    given = {
        "instance": MultiProcessedWeightUpdater(),
        "class": MultiProcessedWeightUpdater,
        "function": lambda: MultiProcessedWeightUpdater(),
    }[how]
    with make(kind, weight_updater=given) as collector:
        updater = collector.weight_updater
        assert isinstance(updater, MultiProcessedWeightUpdater)
        assert updater.collector is collector
        collector.update_policy_weights_(Chosen(2))
        assert settled(collector) == (everywhere(kind, 2), everywhere(kind, 1))


@KINDS
@pytest.mark.parametrize("given", [3, "updater", lambda: 3])
def test_an_updater_must_be_one(kind, given):
    with pytest.raises(
        TypeError, match="weight_updater must be a WeightUpdaterBase, or a function"
    ):
        make(kind, weight_updater=given)


@KINDS
def test_each_push_makes_one_version_on_all_workers(kind):
    with make(kind, weight_updater=MultiProcessedWeightUpdater()) as collector:
        assert settled(collector) == (everywhere(kind, 1), everywhere(kind, 0))
        for version in (1, 2, 3):
            collector.update_policy_weights_(Chosen(version))
            assert collector.policy_version_tracker.version == version
            assert settled(collector) == (everywhere(kind, version), everywhere(kind, version))


@FLEETS
@pytest.mark.parametrize(
    ("ids", "found"), [(0, [{2}, {1}]), ([1], [{1}, {2}]), ((0, 1), [{2}] * 2)]
)
def test_weights_may_be_pushed_to_some_workers(kind, ids, found):
    with make(kind, weight_updater=MultiProcessedWeightUpdater()) as collector:
        collector.update_policy_weights_(Chosen(2), worker_ids=ids)
        actions, versions = settled(collector)
        assert actions == found
        # What nobody changed is of the version that it was.
        assert versions == [{choice - 1 for choice in own} for own in found]


@FLEETS
def test_without_weights_those_of_the_policy_are_pushed(kind):
    policy = Chosen(1)
    with make(kind, policy, weight_updater=MultiProcessedWeightUpdater()) as collector:
        policy.choice.data.fill_(3)
        collector.update_policy_weights_()
        assert settled(collector) == ([{3}] * 2, [{1}] * 2)


@KINDS
def test_weights_of_several_models_are_not_for_an_updater(kind):
    with make(kind, weight_updater=MultiProcessedWeightUpdater()) as collector:
        for given in (
            {"weights_dict": {"policy": Chosen(2)}},
            {"policy": Chosen(2), "model_id": "policy"},
        ):
            with pytest.raises(ValueError, match="can't be used with a weight_updater"):
                collector.update_policy_weights_(**given)
        assert settled(collector) == (everywhere(kind, 1), everywhere(kind, 0))


@KINDS
@pytest.mark.parametrize(
    ("weights", "error"),
    [
        ({"chance": torch.ones(())}, KeyError),
        ({"choice": torch.ones(2)}, ValueError),
        (3, TypeError),
    ],
)
def test_weights_that_do_not_fit_are_refused(kind, weights, error):
    with make(kind, weight_updater=MultiProcessedWeightUpdater()) as collector:
        with pytest.raises(error):
            collector.update_policy_weights_(weights)
        assert settled(collector)[0] == everywhere(kind, 1)


@KINDS
def test_an_updater_is_initialised_by_its_collector(kind):
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.given = args, kwargs

    with make(kind, weight_updater=own(init=init)()) as collector:
        collector.init_updater(1, two=2)
        assert collector.weight_updater.given == ((1,), {"two": 2})
    # By default there is nothing to initialise.
    MultiProcessedWeightUpdater().init(1, two=2)


@KINDS
def test_there_may_be_no_updater_to_initialise(kind):
    with make(kind) as collector:
        collector.init_updater(1, two=2)
        assert collector.weight_updater is None


@KINDS
def test_an_updater_goes_on_to_the_next_version(kind):
    with make(kind, weight_updater=MultiProcessedWeightUpdater()) as collector:
        collector.weight_updater.increment_version()
        assert collector.policy_version == 1
        assert settled(collector)[1] == everywhere(kind, 1)


@KINDS
def test_hooks_are_called_after_each_push(kind):
    called: list[Any] = []
    updater = MultiProcessedWeightUpdater()
    updater.register_post_hook(lambda: called.append("first"))
    updater.register_post_hook(lambda: called.append("second"))
    assert len(updater.post_hooks) == 2
    with make(kind, weight_updater=updater) as collector:
        collector.update_policy_weights_(Chosen(2))
        assert called == ["first", "second"]
        updater.push_weights(Chosen(2))
        updater(Chosen(2))
        assert called == ["first", "second"] * 3
        with pytest.raises(KeyError):
            updater.push_weights({})
        assert len(called) == 6


@KINDS
def test_weights_may_be_pushed_by_the_updater_itself(kind):
    updater = MultiProcessedWeightUpdater()
    with make(kind, weight_updater=updater) as collector:
        for push, choice in ((updater.push_weights, 2), (updater, 3)):
            push(Chosen(choice))
            assert settled(collector)[0] == everywhere(kind, choice)
        # Nobody said that this is another version.
        assert collector.policy_version == 0


@FLEETS
def test_one_updater_may_serve_several_collectors(kind):
    updater = MultiProcessedWeightUpdater()
    with make(kind, weight_updater=updater) as one, make(kind) as other:
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
    collector = make(Collector, weight_updater=updater)
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
    with make(Collector, policy, weight_updater=updater) as collector:
        collector.update_policy_weights_(Chosen(2))
        assert policy.choice == 2
        assert settled(collector) == ([{2}], [{1}])


def test_a_vanilla_updater_may_get_its_weights():
    weights = TensorDict.from_module(Uniform(1)).data
    server = Uniform(2)
    updater = VanillaWeightUpdater(weight_getter=lambda: server, policy_weights=weights)
    updater.push_weights()
    assert numbers(weights) == {2}
    updater.push_weights(Uniform(3))
    assert numbers(weights) == {3}


def test_a_vanilla_updater_may_have_no_weights():
    updater = VanillaWeightUpdater(policy_weights=TensorDict())
    with pytest.raises(RuntimeError, match="VanillaWeightUpdater has no weights to push: pass"):
        updater.push_weights()


def test_an_updater_for_processes_may_get_its_weights():
    server = Chosen(3)
    updater = MultiProcessedWeightUpdater(get_server_weights=lambda: server)
    with make(MultiSyncCollector, weight_updater=updater) as collector:
        collector.update_policy_weights_()
        assert settled(collector)[0] == [{3}] * 2


def test_an_updater_for_processes_writes_to_the_weights_of_devices():
    cpu = torch.device("cpu")
    weights = {cpu: TensorDict.from_module(Chosen(0)).data}
    updater = MultiProcessedWeightUpdater(policy_weights=weights)
    assert updater.all_worker_ids() == [cpu]
    updater.push_weights(Chosen(2))
    assert weights[cpu]["choice"] == 2
    with make(MultiSyncCollector, weight_updater=updater) as collector:
        assert updater.all_worker_ids() == [cpu, 0, 1]
        updater.push_weights(Chosen(3))
        assert weights[cpu]["choice"] == 3
        assert settled(collector)[0] == [{3}] * 2
        updater.push_weights(Chosen(2), worker_ids=[cpu, 1])
        assert weights[cpu]["choice"] == 2
        assert settled(collector)[0] == [{3}, {2}]


@pytest.mark.parametrize("kind", [MultiProcessedWeightUpdater, WeightUpdaterBase])
def test_weights_that_would_reach_nobody_are_refused(kind):
    with pytest.raises(RuntimeError, match=f"{kind.__name__} has no collector to send weights to"):
        kind().push_weights(Chosen(2))


def test_not_all_updaters_are_made_for_a_policy():
    assert WeightUpdaterBase.from_policy(Chosen()) is None


def test_weights_are_mapped_to_a_tensordict():
    updater = MultiProcessedWeightUpdater()
    for given in (Uniform(1), Uniform(1).state_dict(), TensorDict.from_module(Uniform(1))):
        found = updater._maybe_map_weights(given)
        assert isinstance(found, TensorDict)
        assert numbers(found) == {1}
    with pytest.raises(TypeError, match="weights must be a module"):
        updater._maybe_map_weights(3)


def test_weights_of_nested_modules_are_no_weights_by_device():
    weights = TensorDict.from_module(torch.nn.Sequential(torch.nn.Linear(2, 1)))
    assert RayWeightUpdater(weights).policy_weights is weights
    assert RayWeightUpdater({torch.device("cpu"): weights}).policy_weights is weights
