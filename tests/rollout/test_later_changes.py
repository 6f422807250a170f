"""What changes between batches: weights, methods, hooks, wrappers."""

from __future__ import annotations

from typing import Any

import gymnasium
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
from torch.nn.modules import module

from trawl.collectors import Collector
from trawl.envs import GymEnv, SerialEnv
from trawl.testing import Ledger, NumberedEnv


def linear() -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


def with_buffers() -> TensorDictModule:
    policy = linear()
    for name in ("weight", "bias"):
        value = getattr(policy.module, name).detach().clone()
        delattr(policy.module, name)
        policy.module.register_buffer(name, value)
    return policy


@pytest.mark.parametrize(
    ("make", "compiled"), [(linear, None), (linear, {"backend": "eager"}), (with_buffers, None)]
)
def test_replaced_weights_act_from_the_next_batch_on(make, compiled) -> None:
    policy = make()
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


def give_half_for_the_last_layer(layer, *_):
    return give_half() if isinstance(layer, Doubled) else None


CHANGES = {
    "hook": lambda policy, _: policy.module.register_forward_hook(give_half),
    "hook of a layer": lambda policy, _: policy.module[1].register_forward_hook(give_half),
    "hook of the policy": lambda policy, _: policy.register_forward_hook(
        lambda _, __, td: td.set("action", give_half())
    ),
    "hook of all modules": lambda _, patch: patch.setitem(
        module._global_forward_hooks, 0, give_half_for_the_last_layer
    ),
    "layer": lambda policy, _: policy.module.__setitem__(1, Constant()),
    "module": lambda policy, _: setattr(policy, "module", Constant()),
    "parameters": lambda policy, _: replace_parameters(policy),
    "method": lambda policy, _: setattr(policy.module[1], "forward", give_half),
    "method of a layer of torch's": lambda policy, _: setattr(
        policy.module[0], "forward", lambda _: torch.full((1,), 0.25)
    ),
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


def test_dropout_follows_the_mode() -> None:
    inner = nn.Sequential(nn.Linear(3, 1), nn.Dropout(1.0))
    policy = TensorDictModule(inner, in_keys=["observation"], out_keys=["action"])
    with Collector("Pendulum-v1", policy, frames_per_batch=4) as collector:
        assert collector.next()["action"].eq(0).all()
        policy.eval()
        assert collector.next()["action"].ne(0).all()
        policy.train()
        assert collector.next()["action"].eq(0).all()


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


# --- small batches, whose memory is bound once


class Rewarded(gymnasium.RewardWrapper):
    """Doubles the rewards."""

    def reward(self, reward: Any) -> Any:
        return 2 * reward


@pytest.mark.parametrize("several", [False, True])
def test_a_wrapper_that_is_added_between_batches_takes_effect(several: bool) -> None:
    one = GymEnv("CartPole-v1")
    env: Any = SerialEnv(2, [lambda: one, "CartPole-v1"]) if several else one
    with Collector(env, frames_per_batch=4) as collector:
        before = [collector.next() for _ in range(3)]
        one.env = Rewarded(one.env)
        after = [collector.next() for _ in range(3)]
    rewards = torch.stack(
        [batch["next", "reward"].reshape(-1, 4 // (1 + several)) for batch in after]
    )
    assert (rewards[:, 0] == 2).all()
    assert not several or (rewards[:, 1] == 1).all()
    assert all((batch["next", "reward"] == 1).all() for batch in before)


def test_methods_that_are_replaced_between_batches_take_effect() -> None:
    env = GymEnv("CartPole-v1")
    with Collector(env, frames_per_batch=4) as collector:
        collector.next()
        step = env.env.step

        def rewarded(action: Any) -> Any:
            obs, _, *rest = step(action)
            return obs, 100.0, *rest

        env.env.step = rewarded
        assert (collector.next()["next", "reward"] == 100).all()
