"""Environments of TorchRL, policies for them, and the comparison of what collectors deliver."""

from __future__ import annotations

import io
import random
import warnings
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import (
    ActionMask,
    CatFrames,
    Compose,
    DoubleToFloat,
    EnvBase,
    FrameSkipTransform,
    GymEnv,
    GymWrapper,
    InitTracker,
    NoopResetEnv,
    ObservationNorm,
    RandomTruncationTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TimeMaxPool,
    TrajCounter,
    Transform,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
    VecNormV2,
)
from torchrl.envs.custom.pendulum import PendulumEnv
from torchrl.modules import GRUModule, LSTMModule

from trawl.collectors import Collector
from trawl.envs.capture.frames import to_plain


def tree_equal(one: Any, other: Any) -> bool:
    """Compares plain data bit by bit, so that NaN equals NaN."""
    if isinstance(one, Tensor):
        layout = one.shape == other.shape and one.dtype == other.dtype
        return layout and one.numpy().tobytes() == other.numpy().tobytes()
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(tree_equal(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(tree_equal, one, other))
    return bool(one == other)


def equal_batches(one: TensorDictBase, other: TensorDictBase) -> bool:
    """Compares two batches with all their entries, text included."""
    return tree_equal(to_plain(one), to_plain(other))


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# --- environments


class Walk(EnvBase):
    """A random walk with a generator, tensors that share memory, and a counter of episodes."""

    def __init__(self, batch_size: tuple[int, ...] = ()) -> None:
        super().__init__(batch_size=batch_size)
        batch = self.batch_size
        self.observation_spec = Composite(observation=Unbounded((*batch, 3)), shape=batch)
        self.action_spec = Composite(action=Bounded(-1, 1, (*batch, 1)), shape=batch)
        self.reward_spec = Composite(reward=Unbounded((*batch, 1)), shape=batch)
        self.generator = torch.Generator().manual_seed(1)
        self.places = torch.zeros((*batch, 3))
        self.first = self.places[..., :1]  # part of the places
        self.seen = TensorDict({"best": torch.zeros(*batch, 1)}, batch)
        self.episodes = {"number": 0, "lengths": [0]}

    def _draw(self) -> Tensor:
        return torch.randn(self.places.shape, generator=self.generator)

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDictBase:
        self.places.copy_(self._draw())
        self.episodes["number"] += 1
        self.episodes["lengths"].append(0)
        return TensorDict(self._shown(), self.batch_size).update(self.full_done_spec.zero())

    def _shown(self) -> dict[str, Tensor]:
        return {"observation": self.places.clone()}

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.places += self._draw() + tensordict["action"]
        self.first *= 0.9
        self.episodes["lengths"][-1] += 1
        best = self.seen["best"]
        best.copy_(torch.maximum(best, self.places.sum(-1, keepdim=True)))
        found = TensorDict(self._shown(), self.batch_size)
        found["reward"] = best + self.episodes["number"] + self.first
        ended = self.full_done_spec.zero()
        ended["done"] |= self.episodes["lengths"][-1] == 3 + self.episodes["number"] % 4
        ended["terminated"] |= ended["done"]
        return found.update(ended)

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(seed or 0)


class OwnMethods(Walk):
    """The same with the two methods, and a value that nothing else can capture."""

    def __init__(self) -> None:
        super().__init__()
        self.secret = iter([0])

    def get_state(self) -> dict[str, Any]:
        names = ("places", "first", "episodes")
        best, state = self.seen["best"], self.generator.get_state()
        return {"best": best, "generator": state, **{n: vars(self)[n] for n in names}}

    def set_state(self, state: dict[str, Any]) -> None:
        self.seen = TensorDict({"best": state["best"]})
        self.generator.set_state(state["generator"])
        self.places, self.first, self.episodes = (
            state["places"],
            state["first"],
            state["episodes"],
        )


class Inner:
    """An object that is made in the middle of an episode."""

    def __init__(self, places: Tensor) -> None:
        self.places = places


class Objects(Walk):
    """The same with objects in a list, which only a pickle can hold."""

    def _reset(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        found = super()._reset(*args, **kwargs)
        self.inner = [Inner(self.places)]
        return found

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.inner[0].places *= 0.5
        return super()._step(tensordict)


class Unpicklable(Objects):
    """The same with a value that nothing can capture."""

    def __init__(self) -> None:
        super().__init__()
        self.secret = (number for number in range(3))


class Masked(EnvBase):
    """Allows other actions in each step; the mask lies in the spec of the action."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(action_mask=Categorical(2, (5,), dtype=torch.bool))
        self.action_spec = Categorical(5)
        self.reward_spec = Unbounded(1)
        self.steps = 0

    def _shown(self) -> TensorDict:
        self.steps += 1
        mask = (torch.arange(5) + self.steps) % 3 > 0
        ends = torch.full((1,), self.steps % 7 == 0)
        return TensorDict({"action_mask": mask, "done": ends, "terminated": ends})

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDictBase:
        self.steps += self.steps % 7 == 6
        return self._shown()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._shown().update({"reward": tensordict["action"].float().reshape(1)})

    def _set_seed(self, seed: int | None) -> None:
        pass


class Words(gymnasium.Env):
    """Shows words and a number; no fixed layout."""

    def __init__(self) -> None:
        inner = {"word": spaces.Text(8), "observation": spaces.Box(-99, 99, (4,), np.float32)}
        self.observation_space = spaces.Dict(inner)
        self.action_space = spaces.Discrete(2)
        self.place = np.zeros(4, np.float32)

    def _shown(self) -> dict[str, Any]:
        length = int(self.np_random.integers(1, 8))
        word = "".join(self.np_random.choice(list("abc"), length))
        return {"word": word, "observation": self.place.copy()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place[:] = self.np_random.normal(size=4)
        return self._shown(), {}

    def step(self, action: Any) -> Any:
        self.place += self.np_random.normal(size=4).astype(np.float32) * (int(action) + 1)
        ended = bool(self.np_random.random() < 0.2)
        return self._shown(), float(self.place[0]), ended, False, {}


class Drifting(Transform):
    """Scores rewards by a network that changes with each step."""

    def __init__(self) -> None:
        super().__init__(in_keys=["reward"], out_keys=["reward"])
        self.net = nn.Linear(1, 1)
        self.register_buffer("count", torch.zeros(()))

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        reward = next_tensordict.get("reward", None)
        if reward is not None:
            self.count += 1
            self.net.bias.data += 0.1
            next_tensordict.set("reward", self.net(reward).detach() + self.count)
        return next_tensordict

    def _reset(self, tensordict: Any, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset


def first_norm(new: bool, keys: list[str]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if new:
            return VecNormV2(in_keys=keys, decay=0.9)
        return VecNorm(in_keys=keys, decay=0.9, new_api=False)


def gym(name: str, *transforms: Any) -> Any:
    """A Gymnasium environment in TorchRL's wrapper; transforms are functions that make them."""
    return TransformedEnv(GymEnv(name), Compose(*(make() for make in transforms)))


def normed(name: str, new: bool) -> Any:
    make = [RewardSum, StepCounter, partial(first_norm, new, ["observation", "reward"])]
    return gym(name, DoubleToFloat, *make)


def native(*transforms: Any, kind: Any = Walk) -> Any:
    return TransformedEnv(kind(), Compose(*(make() for make in transforms)))


def _cat() -> Any:
    return CatFrames(N=3, dim=-1, in_keys=["observation"], out_keys=["observation"])


def _primer() -> Any:
    return TensorDictPrimer(extra=Unbounded((2,)), random=True)


def _serial(make: Any) -> Any:
    return SerialEnv(2, make)


def _noop() -> Any:
    return [partial(first_norm, True, ["observation"]), partial(NoopResetEnv, 4)]


def _wrapped(make: Any) -> Any:
    return GymWrapper(make())


#: Functions that make environments, and the way in which their states are captured.
ENVS: dict[str, tuple[Any, str]] = {
    "CartPole, VecNorm": (partial(normed, "CartPole-v1", False), "attributes"),
    "Pendulum, VecNormV2": (partial(normed, "Pendulum-v1", True), "attributes"),
    "CartPole, bare": (partial(GymEnv, "CartPole-v1"), "attributes"),
    "CartPole, CatFrames": (partial(gym, "CartPole-v1", _cat), "attributes"),
    "CartPole, TimeMaxPool": (
        partial(gym, "CartPole-v1", partial(TimeMaxPool, in_keys=["observation"], T=3)),
        "attributes",
    ),
    "CartPole, NoopResetEnv": (partial(gym, "CartPole-v1", *_noop()), "attributes"),
    "Pendulum, FrameSkip": (
        partial(gym, "Pendulum-v1", _cat, partial(FrameSkipTransform, 2)),
        "attributes",
    ),
    "CartPole, counters": (
        partial(gym, "CartPole-v1", TrajCounter, InitTracker, StepCounter),
        "attributes",
    ),
    "CartPole, TensorDictPrimer": (partial(gym, "CartPole-v1", _primer), "attributes"),
    "CartPole, random truncation": (
        partial(
            gym,
            "CartPole-v1",
            StepCounter,
            partial(RandomTruncationTransform, prob=0.5, min_horizon=3, max_horizon=9),
        ),
        "attributes",
    ),
    "CartPole, scaling": (
        partial(
            gym,
            "CartPole-v1",
            partial(ObservationNorm, 1.0, 2.0, in_keys=["observation"]),
            partial(RewardScaling, 1.0, 2.0),
            partial(RewardClipping, -1, 1),
        ),
        "attributes",
    ),
    "PendulumEnv": (
        partial(
            native,
            partial(UnsqueezeTransform, -1, in_keys=["th"], out_keys=["observation"]),
            partial(StepCounter, 9),
            kind=PendulumEnv,
        ),
        "attributes",
    ),
    "native": (Walk, "attributes"),
    "native, batch": (partial(Walk, (2,)), "attributes"),
    "native, transforms": (
        partial(native, _cat, RewardSum, partial(first_norm, True, ["reward"])),
        "attributes",
    ),
    "native, own methods": (OwnMethods, "get_state"),
    "native, objects": (Objects, "pickle"),
    "native, mask": (partial(native, ActionMask, kind=Masked), "attributes"),
    "SerialEnv": (
        partial(_serial, partial(normed, "CartPole-v1", True)),
        "attributes attributes",
    ),
    "SerialEnv, lists": (
        partial(SerialEnv, 2, partial(GymEnv, "CartPole-v1"), use_buffers=False),
        "attributes attributes",
    ),
    "SerialEnv, transformed": (
        lambda: TransformedEnv(
            SerialEnv(2, partial(normed, "CartPole-v1", True)),
            Compose(RewardSum(in_keys=["reward"], out_keys=["total"]), _cat()),
        ),
        "attributes attributes",
    ),
    "SerialEnv, one VecNormV2": (
        lambda: TransformedEnv(
            SerialEnv(2, partial(GymEnv, "CartPole-v1")),
            VecNormV2(in_keys=["observation"], reduce_batch_dims=True),
        ),
        "attributes attributes",
    ),
    "nested": (
        lambda: TransformedEnv(gym("CartPole-v1", StepCounter), RewardSum(), auto_unwrap=False),
        "attributes",
    ),
    "CartPole, VecNormV2 in the carrier": (
        partial(gym, "CartPole-v1", partial(VecNormV2, ["observation"], stateful=False)),
        "attributes",
    ),
    "CartPole, networks": (
        partial(gym, "CartPole-v1", Drifting),
        "attributes",
    ),
    "words": (Words, "attributes"),
    "words, TorchRL": (partial(_wrapped, Words), "attributes"),
}


# --- policies


class Noisy(nn.Module):
    """Draws from all global generators.

    Args:
        discrete: number of actions; 0 for a continuous action.
        one_hot: True to write discrete actions as one-hot vectors.
    """

    def __init__(self, discrete: int, one_hot: bool) -> None:
        super().__init__()
        self.discrete, self.one_hot = discrete, one_hot

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean = observation.float().mean(-1, keepdim=True)
        drawn = mean + torch.randn_like(mean) + np.random.normal() + random.random()
        if not self.discrete:
            return drawn.tanh(), mean
        index = (drawn[..., 0] > 0).long()
        return (nn.functional.one_hot(index, self.discrete) if self.one_hot else index), mean


def policy_for(env: Any) -> Any:
    """A stochastic policy, which writes another entry besides the action."""
    spec = env.action_spec
    discrete = int(getattr(spec, "n", 0) or 0)
    return TensorDictModule(
        Noisy(discrete, spec.shape[-1:] == (discrete,)), ["observation"], ["action", "mean"]
    )


def recurrent(kind: Any, inputs: int = 4) -> Any:
    """A recurrent policy of TorchRL, with fixed weights."""
    torch.manual_seed(0)
    keys = {"in_key": "observation", "out_key": "features"}
    memory = kind(input_size=inputs, hidden_size=5, **keys)
    head = TensorDictModule(Noisy(2, True), ["features"], ["action", "mean"])
    return TensorDictSequential(memory, head)


RECURRENT = {"LSTM": partial(recurrent, LSTMModule), "GRU": partial(recurrent, GRUModule)}


def collector_of(name: str, policy: str, **options: Any) -> Collector:
    """A collector of an environment in :data:`ENVS`."""
    make = ENVS[name][0]
    options.setdefault("frames_per_batch", 24)
    if policy == "random":
        return Collector(make, **options)
    if policy in RECURRENT:
        return Collector(make, RECURRENT[policy](), **options)
    from trawl.envs.serial import build_env

    env = build_env(make)
    found = policy_for(env)
    env.close(raise_if_closed=False)
    return Collector(make, found, **options)


def main(name: str, policy: str, path: str, batches: int) -> None:
    """Continues from a state in a file, and writes what follows to another file."""
    with collector_of(name, policy) as collector:
        collector.load_state_dict(torch.load(path, weights_only=True))
        assert collector.resumed
        torch.save([to_plain(collector.next()) for _ in range(batches)], path + ".frames")
