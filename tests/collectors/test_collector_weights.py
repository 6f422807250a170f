"""New weights for the policy of a collector, or of its workers: in every form, for each of them."""

from typing import Any

import pytest
import torch
from multi_parts import ALL, BOTH, CLASSES, Chooser, actions, make, rows_of_workers, worker_of
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from trawl.collectors import Collector


def settled(collector):
    """The actions of each worker once new weights are in use."""
    cls, found = type(collector), {}
    # Those of asynchronous workers may be in batches that they had begun.
    for _ in range(8 if cls is CLASSES[1] else 1):
        batch = collector.next()
        for row in rows_of_workers(batch):
            found[worker_of(row)] = actions(row)
    return [found[index] for index in sorted(found)]


def all_of(cls, choice):
    return [{choice}] * (1 if cls is Collector else 2)


def in_module(choice):
    return TensorDictModule(Chooser(choice), in_keys=["observation"], out_keys=["action"])


TWO = torch.tensor(2.0)

# --- forms

FORMS: dict[str, Any] = {
    "module": lambda: {"policy_or_weights": Chooser(2)},
    "policy": lambda: {"policy": Chooser(2)},
    "state dict": lambda: {"policy_or_weights": Chooser(2).state_dict()},
    "weights": lambda: {"weights": Chooser(2).state_dict()},
    "plain dict": lambda: {"weights": {"choice": TWO}},
    "plain TensorDict": lambda: {"policy_or_weights": TensorDict(choice=TWO)},
    "TensorDict": lambda: {"weights": TensorDict.from_module(Chooser(2))},
    "TensorDict of data": lambda: {"weights": TensorDict.from_module(Chooser(2)).data},
    "by model": lambda: {"weights_dict": {"policy": Chooser(2)}},
    "of a model": lambda: {"weights": Chooser(2).state_dict(), "model_id": "policy"},
    "of all workers": lambda: {"policy": Chooser(2), "worker_ids": [0, 1]},
    "in another dtype": lambda: {"weights": {"choice": TWO.double()}},
    "module of another dtype": lambda: {"policy_or_weights": Chooser(2).double()},
}


@ALL
def test_weights_may_come_in_any_form(cls):
    policy = Chooser(1)
    with make(cls, policy=policy) as collector:
        for name, form in FORMS.items():
            if cls is Collector and name == "of all workers":
                continue
            collector.update_policy_weights_(**form())
            assert settled(collector) == all_of(cls, 2), name
            if cls is Collector:
                policy.become(1)
            # The user's own policy of workers is left alone.
            assert policy.choice == 1
            collector.update_policy_weights_()
            assert settled(collector) == all_of(cls, 1)
        with pytest.warns(DeprecationWarning, match="policy_weights is an older name") as caught:
            collector.update_policy_weights_(policy_weights=Chooser(2))
        assert caught[0].filename == __file__
        assert settled(collector) == all_of(cls, 2)


@ALL
def test_weights_of_a_tensordict_module_are_named_as_it_names_them(cls):
    three = in_module(3)
    dicts = {"module": {"choice": torch.tensor(3.0)}}, {"module.choice": torch.tensor(3.0)}
    with make(cls, policy=in_module(0)) as collector:
        for weights in (three, three.state_dict(), TensorDict.from_module(three), *dicts):
            collector.update_policy_weights_({"module.choice": TWO})
            collector.update_policy_weights_(weights)
            assert settled(collector) == all_of(cls, 3)


@ALL
def test_weights_are_those_of_the_moment(cls):
    source, policy = Chooser(2), Chooser(1)
    with make(cls, policy=policy) as collector:
        collector.update_policy_weights_(source)
        source.become(3)
        assert settled(collector) == all_of(cls, 2)
        assert policy.choice.requires_grad
        policy.become(0)
        collector.update_policy_weights_()
        if cls is not Collector:
            policy.become(3)
        assert settled(collector) == all_of(cls, 0)


def test_tied_weights_are_updated_by_either_name():
    class Tied(Chooser):
        def __init__(self):
            super().__init__(1)
            self.also = self.choice

    policy = Tied()
    with make(Collector, policy=policy) as collector:
        collector.update_policy_weights_({"choice": TWO, "also": TWO})
    assert [float(value) for value in policy.state_dict().values()] == [2, 2]


# --- for whom


