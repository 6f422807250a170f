"""Finds the layout of the entries of an environment's info."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from trawl.envs.batches.autoreset import autoreset_mode
from trawl.envs.batches.pool import is_pool
from trawl.envs.capture import capture, restore
from trawl.envs.capture.rehearsal import unrehearsed
from trawl.envs.capture.ways import Pickle, chain
from trawl.envs.entries.info_keys import (
    InfoEntry,
    InfoKey,
    InfoKeys,
    box,
    given_entries,
    names_of,
    placed_entries,
    seen_values,
)
from trawl.envs.entries.infos import InfoLayout
from trawl.envs.entries.masks import MASK_KEY, allowed_sample, newest_masks
from trawl.envs.outcomes import checked_info, marks_presence, reset_results, step_results
from trawl.envs.vector import is_envpool, is_vector_env, statistics_of
from trawl.errors import EnvStateError

Takes = Generator[list[tuple[str, Any]]]
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
    try:
        known = _known(env, given, mode)
        entries = placed_entries(given, known, lambda: _described(env, known))
        layout = InfoLayout(entries)
    except Exception:
        if owned:
            env.close()
        raise
    return layout, [InfoKey(path, space, key) for path, key, space in entries]


def _known(env: Any, given: Sequence[InfoEntry], mode: Any) -> dict[str, Any]:
    """Returns the spaces or examples of all entries that were found, by name."""
    known: dict[str, Any] = {}
    if is_envpool(env):
        known = _declared(env)
    else:
        known = {name: _episode() for name in _statistics(env)}
        wanted = [entry for entry in given if entry.located(known) is None]
        if wanted:
            with _undone(env):
                takes = _pool_takes(env) if is_pool(env) else _takes(env, mode)
                known = {**seen_values(takes, {"": wanted})[""], **known}
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
    names = list(statistics_of(env))
    base = getattr(env, "unwrapped", env)
    if isinstance(base, SyncVectorEnv):
        names += statistics_of(base.envs[0])
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


def _takes(env: Any, mode: Any) -> Takes:
    """Yields the infos of a reset and of random steps, those of each environment."""
    batched = is_vector_env(env)
    resets_rows = batched and autoreset_mode(env, mode) is AutoresetMode.DISABLED
    action_space = copy.deepcopy(env.action_space)
    action_space.seed(0)

    def each(info: Any, method: str) -> list[tuple[str, Any]]:
        checked_info(info, method, env)
        return _shown(_rows(info, env.num_envs) if batched else [info])

    obs, info = reset_results(env.reset(), env)
    infos, masks = each(info, "reset"), None
    while True:
        yield infos
        masks = newest_masks(masks, _masked(obs, info, batched))
        result = step_results(env.step(allowed_sample(action_space, masks)), env)
        obs, info = result[0], result[-1]
        infos, ended = each(info, "step"), np.logical_or(result[2], result[3])
        if ended.any() and (resets_rows or not batched):
            options = {"options": {"reset_mask": ended}} if batched else {}
            obs, info = reset_results(env.reset(**options), env)
            infos += each(info, "reset")


def _masked(obs: Any, info: Any, batched: bool) -> Any:
    """Returns the infos of a step, or the action masks if they are in the observations."""
    mask = obs.get(MASK_KEY) if isinstance(obs, Mapping) else None
    if mask is None:
        return info if batched else [info]
    rows = [mask] if not batched else zip(*mask, strict=True) if isinstance(mask, tuple) else mask
    return [{MASK_KEY: row} for row in rows]


def _pool_takes(env: Any) -> Takes:
    """Yields the infos of the environments of a pool that are ready."""
    others, rest = divmod(int(env.num_envs), int(env.batch_size))
    if rest:
        return  # It could not be reset afterwards, because it can't finish the last steps.
    space = copy.deepcopy(env.single_action_space)
    space.seed(0)
    _, info = env.reset()
    masks = None
    try:
        while True:
            ids = info["env_id"]
            masks = newest_masks(masks, info, int(env.num_envs), ids)
            yield _shown(_rows(info, len(ids)))
            drawn = [allowed_sample(space, None if masks is None else masks[i]) for i in ids]
            env.send(np.array(drawn, space.dtype))
            *_, info = env.recv()
    except GeneratorExit:
        for _ in range(others - 1):
            env.recv()
        raise


def _shown(infos: Sequence[Any]) -> list[tuple[str, Any]]:
    """Returns infos, and those of the last steps of episodes that are in them."""
    return [("", one) for info in infos for one in (info, info.get("final_info") or {})]


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
