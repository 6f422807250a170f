"""PettingZoo environments, parallel and AEC, with the TensorDict interface."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, stack
from torch import Tensor
from typing_extensions import override

from trawl.checks import check_bool, did_you_mean
from trawl.devices import optional_device
from trawl.envs.agents.arrays import AGENT_MASK, AgentArrays
from trawl.envs.agents.groups import (
    AgentActions,
    AgentGroup,
    chosen_infos,
    first_infos,
    make_groups,
)
from trawl.envs.agents.steps import (
    AgentResults,
    ParallelSteps,
    TurnSteps,
    is_pettingzoo,
    is_turn_based,
)
from trawl.envs.arguments import (
    advice_on_id,
    argument_names,
    lists_arguments,
    named_arguments,
    needed,
)
from trawl.envs.capture import capture, restore
from trawl.envs.capture.ways import chain
from trawl.envs.entries.info_keys import AnyText, AnyValue
from trawl.envs.entries.infos import InfoLeaf
from trawl.envs.entries.masks import MASK_KEY
from trawl.envs.entries.spaces import SpaceLeaf
from trawl.envs.kinds import EnvKind
from trawl.envs.logged import LoggedEnv
from trawl.envs.reset_kwargs import ResetArguments, names_taken
from trawl.envs.seeding import check_seed, next_seed, rebuilt_seed
from trawl.envs.specs import Categorical, Composite, NonTensor, Unbounded
from trawl.errors import env_errors
from trawl.keys import RESET_MASK, Key, nested, next_of
from trawl.memory import Array
from trawl.schema.checks import UNKNOWN
from trawl.schema.states import AGENTS
from trawl.supported import MASK_AEC

STATE = "state"


class PettingZooEnv(LoggedEnv):
    """PettingZoo environment, parallel or AEC, with the TensorDict interface.

    Agents form groups. The entries of a group are stacked: the first dimension after the batch
    dimensions is the agent. The keys are those of TorchRL's ``PettingZooWrapper``.

    Args:
        env: a ``pettingzoo.ParallelEnv`` or ``pettingzoo.AECEnv``.
        group_map: agents of each group, as a mapping from names of groups to lists of agents, or a
            member of TorchRL's ``MarlGroupMapType``. By default, agents of a parallel environment
            whose names differ only in the number at the end are one group (``agent_0`` and
            ``agent_1`` become ``"agent"``). In an AEC environment, each agent is a group.
        use_mask: True to add ``(group, "mask")``, which is True for the agents that act in this
            step. None means True for an AEC environment, and if ``done_on_any`` is False.
        categorical_actions: True if a discrete action is an index, False if it is a one-hot vector.
        done_on_any: True to end an episode when the first agent is done, False to end it when all
            agents are done. None means True for a parallel environment, and False for an AEC one.
        return_state: True to add ``"state"``, the result of the environment's ``state()``.
        info_keys: names of entries of the agents' infos that become ``(group, "info", name)``: a
            list of names, or a mapping from names to spaces, as in :class:`GymEnv`. A mapping from
            names of groups to lists or mappings applies to each group separately. By default, all
            numbers and arrays in the infos of the first reset are taken. Text and other objects
            become non-tensor data.
        device: device of the returned TensorDicts. With None, the TensorDicts have no device, and
            their tensors are on the CPU.

    Attributes:
        fixed_layout: True if all entries have a fixed shape and dtype, unlike text.

    Raises:
        TypeError: if ``env`` is not a PettingZoo environment.
        ValueError: if ``group_map`` does not name each agent exactly once, or agents of one group
            have different spaces; if ``info_keys`` has a name that no info has.

    Examples:
        >>> from mpe2 import simple_spread_v3
        >>> from trawl.envs import PettingZooEnv
        >>> env = PettingZooEnv(simple_spread_v3.parallel_env())
        >>> env.group_map
        {'agent': ['agent_0', 'agent_1', 'agent_2']}
        >>> env.rollout(5)["agent", "observation"].shape
        torch.Size([5, 3, 18])
        >>> env.close()
    """

    @lists_arguments
    def __init__(
        self,
        env: Any,
        *,
        group_map: Any = None,
        use_mask: bool | None = None,
        categorical_actions: bool = True,
        done_on_any: bool | None = None,
        return_state: bool = False,
        info_keys: Any = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not is_pettingzoo(env):
            raise TypeError(
                "env must be a pettingzoo.ParallelEnv or a pettingzoo.AECEnv, but it is "
                f"{type(env).__name__}: {env!r}{advice_on_id(env, 'pettingzoo')}"
            )
        check_bool("categorical_actions", categorical_actions)
        check_bool("return_state", return_state)
        for name, switch in (("use_mask", use_mask), ("done_on_any", done_on_any)):
            if switch is not None:
                check_bool(name, switch)
        self.env = env
        self._rebuilds = 0  # since the last set_seed()
        self._first_seed: int | None = None  # of the last set_seed()
        self.device = optional_device("device", device)
        self.batch_size = torch.Size([])
        self.parallel = not is_turn_based(env)
        self._use(env)
        self._seed: int | None = None
        self._returns_state = return_state
        self.done_on_any = self.parallel if done_on_any is None else done_on_any
        self.use_mask = (not (self.parallel and self.done_on_any)) if use_mask is None else use_mask
        if not self.parallel and not self.use_mask:
            raise MASK_AEC.error()
        self.group_map = make_groups(group_map, env.possible_agents, self.parallel)
        self.agent_groups = [
            AgentGroup(name, agents, env, categorical_actions)
            for name, agents in self.group_map.items()
        ]
        self.action_codec: Any = AgentActions(self.agent_groups)
        self._all_agents = tuple(agent for group in self.agent_groups for agent in group.agents)
        first = self._steps.reset()
        self._describe(first, self._infos(first, info_keys))

    def _infos(self, first: AgentResults, info_keys: Any) -> dict[str, list[InfoLeaf]]:
        """Returns the leaves of the infos that batches have, by group."""
        if info_keys is None:
            return {group.name: first_infos(group, first) for group in self.agent_groups}
        return chosen_infos(self.agent_groups, self._steps, info_keys)

    def _describe(self, first: AgentResults, infos: dict[str, list[InfoLeaf]]) -> None:
        """Makes the arrays and the specs, given the results of the first reset."""
        masked = [group.name for group in self.agent_groups if _has_mask(group, first)]
        self.arrays = AgentArrays(self.agent_groups, infos, masked, self.use_mask, self.done_on_any)
        leaves = [leaf for found in infos.values() for leaf in found]
        self.fixed_layout = all(leaf.dtype is not None for leaf in leaves)
        if self._returns_state:
            self.arrays.observations[(STATE,)] = np.array(self.env.state())
        observed, acted, rewards = Composite(), Composite(), Composite()
        reward, flag = self.full_reward_spec, self.full_done_spec
        flags = flag.clone()
        for group in self.agent_groups:
            name, count = group.name, len(group.agents)
            observed[name] = group.observed.composite((count,))
            acted[name] = group.acted.composite((count,))
            rewards[name], flags[name] = reward.expand(count), flag.expand(count)
            if name in masked:
                shape = (count, group.num_choices or 0)
                observed[name, MASK_KEY] = Categorical(2, shape, torch.bool)
            if self.use_mask:
                observed[name, AGENT_MASK] = Categorical(2, (count,), torch.bool)
            for info in infos[name]:
                observed[(name, *info.key)] = _info_spec(info, count)
        if self._returns_state:
            observed[STATE] = _unbounded(self.arrays.observations[(STATE,)])
        place = self.device or "cpu"
        self.full_observation_spec, self.full_action_spec = observed.to(place), acted.to(place)
        self._reward_spec, self._done_spec = rewards, flags
        self.observation_codec: Any = _ObservationArrays(
            [
                SpaceLeaf(key, (), AnyValue(), self.full_observation_spec[key])
                for key in self.arrays.observations
            ]
        )

    @override
    def set_reset_kwargs(self, given: Any, first: int, counts: Any) -> None:
        names = names_taken(chain(self.env))
        none = given is None
        self.reset_arguments = None if none else ResetArguments(given, first, names, counts)

    # --- steps, for the array path

    def begin_episode(self, **kwargs: Any) -> None:
        """Resets the environment, and writes the results to ``arrays``."""
        seed, self._seed = self._seed, None
        if seed is not None:
            kwargs.setdefault("seed", seed)
        self.start_episode(**self.begin_log(kwargs))
        self.decide_log()
        if self.log is not None:
            self.log.observe(self._leaves())

    def start_episode(self, **kwargs: Any) -> None:
        """Resets the environment like :meth:`begin_episode`, but ignores seeds and the log."""
        self.arrays.begin(self._steps.reset(**kwargs))
        self._read_state()

    def advance(self, actions: dict[str, Any]) -> None:
        """Takes a step, and writes the results to ``arrays``.

        Args:
            actions: action of each agent; those of agents that do not act are ignored.
        """
        acting = self.arrays.acting
        if self.parallel and acting != self._all_agents:
            # An environment may depend on the order of its agents.
            actions = {agent: actions[agent] for agent in acting}
        self.arrays.update(self._steps.step(actions))
        self._read_state()

    def _read_state(self) -> None:
        if self._returns_state:
            state, target = np.asarray(self.env.state()), self.arrays.observations[(STATE,)]
            if state.shape != target.shape:
                raise ValueError(
                    f"the environment's state has shape {state.shape}, but at first "
                    f"{target.shape}: the shape must not change"
                )
            target[...] = state

    # --- TensorDicts

    def _reset(self, mask: Tensor | None, **kwargs: Any) -> TensorDict:
        self.begin_episode(**kwargs)
        return self._tensordict({**self.arrays.observations, **self.arrays.flags})

    @override
    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get(RESET_MASK, None)
        if tensordict is not None and mask is not None and not mask.any():
            return tensordict.exclude(RESET_MASK)
        return self._placed(self._guarded_reset(None, **kwargs))

    @override
    def _after(self, actions: list[Any]) -> TensorDict:
        self.advance(self.action_codec.decode(actions))
        arrays = self.arrays
        if self.log is not None:
            self.log.add_step(actions, np.concatenate(arrays.reward_rows()))
            self.log.observe(self._leaves())
        return self._tensordict({**arrays.observations, **arrays.rewards, **arrays.flags})

    def _tensordict(self, arrays: dict[Any, Array]) -> TensorDict:
        values = {key: _entry(array) for key, array in arrays.items()}
        result = TensorDict(nested(values), [])
        for group in self.agent_groups:
            result.get(group.name).batch_size = [len(group.agents)]
        return result

    # --- the rest

    @override
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the next reset.

        Returns:
            The seed for another environment; if ``static_seed``, the same seed.
        """
        self._seed = self._first_seed = seed = check_seed(seed)
        self._rebuilds = 0
        return next_seed(seed, static_seed)

    def rebuild(self) -> None:
        """Closes the environment, ignoring errors, and makes a new one in the same way.

        If the environment was seeded, the next reset gets a seed that is derived from the last one.

        Raises:
            RuntimeError: if the environment was passed as an object.
            ValueError: if the new environment has other spaces, or is the same object as before.
        """
        fresh = self._made_again(PettingZooEnv, self.close)
        self.is_closed = False
        self._use(fresh.env)
        self.renew_log()
        self._rebuilds += 1
        if self._first_seed is not None:
            self._seed = rebuilt_seed(self._first_seed, self._rebuilds)

    def _use(self, env: Any) -> None:
        self.env, self._steps = env, ParallelSteps(env) if self.parallel else TurnSteps(env)

    # --- the state

    @override
    def replay_reset(self, arguments: Mapping[str, Any]) -> list[Any]:
        self.start_episode(**arguments)
        return self._leaves()

    @override
    def replay_step(self, action: dict[str, Any]) -> tuple[list[Any], Any, bool]:
        self.advance(action)
        return self._leaves(), np.concatenate(self.arrays.reward_rows()), self.arrays.done

    def _leaves(self) -> list[Any]:
        leaves: list[Any] = self.observation_codec.encode(self.arrays.observations)
        return leaves

    @override
    def reward_rows(self, rows: Mapping[Key, Array], chosen: Any, first: int, stop: int) -> Array:
        found = [rows[next_of(key)][first:stop, chosen, :, 0] for key in self.arrays.rewards]
        return np.concatenate(found, -1)

    @override
    def capture(self) -> dict[str, Any]:
        return {
            "env": capture(self.env, self.log),
            "arrays": self.arrays.state_dict(),
            "seeds": [self._seed, self._first_seed],
            "rebuilds": self._rebuilds,
        }

    @override
    def check_state(self, state: Mapping[str, Any]) -> None:
        with env_errors():
            AGENTS(state, "state", UNKNOWN)
        super().check_state(state)
        # Afterwards, because sizes tell less than the names of another environment.
        with env_errors():
            AGENTS(state, "state", {"arrays": self.arrays.state_dict()})
            self.arrays.check_agents(state["arrays"])

    @override
    def restore(self, state: Mapping[str, Any], trust: bool = False) -> None:
        self._use(restore(self.env, state["env"], trust, self.log))
        self.arrays.load_state_dict(state["arrays"])
        self._seed, self._first_seed = state["seeds"]
        self._rebuilds = state["rebuilds"]

    @override
    def _close(self) -> None:
        self.env.close()

    @property
    @override
    def name(self) -> str:
        metadata = getattr(self.env, "metadata", None) or {}
        return str(metadata.get("name") or type(self.env.unwrapped).__name__)

    def __repr__(self) -> str:
        return f"PettingZooEnv({self.name}, groups={self.group_map})"