@BOTH
def test_weights_reach_the_workers_they_are_for(cls):
    with make(cls, policy=Chooser(1)) as collector:
        for ids, found in [(0, [{2}, {1}]), ([1], [{1}, {2}]), ((0, 1), [{2}, {2}])]:
            collector.update_policy_weights_()
            collector.update_policy_weights_(Chooser(2), worker_ids=ids)
            assert settled(collector) == found


# --- mistakes

MISTAKES: list[tuple[Any, dict[str, Any], Any, str]] = [
    ((Chooser(),), {"weights": {}}, ValueError, "pass only one of policy_or_weights, weights"),
    ((Chooser(),), {"policy": Chooser()}, ValueError, "only one of policy_or_weights, policy"),
    ((), {"policy": Chooser(), "weights": {}}, ValueError, "pass only one of policy, weights"),
    ((Chooser(),), {"weights_dict": {}}, ValueError, "pass only one of .*weights_dict"),
    ((), {"weights_dict": {"critic": 1}}, KeyError, "no model 'critic'"),
    ((Chooser(),), {"model_id": "critic"}, KeyError, "no model 'critic'"),
    (
        (),
        {"weights_dict": {"policy": Chooser()}, "model_id": "policy"},
        ValueError,
        "leave model_id='policy' out",
    ),
    ((3,), {}, TypeError, "weights must be a module, a TensorDict or a dict.*int"),
    (({"choice": 3},), {}, TypeError, "weight 'choice' must be a tensor, but it is int"),
    (({},), {}, KeyError, r"don't fit the policy Chooser: missing \['choice'\], unknown \[\]"),
    (({"chance": torch.ones(())},), {}, KeyError, "missing .*choice.* unknown .*chance"),
    (
        ({"choice": TWO, "bias": TWO},),
        {},
        KeyError,
        r"don't fit the policy Chooser: missing \[\], unknown \['bias'\]",
    ),
    (({"choice": torch.ones(2)},), {}, ValueError, r"'choice' has shape \(2,\)"),
]
OF_WORKERS = [
    ({"worker_ids": [2]}, ValueError, "worker 2, but the workers are 0 to 1"),
    ({"worker_ids": -1}, ValueError, "worker -1, but the workers are 0 to 1"),
]
OF_ONE = [
    ({"worker_ids": [0]}, TypeError, r"worker_ids=\[0\] .* without workers"),
    ({"model_id": "critic"}, KeyError, "no model 'critic': pass 'policy'"),
]


class Two(Chooser):
    """A policy with a buffer beside its weight."""

    def __init__(self, choice=0):
        super().__init__(choice)
        self.register_buffer("unused", torch.zeros(2))


@ALL
def test_mistakes_are_told_at_once_and_change_nothing(cls):
    with make(cls, policy=Chooser(1), track_policy_version=True) as collector:
        more = OF_ONE if cls is Collector else OF_WORKERS
        for args, kwargs, kind, match in (*MISTAKES, *(((Chooser(),), *one) for one in more)):
            with pytest.raises(kind, match=match):
                collector.update_policy_weights_(*args, **kwargs)
        assert collector.policy_version == 0
        assert settled(collector) == all_of(cls, 1)
    with make(cls, policy=Two(1)) as collector:
        with pytest.raises(ValueError, match=r"'unused'"):
            collector.update_policy_weights_({"choice": TWO, "unused": torch.zeros(3)})
        assert settled(collector) == all_of(cls, 1)


@ALL
@pytest.mark.parametrize("policy", [None, lambda observation: torch.eye(4)[0]])
def test_a_policy_may_have_no_weights(cls, policy):
    with make(cls, policy=policy) as collector:
        with pytest.raises(TypeError, match=r"has no weights to update"):
            collector.update_policy_weights_(Chooser())
        if cls is Collector:
            collector.update_policy_weights_()
        else:
            with pytest.raises(RuntimeError, match="no weights to send: the policy is not a mod"):
                collector.update_policy_weights_()
        assert collector.next() is not None


def test_weights_that_do_not_fit_what_a_worker_made_are_refused_at_once():
    with make(policy_factory=Chooser) as collector:
        for weights in ({"chance": torch.ones(())}, {"choice": torch.ones(2)}):
            with pytest.raises((KeyError, ValueError), match="choice"):
                collector.update_policy_weights_(weights)
        assert collector.next() is not None
    with pytest.raises(RuntimeError, match=r"update_policy_weights_\(\) failed .* shut down"):
        collector.update_policy_weights_()
