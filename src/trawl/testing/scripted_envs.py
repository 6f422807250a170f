"""Environments that play a script: Gymnasium's, simulators, and those of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from trawl.envs import JaxEnv, Source
from trawl.testing.script import FIELDS, Player, Script

_BOX = spaces.Box(-np.inf, np.inf, (FIELDS,), np.float32)


# --- Gymnasium's environments


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """A Gymnasium environment."""

    observation_space: Any = _BOX

    def __init__(self, script: Script, env: int = 0) -> None:
        self.player = Player(script, env)
        self.action_space = spaces.Discrete(script.actions)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begins the next episode."""
        super().reset(seed=seed)
        self.player.reset()
        return self._observe(-1), self.player.info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes a step."""
        assert self.action_space.contains(action), action
        (reward,), terminated, truncated = self.player.step([int(action)])
        return self._observe(int(action)), reward, terminated, truncated, self.player.info()

    def _observe(self, action: int) -> Any:
        return self.player.observe(action)


class ScriptedDictEnv(ScriptedEnv):
    """A Gymnasium environment whose observations are mappings with a nested one."""

    observation_space = spaces.Dict(
        {"inner": spaces.Dict({"place": _BOX}), "step": spaces.Discrete(100)}
    )

    def _observe(self, action: int) -> Any:
        return {"inner": {"place": self.player.observe(action)}, "step": self.player.count}


def text_of(script: Script, env: int, episode: int, step: int) -> Any:
    """Returns the text in the observation of an environment."""
    return ".".join(map(str, (env, episode, step)))


class ScriptedLooseEnv(ScriptedEnv):
    """A Gymnasium environment whose observations have no fixed layout: a text is among them."""

    observation_space = spaces.Dict({"observation": _BOX, "text": spaces.Text(99)})

    def _observe(self, action: int) -> Any:
        text = text_of(self.player.script, *self.player.now)
        return {"observation": self.player.observe(action), "text": text}


class ScriptedPartsEnv(ScriptedEnv):
    """A Gymnasium environment whose reward has several components."""

    reward_space = spaces.Box(-np.inf, np.inf, (2,))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Takes a step."""
        rewards, terminated, truncated = self.player.step([int(action)] * 2)
        info = self.player.info()
        return self._observe(int(action)), np.array(rewards), terminated, truncated, info


class ReusingEnv(ScriptedEnv):
    """A Gymnasium environment that returns the same array each time, with new content."""

    def __init__(self, script: Script, env: int = 0) -> None:
        super().__init__(script, env)
        self._shown = np.zeros(FIELDS, np.float32)

    def _observe(self, action: int) -> Any:
        self._shown[:] = super()._observe(action)
        return self._shown


def gymnasium_vector(script: Script, envs: Sequence[int], mode: str) -> SyncVectorEnv:
    """Returns Gymnasium's own vector environment."""
    makers = [partial(ScriptedEnv, script, env) for env in envs]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode(mode))


