"""Environments and transforms of TorchRL whose states are captured."""

from __future__ import annotations

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

from tests.oracle.continuing import FORKED, SYNC, Row, parallel
from tests.oracle.continuing import row as row_of
from trawl.envs import SerialEnv as Members

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


class Failing(Walk):
    """The same, which fails in its fourth episode."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.episodes["number"] == 4:
            raise RuntimeError("it fails")
        return super()._step(tensordict)


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


def gym(name: str, *transforms: Any, **options: Any) -> Any:
    """A Gymnasium environment in TorchRL's wrapper; transforms are functions that make them."""
    return TransformedEnv(GymEnv(name, **options), Compose(*(make() for make in transforms)))


def normed(name: str, new: bool) -> Any:
    make = [RewardSum, StepCounter, partial(first_norm, new, ["observation", "reward"])]
    return gym(name, DoubleToFloat, *make)


def native(*transforms: Any, kind: Any = Walk) -> Any:
    return TransformedEnv(kind(), Compose(*(make() for make in transforms)))


def _cat() -> Any:
    return CatFrames(N=3, dim=-1, in_keys=["observation"], out_keys=["observation"])


def emulator() -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    options = {"frameskip": 4, "repeat_action_probability": 0.0}
    return gym("ALE/Pong-v5", RewardSum, StepCounter, **options)


def _primer() -> Any:
    return TensorDictPrimer(extra=Unbounded((2,)), random=True)


def _wrapped(make: Any) -> Any:
    return GymWrapper(make())


# --- policies


class Noisy(nn.Module):
    """Draws from all global generators, and returns its mean, too.

    Args:
        actions: number of actions; 0 for a continuous action.
        one_hot: True to write discrete actions as one-hot vectors.
    """

    def __init__(self, actions: int, one_hot: bool = True) -> None:
        super().__init__()
        self.actions, self.one_hot = actions, one_hot

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean = observation.float().mean(-1, keepdim=True)
        drawn = mean + torch.randn_like(mean) + np.random.normal() + random.random()
        if not self.actions:
            return drawn.tanh(), mean
        index = (drawn[..., 0] > 0).long()
        return (nn.functional.one_hot(index, self.actions) if self.one_hot else index), mean


def noisy(actions: int, one_hot: bool = True) -> Any:
    return TensorDictModule(Noisy(actions, one_hot), ["observation"], ["action", "mean"])


def recurrent(kind: Any) -> Any:
    """Returns a recurrent policy of TorchRL, with fixed weights."""
    torch.manual_seed(0)
    memory = kind(input_size=4, hidden_size=5, in_key="observation", out_key="features")
    head = TensorDictModule(Noisy(2), ["features"], ["action", "mean"])
    return TensorDictSequential(memory, head)


# --- collectors


def row(source: Any, *args: Any, **kwargs: Any) -> Row:
    """Returns a row with small batches: environments of TorchRL take their time."""
    return row_of(source, *args, **{"frames_per_batch": 20, **kwargs})


CART, SWING = partial(noisy, 2), partial(noisy, 0)
LSTM, GRU = partial(recurrent, LSTMModule), partial(recurrent, GRUModule)
CARTS, SWINGS = partial(gym, "CartPole-v1"), partial(gym, "Pendulum-v1")
BARE = partial(GymEnv, "CartPole-v1")
NORMED, SWINGS_NORMED = partial(normed, "CartPole-v1", False), partial(normed, "Pendulum-v1", True)
SERIAL = partial(SerialEnv, 2, partial(normed, "CartPole-v1", True))
OBSERVATION = {"in_keys": ["observation"]}
INITIAL: dict[str, Any] = {"auto_register_policy_transforms": True}
TRUNCATED = partial(RandomTruncationTransform, prob=0.5, min_horizon=3, max_horizon=9)
FRAGILE = partial(native, RewardSum, kind=Failing)
SCALED = (
    partial(ObservationNorm, 1.0, 2.0, **OBSERVATION),
    partial(RewardScaling, 1.0, 2.0),
    partial(RewardClipping, -1, 1),
)
POLE = (
    partial(UnsqueezeTransform, -1, in_keys=["th"], out_keys=["observation"]),
    partial(StepCounter, 9),
)
NOOPS = partial(first_norm, True, ["observation"]), partial(NoopResetEnv, 4)
WORKERS: dict[str, Any] = {"cls": FORKED, "frames_per_batch": 20}