@dataclass
class _ObservationArrays:
    """Codec of the arrays of all observations, which need no encoding."""

    leaves: list[SpaceLeaf]

    def encode(self, arrays: Mapping[Key, Array]) -> list[Array]:
        """Returns the arrays in the order of ``leaves``."""
        return list(arrays.values())


def _has_mask(group: AgentGroup, first: AgentResults) -> bool:
    shown = group.masked or any(MASK_KEY in first.infos.get(agent, ()) for agent in group.agents)
    if shown and group.num_choices is None:
        raise ValueError(
            f"the agents of group {group.name!r} have an action mask, but only discrete and "
            "binary actions can have one: remove the mask in a wrapper"
        )
    return shown


def _entry(array: Array) -> Any:
    """Returns a copy of an array as a tensor, or as non-tensor data with an element per agent."""
    if array.dtype != object:
        return torch.from_numpy(array.copy())
    return stack([NonTensorData(copy.deepcopy(value)) for value in array])


def _info_spec(leaf: InfoLeaf, agents: int) -> Any:
    """Returns the spec of an entry of the infos of a group."""
    if leaf.dtype is None:
        return NonTensor(AnyValue() if leaf.blank is None else AnyText(), (agents,))
    return _unbounded(np.empty((agents, *leaf.shape), leaf.dtype))


