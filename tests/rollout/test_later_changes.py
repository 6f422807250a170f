"""What changes after the first step: dtypes of outputs and observations, weights, methods."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Normal

from trawl.collectors import Collector
from trawl.testing import Ledger, NumberedEnv


def linear() -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("env", ["Pendulum-v1", ["Pendulum-v1"] * 2], ids=["one", "two"])
def test_outputs_of_a_lower_precision_keep_their_values(env) -> None:
    policy = linear()
    with Collector(env, policy, frames_per_batch=8) as collector:
        with torch.autocast("cpu", torch.bfloat16):
            batch = collector.next()
        with torch.no_grad():
            expected = policy.module(batch["observation"])
    torch.testing.assert_close(batch["action"], expected, rtol=0.05, atol=0.05)


class Fading(gymnasium.Env):
    """Gives uint8 images, and other numbers from the second step on."""

    observation_space = gymnasium.spaces.Box(0, 255, (2, 2), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, later) -> None:
        self.later = later
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        return np.zeros((2, 2), np.uint8), {}

    def step(self, action):
        self.steps += 1
        obs = self.later if self.steps > 1 else np.ones((2, 2), np.uint8)
        return obs, 0.0, False, False, {}


def test_observations_of_another_kind_are_refused() -> None:
    env = Fading(np.full((2, 2), 0.7))
    with (
        Collector(env, frames_per_batch=8) as collector,
        pytest.raises(TypeError, match="'observation' is float64, but its space says uint8"),
    ):
        collector.next()


@pytest.mark.parametrize("compiled", [None, {"backend": "eager"}], ids=["plain", "compiled"])
def test_replaced_weights_act_from_the_next_batch_on(compiled) -> None:
    policy = linear()
    with Collector("Pendulum-v1", policy, frames_per_batch=4, compile_policy=compiled) as collector:
        assert collector.next()["action"].abs().sum() > 0
        TensorDict.from_module(policy).apply(torch.zeros_like).to_module(policy)
        assert collector.next()["action"].abs().sum() == 0


class Constant(nn.Module):
    """Gives 0.5 for any input."""

    def forward(self, observation):
        return torch.full_like(observation[..., :1], 0.5)


class Doubled(nn.Module):
    def forward(self, value):
        return 2 * value


def two_layers() -> TensorDictModule:
    inner = nn.Sequential(nn.Linear(3, 1), Doubled())
    return TensorDictModule(inner, in_keys=["observation"], out_keys=["action"])


def replace_parameters(policy):
    layer = policy.module[0]
    layer.weight, layer.bias = nn.Parameter(torch.zeros(1, 3)), nn.Parameter(torch.full((1,), 0.25))


def give_half(*_):
    return torch.full((1,), 0.5)


CHANGES = {
    "hook": lambda policy, _: policy.module.register_forward_hook(give_half),
    "hook of a layer": lambda policy, _: policy.module[1].register_forward_hook(give_half),
    "hook of the policy": lambda policy, _: policy.register_forward_hook(
        lambda _, __, td: td.set("action", give_half())
    ),
    "layer": lambda policy, _: policy.module.__setitem__(1, Constant()),
    "module": lambda policy, _: setattr(policy, "module", Constant()),
    "parameters": lambda policy, _: replace_parameters(policy),
    "method": lambda policy, _: setattr(policy.module[1], "forward", give_half),
    "method of the class": lambda _, patch: patch.setattr(Doubled, "forward", give_half),
    "class": lambda policy, _: setattr(policy.module[1], "__class__", Constant),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_policy_between_two_batches_is_heeded(change, monkeypatch) -> None:
    policy = two_layers()
    with Collector("Pendulum-v1", policy, frames_per_batch=4) as collector:
        before = [collector.next()["action"] for _ in range(2)]
        CHANGES[change](policy, monkeypatch)
        after = [collector.next()["action"] for _ in range(2)]
    assert not (torch.cat(before) == 0.5).any()
    assert (torch.cat(after) == 0.5).all()


def test_a_hook_that_is_removed_is_no_longer_called() -> None:
    policy = two_layers()
    with Collector("Pendulum-v1", policy, frames_per_batch=4) as collector:
        collector.next()
        hook = policy.module[0].register_forward_hook(lambda *_: torch.zeros(1))
        assert collector.next()["action"].eq(0).all()
        hook.remove()
        assert collector.next()["action"].ne(0).all()


def test_an_input_is_copied_from_when_a_hook_may_change_it() -> None:
    policy = two_layers()
    with Collector("Pendulum-v1", policy, frames_per_batch=4) as collector:
        collector.next()
        policy.module.register_forward_pre_hook(lambda _, given: given[0].fill_(9))
        assert collector.next()["observation"].ne(9).all()


@pytest.mark.parametrize("replaced", [True, False])
def test_a_changed_argument_of_a_distribution_is_heeded(replaced) -> None:
    sampler = ProbabilisticTensorDictModule(
        ["loc"], ["action"], distribution_class=Normal, distribution_kwargs={"scale": 1.0}
    )
    mean = TensorDictModule(nn.Linear(3, 1), ["observation"], ["loc"])
    policy = ProbabilisticTensorDictSequential(mean, sampler)
    with Collector("Pendulum-v1", policy, frames_per_batch=4) as collector:
        batches = [collector.next() for _ in range(2)]
        if replaced:
            sampler.distribution_kwargs = {"scale": 1e-9}
        else:
            sampler.distribution_kwargs["scale"] = 1e-9
        batches += [collector.next() for _ in range(2)]
    near = [torch.allclose(batch["action"], batch["loc"]) for batch in batches]
    assert near == [False, False, True, True]


class Halving(TensorDictModule):
    def __call__(self, *args, **kwargs):
        result = super().__call__(*args, **kwargs)
        return result.set("action", torch.full_like(result["action"], 0.5))


class Writing(TensorDictModule):
    def _write_to_tensordict(self, tensordict, tensors, *args, **kwargs):
        return tensordict.set("action", torch.full_like(tensors[0], 0.5))


@pytest.mark.parametrize("kind", [Halving, Writing])
def test_a_subclass_that_calls_or_writes_in_its_own_way_is_heeded(kind) -> None:
    policy = kind(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    with Collector("Pendulum-v1", policy, frames_per_batch=4) as collector:
        assert collector.next()["action"].unique().tolist() == [0.5]
        assert "methods of its own" in collector.stats()["policy_path_reason"]


@pytest.mark.parametrize("row", [1, 511, 512, 513])
def test_an_interruptor_is_asked_before_every_row(row) -> None:
    asked = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == row

    with Collector(lambda: NumberedEnv(), frames_per_batch=1000, interruptor=stop) as collector:
        collector.next()
        assert collector.stats()["frames"] == row


def test_a_batch_longer_than_a_stretch_of_the_loop_is_accounted_for() -> None:
    envs = [NumberedEnv(i, lengths=[3 + i, 1, 6 - i]) for i in range(2)]
    ledger = Ledger(envs, 4)
    with Collector(envs, frames_per_batch=2500, max_frames_per_traj=4) as collector:
        for _ in range(3):
            ledger.add(collector.next())
    assert ledger.frames == 7500


def test_one_leaf_does_not_carry_the_whole_batch() -> None:
    with Collector("CartPole-v1", frames_per_batch=1000) as collector:
        reward = collector.next()["next", "reward"]
    assert reward.untyped_storage().nbytes() == 4000


def test_environments_that_are_reset_with_one_seed_differ() -> None:
    for env in (["Pendulum-v1"] * 3, gymnasium.make_vec("Pendulum-v1", 3)):
        with Collector(env, frames_per_batch=3) as collector:
            collector.reset(seed=5)
            first = collector.next()["observation"][:, 0]
        assert len(first.unique(dim=0)) == 3


def test_weights_that_are_buffers_may_be_replaced() -> None:
    policy = linear()
    layer = policy.module
    for name in ("weight", "bias"):
        value = getattr(layer, name).detach().clone()
        delattr(layer, name)
        layer.register_buffer(name, value)
    zeros = {name: torch.zeros_like(value) for name, value in policy.state_dict().items()}
    with Collector("Pendulum-v1", policy, frames_per_batch=4) as collector:
        assert collector.next()["action"].abs().sum() > 0
        policy.load_state_dict(zeros, assign=True)
        assert collector.next()["action"].abs().sum() == 0


class Growing(gymnasium.Env):
    """Has an observation without a fixed layout, and a reward that is the action."""

    observation_space = gymnasium.spaces.Dict(
        number=gymnasium.spaces.Box(0, 9, (1,), np.float32),
        several=gymnasium.spaces.Sequence(
            gymnasium.spaces.Box(-1, 1, (1,), np.float32), stack=True
        ),
    )
    action_space = gymnasium.spaces.Box(-99, 99, (1,), np.float32)

    def shown(self) -> dict[str, np.ndarray]:
        return {"number": np.ones(1, np.float32), "several": np.zeros((2, 1), np.float32)}

    def reset(self, *, seed=None, options=None):
        return self.shown(), {}

    def step(self, action):
        return self.shown(), float(action[0]), False, False, {}


@pytest.mark.parametrize("kind", ["array", "tuple", "parameter", "tensor"])
def test_actions_stay_though_a_policy_uses_their_memory_again(kind) -> None:
    memory = nn.Parameter(torch.zeros(1), requires_grad=kind == "parameter")

    def act(number: torch.Tensor) -> object:
        with torch.no_grad():
            memory.add_(1)
        return {
            "array": memory.detach().numpy(),
            "tuple": (memory.detach(),),
            "parameter": memory,
            "tensor": memory.detach(),
        }[kind]

    policy = TensorDictModule(act, ["number"], ["action"])
    with Collector(Growing, policy, frames_per_batch=5) as collector:
        batch = collector.next()
    assert torch.equal(batch["action"], batch["next", "reward"])
    assert len(batch["action"].unique()) == 5
