"""The cases of policies that draw their actions: with distribution objects, and without.

The hand-written loop computes samples and log-probabilities by their formulas. A second loop uses
distribution objects, as most programs do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from frameworks import others
from harness import HAND, TRAWL, Case, Contender, Source
from rllib import DistributionName

FRAMES = 1000
ENVS = 8
OBJECTS = "loop with distribution objects"
LOG_SQRT_TAU = math.log(math.sqrt(2 * math.pi))
NORMAL = ("loc", "scale")
LIMIT = 2.0


def normal(loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A sample and its log-probability."""
    sample = loc + torch.randn(loc.shape) * scale
    return sample, -((sample - loc) ** 2) / (2 * scale**2) - scale.log() - LOG_SQRT_TAU


def gaussian(head: nn.Module) -> hand.Act:
    def act(observation: Tensor) -> tuple[Tensor, ...]:
        loc, scale = head(observation)
        action, log_prob = normal(loc, scale)
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
        raw, log_prob = normal(loc, scale)
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
    """A policy of TensorDict modules, with a network and a distribution."""
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


def tanh_normal(head: nn.Module) -> ProbabilisticTensorDictSequential:
    from torchrl.modules import TanhNormal

    return policy(head, TanhNormal, NORMAL, low=-LIMIT, high=LIMIT)


@dataclass(frozen=True)
class Kind:
    """A kind of policy, and the environment that it acts in.

    Attributes:
        title: Shown in the report.
        formulas: Makes the policy of the hand-written loop.
        objects: Makes the policy of the loop with distribution objects.
        modules: Makes the policy of the collectors.
        head: Makes the network.
        params: Keys of the distribution's parameters.
        make: Makes the environment.
        env: Name of the environment.
        indexed: Whether actions are indices.
        parameters: Makes the network of RLlib and Sample Factory, whose distributions take the
            logarithm of a scale.
        rllib: RLlib's distribution.
        limits: Limits of the actions, if RLlib's distribution has some.
    """

    title: str
    formulas: Callable[[nn.Module], hand.Act]
    objects: Callable[[nn.Module], hand.Act]
    modules: Callable[[nn.Module], Any]
    head: Callable[[], nn.Module]
    params: Sequence[str]
    parameters: Callable[[], nn.Module]
    rllib: DistributionName
    limits: Mapping[str, float] | None = None
    make: Callable[[], Any] = work.pendulum
    env: str = "Pendulum"
    indexed: bool = False


GAUSSIAN = Kind(
    "Gaussian",
    gaussian,
    gaussian_objects,
    partial(policy, cls=Normal, names=NORMAL),
    work.gaussian_head,
    NORMAL,
    partial(work.mlp, 3, 2),
    "TorchDiagGaussian",
)
TANH_NORMAL = Kind(
    "TanhNormal",
    squashed,
    squashed_objects,
    tanh_normal,
    work.gaussian_head,
    NORMAL,
    partial(work.mlp, 3, 2),
    "TorchSquashedGaussian",
    {"low": -LIMIT, "high": LIMIT},
)
CATEGORICAL = Kind(
    "Categorical",
    categorical,
    categorical_objects,
    partial(policy, cls=Categorical, names=("logits",)),
    partial(work.mlp, 4, 2),
    ("logits",),
    partial(work.mlp, 4, 2),
    "TorchCategorical",
    make=work.cartpole,
    env="CartPole",
    indexed=True,
)


def case(name: str, kind: Kind, count: int) -> Case:
    """The case of a kind of policy for some environments."""
    names, head, make = ("action", "action_log_prob", *kind.params), kind.head(), kind.make

    def loop(acting: Callable[[nn.Module], hand.Act]) -> Source:
        if count == 1:
            return hand.single(make(), acting(head), FRAMES, names)
        envs = [make() for _ in range(count)]
        return hand.several(envs, acting(head), FRAMES // count, names)

    def trawl() -> Source:
        own = partial(peers.trawl_indexed, make) if kind.indexed else make
        return peers.trawl(own if count == 1 else [own] * count, kind.modules(head), FRAMES)

    def torchrl() -> Source:
        wrap = partial(peers.torchrl_indexed if kind.indexed else peers.torchrl_single, make)
        env = wrap() if count == 1 else peers.torchrl_serial(make, count, True, wrap)
        return peers.torchrl(env, kind.modules(head), FRAMES)

    environments = f"{count} {kind.env}{'s' if count > 1 else ''}"
    return Case(
        name,
        f"{environments}, {kind.title} policy with log-probability",
        (
            Contender(TRAWL, trawl),
            Contender(HAND, partial(loop, kind.formulas), 0.95, "bare formulas"),
            Contender(OBJECTS, partial(loop, kind.objects), 1.4),
            Contender("TorchRL", torchrl, 4.0, "trust_policy=True"),
            *others(make, kind.parameters(), count, FRAMES, kind.rllib, kind.limits, goal=8.0),
        ),
    )


CASES: dict[str, Callable[[], Case]] = {
    name: partial(case, name, kind, count)
    for name, kind, count in (
        ("stochastic", GAUSSIAN, 1),
        ("stochastic8", GAUSSIAN, ENVS),
        ("tanh_normal", TANH_NORMAL, 1),
        ("tanh_normal8", TANH_NORMAL, ENVS),
        ("categorical1", CATEGORICAL, 1),
        ("categorical8", CATEGORICAL, ENVS),
    )
}