def _unbounded(example: Array) -> Any:
    """Returns a spec with the shape and dtype of an array."""
    return Unbounded(example.shape, torch.from_numpy(example).dtype)


# --- ids


def make_pettingzoo(name: str, **options: Any) -> PettingZooEnv:
    """Makes a PettingZoo environment: the parallel one, if there is one.

    Args:
        name: id in PettingZoo's registry, such as ``"classic/rps-v2"``; or a module of another
            package, such as ``"mpe2/simple_spread_v3"``.
        **options: arguments of :class:`PettingZooEnv` and of the environment; ``parallel=False``
            makes the AEC environment.

    Raises:
        ImportError: if PettingZoo is not installed.
        TypeError: if an argument is unknown.
        ValueError: if there is no such environment.
    """
    with needed(f"pettingzoo:{name}", "PettingZoo", "pettingzoo"):
        import_module("pettingzoo")
    own = set(argument_names(PettingZooEnv)) & options.keys()
    rest = {key: value for key, value in options.items() if key not in own}
    kinds = ("parallel", "aec") if rest.pop("parallel", True) else ("aec",)
    module = _module_of(name)
    for kind in kinds:
        own_make = getattr(module, _FACTORIES[kind], None)
        make = _registered(kind, name) if module is None else own_make
        if make is not None:
            known = partial(_arguments_of, kind, name)
            with named_arguments(f"pettingzoo:{name}", rest, known):
                made = make(**rest)
            return PettingZooEnv(made, **{key: options[key] for key in own})
    raise ValueError(f"there is no PettingZoo environment {name!r}{_hint(name)}")