#: Collectors of environments of TorchRL, by name.
ROWS: dict[str, Row] = {
    "VecNorm": row(NORMED, policy=CART, frames_per_batch=10),
    "VecNormV2": row(SWINGS_NORMED, policy=SWING),
    "bare": row(BARE, policy=CART, frames_per_batch=2),
    "CatFrames": row(partial(gym, "CartPole-v1", _cat), policy=CART, init_random_frames=50),
    "TimeMaxPool": row(partial(CARTS, partial(TimeMaxPool, T=3, **OBSERVATION))),
    "NoopResetEnv": row(partial(CARTS, *NOOPS)),
    "FrameSkip": row(partial(SWINGS, _cat, partial(FrameSkipTransform, 2)), policy=SWING),
    "counters": row(partial(CARTS, TrajCounter, InitTracker, StepCounter)),
    "TensorDictPrimer": row(partial(CARTS, _primer), policy=CART),
    "random truncation": row(partial(CARTS, StepCounter, TRUNCATED)),
    "scaling": row(partial(CARTS, *SCALED), policy=CART),
    "carrier": row(partial(CARTS, partial(VecNormV2, ["observation"], stateful=False))),
    "networks": row(partial(CARTS, Drifting)),
    "nested": row(lambda: TransformedEnv(CARTS(StepCounter), RewardSum(), auto_unwrap=False)),
    "PendulumEnv": row(partial(native, *POLE, kind=PendulumEnv), policy=SWING),
    "native": row(Walk, policy=SWING),
    "native, batch": row(partial(Walk, (2,)), policy=SWING, max_frames_per_traj=7),
    "native, transforms": row(
        partial(native, _cat, RewardSum, partial(first_norm, True, ["reward"])), policy=SWING
    ),
    "native, own methods": row(OwnMethods, "get_state"),
    "native, objects": row(Objects, "pickle"),
    "native, mask": row(partial(native, ActionMask, kind=Masked)),
    "SerialEnv": row(SERIAL),
    "SerialEnv, lists": row(partial(SerialEnv, 2, BARE, use_buffers=False), policy=CART),
    "SerialEnv, transformed": row(
        lambda: TransformedEnv(
            SERIAL(), Compose(RewardSum(in_keys=["reward"], out_keys=["total"]), _cat())
        ),
        policy=CART,
    ),
    "SerialEnv, one VecNormV2": row(
        lambda: TransformedEnv(
            SerialEnv(2, BARE), VecNormV2(in_keys=["observation"], reduce_batch_dims=True)
        )
    ),
    "words": row(Words, policy=CART, trajs_per_batch=1, traj_format="cat"),
    "words, wrapped": row(partial(_wrapped, Words), policy=CART, max_frames_per_traj=7),
    "LSTM": row(BARE, policy=LSTM, max_frames_per_traj=17, **INITIAL),
    "LSTM, SerialEnv": row(SERIAL, policy=LSTM, **INITIAL),
    "GRU": row(NORMED, policy=GRU, **INITIAL),
    "physics": row(partial(normed, "HalfCheetah-v5", True), "mujoco", needs="mujoco"),
    "emulator": row(emulator, "ale", needs="ale_py"),
    "fragile": row(FRAGILE, at=3, on_env_error="restart"),
    "members": row(partial(Members, 2, NORMED), policy=CART),
    "members, native": row(partial(Members, 2, partial(native, RewardSum, StepCounter))),
    "members, fragile": row(partial(Members, 2, FRAGILE), at=3, on_env_error="restart"),
    "workers": row([NORMED] * 2, cls=SYNC),
    "workers, words": row([Words] * 2, **WORKERS),
    "workers, native": row([partial(native, RewardSum)] * 2, cls=SYNC),
    "processes": row(parallel(BARE, 3, envs_per_worker=2), frames_per_batch=30),
}
