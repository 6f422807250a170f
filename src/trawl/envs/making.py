"""Makes and wraps the simulator of a :class:`~trawl.envs.GymEnv`, and names missing extras."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium
from gymnasium import Env
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AddRenderObservation, FilterObservation

from trawl.envs.arguments import argument_names, named_arguments
from trawl.envs.dm import DMEnv, is_dm_env
from trawl.envs.kinds import check_prefix, kind_of, kind_of_id
from trawl.envs.outcomes import flag_of, reward_of, step_results
from trawl.envs.source import check_source
from trawl.envs.vector import is_envpool, is_vector_env


class _FrameSkip(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that repeats each action, and sums the rewards."""

    def __init__(self, env: Env[Any, Any], times: int) -> None:
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> Any:
        total = 0.0
        for _ in range(self._times):
            found = step_results(self.env.step(action), self.env)
            obs, reward, terminated, truncated, info = found
            total += reward_of(reward, self.env)
            terminated = flag_of(terminated, "terminated", self.env)
            if terminated or flag_of(truncated, "truncated", self.env):
                break
        return obs, total, terminated, truncated, info


def make(
    env_id: str,
    num_envs: int | None,
    from_pixels: bool,
    autoreset_mode: AutoresetMode | str | None,
    kwargs: Mapping[str, Any],
    adapter: type[Any],
) -> Any:
    """Makes an environment from its id; with ``num_envs``, makes a vector environment.

    Args:
        env_id: the id.
        num_envs: number of sub-environments, or None.
        from_pixels: True to render images.
        autoreset_mode: mode of the vector environment, or None.
        kwargs: arguments of the package that makes the environment.
        adapter: the class :class:`GymEnv`.

    Raises:
        gymnasium.error.Error: if Gymnasium has no such id, or can't make the environment.
        ImportError: if the package that makes the environment is not installed.
        TypeError: if an argument is unknown.
        ValueError: if the package has no such environment, or if it is not for :class:`GymEnv`.
    """
    check_prefix(env_id)
    kind, name = kind_of_id(env_id)
    if kind is not None and kind.make is not None:
        if kind.adapter is not adapter:
            # Gymnasium would import the module, and might have an environment with the same name.
            prefix = env_id.partition(":")[0]
            raise ValueError(
                f"GymEnv can't make {env_id!r}, which is an environment of {prefix}: pass the id "
                f"to the collector, or the environment to {kind.name}"
            )
        return kind.make(name, num_envs=num_envs, autoreset_mode=autoreset_mode, **kwargs)
    options = dict(kwargs)
    if from_pixels:
        options.setdefault("render_mode", "rgb_array")

    def names() -> set[str]:
        return {*argument_names(adapter), *_arguments_of(env_id)} - {"env"}

    with named_extras(env_id), named_arguments(env_id, kwargs, names):
        return _make_by_gymnasium(env_id, num_envs, autoreset_mode, options)


def _arguments_of(env_id: str) -> set[str]:
    """Returns the names of the arguments that Gymnasium takes with an id."""
    made = gymnasium.spec(env_id).entry_point
    entry = load_env_creator(made) if isinstance(made, str) else made
    takers = [gymnasium.make, gymnasium.make_vec, *([] if entry is None else [entry])]
    return {name for taker in takers for name in argument_names(taker)} - {"id"}


def _make_by_gymnasium(
    env_id: str,
    num_envs: int | None,
    autoreset_mode: AutoresetMode | str | None,
    options: dict[str, Any],
) -> Any:
    if num_envs is None:
        return gymnasium.make(env_id, **options)
    mode = options.setdefault("vectorization_mode", "sync")
    if autoreset_mode is not None and mode in ("sync", "async"):
        given = options.get("vector_kwargs") or {}
        options["vector_kwargs"] = {**given, "autoreset_mode": autoreset_mode}
    return gymnasium.make_vec(env_id, num_envs, **options)


def wrapped(env: Any, frame_skip: int | None, from_pixels: bool, pixels_only: bool) -> Any:
    """Returns the environment with the wrappers that the arguments of :class:`GymEnv` require.

    Raises:
        TypeError: if ``env`` does not have Gymnasium's interface.
        ValueError: if an argument is invalid, or does not apply to vector environments.
    """
    check_source(env)
    if is_dm_env(env):
        env = DMEnv(env)
    if not (isinstance(env, Env) or is_vector_env(env)):
        kind = kind_of(env)
        other = "one of JAX to JaxEnv" if kind is None else f"this one to {kind.name}"
        raise TypeError(
            "env must be an id, a gymnasium.Env, a gymnasium.vector.VectorEnv, an EnvPool "
            f"environment or an environment of dm_env, but it is {type(env).__name__}: {env!r}. "
            f"Pass an environment of another kind to the collector as it is, or {other}"
        )
    if is_envpool(env) and not hasattr(env, "num_envs"):
        raise TypeError("an EnvPool environment must be made by envpool.make_gymnasium")
    if not is_vector_env(env):
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(env, name, None), gymnasium.Space):
                raise TypeError(
                    f"{type(env.unwrapped).__name__}.{name} must be a gymnasium.Space, but it is "
                    f"{getattr(env, name, None)!r}"
                )
    if is_vector_env(env):
        if frame_skip not in (None, 1) or from_pixels:
            raise ValueError("frame_skip and from_pixels need a single environment, not a vector")
        return env
    if frame_skip is not None:
        if not isinstance(frame_skip, int) or frame_skip < 1:
            raise ValueError(f"frame_skip must be a positive integer, but it is {frame_skip!r}")
        env = _FrameSkip(env, frame_skip)
    if from_pixels:
        env = AddRenderObservation(
            env, render_only=False, render_key="pixels", obs_key="observation"
        )
        if pixels_only:
            env = FilterObservation(env, ["pixels"])
    elif pixels_only:
        raise ValueError("pixels_only=True needs from_pixels=True")
    return env


def single_spaces(env: Any, batched: bool) -> Sequence[Any]:
    """Returns the observation space and the action space of one environment."""
    if not batched:
        return env.observation_space, env.action_space
    with warnings.catch_warnings():
        # EnvPool casts the bounds of its spaces on access, and Gymnasium warns about that.
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        return env.single_observation_space, env.single_action_space


# --- extras


_EXTRAS = {"ale_py": ("ALE", "atari"), "mujoco": ("MuJoCo", "mujoco")}


def register_atari(env_id: str) -> None:
    """Registers the environments of ``ale_py``, if an id such as ``"ALE/Pong-v5"`` needs them.

    Raises:
        ImportError: if ``ale_py`` is not installed.
    """
    if env_id.startswith("ALE/") and env_id not in gymnasium.registry:
        import ale_py

        gymnasium.register_envs(ale_py)


@contextmanager
def named_extras(env_id: str) -> Iterator[None]:
    """Registers an environment if its id needs that, and names the extra if a package is missing.

    Args:
        env_id: id of the environment that is made in the context.

    Raises:
        ImportError: if a package of an extra is not installed.
    """
    try:
        register_atari(env_id)
        yield
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        # Gymnasium raises errors of its own, whose cause names the package.
        packages = {getattr(each, "name", None) for each in (error, error.__cause__)}
        for package, (title, extra) in _EXTRAS.items():
            if package in packages:
                raise ImportError(
                    f"{env_id} needs {title}: pip install 'trawl-rl[{extra}]'", name=package
                ) from error
        raise
