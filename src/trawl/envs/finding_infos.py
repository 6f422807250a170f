"""Finds the layout of the entries of an environment's info."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from gymnasium import Space, Wrapper, spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper

from trawl.envs.autoreset import autoreset_mode
from trawl.envs.capture import capture, restore
from trawl.envs.capture.rehearsal import unrehearsed
from trawl.envs.capture.ways import Pickle, chain
from trawl.envs.final_obs import marks_presence
from trawl.envs.info_keys import (
    InfoEntry,
    InfoKey,
    InfoKeys,
    as_array,
    box,
    given_entries,
    names_of,
    placed_entries,
    space_of,
)
from trawl.envs.infos import InfoLayout
from trawl.envs.masks import newest_masks
from trawl.envs.outcomes import checked_info, reset_results, step_results
from trawl.envs.pool import is_pool
from trawl.envs.vector import is_envpool, is_vector_env, statistics_of
from trawl.errors import EnvStateError
from trawl.supported import INFO_POOL

# Steps that are taken to see values, at most.
_STEPS = 1000
# Steps that are taken in any case: a reset may return an integer where steps return a float.
_LEAST = 3
# Results of EnvPool that are not in the info.
_OUTCOME = frozenset({"reward", "done", "trunc", "discount", "step_type"})


def find_infos(
    env: Any, info_keys: InfoKeys, mode: Any = None, *, owned: bool = False
) -> tuple[InfoLayout | None, list[InfoKey]]:
    """Finds the layout of the entries of an environment's info.

    Args:
        env: the environment.
        info_keys: the argument of :class:`~trawl.envs.GymEnv`.
        mode: the autoreset mode stated by the user, or None.
        owned: True to close the environment if this function fails.

    Returns:
        The layout, None without entries; and the entries with their spaces and keys.

    Raises:
        TypeError: if ``info_keys`` is of another type.
        ValueError: if ``info_keys`` has a name that the info lacks, or keys that clash.
    """
    given = given_entries(info_keys)
    if not given:
        return None, []
    if is_pool(env) and not is_envpool(env):
        raise INFO_POOL.error(against=f"{type(env).__name__} with batch_size below num_envs")
    try:
        known = _known(env, given, mode)
        entries = placed_entries(given, known, lambda: _described(env, known))
        layout = InfoLayout(entries)
    except Exception:
        if owned:
            env.close()
        raise
    return layout, [InfoKey(path, space, key) for path, key, space in entries]


def _known(env: Any, given: Sequence[InfoEntry], mode: Any) -> dict[str, Space[Any]]:
    """Returns the spaces of all entries that were found, by name."""
    known: dict[str, Space[Any]] = {}
    missing = [entry for entry in given if entry.space is None]
    if is_envpool(env):
        known = _declared(env)
    else:
        known = {name: _episode() for name in _statistics(env)}
        wanted = [entry for entry in missing if entry.located(known) is None]
        if wanted:
            with _undone(env):
                known = {**_probe(env, wanted, mode), **known}
    return known


def _described(env: Any, known: Mapping[str, Any]) -> str:
    # An EnvPool environment prints its whole configuration.
    name = type(env).__name__ if is_envpool(env) else env
    return f"the info of {name} has only {names_of(known)}"


def _episode() -> Space[Any]:
    """Returns the space of the statistics of ``RecordEpisodeStatistics``."""
    parts = {"r": np.float32, "l": np.int64, "t": np.float32}
    return spaces.Dict({name: box((), dtype) for name, dtype in parts.items()})


def _statistics(env: Any) -> list[str]:
    names = list(statistics_of(env, (Wrapper, VectorWrapper)))
    base = getattr(env, "unwrapped", env)
    if isinstance(base, SyncVectorEnv):
        names += statistics_of(base.envs[0], Wrapper)
    return names


def _declared(env: Any) -> dict[str, Space[Any]]:
    """Returns the spaces of all entries that an EnvPool environment declares."""
    found: dict[str, Space[Any]] = {}
    for key, spec in env.spec.state_array_spec.items():
        name = key.removeprefix("info:")
        observed = name == "obs" or name.startswith(("obs:", "obs."))
        if not observed and name not in _OUTCOME and "." not in name:
            found[name] = box([n for n in spec.shape if n != -1], spec.dtype)
    return found


@contextmanager
def _undone(env: Any) -> Iterator[None]:
    """Context after which an environment is as before it, if its state can be captured."""
    state = None
    with suppress(EnvStateError):
        state = capture(env)
    if state is None or state["way"] == Pickle.name:  # which would replace the environment
        yield
        return
    layers = chain(env)
    layers += [one for inner in getattr(layers[-1], "envs", ()) for one in chain(inner)]
    attributes = [getattr(layer, "__dict__", {}) for layer in layers]
    before = [set(one) for one in attributes]
    yield
    for one, names in zip(attributes, before, strict=True):
        for name in one.keys() - names:
            del one[name]
    with suppress(EnvStateError), unrehearsed():
        restore(env, state)


def _probe(env: Any, wanted: Sequence[InfoEntry], mode: Any) -> dict[str, Space[Any]]:
    """Returns the spaces of the entries that appear in a reset and some random steps."""
    batched = is_vector_env(env)
    resets_rows = batched and autoreset_mode(env, mode) is AutoresetMode.DISABLED
    action_space = copy.deepcopy(env.action_space)
    action_space.seed(0)
    found: dict[str, Any] = {}
    _, info = reset_results(env.reset(), env)
    info = checked_info(info, "reset", env)
    masks: Any = None
    for step in range(_STEPS):
        for one in _rows(info, env.num_envs) if batched else [info]:
            found = _merged(_merged(found, one), one.get("final_info"))
        if step >= _LEAST and all(entry.located(found) for entry in wanted):
            break
        masks = newest_masks(masks, info if batched else [info])
        result = step_results(env.step(_sample(action_space, masks)), env)
        info = checked_info(result[-1], "step", env)
        if not batched and (result[2] or result[3]):
            found = _merged(found, info)
            _, info = reset_results(env.reset(), env)
        elif resets_rows:
            ended = np.asarray(result[2]) | np.asarray(result[3])
            if ended.any():
                for one in _rows(info, env.num_envs):
                    found = _merged(found, one)
                _, info = reset_results(env.reset(options={"reset_mask": ended}), env)
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
