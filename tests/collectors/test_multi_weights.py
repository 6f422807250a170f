"""New weights for the policies of workers: in every form, for those they are meant for."""

from typing import Any

import pytest
import torch
from multi_parts import BOTH, Chooser, actions, make, together, worker_of
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn


def settled(collector, batches=8):
    """The actions of each worker once new weights are in use."""
    found = {}
    for _ in range(batches):
        batch = collector.next()
        for row in batch if together(type(collector)) else [batch]:
            found[worker_of(row)] = actions(row)
    return [found[index] for index in sorted(found)]


# --- forms

FORMS = {
    "module": lambda: {"policy_or_weights": Chooser(2)},
    "policy": lambda: {"policy": Chooser(2)},
    "state dict": lambda: {"policy_or_weights": Chooser(2).state_dict()},
    "weights": lambda: {"weights": Chooser(2).state_dict()},
    "plain dict": lambda: {"weights": {"choice": torch.tensor(2.0)}},
    "TensorDict": lambda: {"weights": TensorDict.from_module(Chooser(2))},
    "TensorDict of data": lambda: {"weights": TensorDict.from_module(Chooser(2)).data},
    "by model": lambda: {"weights_dict": {"policy": Chooser(2)}},
    "of a model": lambda: {"weights": Chooser(2).state_dict(), "model_id": "policy"},
    "of all workers": lambda: {"policy": Chooser(2), "worker_ids": [0, 1]},
    "in another dtype": lambda: {"weights": {"choice": torch.tensor(2, dtype=torch.float64)}},
}


@BOTH
def test_weights_may_come_in_any_form(cls):
    policy = Chooser(1)
    with make(cls, policy=policy) as collector:
        for form in FORMS:
            collector.update_policy_weights_(**FORMS[form]())
            assert settled(collector) == [{2}, {2}], form
            # The user's own policy is left alone.
            assert policy.choice == 1
            collector.update_policy_weights_()
            assert settled(collector) == [{1}, {1}]


@BOTH
def test_weights_by_their_older_name_warn(cls):
    with make(cls, policy=Chooser(1)) as collector:
        with pytest.warns(DeprecationWarning, match="policy_weights is an older name"):
            collector.update_policy_weights_(policy_weights=Chooser(2))
        assert settled(collector) == [{2}, {2}]


@BOTH
def test_nested_weights_find_their_places(cls):
    policy = TensorDictModule(Chooser(1), in_keys=["observation"], out_keys=["action"])
    with make(cls, policy=policy) as collector:
        collector.update_policy_weights_({"module": {"choice": torch.tensor(3.0)}})
        assert settled(collector) == [{3}, {3}]


@BOTH
def test_weights_are_those_of_the_moment(cls):
    policy = Chooser(1)
    with make(cls, policy=policy) as collector:
        policy.become(2)
        collector.update_policy_weights_()
        policy.become(3)
        assert settled(collector) == [{2}, {2}]


@BOTH
def test_buffers_are_sent_as_well(cls):
    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("choice", torch.tensor(1))

        def forward(self, observation):
            return nn.functional.one_hot(self.choice, 4).expand(*observation.shape[:-1], 4)

    policy = Moving()
    with make(cls, policy=policy) as collector:
        assert settled(collector) == [{1}, {1}]
        policy.choice.fill_(2)
        assert settled(collector) == [{1}, {1}]
        collector.update_policy_weights_()
        assert settled(collector) == [{2}, {2}]


# --- for whom


@BOTH
@pytest.mark.parametrize(
    ("ids", "found"),
    [(0, [{2}, {1}]), ([1], [{1}, {2}]), ((0, 1), [{2}, {2}])],
)
def test_weights_reach_the_workers_they_are_for(cls, ids, found):
    with make(cls, policy=Chooser(1)) as collector:
        collector.update_policy_weights_(Chooser(2), worker_ids=ids)
        assert settled(collector) == found


def test_a_factory_may_be_given_weights_for_each_worker():
    with make(policy_factory=Chooser, track_policy_version=True) as collector:
        for index, choice in enumerate((3, 2)):
            collector.update_policy_weights_(Chooser(choice), worker_ids=index)
        batch = collector.next()
        assert [actions(row) for row in batch] == [{3}, {2}]
        assert batch["policy_version"].tolist() == [[1] * 5, [2] * 5]


# --- mistakes


MISTAKES: list[tuple[Any, dict[str, Any], Any, str]] = [
    ((Chooser(),), {"weights": {}}, ValueError, "pass only one of policy_or_weights, weights"),
    ((), {"policy": Chooser(), "weights": {}}, ValueError, "pass only one of policy, weights"),
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
    (({"chance": torch.ones(())},), {}, KeyError, "missing .*choice.* unknown .*chance"),
    (({"choice": torch.ones(2)},), {}, ValueError, r"'choice' has shape \(2,\)"),
    ((Chooser(),), {"worker_ids": [2]}, ValueError, "worker 2, but the workers are 0 to 1"),
    ((Chooser(),), {"worker_ids": -1}, ValueError, "worker -1, but the workers are 0 to 1"),
]


@BOTH
def test_mistakes_are_told_at_once_and_change_nothing(cls):
    with make(cls, policy=Chooser(1), track_policy_version=True) as collector:
        for args, kwargs, kind, match in MISTAKES:
            with pytest.raises(kind, match=match):
                collector.update_policy_weights_(*args, **kwargs)
        assert collector.policy_version == 0
        assert settled(collector) == [{1}, {1}]


@BOTH
@pytest.mark.parametrize("policy", [None, lambda observation: torch.eye(4)[0]])
def test_there_may_be_no_weights_to_take(cls, policy):
    with (
        make(cls, policy=policy) as collector,
        pytest.raises(RuntimeError, match="no weights to send: the policy is not a module"),
    ):
        collector.update_policy_weights_()


@pytest.mark.parametrize("weights", [{"chance": torch.ones(())}, {"choice": torch.ones(2)}])
def test_weights_that_do_not_fit_what_a_worker_made_are_refused_at_once(weights):
    with make(policy_factory=Chooser) as collector:
        with pytest.raises((KeyError, ValueError), match="choice"):
            collector.update_policy_weights_(weights)
        assert collector.next() is not None


@BOTH
@pytest.mark.parametrize("policy", [None, lambda observation: torch.eye(4)[0]])
def test_a_policy_may_have_no_weights(cls, policy):
    with make(cls, policy=policy) as collector:
        with pytest.raises(TypeError, match=r"has no weights to update"):
            collector.update_policy_weights_(Chooser())
        assert collector.next() is not None


def test_a_closed_collector_takes_no_weights():
    collector = make(policy=Chooser(1))
    collector.shutdown()
    with pytest.raises(RuntimeError, match=r"update_policy_weights_\(\) failed .* shut down"):
        collector.update_policy_weights_()
