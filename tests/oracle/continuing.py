"""Environments whose states are captured in every way, and collectors that continue from one."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import closed_envs
import gymnasium
import numpy as np
import nursery
import torch
from gymnasium import spaces, wrappers
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as vector_wrappers
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from trawl.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    RandomPolicy,
)
from trawl.envs import GymEnv, ParallelEnv, PettingZooEnv, SerialEnv
from trawl.tensordicts import is_lazy
from trawl.testing import ImageEnv, NestedEnv, NumberedEnv, RaggedEnv, SelfResettingVectorEnv

# --- environments


class Walk(gymnasium.Env[Any, Any]):
    """Random steps on a line, in episodes of random length."""

    observation_space: Any = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=2)
        return self.place.copy(), {}

    def step(self, action: Any) -> Any:
        self.place = self.place + self.np_random.normal(size=2) * (action + 1)
        ended = bool(self.np_random.random() < 0.1)
        return self.place.copy(), float(self.place[0]), ended, False, {}


class NotAllowed(Exception):
    """Raised for an action that the mask doesn't allow."""


class Masked(Walk):
    """It allows one or two actions at random, and says so in ``info``."""

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], self.shown()

    def step(self, action: Any) -> Any:
        if not self.mask[action]:
            raise NotAllowed
        *results, _ = super().step(action)
        return *results, self.shown()

    def shown(self) -> Any:
        self.mask = np.zeros(3, np.int8)
        self.mask[self.np_random.integers(3, size=2)] = 1
        return {"action_mask": self.mask}


class Told(Masked):
    """It allows actions at random, and tells its steps in words."""

    observation_space = spaces.Dict(place=Walk.observation_space, text=spaces.Text(32))

    def reset(self, **kwargs: Any) -> Any:
        place, info = super().reset(**kwargs)
        return {"place": place, "text": f"{place[0]:.8f}"}, info

    def step(self, action: Any) -> Any:
        place, *results = super().step(action)
        return {"place": place, "text": f"{place[0]:.8f}"}, *results


class Drawing(Walk):
    """It draws from the global generators of its process."""

    def step(self, action: Any) -> Any:
        _, reward, ended, *rest = super().step(action)
        self.place[0] = np.random.normal() + torch.randn(()).item() + random.random()
        return self.place.copy(), reward, ended, *rest


class Fragile(Walk):
    """It fails at random steps."""

    def step(self, action: Any) -> Any:
        if self.np_random.random() < 0.05:
            raise OSError("it broke")
        return super().step(action)


class Pickled(Walk):
    """It has a set, which only a pickle holds."""

    def reset(self, **kwargs: Any) -> Any:
        found = super().reset(**kwargs)
        self.seen: set[int] = set()
        return found

    def step(self, action: Any) -> Any:
        *results, info = super().step(action)
        self.seen.add(int(action))
        results[1] += len(self.seen)
        return *results, info


class OwnMethods(Walk):
    """An environment with the two methods, and a thread's lock that nothing else can capture."""

    def __init__(self) -> None:
        self.place, self.secret = np.zeros(2), iter([0])

    def get_state(self) -> Any:
        return {"place": self.place, "generator": self.np_random.bit_generator.state}

    def set_state(self, state: Any) -> None:
        self.place = state["place"].copy()
        self.np_random.bit_generator.state = state["generator"]


class Tensors(Walk):
    """An environment with tensors, a TensorDict and a generator of torch."""

    def __init__(self) -> None:
        self.dtype, self.device = torch.bfloat16, torch.device("cpu")
        self.noise = torch.zeros(2, dtype=self.dtype)
        self.weights = torch.ones(2, requires_grad=True)

    def reset(self, **kwargs: Any) -> Any:
        found = super().reset(**kwargs)
        self.generator = torch.Generator(self.device).manual_seed(3)
        self.seen = TensorDict({"sums": torch.zeros(2)})
        self.sizes = [self.noise.shape]
        return found

    def step(self, action: Any) -> Any:
        self.noise = torch.randn(self.sizes[0], generator=self.generator).to(self.dtype)
        self.seen["sums"] += self.noise
        self.place += (self.seen["sums"] * self.weights).detach().numpy()
        return super().step(action)


class Held(SelfResettingVectorEnv):
    """A vector environment with a set, which only a pickle holds."""

    def __init__(self) -> None:
        super().__init__([Walk] * 2)
        self.found: set[int] = set()


