import pytest
import torch
from collector_parts import Scorer, by_step
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from trawl.collectors import Collector
from trawl.testing import NumberedEnv


def wrapped(choice):
    return TensorDictModule(Scorer(choice), in_keys=["observation"], out_keys=["action"])


def choices(collector):
    return NumberedEnv.action_numbers(next(iter(collector))).tolist()


SCORES = torch.tensor([0.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((Scorer(3),), {}),
        ((TensorDict(scores=SCORES),), {}),
        ((TensorDict.from_module(Scorer(3)),), {}),
        (({"scores": SCORES},), {}),
        ((Scorer(3).state_dict(),), {}),
        ((Scorer(3).double(),), {}),
        ((), {"policy": Scorer(3)}),
        ((), {"weights": {"scores": SCORES}}),
        ((), {"weights_dict": {"policy": {"scores": SCORES}}}),
        ((Scorer(3),), {"model_id": "policy"}),
    ],
    ids=[
        "module",
        "tensordict",
        "tensordict of a module",
        "dict",
        "state dict",
        "other dtype",
        "policy",
        "weights",
        "weights_dict",
        "model_id",
    ],
)
def test_weights_may_come_in_many_forms(args, kwargs):
    with Collector(NumberedEnv(), Scorer(0), frames_per_batch=4) as collector:
        assert choices(collector) == [0] * 4
        collector.update_policy_weights_(*args, **kwargs)
        assert choices(collector) == [3] * 4


@pytest.mark.parametrize(
    "weights",
    [
        wrapped(3),
        wrapped(3).state_dict(),
        TensorDict.from_module(wrapped(3)),
        {"module": {"scores": SCORES}},
        {"module.scores": SCORES},
    ],
    ids=["module", "state dict", "tensordict", "nested dict", "dotted dict"],
)
def test_weights_of_a_tensordict_module_are_named_as_it_names_them(weights):
    with Collector(NumberedEnv(), wrapped(0), frames_per_batch=4) as collector:
        collector.update_policy_weights_(weights)
        assert choices(collector) == [3] * 4


def test_weights_are_copied():
    source, policy = Scorer(3), Scorer(0)
    with Collector(NumberedEnv(), policy, frames_per_batch=4) as collector:
        collector.update_policy_weights_(source)
        with torch.no_grad():
            source.scores.copy_(torch.tensor([0.0, 1.0, 0.0, 0.0]))
        assert choices(collector) == [3] * 4
        assert policy.scores.requires_grad


def test_the_policy_itself_needs_no_update():
    policy = Scorer(0)
    with Collector(NumberedEnv(), policy, frames_per_batch=4) as collector:
        with torch.no_grad():
            policy.scores.copy_(SCORES)
        collector.update_policy_weights_()
        assert choices(collector) == [3] * 4


def test_an_update_makes_a_new_version():
    with Collector(
        NumberedEnv(), Scorer(), frames_per_batch=4, track_policy_version=True
    ) as collector:
        collector.update_policy_weights_()
        collector.update_policy_weights_(Scorer())
        assert collector.policy_version == collector.get_policy_version() == 2
        assert next(iter(collector))["policy_version"].tolist() == [2] * 4


def test_an_update_that_fails_makes_no_version():
    with Collector(
        NumberedEnv(), Scorer(), frames_per_batch=4, track_policy_version=True
    ) as collector:
        with pytest.raises(KeyError):
            collector.update_policy_weights_({"other": SCORES})
        assert collector.policy_version == 0


def test_an_older_name_warns():
    with Collector(NumberedEnv(), Scorer(0), frames_per_batch=4) as collector:
        with pytest.warns(DeprecationWarning, match=r"policy_weights is an older name") as caught:
            collector.update_policy_weights_(policy_weights=Scorer(3))
        assert caught[0].filename == __file__
        assert choices(collector) == [3] * 4


@pytest.mark.parametrize(
    ("args", "kwargs", "kind", "match"),
    [
        ((Scorer(),), {"weights": {}}, ValueError, "pass only one of policy_or_weights, weights"),
        (
            (Scorer(),),
            {"policy": Scorer()},
            ValueError,
            "pass only one of policy_or_weights, policy",
        ),
        ((), {"policy": Scorer(), "weights": {}}, ValueError, "pass only one of policy, weights"),
        ((Scorer(),), {"weights_dict": {}}, ValueError, "pass only one of .*weights_dict"),
        ((), {"weights_dict": {}, "model_id": "policy"}, ValueError, "leave model_id='policy' out"),
        ((Scorer(),), {"model_id": "critic"}, KeyError, "no model 'critic': pass 'policy'"),
        ((), {"weights_dict": {"critic": {}}}, KeyError, "no model 'critic': pass 'policy'"),
        ((Scorer(),), {"worker_ids": [0]}, TypeError, r"worker_ids=\[0\] .* without workers"),
        ((3,), {}, TypeError, "weights must be a module, a TensorDict or a dict .* are int"),
        (({"scores": 3},), {}, TypeError, "weight 'scores' must be a tensor, but it is int"),
        (({},), {}, KeyError, r"don't fit the policy Scorer: missing \['scores'\], unknown \[\]"),
        (
            ({"scores": SCORES, "bias": SCORES},),
            {},
            KeyError,
            r"don't fit the policy Scorer: missing \[\], unknown \['bias'\]",
        ),
        (
            ({"scores": SCORES[:3]},),
            {},
            ValueError,
            r"weight 'scores' has shape \(3,\), but the policy's has \(4,\)",
        ),
    ],
)
def test_wrong_weights_are_refused(args, kwargs, kind, match):
    with (
        Collector(NumberedEnv(), Scorer(2), frames_per_batch=4) as collector,
        pytest.raises(kind, match=match),
    ):
        collector.update_policy_weights_(*args, **kwargs)


def test_weights_that_are_refused_change_nothing():
    class Two(Scorer):
        def __init__(self, choice):
            super().__init__(choice)
            self.register_buffer("unused", torch.zeros(2))

    with Collector(NumberedEnv(), Two(2), frames_per_batch=4) as collector:
        with pytest.raises(ValueError, match=r"'unused'"):
            collector.update_policy_weights_({"scores": SCORES, "unused": torch.zeros(3)})
        assert choices(collector) == [2] * 4


@pytest.mark.parametrize("policy", [None, by_step().module], ids=["random", "function"])
def test_a_policy_without_weights_has_none_to_update(policy):
    with (
        Collector(NumberedEnv(), policy, frames_per_batch=4) as collector,
        pytest.raises(TypeError, match=r"has no weights to update"),
    ):
        collector.update_policy_weights_({"scores": SCORES})


@pytest.mark.parametrize("policy", [None, by_step().module, Scorer()])
def test_an_update_without_weights_is_always_possible(policy):
    with Collector(NumberedEnv(), policy, frames_per_batch=4) as collector:
        collector.update_policy_weights_()
