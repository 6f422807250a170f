"""Environments of VMAS, the vectorised simulator for several agents."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces as gymnasium_spaces
from torch import Tensor
from typing_extensions import override

from trawl.checks import check_number
from trawl.devices import optional_device
from trawl.envs.arguments import (
    advice_on_id,
    argument_names,
    lists_arguments,
    nearest_first,
    needed,
    unknown_argument,
)
from trawl.envs.kinds import EnvKind
from trawl.envs.seeding import check_seed
from trawl.envs.specs import Bounded, Categorical, Composite, Spec, Unbounded
from trawl.envs.tensor_env import TensorEnv, TensorStep


class VmasEnv(TensorEnv):
    """VMAS environment with the TensorDict interface.

    Agents whose names differ only in the number at the end form a group. The name of the group is
    the name without the number; if there is only the group ``"agent"``, it is called ``"agents"``.
    The keys of a group are ``(group, "observation")``, ``(group, "action")``,
    ``(group, "reward")`` and, for the entries of ``info``, ``(group, "info", name)`` (float32). Its
    entries have a dimension for the agents. All agents share the flags. Without
    ``terminated_truncated=True`` in ``vmas.make_env``, each episode that ends is ``terminated``.

    Args:
        env: environment that ``vmas.make_env`` made, with any options except
            ``multidiscrete_actions=True``.

    Raises:
        TypeError: if ``env`` is not an environment of VMAS.
        ValueError: if the agents of a group have different spaces.

    Examples:
        >>> import vmas
        >>> from trawl.envs import VmasEnv
        >>> env = VmasEnv(vmas.make_env("balance", num_envs=2, max_steps=5, seed=0))
        >>> env.rollout(4)["agents", "observation"].shape
        torch.Size([2, 4, 3, 16])
    """

    can_restart = True
    state_names = ("_begun", "_shown", "random_state")

    @lists_arguments
    def __init__(self, env: Any) -> None:
        if not is_vmas(env):
            raise TypeError(
                "env must be an environment that vmas.make_env made without a wrapper, but it is "
                f"{type(env).__name__}: {env!r}{advice_on_id(env, 'vmas')}"
            )
        self.env = env
        self.home = torch.empty(0, device=env.device).device
        self.device = None if self.home.type == "cpu" else self.home
        count = int(env.num_envs)
        self.batch_size = torch.Size([count])
        self.group_map = _groups_of([agent.name for agent in env.agents])
        numbers = {agent.name: index for index, agent in enumerate(env.agents)}
        self._members = [[numbers[name] for name in names] for names in self.group_map.values()]
        self.agents = {group: len(names) for group, names in self.group_map.items()}
        self._observed_space = _listed(env.observation_space, numbers)
        self._action_space = _listed(env.action_space, numbers)
        self._discrete = False
        self._none = torch.zeros(count, dtype=torch.bool, device=self.home)
        # The reset tells which entries info has.
        self._begun: list[Tensor] | None = None
        self._shown: list[Tensor] = []
        self._info: list[list[str]] = []
        self._begin_all()
        self._make_specs()

    def _make_specs(self) -> None:
        observed, acted = Composite(shape=self.batch_size), Composite(shape=self.batch_size)
        rewards = Composite(shape=self.batch_size)
        self.observation_keys = []
        shown = iter(self._begun or ())
        for group, members, info in zip(self.group_map, self._members, self._info, strict=True):
            names = [(group, "observation"), *((group, "info", name) for name in info)]
            for key in names:
                leaf = next(shown)
                observed[key] = Unbounded(leaf.shape, leaf.dtype, self.home)
                self.observation_keys.append(key)
            acted[group, "action"] = self._action_spec(group, members)
            shape = (*self.batch_size, len(members), 1)
            rewards[group, "reward"] = Unbounded(shape, device=self.home)
        self.full_observation_spec, self.full_action_spec = observed, acted
        self._reward_spec = rewards

    def _action_spec(self, group: str, members: list[int]) -> Spec:
        found = [self._action_space[index] for index in members]
        if any(space != found[0] for space in found):
            raise ValueError(f"the agents of group {group!r} have different action spaces: {found}")
        count, space = self.batch_size[0], _as_gymnasium(found[0])
        if isinstance(space, gymnasium_spaces.Discrete):
            self._discrete = True
            return Categorical(int(space.n), (count, len(members)), device=self.home)
        if not isinstance(space, gymnasium_spaces.Box):
            raise ValueError(
                f"the action space of group {group!r} is {space}, which is not supported: make the "
                "environment without multidiscrete_actions=True"
            )
        low, high = (
            torch.from_numpy(bound).expand(len(members), -1) for bound in (space.low, space.high)
        )
        spec = Bounded(low.clone(), high.clone(), torch.float32)
        return spec.expand(count).to(self.home)

    @property
    @override
    def reward_spec(self) -> Spec:
        spec: Spec = self.full_reward_spec[self.reward_keys[0]]
        return spec

    @property
    @override
    def name(self) -> str:
        # VMAS loads the file of a scenario as a module without a name.
        code = type(self.env.scenario).make_world.__code__
        return f"vmas {Path(code.co_filename).stem}"

    @property
    def random_state(self) -> list[Any]:
        """States of the generators from which all environments of VMAS in a process draw."""
        return list(self.env.vmas_random_state)

    @random_state.setter
    def random_state(self, states: list[Any]) -> None:
        # The methods of VMAS refer to this list.
        self.env.vmas_random_state[:] = states

    # --- what the loop calls

    def _begin_all(self) -> None:
        self.env.reset(return_observations=False)
        self._begun = self._show(*self._current())

    def _current(self) -> tuple[Any, Any]:
        """Returns the observations and the infos of the current state."""
        found = self.env.get_from_scenario(
            get_observations=True, get_rewards=False, get_infos=True, get_dones=False
        )
        return found[0], found[-1]

    def _show(self, obs: Any, infos: Any) -> list[Tensor]:
        """Returns the observation leaves."""
        agents = self.env.agents
        values = [obs[agent.name] for agent in agents] if isinstance(obs, Mapping) else obs
        found = [infos[agent.name] for agent in agents] if isinstance(infos, Mapping) else infos
        leaves = []
        if not self._info:
            self._info = [[str(name) for name in found[one[0]]] for one in self._members]
        for members, names in zip(self._members, self._info, strict=True):
            leaves.append(torch.stack([values[i] for i in members], 1))
            leaves += [torch.stack([_column(found[i][n]) for i in members], 1) for n in names]
        return leaves

    @override
    def begin(self, mask: Tensor | None, **kwargs: Any) -> list[Tensor]:
        self._refuse_options("VMAS", kwargs)
        seed = kwargs.get("seed", self._seed)
        self._seed = None
        whole = mask is None or bool(mask.all())
        if seed is not None:
            self.env.seed(seed)
        if whole:
            begun, self._begun = self._begun, None
            if begun is not None and seed is None:
                return begun
            self.env.reset(return_observations=False)
        elif mask is not None:
            # VMAS resets either all environments, or one by one.
            for index in mask.nonzero().flatten().tolist():
                self.env.reset_at(index, return_observations=False)
        self._begun = None
        self._shown = self._show(*self._current())
        return self._shown

    @override
    def advance(self, actions: Iterable[Tensor]) -> TensorStep:
        self._begun = None
        given: list[Any] = [None] * len(self.env.agents)
        for members, row in zip(self._members, actions, strict=True):
            # Copies, because VMAS changes its actions.
            parts = (
                row.clone().unsqueeze(-1) if self._discrete else row.to(torch.float32, copy=True)
            )
            for index, part in zip(members, parts.unbind(1), strict=True):
                given[index] = part
        obs, rewards, *flags, infos = self.env.step(given)
        terminated, truncated = flags if len(flags) == 2 else (flags[0], self._none)
        by_agent = rewards
        if isinstance(rewards, Mapping):
            by_agent = [rewards[agent.name] for agent in self.env.agents]
        leaves = self._shown = self._show(obs, infos)
        grouped = [
            torch.stack([by_agent[i] for i in members], 1).reshape(-1, len(members), 1)
            for members in self._members
        ]
        return TensorStep(leaves, None, grouped, terminated, truncated, None)

    @override
    def begin_next(self, ended: Tensor, cut: Tensor | None = None) -> list[Tensor]:
        ended = ended if cut is None else ended | cut
        # VMAS resets by number, so it needs the flags on the host in any case.
        return self.begin(ended) if bool(ended.any()) else self._shown

    @override
    def _close(self) -> None:
        pass


def is_vmas(env: Any) -> bool:
    """Returns True if ``env`` is an environment of VMAS."""
    kind = type(env)
    return kind.__module__.startswith("vmas.") and all(
        hasattr(kind, name) for name in ("reset_at", "get_from_scenario", "step")
    )


def _groups_of(names: Sequence[str]) -> dict[str, list[str]]:
    """Returns the names of the agents in each group."""
    groups: dict[str, list[str]] = {}
    for name in names:
        prefix, separator, number = name.rpartition("_")
        group = prefix if separator and number.isdigit() else name
        groups.setdefault(group, []).append(name)
    return {"agents": list(names)} if list(groups) == ["agent"] else groups


def _listed(space: Any, numbers: Mapping[str, int]) -> list[Any]:
    """Returns the spaces of the agents; the space of all is a Tuple, or a Dict by name."""
    if hasattr(space.spaces, "keys"):
        return [space.spaces[name] for name in numbers]
    return list(space.spaces)


def _as_gymnasium(space: Any) -> Any:
    """Returns the space as one of Gymnasium; VMAS uses those of the older Gym."""
    if type(space).__name__ == "Discrete":
        return gymnasium_spaces.Discrete(int(space.n))
    if type(space).__name__ == "Box":
        return gymnasium_spaces.Box(space.low, space.high, dtype=space.dtype.type)
    return space


def _column(value: Tensor) -> Tensor:
    """Returns an entry of info as float32, with a dimension after that of the environments."""
    value = value.to(torch.float32)
    return value.unsqueeze(-1) if value.ndim == 1 else value


# --- ids


def make_vmas(name: str, *, num_envs: int = 1, **options: Any) -> VmasEnv:
    """Makes an environment of VMAS.

    Args:
        name: the scenario, such as ``"balance"``.
        num_envs: number of environments.
        **options: further arguments of ``vmas.make_env``.

    Raises:
        ImportError: if VMAS is not installed.
        TypeError: if an argument is unknown.
        ValueError: if there is no such scenario, or the device can't be used.
    """
    with needed(f"vmas:{name}", "VMAS", "vmas"):
        import vmas
    count = check_number("num_envs", num_envs, least=1)
    optional_device("device", options.get("device"))
    if options.get("seed") is not None:
        check_seed(options["seed"])
    with warnings.catch_warnings():
        # VMAS only warns of an unknown argument.
        warnings.filterwarnings("error", message="Scenario kwargs")
        try:
            return VmasEnv(vmas.make_env(name, num_envs=count, **options))
        except UserWarning as error:
            raise _unused_by_vmas(name, options, str(error)) from error
        except AssertionError as error:
            if "not found" not in str(error):
                raise
            known = [*vmas.scenarios, *vmas.mpe_scenarios, *vmas.debug_scenarios]
            raise ValueError(
                f"VMAS has no scenario {name!r}: it has {', '.join(nearest_first(name, known))}"
            ) from error


def _unused_by_vmas(name: str, options: Mapping[str, Any], warning: str) -> TypeError:
    """Returns the error for arguments that a scenario has not used.

    Args:
        name: the scenario.
        options: all arguments.
        warning: the warning of VMAS, which has the unused arguments as a dict.
    """
    scenario = import_module("vmas.scenarios").load(f"{name.removesuffix('.py')}.py").Scenario
    # A scenario takes its arguments from a dict, so only its source has their names.
    methods = [one for kind in scenario.__mro__ for one in vars(kind).values()]
    source = "".join(inspect.getsource(one) for one in methods if inspect.isfunction(one))
    taken = re.findall(r"kwargs\.(?:pop|get)\(\s*[\"'](\w+)", source)
    known = {*argument_names(import_module("vmas").make_env), *taken} - {"scenario"}
    unknown = next(one for one in options if f"{one!r}: " in warning)
    return unknown_argument(f"vmas:{name}", unknown, known - {unknown})


VMAS = EnvKind(VmasEnv, is_vmas, make_vmas)