class Halving(SelfResettingVectorEnv):
    """A vector environment whose resets return floats of half the size."""

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        return obs.astype(np.float32), info


class Failing(gymnasium.Wrapper[Any, Any, Any, Any]):
    """It fails in a certain step, counted since it was made."""

    def __init__(self, at: int) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.at, self.taken = at, 0

    def step(self, action: Any) -> Any:
        self.taken += 1
        if self.taken == self.at:
            raise RuntimeError("the gripper is stuck")
        return super().step(action)


def sync(mode: str, *makes: Any, **options: Any) -> Any:
    return partial(SyncVectorEnv, makes, autoreset_mode=AutoresetMode(mode), **options)


def normalized(make: Any) -> Any:
    env = make()
    if env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP:
        env = vector_wrappers.NormalizeObservation(env)
    return vector_wrappers.NormalizeReward(env)


def wrapped(make: Any) -> Any:
    env = wrappers.TransformReward(wrappers.TimeLimit(make(), 60), lambda reward: 2 * reward)
    env = wrappers.NormalizeObservation(wrappers.FrameStackObservation(env, 3))
    return wrappers.RecordEpisodeStatistics(wrappers.NormalizeReward(env))


def closed() -> Any:
    """Returns an environment whose state can't be read, but that of its wrappers can."""
    env = wrappers.NormalizeReward(wrappers.NormalizeObservation(closed_envs.Closed()))
    return wrappers.RecordEpisodeStatistics(env)


def parallel(kind: Any = Walk, count: int = 2, **options: Any) -> Any:
    return partial(ParallelEnv, count, kind, **options)


def pool(name: str = "CartPole-v1", **options: Any) -> Any:
    import envpool

    return envpool.make_gymnasium(name, **{"num_envs": 9, "seed": 3, **options})


def agents(kind: str, *args: Any, **options: Any) -> Any:
    """Returns environments of agents that die early or appear late."""
    from tests.envs import agents

    return PettingZooEnv(getattr(agents, kind)(*args), done_on_any=False, **options)


def spread(make: str = "parallel_env") -> Any:
    """Returns an environment of agents whose state can't be read."""
    return getattr(importlib.import_module("mpe2.simple_spread_v3"), make)(max_cycles=8)


def pong(noops: int = 30, sticky: float = 0.25) -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=sticky)
    return wrappers.FrameStackObservation(wrappers.AtariPreprocessing(env, noops), 4)


# --- policies


class Noisy(nn.Module):
    """Draws from all global generators.

    Args:
        actions: number of actions; 0 for one continuous action.
    """

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.actions = actions

    def forward(self, observation: Tensor) -> Tensor:
        mean = observation.float().mean(-1, keepdim=True)
        drawn = mean + torch.randn_like(mean) + np.random.normal() + random.random()
        if not self.actions:
            return drawn.tanh()
        return nn.functional.one_hot((4 * drawn[..., 0]).long() % self.actions, self.actions)


