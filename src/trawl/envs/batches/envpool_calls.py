"""Quick calls of EnvPool, without the Python code of its public methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from trawl.checks import did_you_mean
from trawl.envs.arguments import named_arguments, needed
from trawl.foreign.environments import envpool_keys, envpool_method
from trawl.memory import Array, Mask
from trawl.supported import MODE_ENVPOOL


class EnvPoolResults(NamedTuple):
    """Results of sub-environments, with a row for each.

    Attributes:
        ids: numbers of the sub-environments.
        obs: the observations.
        reward: the rewards.
        terminated: the terminated flags.
        truncated: the truncated flags.
        info: the info; empty if the inner calls are used.
    """

    ids: Array
    obs: Any
    reward: Array
    terminated: Mask
    truncated: Mask
    info: Any = MappingProxyType({})


class EnvPoolCalls:
    """Sends actions and resets to an EnvPool environment, and receives results.

    EnvPool's public methods take about a third of the time of a step of cheap environments, mostly
    because they name and nest actions and results. If there is a single action and observations are
    a single array, this class uses the inner calls of these methods instead.

    Args:
        env: the environment.
        reads_infos: True to use only public methods, which return infos.

    Attributes:
        receive_raw: function that waits for results, for :meth:`read`.
    """

    def __init__(self, env: Any, reads_infos: bool = False) -> None:
        self._env = env
        own = all(_is_original(env, name) for name in ("step", "send", "recv", "reset"))
        self._original = own and not reads_infos
        self._places = self._find_places()
        self._pick = itemgetter(*(self._places or (0, 0)))
        self._inner_send = self._find_send()
        self._inner_reset: Any = envpool_method(env, "reset")
        self._action_dtype = None
        if self._inner_send is not None:
            self._action_dtype = env.spec.action_array_spec["action"].dtype
        self.receive_raw: Callable[[], Any] = (
            env.recv if self._places is None else envpool_method(env, "recv") or env.recv
        )

    def _find_places(self) -> list[int] | None:
        """Returns where the inner results have the entries of :class:`EnvPoolResults`."""
        wanted = ("info:env_id", "obs", "reward", "done", "trunc")
        keys = envpool_keys(self._env, "state")
        inner = self._original and envpool_method(self._env, "recv") is not None
        if not inner or any(keys.count(key) != 1 for key in wanted):
            return None
        return [keys.index(key) for key in wanted]

    def _find_send(self) -> Callable[[list[Array]], None] | None:
        keys = envpool_keys(self._env, "action")
        single = keys == ["env_id", "players.env_id", "action"]
        if not (self._original and single) or self._env.config.get("max_num_players", 1) != 1:
            return None
        return envpool_method(self._env, "send")

    @property
    def quick(self) -> bool:
        """True if the inner calls are used for actions and results."""
        return self._places is not None and self._inner_send is not None

    def send(self, action: Any, ids: Array) -> None:
        """Begins a step of sub-environments.

        Args:
            action: their actions, with a row for each.
            ids: their numbers, as int32.
        """
        if self._inner_send is None:
            self._env.send(action, ids)
        else:
            self._inner_send([ids, ids, np.ascontiguousarray(action, self._action_dtype)])

    def send_reset(self, ids: Array) -> None:
        """Begins to reset sub-environments; ``ids`` are their numbers, as int32."""
        self._inner_reset(ids)

    def read(self, raw: Any) -> EnvPoolResults:
        """Returns the results that :attr:`receive_raw` has returned."""
        if self._places is None:
            obs, reward, terminated, truncated, info = raw
            return EnvPoolResults(info["env_id"], obs, reward, terminated, truncated, info)
        ids, obs, reward, done, truncated = self._pick(raw)
        return EnvPoolResults(ids, obs, reward, done & ~truncated, truncated)

    def reset(self, ids: Array) -> tuple[Any, Array, Any]:
        """Resets sub-environments, if all are stepped together.

        Returns:
            Observations, the numbers of their sub-environments, and the info.
        """
        if self._places is None:
            obs, info = self._env.reset(ids)
            return obs, info["env_id"], info
        self.send_reset(ids)
        raw = self.receive_raw()
        return raw[self._places[1]], raw[self._places[0]], {}


def refuse_seed(seed: object) -> None:
    """Raises a ``ValueError`` if a reset of an EnvPool environment is given a seed."""
    if seed is not None:
        raise ValueError(
            "an EnvPool environment takes its seed when it is made: use "
            "envpool.make_gymnasium(..., seed=...) instead of set_seed(...)"
        )


def _is_original(env: Any, name: str) -> bool:
    """Returns True if a method of an environment is EnvPool's own."""
    method = getattr(type(env), name, None)
    return name not in vars(env) and getattr(method, "__module__", "").startswith("envpool.")


def make_envpool(
    name: str, *, num_envs: int | None = None, autoreset_mode: Any = None, **options: Any
) -> Any:
    """Makes an EnvPool environment.

    Args:
        name: EnvPool's id, such as ``"Pong-v5"``.
        num_envs: number of sub-environments; None for one.
        autoreset_mode: must be None, because EnvPool resets sub-environments by their ids.
        **options: arguments of ``envpool.make_gymnasium``.

    Raises:
        ImportError: if EnvPool is not installed.
        TypeError: if an argument is unknown or has the wrong type.
        ValueError: if there is no such id, or an autoreset mode is given.
    """
    if autoreset_mode is not None:
        raise MODE_ENVPOOL.error("autoreset_mode", str(autoreset_mode), against=f"envpool:{name}")
    with needed(f"envpool:{name}", "EnvPool", "envpool"):
        import envpool
    known = envpool.list_all_envs()
    if name not in known:
        raise ValueError(f"EnvPool has no environment {name!r}{did_you_mean([name], known, 5)}")

    def defaults() -> dict[str, Any]:
        found: dict[str, Any] = envpool.make_spec(name).config._asdict()
        return found

    try:
        with named_arguments(f"envpool:{name}", options, lambda: {*defaults(), *_RENDERING}):
            return envpool.make_gymnasium(name, num_envs=num_envs or 1, **options)
    except TypeError:
        _check_types(name, options, defaults())
        raise


# Arguments that EnvPool takes in addition to those of the environment.
_RENDERING = ("from_pixels", "render_mode", "render_width", "render_height", "render_camera_id")


def _check_types(name: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises a ``TypeError`` for a string instead of a number, or a number instead of a string."""
    for key, value in options.items():
        default, is_text = defaults.get(key), isinstance(value, str)
        if isinstance(default, (str, int, float)) and isinstance(default, str) != is_text:
            wanted = "a number" if is_text else "a string"
            raise TypeError(f"{key} of envpool:{name} must be {wanted}, but it is {value!r}")
