"""Environments of every kind that play a script, and what the oracle knows of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from trawl.envs import GymEnv, ParallelEnv, PettingZooEnv, TorchVectorEnv
from trawl.envs.build import adapted
from trawl.supported import Trait
from trawl.testing.oracle import Kind
from trawl.testing.script import Script
from trawl.testing.scripted_envs import (
    ReusingEnv,
    ScriptedDictEnv,
    ScriptedEnv,
    ScriptedLooseEnv,
    ScriptedPartsEnv,
    ScriptedPool,
    ScriptedSource,
    Simulator,
    TensorSimulator,
    agents_environment,
    dm_environment,
    gymnasium_vector,
    jax_envs,
    text_of,
    torchrl_environment,
    turns_environment,
)

#: Numbers of environments that step as one: all of a batch, or those of a member of a list.
_ALL, _MEMBER = 99, 2


@dataclass(frozen=True)
class Face:
    """A kind of environment that plays a script.

    Attributes:
        make: function of a script and the numbers of the environments, which returns what a
            collector takes as its environment.
        kind: what the oracle has to know about the kind.
        single: True if it is one environment, without a batch dimension.
        keys: actual keys of entries, by the names that the oracle gives them.
        ends: how episodes can end.
        needs: module that has to be installed.
        traits: traits with which some options can't be combined.
    """

    make: Callable[[Script, Sequence[int]], Any]
    kind: Kind = field(default_factory=Kind)
    single: bool = False
    keys: Mapping[Any, Any] = field(default_factory=dict)
    ends: Sequence[str] = ("terminated", "truncated", "both")
    needs: str | None = None
    traits: frozenset[Trait] = frozenset()

    def key(self, key: Any) -> Any:
        """Returns the actual key of an entry."""
        path = key if isinstance(key, tuple) else (key,)
        after, path = path[: path[0] == "next"], path[path[0] == "next" :]
        actual = self.keys.get(path if len(path) > 1 else path[0], path)
        full = (*after, *(actual if isinstance(actual, tuple) else (actual,)))
        return full if len(full) > 1 else full[0]


def _single(make: Callable[[Script, int], Any]) -> Any:
    return lambda script, envs: partial(make, script, envs[0])


def _list(make: Callable[[Script, int], Any]) -> Any:
    return lambda script, envs: [partial(make, script, env) for env in envs]


def _adapted(adapter: Any, env: Any, script: Script) -> Any:
    """Returns an environment whose infos are observed, if the script has any."""
    return adapter(env, info_keys=["level"]) if script.levels else env


def _one(script: Script, env: int, kind: Any = ScriptedEnv) -> Any:
    return _adapted(GymEnv, kind(script, env), script)


def _agents(script: Script, env: int) -> Any:
    return _adapted(PettingZooEnv, agents_environment(script, env), script)


def _turns(script: Script, env: int) -> Any:
    groups = {"agent": ["agent_0", "agent_1"]}
    infos = ["level"] if script.levels else None
    return PettingZooEnv(turns_environment(script, env), group_map=groups, info_keys=infos)


def _turn(script: Script, env: int, episode: int, step: int) -> Any:
    return np.arange(2) == step % 2


def _batch(make: Callable[[Script, Sequence[int], str], Any], mode: str) -> Any:
    return lambda script, envs: partial(make, script, envs, mode)


def _members(make: Callable[[Script, Sequence[int], str], Any], mode: str) -> Any:
    return lambda script, envs: [
        partial(make, script, envs[i : i + _MEMBER], mode) for i in range(0, len(envs), _MEMBER)
    ]


def _sync(script: Script, envs: Sequence[int], mode: str) -> Any:
    return _adapted(GymEnv, gymnasium_vector(script, envs, mode), script)


def _vector(script: Script, envs: Sequence[int], mode: str) -> Any:
    return _adapted(GymEnv, Simulator(script, envs, mode), script)


def _tensors(script: Script, envs: Sequence[int], mode: str) -> Any:
    # Some simulators return their observations in the same memory each time.
    made = TensorSimulator(script, envs, mode, reuse=mode == "Disabled")
    return _adapted(TorchVectorEnv, made, script)


def _pool(script: Script, envs: Sequence[int], mode: str) -> Any:
    pool = ScriptedPool(script, envs, mode, 2 if mode == "SameStep" else 1)
    # It can be reset only once, so its infos can't be found out.
    level = spaces.Box(-np.inf, np.inf, (), np.float32)
    return GymEnv(pool, info_keys={"level": level}) if script.levels else pool


def _source(script: Script, envs: Sequence[int], mode: str, device: str | None = None) -> Any:
    made = ScriptedSource(script, envs, mode, device)
    return adapted(made, info_keys=["level"]) if script.levels else made


class _Late(TorchVectorEnv):
    """Works as on a GPU, whose answers come later."""

    answers_at_once = False


def _late(script: Script, envs: Sequence[int], mode: str) -> Any:
    made = TensorSimulator(script, envs, mode, partial=True, reuse=True)
    infos = ["level"] if script.levels else []
    return _Late(made, info_keys=infos, partial_reset="mask" if mode == "SameStep" else None)


def _parallel(make: Callable[[Script, int], Any] = _one, **options: Any) -> Any:
    return lambda script, envs: partial(_parallel_env, make, script, envs, options)


def _parallel_env(make: Any, script: Script, envs: Sequence[int], options: Any) -> Any:
    makers = [partial(make, script, env) for env in envs]
    return ParallelEnv(len(makers), makers, **options)


def _step_one_hot(script: Script, env: int, episode: int, step: int) -> Any:
    return np.eye(100, dtype=np.int64)[step]


def _discount(script: Script, env: int, episode: int, step: int) -> Any:
    return np.array([0.0 if script.flags(env, episode, step)[0] else 1.0], np.float32)


_AGENT_KEYS: dict[Any, Any] = {
    name: ("agent", name)
    for name in (
        "observation",
        "action",
        "reward",
        "raw_reward",
        "seen",
        "hidden",
        "action_mask",
        "mask",
    )
}
_AGENT_KEYS["info", "level"] = ("agent", "info", "level")
_ALL_AT_ONCE = frozenset({Trait.ALL_AT_ONCE})

#: The faces of a script, by name.
FACES: dict[str, Face] = {
    "one": Face(_single(_one), single=True),
    "list": Face(_list(_one)),
    "mapping": Face(
        _single(partial(_one, kind=ScriptedDictEnv)),
        Kind(extra={"step": _step_one_hot}),
        single=True,
        keys={"observation": ("inner", "place")},
    ),
    "reusing": Face(_list(partial(_one, kind=ReusingEnv))),
    "sync_next_step": Face(_batch(_sync, "NextStep"), Kind(together=_ALL)),
    "sync_same_step": Face(_batch(_sync, "SameStep"), Kind(resets="same", together=_ALL)),
    "vector_next_step": Face(
        _batch(_vector, "NextStep"), Kind(resets="next", together=_ALL), traits=_ALL_AT_ONCE
    ),
    "vector_same_step": Face(
        _batch(_vector, "SameStep"), Kind(resets="same", together=_ALL), traits=_ALL_AT_ONCE
    ),
    "vector_disabled": Face(_batch(_vector, "Disabled"), Kind(together=_ALL)),
    "tensors_next_step": Face(
        _batch(_tensors, "NextStep"),
        Kind(resets="next", together=_ALL),
        traits=_ALL_AT_ONCE,
    ),
    "tensors_same_step": Face(
        _batch(_tensors, "SameStep"),
        Kind(resets="same", together=_ALL),
        traits=_ALL_AT_ONCE,
    ),
    "tensors_disabled": Face(
        _batch(_tensors, "Disabled"),
        Kind(together=_ALL),
    ),
    "late_next_step": Face(
        _batch(_late, "NextStep"),
        Kind(resets="next", together=_ALL),
        traits=_ALL_AT_ONCE,
    ),
    "late_same_step": Face(
        _batch(_late, "SameStep"),
        Kind(resets="same", together=_ALL),
    ),
    "jax": Face(
        lambda script, envs: partial(jax_envs, script, envs),
        Kind(blind=True, together=_ALL),
        needs="jax",
    ),
    "dm_env": Face(
        _single(dm_environment),
        Kind(extra={"discount": _discount}, never_stacked=frozenset(["discount"])),
        single=True,
        ends=("terminated", "truncated"),
        needs="dm_env",
    ),
    "agents": Face(
        _single(_agents),
        Kind(agents=2),
        single=True,
        keys=_AGENT_KEYS,
        needs="pettingzoo",
    ),
    "agents_list": Face(
        _list(_agents),
        Kind(agents=2),
        keys=_AGENT_KEYS,
        needs="pettingzoo",
    ),
    "torchrl": Face(
        _single(torchrl_environment),
        single=True,
        needs="torchrl",
    ),
    "torchrl_list": Face(
        _list(torchrl_environment),
        Kind(together=_ALL),
        needs="torchrl",
    ),
    "vectors_list": Face(
        _members(_vector, "NextStep"), Kind(resets="next", together=_MEMBER), traits=_ALL_AT_ONCE
    ),
    "tensors_list": Face(_members(_tensors, "Disabled"), Kind(together=_MEMBER)),
    "parallel": Face(_parallel(backend="thread"), Kind(resets="same")),
    "groups": Face(_parallel(backend="thread", groups=3), Kind(resets="same", grouped=True)),
    "agents_parallel": Face(
        _parallel(make=_agents, backend="thread"),
        Kind(agents=2, resets="same"),
        keys=_AGENT_KEYS,
        needs="pettingzoo",
    ),
    "loose": Face(
        _list(partial(_one, kind=ScriptedLooseEnv)),
        Kind(extra={"text": text_of}, never_stacked=frozenset(["text"])),
    ),
    "source": Face(_batch(_source, "Disabled"), Kind(together=_ALL)),
    "source_same_step": Face(_batch(_source, "SameStep"), Kind(resets="same", together=_ALL)),
    "source_tensors": Face(
        _batch(partial(_source, device="cpu"), "SameStep"), Kind(resets="same", together=_ALL)
    ),
    "turns": Face(
        _single(_turns),
        Kind(agents=2, in_turn=True, extra={"mask": _turn}, never_stacked=frozenset(["mask"])),
        single=True,
        keys=_AGENT_KEYS,
        needs="pettingzoo",
    ),
    "parts": Face(_list(partial(_one, kind=ScriptedPartsEnv)), Kind(parts=2)),
}

#: The faces of a script that return the environments that are ready, in any order.
POOLS: dict[str, Face] = {
    f"pool_{name}": Face(
        _batch(_pool, mode), traits=frozenset({Trait.POOL, Trait.READY}) | _ALL_AT_ONCE
    )
    for name, mode in (("next_step", "NextStep"), ("same_step", "SameStep"))
}