class Memory(nn.Module):
    """Acts by a mean of what it has seen in the episode."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head

    def forward(self, observation: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        before = torch.zeros_like(observation) if hidden is None else hidden
        hidden = 0.9 * before + 0.1 * observation
        return self.head(hidden), hidden


class Small(nn.Module):
    """Writes actions of half precision."""

    def forward(self, observation: Tensor) -> Tensor:
        noise = torch.rand(*observation.shape[:-1], 2)
        return ((observation.tanh() + noise) / 2).to(torch.bfloat16)


class Steady(nn.Module):
    """Balances a pole without noise, for some steps."""

    def forward(self, observation: Tensor) -> Tensor:
        right = observation[..., 2] + observation[..., 0].sin() > 0
        return nn.functional.one_hot(right.long(), 2)


def noisy(actions: int) -> Any:
    return TensorDictModule(Noisy(actions), ["observation"], ["action"])


def recurrent() -> Any:
    keys: Any = ["action", ("next", "hidden")]
    return TensorDictModule(Memory(Noisy(2)), ["observation", "hidden"], keys)


def speaking(actions: int) -> Any:
    """Returns a policy whose words fit into no fixed layout."""

    def speak(tensordict: TensorDictBase) -> TensorDictBase:
        tensordict.set_non_tensor("word", "yes")
        return noisy(actions)(tensordict)

    return speak


def small() -> Any:
    return TensorDictModule(Small(), ["observation"], ["action"])


def steady() -> Any:
    return TensorDictModule(Steady(), ["observation"], ["action"])


def random_actions() -> Any:
    return RandomPolicy(GymEnv("CartPole-v1").full_action_spec.expand(3))


class Scaled:
    """A ``postproc`` that depends on the batches before."""

    def __init__(self) -> None:
        self.total = torch.zeros(())

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        self.total += batch["next", "reward"].sum()
        return batch.set("scale", self.total.expand(batch.shape).clone())

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total.copy_(state["total"])


# --- collectors


@dataclass(frozen=True)
class Row:
    """A collector whose state is taken.

    Attributes:
        source: its environments, or functions that make them.
        way: the ways in which states of environments are captured.
        policy: function that makes its policy.
        cls: its class.
        at: number of batches before the state.
        seed: its seed; None for none.
        needs: names of modules that have to be installed.
        fresh: functions that make further arguments.
        options: its other arguments.
    """

    source: Any
    way: str = "attributes"
    policy: Callable[[], Any] | None = None
    cls: Any = Collector
    at: int = 2
    seed: int | None = 1
    needs: str = ""
    fresh: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """Makes the collector."""
        given = {"frames_per_batch": 40, **self.options}
        given |= {name: make() for name, make in self.fresh.items()}
        return self.cls(self.source, policy=self.policy and self.policy(), **given)


def row(source: Any, *args: Any, **kwargs: Any) -> Row:
    """Returns a row; arguments that it doesn't know are options of the collector."""
    known = {name: kwargs.pop(name) for name in list(kwargs) if name in Row.__dataclass_fields__}
    return Row(source, *args, **known, options=kwargs)


def ready(source: Any, policy: Any, **options: Any) -> Row:
    """Returns a row whose environments are stepped when they are ready."""
    return row(source, policy=policy, cls=READY, **options)


SYNC = partial(MultiSyncCollector, start_method="inline")
FORKED = partial(MultiSyncCollector, start_method="forkserver")
TURNS = partial(MultiAsyncCollector, start_method="forkserver")
#: Waits for all environments, so that batches are the same each time.
READY = partial(AsyncBatchedCollector, min_batch_size=3, server_timeout=float("inf"))
COMPLETED = {"yield_completed_trajectories": True}
PROCESS, THREADS = {"policy_backend": "multiprocessing"}, {"env_backend": "threading"}
CARTS, CLOSED = ["CartPole-v1"] * 3, closed_envs.Closed
SWING, CART, THREE, FOUR = (partial(noisy, actions) for actions in (0, 2, 3, 4))
NAME = "CartPole-v1"
POLE = partial(gymnasium.make, NAME)
FAILING = [partial(Failing, at) for at in (5, 10**9, 8)]
NUMBERED = [partial(NumberedEnv, i, lengths=own) for i, own in enumerate([(3, 1), (5,), (2, 9)])]
KINDS = NestedEnv, ImageEnv, RaggedEnv
NESTED, IMAGES, RAGGED = (partial(kind, lengths=[3, 1, 7]) for kind in KINDS)
VECTOR = partial(SelfResettingVectorEnv, [Walk] * 2)
ENTRY = partial(gymnasium.make_vec, NAME, 3, vectorization_mode="vector_entry_point")
WHOLE: dict[str, Any] = {"trajs_per_batch": 2, "traj_format": "cat"}
RESTART: dict[str, Any] = {"on_env_error": "restart", "at": 4}
REPLAY: dict[str, Any] = {"way": "replay", "policy": THREE}
POOL: dict[str, Any] = {"way": "replay", "needs": "envpool", "seed": None, "frames_per_batch": 180}
STEADY: dict[str, Any] = {**POOL, "policy": steady}
LUNAR: dict[str, Any] = {"way": "replay", "needs": "Box2D", "max_frames_per_traj": 15}

