"""Looks at what an environment returns, before it is converted to the layout of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorWrapper

from trawl.envs.agents.pettingzoo import PettingZooEnv
from trawl.envs.batches.autoreset import ModeCheck
from trawl.envs.batches.pool import is_pool
from trawl.envs.capture.ways import chain
from trawl.envs.entries.infos import BatchReader
from trawl.envs.entries.spaces import SpaceCodec
from trawl.envs.gym import GymEnv
from trawl.envs.making import single_spaces
from trawl.envs.outcomes import Outcome, final_sample, flag_of, reset_results, step_results
from trawl.envs.torch_vector import TorchVectorEnv
from trawl.envs.vector import SameStepVector, is_envpool
from trawl.keys import Key, show_key
from trawl.memory import Array, Mask
from trawl.testing.findings import Findings
from trawl.testing.samples import Lie, Samples, as_array


class Watched:
    """Looks at all that an environment with Gymnasium's interface returns to its adapter.

    Args:
        adapter: the adapter.
        findings: the findings to add to.

    Attributes:
        env: the environment, without the wrapper that watches it.
        when: the step or the reset that was watched last.
        durations: seconds that each step took.
    """

    def __init__(self, adapter: GymEnv | TorchVectorEnv, findings: Findings) -> None:
        self.env = adapter.env
        self.durations: list[float] = []
        self._adapter = adapter
        self._findings = findings
        # The adapter's own codec may also have entries of the info.
        codec = SpaceCodec(single_spaces(self.env, bool(adapter.batch_size))[0], "observation")
        self._modes: _TensorModes | None = None
        if isinstance(adapter, TorchVectorEnv):
            self._modes = _TensorModes(adapter, codec, findings)
        self._samples = Samples(codec, adapter.batch_size, findings)
        self.when = "the first reset"
        self._steps = 0
        # Arrays that were returned last, with copies.
        self._shown: list[tuple[Key, Array, Array]] = []
        # The shapes of the entries of the info of each step, and whether an episode ended.
        self._infos: list[tuple[dict[str, Any], bool]] = []
        # Whether the last observation of an episode was the first of the next one, for each end.
        self._finals: list[bool] = []
        self._varies = False
        self._vector = adapter.vector if isinstance(adapter, GymEnv) else None
        kind: Any = _WatchedEnv if self._vector is None else _WatchedVector
        self._wrapper: Any = (kind if self._modes is None else _WatchedTensors)(self.env, self)
        adapter.env = self._wrapper
        if self._vector is not None:
            self._vector.env = self._wrapper

    def unwatch(self) -> None:
        """Puts the environment back into its adapter, and into what the adapter added to it."""
        for holder in (self._adapter, self._vector, *chain(self._adapter.env)):
            if getattr(holder, "env", None) is self._wrapper:
                holder.env = self.env

    def finish(self) -> None:
        """Adds the findings about all steps together."""
        self._compare_infos()
        if self._finals and all(self._finals) and self._varies:
            self._findings.add(
                "warning",
                "autoreset",
                "info['final_obs'] always equals the first observation of the next episode, which "
                "the same step returned, so that the last observations of episodes are lost: "
                "copy it before the reset, or declare the autoreset mode in which the "
                "environment really resets",
            )

    def reset(self, **kwargs: Any) -> Any:
        """Resets the environment, and looks at the results."""
        self.when = f"the reset after step {self._steps}" if self._steps else "the first reset"
        found = self.env.reset(**kwargs)
        self._find_reuse()
        obs, info = reset_results(found, self.env)
        before = self._look(obs)
        self._check_info(info, "reset")
        if self._modes is not None:
            self._modes.reset(before, self._arrays, kwargs.get("options") or {})
        return found

    def step(self, action: Any) -> Any:
        """Steps the environment, and looks at the results."""
        self._steps += 1
        self.when = f"step {self._steps}"
        begun = time.perf_counter()
        found = self.env.step(action)
        self.durations.append(time.perf_counter() - begun)
        self._find_reuse()
        obs, reward, terminated, truncated, info = step_results(found, self.env)
        before = self._look(obs)
        self._check_reward(reward)
        self._check_info(info, "step")
        if self._modes is not None:
            results = [np.reshape(as_array(one), -1) for one in (reward, terminated, truncated)]
            self._modes.step(Outcome(*results))
            if self._modes.mode is AutoresetMode.SAME_STEP:
                self._compare_finals(obs, info, results[1] | results[2], before)
        elif self._vector is None:
            ended = flag_of(terminated, "terminated", self.env)
            ended |= flag_of(truncated, "truncated", self.env)
            if isinstance(info, Mapping):
                self._infos.append(({str(name): _shape(info[name]) for name in info}, ended))
            self._check_own_reset(info)
        elif isinstance(self._vector, SameStepVector):
            self._compare_finals(obs, info, np.logical_or(terminated, truncated), before)
        return found

    def _look(self, obs: Any) -> list[Array]:
        """Looks at an observation, and returns the arrays of the one before it."""
        before = self._arrays
        found = self._samples.look(obs, self.when)
        self._shown = [(key, array, array.copy()) for key, array in found]
        return before

    @property
    def _arrays(self) -> list[Array]:
        return [copied for _, _, copied in self._shown]

    def _add(self, level: Any, topic: str, message: str, matter: Any = "") -> None:
        self._findings.add(level, topic, message, str(matter))

    def _find_reuse(self) -> None:
        """Finds arrays that were changed after they had been returned."""
        for key, array, copied in self._shown:
            if array.tobytes() != copied.tobytes():
                self._add(
                    "note",
                    "buffers",
                    f"the array of observation {show_key(key)} that was returned before "
                    f"{self.when} was overwritten in it: collectors copy each observation, but "
                    "other code that keeps one sees it change: return a copy",
                    key,
                )

    # --- rewards and infos

    def _check_reward(self, reward: Any) -> None:
        try:
            array = np.asarray(as_array(reward))
        except ValueError:
            return
        if array.dtype.kind not in "biuf":
            return  # the adapter's own check rejects it
        wrong = ~(np.abs(array.astype(np.float64)) <= np.finfo(np.float32).max)
        if wrong.any():
            self._add(
                "error",
                "rewards",
                f"the reward of {self.when} is {array[wrong][0]}, which is no finite float32: "
                "return finite numbers below 3.4e38",
            )

    def _check_info(self, info: Any, method: str) -> None:
        if not isinstance(info, Mapping):
            self._add(
                "warning",
                "infos",
                f"the info of {self.when} is {type(info).__name__}, so that entries can't be "
                f"collected with info_keys: return a dict from {method}, {{}} if it is empty",
            )

    def _check_own_reset(self, info: Any) -> None:
        for name in ("final_obs", "final_observation", "terminal_observation"):
            if isinstance(info, Mapping) and name in info:
                self._add(
                    "warning",
                    "autoreset",
                    f"info[{name!r}] of {self.when} says that the environment begins the next "
                    "episode itself, although it is no vector environment, so that the last "
                    "observations of episodes are lost: return the last observation, and begin "
                    "an episode only in reset",
                )

    def _compare_infos(self) -> None:
        # What is reported only when an episode ends is expected to be missing elsewhere.
        inner = [names for names, ended in self._infos if not ended]
        if not inner:
            return
        every = set[str]().union(*inner)
        varying = every - set[str].intersection(*[set(names) for names in inner])
        if varying:
            names = sorted(varying)
            first = next(i for i, (has, _) in enumerate(self._infos) if not varying <= set(has))
            self._add(
                "note",
                "infos",
                f"the info has {', '.join(names)} only in some steps (for example not in step "
                f"{first + 1}): if you collect it with info_keys, it is zero where it is missing, "
                "so return it in each step",
            )
        for name in sorted(every):
            shapes = sorted({names[name] for names in inner if names.get(name) is not None})
            if len(shapes) > 1:
                self._add(
                    "note",
                    "infos",
                    f"info[{name!r}] has the shapes {shapes} in different steps, so that it can't "
                    "be collected with info_keys: return one shape",
                    name,
                )

    def _compare_finals(self, obs: Any, info: Any, ended: Any, before: list[Array]) -> None:
        now = self._samples.pick(obs)
        for row in map(int, np.flatnonzero(ended)):
            final = final_sample(info, row)
            if final is None:
                continue  # the adapter rejects it
            last = self._samples.pick(final)
            self._finals.append(
                all(np.array_equal(a, np.asarray(b)[row]) for a, b in zip(last, now, strict=True))
            )
            self._varies |= any(
                not np.array_equal(a[row], np.asarray(b)[row])
                for a, b in zip(before, now, strict=False)
            )


class _TensorModes:
    """Checks that an environment of tensors resets according to its autoreset mode.

    Args:
        adapter: its adapter.
        codec: codec of the observations of one environment.
        findings: the findings to add to.
    """

    def __init__(self, adapter: TorchVectorEnv, codec: SpaceCodec, findings: Findings) -> None:
        self.mode = adapter.mode
        self._check = ModeCheck(adapter.env, BatchReader(codec), adapter.mode)
        self._findings = findings
        self._ended: Mask = np.zeros(adapter.batch_size, np.bool_)

    def reset(self, before: list[Array], after: list[Array], options: Mapping[str, Any]) -> None:
        """Checks a reset, which may be of some environments only."""
        rows = np.ones_like(self._ended)
        for name in ("reset_mask", "env_idx"):
            if name in options:
                rows = np.zeros_like(self._ended)
                rows[as_array(options[name])] = True
        if before and not rows.all():
            self._try(lambda: self._check.others(before, after, rows))
        self._ended = self._ended & ~rows

    def step(self, outcome: Outcome) -> None:
        """Checks a step, which may be only a reset of some environments."""
        if self.mode is AutoresetMode.NEXT_STEP and self._ended.any():
            self._try(lambda: self._check.reset_step(self._ended, outcome))
        self._ended = (outcome.terminated | outcome.truncated).astype(np.bool_)

    def _try(self, check: Callable[[], None]) -> None:
        try:
            check()
        except ValueError as error:
            message = str(error).replace("GymEnv(", "TorchVectorEnv(")
            self._findings.add("error", "autoreset", message)
            raise Lie from None


class _WatchedTensors:
    def __init__(self, env: Any, watch: Watched) -> None:
        self._env = env
        self.reset = watch.reset
        self.step = watch.step

    @property
    def unwrapped(self) -> Any:
        return getattr(self._env, "unwrapped", self._env)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class _WatchedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Any, watch: Watched) -> None:
        super().__init__(env)
        self._watch = watch

    def reset(self, **kwargs: Any) -> Any:
        return self._watch.reset(**kwargs)

    def step(self, action: Any) -> Any:
        return self._watch.step(action)


class _WatchedVector(VectorWrapper):
    def __init__(self, env: Any, watch: Watched) -> None:
        super().__init__(env)
        self._watch = watch

    def reset(self, **kwargs: Any) -> Any:
        return self._watch.reset(**kwargs)

    def step(self, actions: Any) -> Any:
        return self._watch.step(actions)


def watched(env: Any, findings: Findings) -> Watched | None:
    """Watches an environment with Gymnasium's interface; returns None for other kinds.

    Args:
        env: the adapter of the environment.
        findings: the findings to add to.
    """
    if isinstance(env, TorchVectorEnv):
        return Watched(env, findings)
    if not isinstance(env, GymEnv) or is_envpool(env.env) or is_pool(env.env):
        return None
    if not isinstance(env.env, (gymnasium.Env, gymnasium.vector.VectorEnv)):
        return None
    return Watched(env, findings)


def check_agents(adapter: PettingZooEnv, findings: Findings, steps: int, seed: int) -> None:
    """Looks at what a parallel environment of PettingZoo returns in random steps.

    Errors that it raises are left to the adapter's own steps.

    Args:
        adapter: the adapter of the environment.
        findings: the findings to add to.
        steps: number of steps.
        seed: seed of the environment and the actions.

    Raises:
        Lie: if observations can't be read.
    """
    env = adapter.env
    samples: dict[str, Samples] = {}

    def look(observations: Mapping[str, Any], when: str) -> None:
        for agent, observed in observations.items():
            if agent not in samples:
                codec = SpaceCodec(env.observation_space(agent), "observation")
                samples[agent] = Samples(codec, (), findings, f" of agent {agent!r}")
            samples[agent].look(observed, when)

    with suppress(_Over):
        observations, infos = _or_over(lambda: env.reset(seed=seed), 2)
        for step in range(1, steps + 1):
            look(observations, f"step {step - 1}" if step > 1 else "the first reset")
            agents = list(env.agents)
            actions = {
                agent: _sample(env, agent, observations.get(agent), infos.get(agent), seed + step)
                for agent in agents
            }
            if not agents:
                return
            found = _or_over(partial(env.step, actions), 5)
            observations, infos = found[0], found[4]
            names = ("observation", "reward", "termination", "truncation")
            for name, values in zip(names, found, strict=False):
                missing = [agent for agent in agents if agent not in values]
                if missing:
                    findings.add(
                        "error",
                        "agents",
                        f"step {step} returned no {name} of {missing}, who took part in it, so "
                        "that zeros are collected instead: return one for each agent that was in "
                        "agents before the step",
                        name,
                    )
                    return
            for name, flags in zip(names[2:], found[2:4], strict=True):
                for agent, flag in flags.items():
                    try:
                        flag_of(flag, f"{name} of agent {agent!r}", env)
                    except TypeError as error:
                        findings.add("error", "agents", f"step {step}: {error}", name)
                        return


class _Over(Exception):
    """Raised to end a look at an environment that fails."""


def _or_over(call: Callable[[], Any], count: int) -> Any:
    try:
        found = call()
    except Exception:
        raise _Over from None
    if not isinstance(found, tuple) or not all(isinstance(one, Mapping) for one in found):
        raise _Over
    if len(found) != count:
        raise _Over
    return found


def _sample(env: Any, agent: str, observed: Any, info: Any, seed: int) -> Any:
    """Returns a random action of an agent, among those that its mask allows."""
    space = env.action_space(agent)
    space.seed(seed)
    for holder in (observed, info):
        if isinstance(holder, Mapping) and holder.get("action_mask") is not None:
            return space.sample(np.asarray(holder["action_mask"], np.int8))
    return space.sample()


def _shape(value: Any) -> tuple[int, ...] | None:
    """Returns the shape of a number or an array; None for anything else."""
    known = isinstance(value, (bool, int, float, np.generic, np.ndarray))
    return np.shape(value) if known else None