class Simulator(VectorEnv[Any, Any, Any]):
    """A simulator that steps all of its environments together, with Gymnasium's vector API.

    Args:
        script: the script.
        envs: numbers of the environments.
        mode: when new episodes begin.
        partial: True if a mask can reset some of the environments, whatever the mode.
    """

    def __init__(
        self, script: Script, envs: Sequence[int], mode: str, partial: bool = False
    ) -> None:
        self.mode = AutoresetMode(mode)
        self.partial = partial or self.mode is AutoresetMode.DISABLED
        self.metadata = {"autoreset_mode": self.mode}
        self.players = [Player(script, env) for env in envs]
        self.num_envs = len(envs)
        self.single_observation_space = _BOX
        self.single_action_space = spaces.Discrete(script.actions)
        self.observation_space = gymnasium.vector.utils.batch_space(_BOX, self.num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(
            self.single_action_space, self.num_envs
        )
        self._obs = np.zeros((self.num_envs, FIELDS), np.float32)
        self._over = np.zeros(self.num_envs, bool)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Resets all environments, or those of the ``reset_mask``.

        Raises:
            ValueError: if there is a ``reset_mask``, but only all can be reset.
        """
        mask = (options or {}).get("reset_mask")
        if mask is not None and not self.partial:
            raise ValueError("all environments must be reset together, not only some of them")
        self._obs = self._obs.copy()
        begun = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        for i in begun:
            self._begin(i)
        return self._obs.copy(), self._infos(begun)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps all environments, or resets them, as the mode says."""
        rewards = np.zeros(self.num_envs, np.float64)
        terminated, truncated, over = (np.zeros(self.num_envs, bool) for _ in range(3))
        self._obs = self._obs.copy()
        for i, (player, action) in enumerate(zip(self.players, actions, strict=True)):
            if self._over[i]:
                assert self.mode is AutoresetMode.NEXT_STEP
                self._begin(i)
                continue
            (rewards[i],), terminated[i], truncated[i] = player.step([int(action)])
            self._obs[i] = player.observe(int(action))
            over[i] = terminated[i] or truncated[i]
        if self.mode is AutoresetMode.SAME_STEP and over.any():
            # In the rows of the others, it may have any numbers.
            ended = np.flatnonzero(over).tolist()
            final, final_infos = self._obs.copy(), self._infos(ended)
            final[~over] = 7
            for row in ended:
                self._begin(row)
            infos = {**self._infos(), "final_obs": final, "_final_obs": over}
            infos |= {"final_info": final_infos, "_final_info": over} if final_infos else {}
            return self._obs.copy(), rewards, terminated, truncated, infos
        self._over = over
        return self._obs.copy(), rewards, terminated, truncated, self._infos()

    def _begin(self, i: int) -> None:
        self.players[i].reset()
        self._obs[i] = self.players[i].observe()
        self._over[i] = False

    def _infos(self, rows: Sequence[int] | None = None) -> dict[str, Any]:
        told = range(self.num_envs) if rows is None else rows
        infos = [player.info() if i in told else {} for i, player in enumerate(self.players)]
        found = _stacked(infos)
        return {**found, **{f"_{name}": np.array([name in one for one in infos]) for name in found}}


# --- pools


class ScriptedPool(VectorEnv[Any, Any, Any]):
    """A pool with the interface of ALE's, which returns the environments that are ready.

    Args:
        script: the script.
        envs: numbers of the environments.
        mode: when new episodes begin.
        batch_size: number of environments in each result; by default, all.
        seed: seed of the order in which they become ready.
    """

    def __init__(
        self,
        script: Script,
        envs: Sequence[int],
        mode: str,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        self.players = [Player(script, env) for env in envs]
        self.num_envs, self.batch_size = len(envs), batch_size or len(envs)
        self.autoreset_mode = AutoresetMode(mode)
        self.single_observation_space = _BOX
        self.single_action_space = spaces.Discrete(script.actions)
        self._random = np.random.default_rng(seed)
        self._results: dict[int, Any] = {}
        self._returned: Any = None
        self._ended: set[int] = set()

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Resets all environments, and waits for the first results."""
        assert not self._results
        self._ended = set()
        self._results = {i: self._begin(i) for i in range(self.num_envs)}
        obs, _, _, _, info = self.recv()
        return obs, info

    def send(self, actions: Any) -> None:
        """Steps the environments that were returned last."""
        for i, action in zip(self._returned, actions, strict=True):
            self._results[int(i)] = self._step(int(i), int(action))
        self._returned = None

    def recv(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Returns the results of environments that are ready."""
        ready = self._random.permutation(sorted(self._results))[: self.batch_size]
        found = [self._results.pop(int(i)) for i in ready]
        self._returned = ready
        obs, reward, terminated, truncated, infos, finals = zip(*found, strict=True)
        info = {"env_id": ready.astype(np.int32), **_stacked(infos)}
        ended = np.array([final is not None for final in finals])
        if ended.any():
            last = [final or (np.zeros(FIELDS, np.float32), infos[0]) for final in finals]
            info["final_obs"] = np.stack([shown for shown, _ in last])
            info |= {"final_info": _stacked([one for _, one in last]), "_final_info": ended}
        flags = np.array(terminated), np.array(truncated)
        return np.stack(obs), np.array(reward, np.float32), *flags, info

    def _begin(self, i: int) -> Any:
        self.players[i].reset()
        return self.players[i].observe(), 0.0, False, False, self.players[i].info(), None

    def _step(self, i: int, action: int) -> Any:
        if i in self._ended:
            self._ended.remove(i)
            return self._begin(i)
        (reward,), terminated, truncated = self.players[i].step([action])
        obs, info = self.players[i].observe(action), self.players[i].info()
        if (terminated or truncated) and self.autoreset_mode is AutoresetMode.SAME_STEP:
            begun, *_, fresh, _ = self._begin(i)
            return begun, reward, terminated, truncated, fresh, (obs, info)
        if terminated or truncated:
            self._ended.add(i)
        return obs, reward, terminated, truncated, info, None


def _stacked(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the infos of several environments as one, with any numbers where some have none."""
    known = {name: value for info in infos for name, value in info.items()}
    return {
        name: np.stack([info.get(name, np.full_like(value, 7)) for info in infos])
        for name, value in known.items()
    }


# --- tensors


class TensorSimulator:
    """A simulator whose data are torch tensors, with Gymnasium's vector API.

    Args:
        script: the script.
        envs: numbers of the environments.
        mode: when new episodes begin.
        partial: True if a mask can reset some of the environments, whatever the mode.
        device: device of the tensors.
        reuse: True if observations are returned in the same memory each time.
    """

    def __init__(
        self,
        script: Script,
        envs: Sequence[int],
        mode: str,
        partial: bool = False,
        device: str = "cpu",
        reuse: bool = False,
    ) -> None:
        self._reuse = reuse
        self._shown: torch.Tensor | None = None
        self._inner = Simulator(script, envs, mode, partial)
        self.metadata = self._inner.metadata
        self.num_envs = self._inner.num_envs
        self.device = torch.device(device)
        self.single_observation_space = self._inner.single_observation_space
        self.single_action_space = self._inner.single_action_space

    @property
    def unwrapped(self) -> TensorSimulator:
        """The simulator itself."""
        return self

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Resets all environments, or those of the ``reset_mask``."""
        if "reset_mask" in (options or {}):
            options = {"reset_mask": options["reset_mask"].cpu().numpy()}
        obs, infos = self._inner.reset(seed=seed, options=options)
        return self._observation(obs), self._tensors(infos)

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Steps all environments."""
        obs, *results, infos = self._inner.step(actions.cpu().numpy())
        rewards, terminated, truncated = map(self._tensor, results)
        shown = self._observation(obs)
        return shown, rewards.float(), terminated, truncated, self._tensors(infos)

    def close(self) -> None:
        """Closes the environments."""

    def _observation(self, array: Any) -> torch.Tensor:
        found = self._tensor(array)
        if not self._reuse:
            return found
        if self._shown is None:
            self._shown = found.clone()
        return self._shown.copy_(found)

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _tensors(self, infos: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self._tensors(value) if isinstance(value, dict) else self._tensor(value)
            for name, value in infos.items()
        }


class ScriptedSource(Source):
    """A kind of environments of its own, of arrays or of tensors.

    Args:
        script: the script.
        envs: numbers of the environments.
        mode: when new episodes begin.
        device: device of the tensors; None for arrays.
    """

    single_observation_space: Any = _BOX
    can_restart = True

    def __init__(
        self, script: Script, envs: Sequence[int], mode: str, device: str | None = None
    ) -> None:
        simulator: Any = Simulator if device is None else TensorSimulator
        self._inner = simulator(script, envs, mode, partial=True)
        self.num_envs, self.device, self.autoreset_mode = len(envs), device, mode
        self.single_action_space = spaces.Discrete(script.actions)

    def begin(self, mask: Any, seeds: Any) -> Any:
        """Begins episodes where the mask is True."""
        assert seeds is None or len(seeds) == self.num_envs
        return self._inner.reset(options={"reset_mask": mask})

    def step(self, actions: Any) -> Any:
        """Steps all environments."""
        return self._inner.step(actions)


class ScriptedJax:
    """An environment of JAX, with the interface of gymnax; it plays the first episode for ever."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.action_space = spaces.Discrete(script.actions)

    def reset(self, key: Any) -> tuple[Any, ...]:
        """Begins an episode."""
        import jax.numpy as jnp

        count = jnp.uint32(0)
        info = self._info(count)
        if self.script.late:
            info.pop("level", None)
        return {"count": count}, self._observe(count, -1), info

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        """Takes a step."""
        count = state["count"] + 1
        over = count >= self.script.length(0, 0)
        at_end = self.script.flags(0, 0, self.script.length(0, 0))
        terminated, truncated = (over & flag for flag in at_end)
        reward = self.script.reward(0, 0, 0, 0) + (4.0 * count + action) / 8
        return (
            {"count": count},
            self._observe(count, action),
            reward,
            terminated,
            truncated,
            self._info(count),
        )

    def _observe(self, count: Any, action: Any) -> Any:
        import jax.numpy as jnp

        return jnp.stack([0.0 * count, 0.0 * count, 1.0 * count, action + 0.0 * count]).astype(
            jnp.float32
        )

    def _info(self, count: Any) -> dict[str, Any]:
        import jax.numpy as jnp

        found = {"level": count + self.script.level(0, 0, 0)} if self.script.levels else {}
        if self.script.masks:
            legal = (count + self.script.legal(0, 0, 0)) % self.script.actions
            found["action_mask"] = jnp.arange(self.script.actions) == legal
        return found


def jax_envs(script: Script, envs: Sequence[int]) -> Any:
    """Returns a batch of :class:`ScriptedJax`."""
    return JaxEnv(ScriptedJax(script), len(envs), info_keys=["level"] if script.levels else ())


# --- interfaces of other libraries


def dm_environment(script: Script, env: int) -> Any:
    """Returns an environment of dm_env."""
    import dm_env  # type: ignore[import-untyped]
    from dm_env import specs

    class ScriptedDM(dm_env.Environment):  # type: ignore[misc]
        def __init__(self) -> None:
            self.player = Player(script, env)

        def reset(self) -> Any:
            self.player.reset()
            return dm_env.restart(self.player.observe())

        def step(self, action: Any) -> Any:
            (reward,), terminated, truncated = self.player.step([int(action)])
            obs = self.player.observe(int(action))
            if terminated:
                return dm_env.termination(reward, obs)
            return (dm_env.truncation if truncated else dm_env.transition)(reward, obs)

        def observation_spec(self) -> Any:
            return specs.Array((FIELDS,), np.float32)

        def action_spec(self) -> Any:
            return specs.DiscreteArray(script.actions)

    return ScriptedDM()


def agents_environment(script: Script, env: int, agents: int = 2) -> Any:
    """Returns a parallel environment of PettingZoo."""
    from pettingzoo import ParallelEnv

    class ScriptedAgents(ParallelEnv):  # type: ignore[misc]
        metadata = {"name": "scripted"}  # noqa: RUF012 - as PettingZoo
        render_mode = None

        def __init__(self) -> None:
            self.possible_agents = [f"agent_{i}" for i in range(agents)]
            self.agents: list[str] = []
            self.player = Player(script, env)

        def observation_space(self, agent: Any) -> Any:
            return _BOX

        def action_space(self, agent: Any) -> Any:
            return spaces.Discrete(script.actions)

        def reset(self, seed: Any = None, options: Any = None) -> Any:
            self.agents = self.possible_agents[:]
            self.player.reset()
            return self._all(lambda i: self.player.observe(-1, i)), self._infos()

        def step(self, actions: Any) -> Any:
            taken = [int(actions[name]) for name in self.agents]
            rewards, terminated, truncated = self.player.step(taken)
            results = (
                self._all(lambda i: self.player.observe(taken[i], i)),
                self._all(lambda i: rewards[i]),
                self._all(lambda i: terminated),
                self._all(lambda i: truncated),
                self._infos(),
            )
            if terminated or truncated:
                self.agents = []
            return results

        def _all(self, value: Callable[[int], Any]) -> dict[str, Any]:
            return {name: value(i) for i, name in enumerate(self.possible_agents)}

        def _infos(self) -> dict[str, Any]:
            return self._all(lambda i: self.player.info())

    return ScriptedAgents()


def turns_environment(script: Script, env: int, agents: int = 2) -> Any:
    """Returns an AEC environment of PettingZoo, whose agents act in turn."""
    from pettingzoo import AECEnv

    class ScriptedTurns(AECEnv):  # type: ignore[misc]
        metadata = {"name": "turns"}  # noqa: RUF012 - as PettingZoo
        render_mode = None

        def __init__(self) -> None:
            self.possible_agents = [f"agent_{i}" for i in range(agents)]
            self.player = Player(script, env)

        def observation_space(self, agent: Any) -> Any:
            return _BOX

        def action_space(self, agent: Any) -> Any:
            return spaces.Discrete(script.actions)

        def reset(self, seed: Any = None, options: Any = None) -> None:
            self.agents = self.possible_agents[:]
            self.player.reset()
            self._set(-1, [0.0] * agents, False, False)

        def step(self, action: Any) -> None:
            self._set(int(action), *self.player.step([int(action)] * agents))

        def _set(
            self, action: int, rewards: Sequence[float], terminated: bool, truncated: bool
        ) -> None:
            self.agent_selection = self.agents[self.player.count % agents]
            self.seen = {name: self.player.observe(action, i) for i, name in enumerate(self.agents)}
            self.rewards = dict(zip(self.agents, rewards, strict=True))
            self.terminations = dict.fromkeys(self.agents, terminated)
            self.truncations = dict.fromkeys(self.agents, truncated)
            self.infos = {name: self.player.info() for name in self.agents}

        def observe(self, agent: Any) -> Any:
            return self.seen[agent]

    return ScriptedTurns()


def torchrl_environment(script: Script, env: int) -> Any:
    """Returns an environment of TorchRL."""
    from tensordict import TensorDict
    from torchrl.data import Categorical, Composite, OneHot, Unbounded
    from torchrl.envs import EnvBase

    class ScriptedTorchRL(EnvBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.player = Player(script, env)
            self.observation_spec = Composite(observation=Unbounded((FIELDS,)))
            self.action_spec = OneHot(script.actions)
            self.reward_spec = Unbounded((1,))
            flags = ("done", "terminated", "truncated")
            flag = Categorical(2, shape=(1,), dtype=torch.bool)
            self.done_spec = Composite({name: flag.clone() for name in flags})

        def _reset(self, tensordict: Any, **kwargs: Any) -> Any:
            self.player.reset()
            found = {"observation": torch.from_numpy(self.player.observe())}
            return TensorDict(found).update(self.full_done_spec.zero()).to(self.device)

        def _step(self, tensordict: Any) -> Any:
            action = int(tensordict["action"].long().argmax(-1))
            (reward,), terminated, truncated = self.player.step([action])
            return TensorDict(
                {
                    "observation": torch.from_numpy(self.player.observe(action)),
                    "reward": torch.tensor([reward]),
                    "done": torch.tensor([terminated or truncated]),
                    "terminated": torch.tensor([terminated]),
                    "truncated": torch.tensor([truncated]),
                }
            ).to(self.device)

        def _set_seed(self, seed: Any) -> None: ...

    return ScriptedTorchRL()


# --- the table