#: Collectors of all kinds, by name.
ROWS: dict[str, Row] = {
    # Policies, batches and places.
    "random frames": row("CartPole-v1", policy=CART, init_random_frames=100),
    "exact": row(["Pendulum-v1"] * 2, policy=SWING, total_frames=187, exact_frames=True),
    "recurrent": row(CARTS, policy=recurrent, frames_per_batch=60, max_frames_per_traj=17),
    "split": row("MountainCar-v0", policy=THREE, split_trajs=True, seed=None),
    "postproc": row("CartPole-v1", fresh={"postproc": Scaled}),
    "workers, postproc": row(CARTS[:2], policy=CART, cls=SYNC, fresh={"postproc": Scaled}),
    "workers, ahead": row(CARTS[:2], policy=CART, cls=FORKED, prefetch=1, **WHOLE),
    "workers, pickle": row([Pickled] * 2, cls=FORKED),
    "workers, unseeded": row([CARTS] * 2, policy=CART, cls=FORKED, seed=None, frames_per_batch=60),
    "workers in turns": row(CARTS[:2], policy=CART, cls=TURNS, at=4, frames_per_batch=20),
    # Gymnasium's single environments.
    **{name: row(f"{name}-v1") for name in ("Acrobot", "Blackjack", "FrozenLake", "CliffWalking")},
    "own methods": row(OwnMethods, "get_state"),
    "own methods, wrapped": row(partial(wrapped, OwnMethods), "get_state"),
    "pickle, wrapped": row(partial(wrapped, Pickled), "pickle"),
    "wrapped": row(partial(wrapped, partial(gymnasium.make, "Pendulum-v1"))),
    "tensors": row(Tensors),
    "MuJoCo": row(partial(wrapped, partial(gymnasium.make, "Ant-v5")), "mujoco", needs="mujoco"),
    "Atari": row(partial(pong, sticky=0), "ale", needs="ale_py cv2"),
    # Gymnasium's vector environments.
    "next step": row(sync("NextStep", NESTED, NESTED), frames_per_batch=30, **WHOLE),
    "next step, masks": row(sync("NextStep", Masked, Masked, copy=False), max_frames_per_traj=7),
    "next step, fragile": row(sync("NextStep", Fragile, Fragile), **RESTART),
    "next step, normalized": row(partial(normalized, sync("NextStep", POLE))),
    "same step": row(sync("SameStep", RAGGED, RAGGED), seed=None),
    "same step, pickle": row(sync("SameStep", Walk, Pickled), "attributes pickle", **WHOLE),
    "same step, fragile": row(sync("SameStep", Fragile, Fragile), **RESTART),
    "same step, normalized": row(partial(normalized, sync("SameStep", Walk, Walk))),
    "disabled": row(sync("Disabled", IMAGES, IMAGES, IMAGES, copy=False), frames_per_batch=30),
    "disabled, fragile": row(sync("Disabled", Fragile, Fragile), **RESTART),
    "several vectors": row([sync(mode, Walk, Walk) for mode in ("SameStep", "Disabled")]),
    "vectors of workers": row([sync(mode, Walk) for mode in ("SameStep", "Disabled")], cls=SYNC),
    "held": row(Held, "pickle"),
    "vector": row(VECTOR, seed=None),
    "entry point": row(ENTRY, frames_per_batch=60),
    "vector, halving": row(partial(Halving, [Walk] * 2)),
    "adapter": row(partial(GymEnv, "CartPole-v1", num_envs=2)),
    # Environments in processes and threads.
    "processes": row(parallel(Drawing, 4, envs_per_worker=3), frames_per_batch=80),
    "groups": row(parallel(Masked, 4, envs_per_worker=2, groups=2), max_frames_per_traj=7),
    "processes, fragile": row(parallel(Fragile, envs_per_worker=2), **RESTART),
    "groups, fragile": row(parallel(Fragile, groups=2), **RESTART),
    "processes, vectors": row(parallel(sync("NextStep", Walk, Walk)), seed=None),
    "processes, batches": row(parallel(partial(SerialEnv, 2, [Walk, Walk]))),
    "processes, messages": row(parallel(Told), frames_per_batch=20),
    "processes, replay": row(parallel("LunarLander-v3", envs_per_worker=2), **LUNAR),
    "processes, pickle": row(parallel(Pickled), "pickle"),
    "threads": row(parallel(Pickled, envs_per_worker=2, backend="thread"), "pickle"),
    "threads, vectors": row(parallel(VECTOR, backend="thread")),
    "threads, messages": row(parallel(RAGGED, backend="thread"), frames_per_batch=20),
    "processes of workers": row([parallel(Drawing, 1)] * 2, cls=FORKED, frames_per_batch=60),
    # Environments whose state can't be read.
    "closed": row(CLOSED, **REPLAY, init_random_frames=100),
    "closed, whole": row([closed] * 2, **REPLAY, max_frames_per_traj=17, **WHOLE),
    "closed, reset": row([closed] * 2, **REPLAY, compact_obs=True, reset_at_each_iter=True),
    "closed, words": row([closed] * 2, "replay", partial(speaking, 3), max_frames_per_traj=17),
    "closed, half precision": row(partial(CLOSED, "box"), "replay", small),
    "closed, workers": row([[closed] * 2] * 2, **REPLAY, cls=FORKED, max_frames_per_traj=17),
    "closed, workers in turns": row([CLOSED] * 2, **REPLAY, cls=TURNS, frames_per_batch=20),
    "closed, fragile": row([partial(CLOSED, fails_at=(45, 46))] * 2, **REPLAY, **RESTART),
    **{f"one, {one}": row([partial(CLOSED, one)], "replay") for one in closed_envs.ACTIONS},
    **{f"two, {one}": row([partial(CLOSED, one)] * 2, "replay") for one in closed_envs.ACTIONS},
    "sticky Atari": row(pong, "replay", needs="ale_py cv2"),
    # Agents.
    "walkers": row(partial(agents, "Walkers", "observation")),
    "walkers, limit": row(partial(agents, "Walkers", "info"), max_frames_per_traj=4),
    "walkers, words": row(partial(agents, "Walkers", info_keys={"text": str})),
    "walkers in turn": row(partial(agents, "Turns")),
    "spread": row(spread, "replay", needs="mpe2", max_frames_per_traj=3),
    "spread in turn": row(partial(spread, "env"), "replay", needs="mpe2"),
    "rps": row("pettingzoo:classic/rps-v2", needs="pygame"),
    "tictactoe": row("pettingzoo:classic/tictactoe-v3", needs="pygame"),
    # EnvPool.
    "pool": row(pool, max_frames_per_traj=7, **STEADY),
    "pool, reset": row(pool, reset_at_each_iter=True, **STEADY),
    "pool, compact": row(pool, compact_obs=True, **STEADY),
    "pool, words": row(pool, policy=partial(speaking, 2), max_frames_per_traj=11, **POOL),
    "pool, box": row(partial(pool, "Pendulum-v1"), **POOL),
    "pool, table": row(partial(pool, "FrozenLake-v1"), **POOL),
    "pool, Atari": row(partial(pool, "Pong-v5", num_envs=2), **POOL),
    "pools": row([partial(pool, num_envs=3), partial(pool, num_envs=3, seed=8)], **STEADY),
    "pools of workers": row([partial(pool, seed=seed) for seed in (3, 4)], cls=SYNC, **STEADY),
    # Environments that are stepped when they are ready.
    "ready": ready(CARTS, CART, frames_per_batch=35, total_frames=150, envs_per_worker=2),
    "ready, recurrent": ready(CARTS, recurrent, max_policy_lag=1),
    "ready, model's process": ready(["Pendulum-v1"] * 3, SWING, **PROCESS),
    "ready, random": ready(CARTS, random_actions, frames_per_batch=7, **THREADS),
    "ready, fragile": ready(FAILING, CART, **RESTART, **THREADS),
    "ready, model's process, fragile": ready(FAILING, CART, **RESTART, **THREADS, **PROCESS),
    "ready, whole": ready(CARTS, CART, frames_per_batch=7, **COMPLETED, **THREADS),
    "ready, model's process, whole": ready(NUMBERED, FOUR, **COMPLETED, **PROCESS),
}  # fmt: skip


