"""TorchRL's policies, called directly or not, give what they give with a TensorDict."""

import pytest
from test_plan import OBS, assert_same_as_called_with_a_tensordict, module, parameters
from torch import nn

torchrl_modules = pytest.importorskip("torchrl.modules")


def torchrl_actor():
    return torchrl_modules.Actor(nn.Linear(3, 1), in_keys=[OBS])


def torchrl_probabilistic_actor():
    return torchrl_modules.ProbabilisticActor(
        parameters(),
        in_keys=["loc", "scale"],
        distribution_class=torchrl_modules.TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
    )


def torchrl_actor_and_value():
    return torchrl_modules.ActorValueOperator(
        module(nn.Linear(3, 4), out_keys=("hidden",)),
        module(nn.Linear(4, 1), ("hidden",)),
        torchrl_modules.ValueOperator(nn.Linear(4, 1), in_keys=["hidden"]),
    )


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "make", [torchrl_actor, torchrl_probabilistic_actor, torchrl_actor_and_value]
)
def test_torchrl_policies_give_the_same(make, batched):
    assert_same_as_called_with_a_tensordict(make, batched=batched)
