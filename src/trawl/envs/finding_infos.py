"""Finds the layout of the entries of an environment's info."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, Wrapper, spaces
from gymnasium.vector import SyncVectorEnv, VectorWrapper

from trawl.envs.autoreset import autoreset_mode
from trawl.envs.final_obs import marks_presence
from trawl.envs.info_wrappers import InfoEnvPool, InfoSingle, InfoVector
from trawl.envs.infos import InfoKeys, InfoLayout, as_array, box, given_spaces, space_of
from trawl.envs.making import single_spaces
from trawl.envs.masks import newest_masks
from trawl.envs.pool import is_pool
from trawl.envs.vector import is_envpool, is_vector_env

# Steps that are taken to see values, at most.
_STEPS = 1000
# Steps that are taken in any case: a reset may return an integer where steps return a float.
_LEAST = 3
# Results of EnvPool that are not in the info.
_OUTCOME = frozenset({"reward", "done", "trunc", "discount", "step_type"})


def with_infos(
    env: Any, info_keys: InfoKeys, mode: Any = None, spare: Callable[[], Any] | None = None
) -> tuple[Any, dict[str, Space[Any]]]:
    """Wraps an environment so that its observations have entries of its info.

    Args:
        env: the environment.
        info_keys: the argument of :class:`~trawl.envs.GymEnv`.
        mode: the autoreset mode stated by the user, or None.
        spare: function that makes another such environment, in which values are looked for; None
            to look for them in ``env``.

    Returns:
        The environment, and the space of each entry.

    Raises:
        TypeError: if ``info_keys`` is of another type.
        ValueError: if ``info_keys`` has a name that the info lacks.
    """
    given = given_spaces(info_keys)
    if not given:
        return env, {}
    if is_pool(env) and not is_envpool(env):
        raise ValueError(
            f"info_keys can't be used with {type(env).__name__} and a batch_size below num_envs: "
            "make the environment without batch_size"
        )
    try:
        found = _find(env, given, spare)
    except Exception:
        if spare is not None:
            env.close()
        raise
    layout = InfoLayout(found)
    if is_envpool(env):
        return InfoEnvPool(env, layout, single_spaces(env, True)[0]), found
    if not is_vector_env(env):
        return InfoSingle(env, layout), found
    same_step = autoreset_mode(env, mode).value == "SameStep"
    outside = tuple(name for name in _statistics(env, VectorWrapper) if name in found)
    return InfoVector(env, layout, same_step, outside), found


def _find(
    env: Any, given: Mapping[str, Space[Any] | None], spare: Callable[[], Any] | None
) -> dict[str, Space[Any]]:
    known = {name: space for name, space in given.items() if space is not None}
    missing = [name for name in given if name not in known]
    if is_envpool(env):
        found = _declared(env)
    else:
        found = {name: _episode() for name in _all_statistics(env)}
        if not set(missing) <= set(found):
            probed = env if spare is None else spare()
            try:
                found = {**_probe(probed, set(missing) - set(found)), **found}
            finally:
                if probed is not env:
                    probed.close()
    absent = [name for name in missing if name not in found]
    if absent:
        raise ValueError(
            f"info_keys has {absent}, but the info of {env} has only {sorted(found)}. If a name "
            "appears later than the first episodes, state its space: "
            f"info_keys={{{absent[0]!r}: gymnasium.spaces.Box(...)}}"
        )
    return {name: known[name] if name in known else found[name] for name in given}


def _episode() -> Space[Any]:
    """Returns the space of the statistics of ``RecordEpisodeStatistics``."""
    parts = {"r": np.float32, "l": np.int64, "t": np.float32}
    return spaces.Dict({name: box((), dtype) for name, dtype in parts.items()})


def _all_statistics(env: Any) -> list[str]:
    names = list(_statistics(env, (Wrapper, VectorWrapper)))
    base = getattr(env, "unwrapped", env)
    if isinstance(base, SyncVectorEnv):
        names += _statistics(base.envs[0], Wrapper)
    return names


def _statistics(env: Any, kinds: Any) -> Iterator[str]:
    """Yields the names under which wrappers report statistics of episodes."""
    while isinstance(env, kinds):
        name = vars(env).get("_stats_key")
        if type(env).__name__ == "RecordEpisodeStatistics" and name is not None:
            yield name
        env = env.env


def _declared(env: Any) -> dict[str, Space[Any]]:
    """Returns the spaces of all entries that an EnvPool environment declares."""
    found: dict[str, Space[Any]] = {}
    for key, spec in env.spec.state_array_spec.items():
        name = key.removeprefix("info:")
        observed = name == "obs" or name.startswith(("obs:", "obs."))
        if not observed and name not in _OUTCOME and "." not in name:
            found[name] = box([n for n in spec.shape if n != -1], spec.dtype)
    return found


def _probe(env: Any, wanted: set[str]) -> dict[str, Space[Any]]:
    """Returns the spaces of the entries that appear in a reset and some random steps."""
    batched = is_vector_env(env)
    action_space = copy.deepcopy(env.action_space)
    action_space.seed(0)
    found: dict[str, Any] = {}
    _, info = env.reset()
    masks: Any = None
    for step in range(_STEPS):
        for one in _rows(info, env.num_envs) if batched else [info]:
            found = _merged(_merged(found, one), one.get("final_info"))
        if step >= _LEAST and wanted <= found.keys():
            break
        masks = newest_masks(masks, info if batched else [info])
        result = env.step(_sample(action_space, masks))
        info = result[-1]
        if not batched and (result[2] or result[3]):
            found = _merged(found, info)
            _, info = env.reset()
    hidden = ("final_obs", "final_observation", "final_info")
    return {name: space_of(value) for name, value in found.items() if name not in hidden}


def _merged(old: Any, new: Any) -> Any:
    """Returns a value with a layout that fits both values."""
    if old is None or new is None:
        return new if old is None else old
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {name: _merged(old.get(name), new.get(name)) for name in {**old, **new}}
    one, other = as_array(old), as_array(new)
    if one is None or other is None:
        return old if one is None else new
    if one.shape == other.shape and one.dtype != other.dtype:
        return one.astype(np.result_type(one, other))
    return old


def _sample(space: Any, masks: Any) -> Any:
    """Draws random actions, which follow the masks where they can."""
    if masks is None:
        return space.sample()
    if isinstance(space, spaces.Discrete):
        return space.sample(np.asarray(masks[0] != 0, np.int8))
    if isinstance(space, spaces.MultiDiscrete):
        # The choices of one environment, or one choice of each environment.
        flat = np.asarray(masks != 0, np.int8).ravel()
        if len(flat) == space.nvec.sum():
            return space.sample(tuple(np.split(flat, np.cumsum(space.nvec.ravel())[:-1])))
    return space.sample()


def _rows(info: Any, num_envs: int) -> list[dict[str, Any]]:
    """Returns the info of each sub-environment."""
    if not isinstance(info, Mapping):
        return list(info)
    return [_row(info, row) for row in range(num_envs)]


def _row(info: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Returns the entries that a sub-environment has in the info of a vector environment."""
    found = {}
    for name, value in info.items():
        present = info.get(f"_{name}")
        if marks_presence(name, dict(info)) or (present is not None and not present[row]):
            continue
        found[name] = _row(value, row) if isinstance(value, Mapping) else value[row]
    return found