# --- comparing


def saved(state: Any) -> Any:
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one: Any, other: Any) -> bool:
    """Returns True if two batches are equal, to the bit, whatever they hold."""
    if one is None or other is None:
        return one is other
    if isinstance(one, Tensor):
        layout = one.shape == other.shape and one.dtype == other.dtype
        return layout and _bits(one) == _bits(other)
    if isinstance(one, (NonTensorData, NonTensorStack)):
        return repr(one.tolist()) == repr(other.tolist())
    if is_lazy(one):
        pairs = zip(one.tensordicts, other.tensordicts, strict=True)
        return is_lazy(other) and all(same(*pair) for pair in pairs)
    return (
        one.shape == other.shape
        and set(one.keys()) == set(other.keys())
        and all(same(value, other.get(key)) for key, value in one.items())
    )


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def following(collector: Any, count: int, seed: int | None = 1) -> list[Any]:
    """Returns the next batches. Without a seed, collectors draw from the global generators."""
    found = []
    for index in range(count):
        if seed is None:
            torch.manual_seed(index), np.random.seed(index), random.seed(index)
        batch = collector.next()
        found.append(None if batch is None else batch.clone())
    return found


def by_worker(batches: list[Any]) -> list[list[Any]]:
    """Returns the batches of each of two asynchronous workers, whose ids are every second one."""
    ids = [int(batch["collector", "traj_ids"].reshape(-1)[0]) % 2 for batch in batches]
    return [[b for b, i in zip(batches, ids, strict=True) if i == worker] for worker in (0, 1)]


