"""The cases of policies that draw their actions: with distribution objects, and without.

The hand-written loop computes samples and log-probabilities by their formulas. A second loop uses
distribution objects, as most programs do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn.functional import softplus

import hand
import peers
import work
from harness import HAND, TRAWL, Case, Contender, Source

FRAMES = 1000
ENVS = 8
OBJECTS = "loop with distribution objects"
LOG_SQRT_TAU = math.log(math.sqrt(2 * math.pi))
NORMAL = ("loc", "scale")
LIMIT = 2.0


def normal(loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A sample, its log-probability, and the squared error that it is computed from."""
    sample = loc + torch.randn(loc.shape) * scale
    squared = (sample - loc) ** 2
    return sample, -squared / (2 * scale**2) - scale.log() - LOG_SQRT_TAU, squared


def gaussian(head: nn.Module) -> hand.Act:
    def act(observation: Tensor) -> tuple[Tensor, ...]:
        loc, scale = head(observation)
        action, log_prob, _ = normal(loc, scale)
        return action, log_prob, loc, scale

    return act


def gaussian_objects(head: nn.Module) -> hand.Act:
    def act(observation: Tensor) -> tuple[Tensor, ...]:
        loc, scale = head(observation)
        dist = Normal(loc, scale)
        action = dist.sample()
        return action, dist.log_prob(action), loc, scale

    return act


def squashed(head: nn.Module) -> hand.Act:
    def act(observation: Tensor) -> tuple[Tensor, ...]:
        loc, scale = head(observation)
        raw, log_prob, _ = normal(loc, scale)
        slope = 2 * (math.log(2) - raw - softplus(-2 * raw)) + math.log(LIMIT)
        return raw.tanh() * LIMIT, (log_prob - slope).sum(-1), loc, scale

    return act


def squashed_objects(head: nn.Module) -> hand.Act:
    from torchrl.modules import TanhNormal

    def act(observation: Tensor) -> tuple[Tensor, ...]:
        loc, scale = head(observation)
        dist = TanhNormal(loc, scale, low=-LIMIT, high=LIMIT)
        action = dist.rsample()
        return action, dist.log_prob(action), loc, scale

    return act


def categorical(head: nn.Module) -> hand.Act:
    def act(observation: Tensor) -> tuple[Tensor, ...]:
        logits = head(observation)
        log_probs = logits.log_softmax(-1)
        action = torch.multinomial(log_probs.exp(), 1)
        return action.squeeze(-1), log_probs.gather(-1, action).squeeze(-1), logits

    return act


def categorical_objects(head: nn.Module) -> hand.Act:
    def act(observation: Tensor) -> tuple[Tensor, ...]:
        logits = head(observation)
        dist = Categorical(logits=logits)
        action = dist.sample()
        return action, dist.log_prob(action), logits

    return act


def policy(
    head: nn.Module, cls: Any, names: Sequence[str], **fixed: Any
) -> ProbabilisticTensorDictSequential:
    """The same as a policy of TensorDict modules."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(head, ["observation"], list(names)),
        ProbabilisticTensorDictModule(
            in_keys=list(names),
            out_keys=["action"],
            distribution_class=cls,
            distribution_kwargs=fixed,
            return_log_prob=True,
        ),
    )


def _case(
    name: str,
    title: str,
    count: int,
    loops: tuple[Callable[..., hand.Act], Callable[..., hand.Act]],
    made: Callable[..., Any],
    head: nn.Module,
    params: Sequence[str],
    make: Callable[[], Any] = work.pendulum,
    indexed: bool = False,
) -> Case:
    names = ("action", "action_log_prob", *params)

    def loop(kind: Callable[..., hand.Act]) -> Source:
        if count == 1:
            return hand.single(make(), kind(head), FRAMES, names)
        envs = [make() for _ in range(count)]
        return hand.several(envs, kind(head), FRAMES // count, names)

    def trawl() -> Source:
        own = partial(peers.trawl_indexed, make) if indexed else make
        return peers.trawl(own if count == 1 else [own] * count, made(head), FRAMES)

    def torchrl() -> Source:
        wrap = partial(peers.torchrl_indexed if indexed else peers.torchrl_single, make)
        env = wrap() if count == 1 else peers.torchrl_serial(make, count, True, wrap)
        return peers.torchrl(env, made(head), FRAMES)

    formulas, objects = loops
    return Case(
        name,
        title,
        (
            Contender(TRAWL, trawl),
            Contender(HAND, partial(loop, formulas), 0.95, "bare formulas"),
            Contender(OBJECTS, partial(loop, objects), 1.4),
            Contender("TorchRL", torchrl, 4.0, "trust_policy=True"),
        ),
    )


def stochastic() -> Case:
    return _case(
        "stochastic",
        "1 Pendulum, Gaussian policy with log-probability",
        1,
        (gaussian, gaussian_objects),
        partial(policy, cls=Normal, names=NORMAL),
        work.gaussian_head(),
        NORMAL,
    )


def stochastic8() -> Case:
    return _case(
        "stochastic8",
        f"{ENVS} Pendulums, Gaussian policy with log-probability",
        ENVS,
        (gaussian, gaussian_objects),
        partial(policy, cls=Normal, names=NORMAL),
        work.gaussian_head(),
        NORMAL,
    )


def _tanh_normal(head: nn.Module) -> Any:
    from torchrl.modules import TanhNormal

    return policy(head, TanhNormal, NORMAL, low=-LIMIT, high=LIMIT)


def tanh_normal() -> Case:
    return _case(
        "tanh_normal",
        "1 Pendulum, TanhNormal policy with log-probability",
        1,
        (squashed, squashed_objects),
        _tanh_normal,
        work.gaussian_head(),
        NORMAL,
    )


def tanh_normal8() -> Case:
    return _case(
        "tanh_normal8",
        f"{ENVS} Pendulums, TanhNormal policy with log-probability",
        ENVS,
        (squashed, squashed_objects),
        _tanh_normal,
        work.gaussian_head(),
        NORMAL,
    )


def categorical1() -> Case:
    return _case(
        "categorical1",
        "1 CartPole, Categorical policy with log-probability",
        1,
        (categorical, categorical_objects),
        partial(policy, cls=Categorical, names=("logits",)),
        work.mlp(4, 2),
        ("logits",),
        work.cartpole,
        indexed=True,
    )


def categorical8() -> Case:
    return _case(
        "categorical8",
        f"{ENVS} CartPoles, Categorical policy with log-probability",
        ENVS,
        (categorical, categorical_objects),
        partial(policy, cls=Categorical, names=("logits",)),
        work.mlp(4, 2),
        ("logits",),
        work.cartpole,
        indexed=True,
    )


CASES = (stochastic, stochastic8, tanh_normal, tanh_normal8, categorical1, categorical8)