def _hint(name: str) -> str:
    """Returns a hint for a name that PettingZoo doesn't know."""
    package, _, module = name.partition("/")
    if module.isidentifier() and package.isidentifier() and find_spec(package) is None:
        return f", and no package {package!r} is installed: pip install {package}"
    near = did_you_mean([name], _names_near(name), 3) or "."
    return (
        f"{near} Use an id such as classic/rps-v2, or a module of an installed package, such as "
        "mpe2/simple_spread_v3"
    )


# Ending of the name of a module that defines an environment.
_VERSIONED = re.compile(r"_v\d+$")

# The functions in an environment's module.
_FACTORIES = {"parallel": "parallel_env", "aec": "env"}


def _registered(kind: str, name: str) -> Callable[..., Any] | None:
    """Returns a function that makes an environment of PettingZoo's registry, or None."""
    import pettingzoo

    errors = pettingzoo.env_registry.exceptions
    try:
        pettingzoo.spec(kind, name)
    except errors.FailedToImport:
        raise
    except errors.PettingZooRegistryError:
        return None
    return partial(pettingzoo.make, kind, name)


def _arguments_of(kind: str, name: str) -> list[str]:
    """Returns the arguments of a PettingZoo environment and of its adapter."""
    module = _module_of(name)
    if module is None:
        entry = import_module("pettingzoo").spec(kind, name).entry_point
        module = import_module(entry.partition(":")[0])
    # The other functions of the module pass their arguments on to this one.
    make = getattr(module, "raw_env", None)
    own = [one for one in argument_names(PettingZooEnv) if one != "env"]
    return ["num_envs", "parallel", *own, *(() if make is None else argument_names(make))]


def _names_near(name: str) -> list[str]:
    """Returns the names of PettingZoo's environments, and of those in the package that is named."""
    pettingzoo = import_module("pettingzoo")
    package = name.partition("/")[0]
    modules = [one.name for one in iter_modules(_folders(package))]
    own = [f"{package}/{one}" for one in modules if _VERSIONED.search(one)]
    return [*own, *pettingzoo.aec_registry, *pettingzoo.parallel_registry]


def _module_of(name: str) -> Any:
    """Returns the module of an environment in a package of its own; None if there is none."""
    package, _, module = name.partition("/")
    path = f"{package}.{module}"
    if not module.isidentifier() or not _folders(package) or find_spec(path) is None:
        return None
    return import_module(path)


def _folders(package: str) -> Sequence[str]:
    """Returns the folders with the modules of a package; empty if it is none."""
    found = find_spec(package) if package.isidentifier() else None
    return [] if found is None else found.submodule_search_locations or []


PETTINGZOO = EnvKind(PettingZooEnv, is_pettingzoo, make_pettingzoo)