def equal(found: list[Any], wanted: list[Any], in_turns: bool = False) -> bool:
    """Returns True if batches are the same; in which order workers take turns is open."""
    if not in_turns:
        return len(found) == len(wanted) and all(map(same, found, wanted))
    pairs = zip(by_worker(found), by_worker(wanted), strict=True)
    return all(same(*pair) for mine, other in pairs for pair in zip(mine, other, strict=False))


def assert_continues(case: Row, later: int = 3, used: int = 0, **load: Any) -> None:
    """Compares a collector with one that continues from its state."""
    in_turns = case.cls is TURNS
    later *= 1 + in_turns
    with case.make() as collector, case.make() as other:
        if case.seed is not None:
            collector.set_seed(case.seed)
        following(collector, case.at, case.seed)
        if isinstance(collector, Collector):
            assert set(collector.env_state_methods()) == set(case.way.split())
        state = saved(collector.state_dict())
        wanted = following(collector, later, case.seed)
        following(other, used, case.seed)
        other.load_state_dict(state, **load)
        assert other.resumed
        assert equal(following(other, later, case.seed), wanted, in_turns)
        first, second = collector.stats(), other.stats()
    for name in ("frames", "batches", "env_restarts", "policy_version"):
        assert first.get(name) == second.get(name), name


def assert_counts(case: Row, path: tuple[Any, ...], early: int = 0, later: int = 6) -> None:
    """Checks that other batches follow a state if a piece of it is that of an earlier state.

    The earlier state is taken after ``early`` batches.
    """
    with case.make() as collector, case.make() as other:
        collector.set_seed(case.seed)
        following(collector, early)
        before = saved(collector.state_dict())
        following(collector, case.at)
        state = saved(collector.state_dict())
        wanted = following(collector, later)
        other.load_state_dict(state)
        assert equal(following(other, later), wanted)
        place, old = state, before
        for key in path[:-1]:
            place, old = place[key], old[key]
        place[path[-1]] = old[path[-1]]
        other.load_state_dict(state)
        with suppress(NotAllowed):
            assert not equal(following(other, later), wanted)


def continue_elsewhere(module: str, path: str) -> None:
    """Continues from the states in a file, and writes the batches that follow to it.

    Args:
        module: name of the module with the rows.
        path: the path of the file.
    """
    rows, found = importlib.import_module(module).ROWS, {}
    for (name, trust), state in torch.load(path, weights_only=True).items():
        with rows[name].make() as collector:
            collector.load_state_dict(state, trust=trust)
            found[name, trust] = following(collector, 3, rows[name].seed)
    torch.save(found, path)


def assert_continues_elsewhere(module: str, names: list[tuple[str, bool]], path: Path) -> None:
    """Compares collectors with those that continue from their states in another process.

    Args:
        module: name of the module with the rows.
        names: names of rows, and True where the other process trusts the state.
        path: path of a file to write.
    """
    rows, states, wanted = importlib.import_module(module).ROWS, {}, {}
    for name, trust in names:
        case = rows[name]
        with case.make() as collector:
            if case.seed is not None:
                collector.set_seed(case.seed)
            following(collector, 2, case.seed)
            states[name, trust] = collector.state_dict()
            wanted[name, trust] = following(collector, 3, case.seed)
    torch.save(states, path)
    code = f"""
    import sys
    sys.executable = {nursery.python(nursery.tested)!r}
    from tests.oracle.continuing import continue_elsewhere

    continue_elsewhere(*sys.argv[1:])
    """
    ended = nursery.run(code, module, path, warn=["ignore"], within=nursery.tested())
    assert ended.returncode == 0, ended.stderr
    found = torch.load(path, weights_only=False)
    for key, batches in wanted.items():
        assert equal(found[key], batches), key
