"""Environments with the interface of dm_env, such as those of dm_control, as Gymnasium's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any, TypeGuard

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from typing_extensions import override

from trawl.envs.arguments import (
    advice_on_id,
    argument_names,
    check_mapping,
    named_arguments,
    nearest_first,
    needed,
)

# Methods of dm_env.Environment. In TorchRL and Trawl, attributes of these names are no methods.
_METHODS = ("reset", "step", "observation_spec", "action_spec", "reward_spec", "discount_spec")
#: Name of the observation that holds the discount.
DISCOUNT = "discount"
#: Discount of the observation with which an episode begins.
FIRST_DISCOUNT = 1.0


def is_dm_env(env: object) -> TypeGuard[Any]:
    """Returns True if an object has the interface of ``dm_env.Environment``."""
    kind = type(env)
    return kind is not type and all(callable(getattr(kind, name, None)) for name in _METHODS)


class DMEnv(gymnasium.Env[Any, Any]):
    """dm_env environment with Gymnasium's interface.

    Observations keep their names. An observation that is a single array is called
    ``"observation"``. The discount of each step becomes an observation, ``"discount"``, which is 1
    after a reset. If the last step of an episode has the discount 0, the episode is terminated.
    Otherwise, it is truncated.

    Collectors and :class:`~trawl.envs.GymEnv` wrap environments of dm_env in this class.

    Args:
        env: the environment.
        name: name of the environment, for messages.
        render_options: arguments of ``physics.render`` in dm_control, such as ``height``, ``width``
            and ``camera_id``.

    Attributes:
        env: the environment.
        has_names: True if the observation of ``env`` is a mapping.
        render_options: the arguments of ``physics.render``.

    Raises:
        TypeError: if ``env`` is not a dm_env environment, if data are neither numbers nor bools, or
            if ``render_options`` is not a mapping.
        ValueError: if ``env`` has an observation that is called ``"discount"``.

    Examples:
        >>> from dm_control import suite  # doctest: +SKIP
        >>> env = DMEnv(suite.load("cheetah", "run"))  # doctest: +SKIP
        >>> sorted(env.observation_space)  # doctest: +SKIP
        ['discount', 'position', 'velocity']
    """

    def __init__(
        self, env: Any, name: str | None = None, render_options: Mapping[str, Any] | None = None
    ) -> None:
        if not is_dm_env(env):
            raise TypeError(
                f"env must have the interface of dm_env.Environment, but it is {env!r}"
                f"{advice_on_id(env, 'dm_control')}"
            )
        self.env = env
        self.name = name or type(env).__name__
        self.action_space = _space(env.action_spec(), "action")
        observed = env.observation_spec()
        self.has_names = isinstance(observed, Mapping)
        named = dict(observed) if self.has_names else {"observation": observed}
        if DISCOUNT in named:
            raise ValueError(
                f"{self.name} has an observation {DISCOUNT!r}, but batches use this name for the "
                "discount of a step: rename the observation with a wrapper"
            )
        found = {name: _space(spec, str(name)) for name, spec in named.items()}
        discount = _box(env.discount_spec(), np.dtype(np.float32))
        found[DISCOUNT] = spaces.Box(discount.low.reshape(1), discount.high.reshape(1))
        self.observation_space = spaces.Dict(found)
        # The arrays of the most common discounts.
        self._discounts = {value: np.array([value], np.float32) for value in (0.0, 1.0)}
        for array in self._discounts.values():
            array.flags.writeable = False
        self.render_options = check_mapping("render_options", render_options)
        if hasattr(env, "physics"):
            self.metadata = {"render_modes": ["rgb_array"]}
            self.render_mode = "rgb_array"
        # Also an attribute, so that a state of the environment includes it.
        self._generator = _generator_of(env)

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode.

        Args:
            seed: seed of the environment's random numbers. If the environment has no generator that
                can be seeded, a warning says so.
            options: ignored.
        """
        super().reset(seed=seed)
        if seed is not None:
            self._seed(seed)
        return self._observation(self.env.reset(), FIRST_DISCOUNT), {}

    def _seed(self, seed: int) -> None:
        if self._generator is None:
            warnings.warn(
                f"{self.name} can't be seeded, because it has neither task.random nor "
                "random_state: its episodes don't depend on the seed",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        # A generator takes 32 bits, or several such numbers.
        words = [seed & 0xFFFFFFFF, seed >> 32]
        self._generator.seed(words if words[1] else seed)

    @override
    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Takes a step.

        Raises:
            RuntimeError: if the environment begins an episode by itself.
        """
        timestep = self.env.step(action)
        discount = timestep.discount
        if discount is None:
            raise self.no_discount(timestep)
        observation = self._observation(timestep, discount)
        if not timestep.last():
            return observation, timestep.reward, False, False, {}
        terminated = not discount
        return observation, timestep.reward, terminated, not terminated, {}

    def no_discount(self, timestep: Any) -> RuntimeError:
        """Returns the error for a step without a discount, such as one that began an episode."""
        if timestep.first():
            return RuntimeError(
                f"{self.name} began a new episode in step(), before the last one had ended"
            )
        return RuntimeError(
            f"{self.name} returned a time step without a discount, which only a reset may return: "
            "the last step of an episode must have a discount, too (0 if it is terminated)"
        )

    def _observation(self, timestep: Any, discount: Any) -> dict[str, Any]:
        found = timestep.observation
        named = dict(found) if self.has_names else {"observation": found}
        try:
            # Some wrappers return arrays, which have no hash.
            discount = float(discount.item() if isinstance(discount, np.ndarray) else discount)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{self.name} returned a discount that is not a number: {discount!r}"
            ) from error
        array = self._discounts.get(discount)
        named[DISCOUNT] = np.array([discount], np.float32) if array is None else array
        return named

    @override
    def render(self) -> Any:
        """Returns the rendered image, uint8 of shape ``(height, width, 3)``; only dm_control.

        The array is a copy.
        """
        return self.env.physics.render(**self.render_options)

    @override
    def close(self) -> None:
        """Closes the environment."""
        self.env.close()

    def __str__(self) -> str:
        return f"DMEnv({self.name})"


def make_dm_control(
    name: str, *, num_envs: int | None = None, autoreset_mode: Any = None, **options: Any
) -> Any:
    """Makes an environment of dm_control's suite.

    Args:
        name: domain and task, such as ``"cheetah/run"``.
        num_envs: number of environments in a vector environment; None for a single one.
        autoreset_mode: autoreset mode of the vector environment, or None.
        **options: arguments of ``dm_control.suite.load``, and ``render_options`` of :class:`DMEnv`.

    Raises:
        ImportError: if dm_control is not installed.
        TypeError: if an argument is unknown or has the wrong type.
        ValueError: if there is no such task.
    """
    with needed(f"dm_control:{name}", "dm_control", "dm_control"), warnings.catch_warnings():
        # Without a display, dm_control uses another way to render.
        warnings.filterwarnings("ignore", message=".*DISPLAY environment variable")
        from dm_control import suite
    domain, _, task = name.partition("/")
    tasks: dict[str, Sequence[str]] = suite.TASKS_BY_DOMAIN
    if domain not in tasks:
        raise ValueError(
            f"dm_control has no domain {domain!r}: it has {', '.join(nearest_first(domain, tasks))}"
        )
    if task not in tasks[domain]:
        raise ValueError(
            f"dm_control's domain {domain!r} has no task {task!r}: it has "
            f"{', '.join(nearest_first(task, tasks[domain]))}"
        )
    render_options = options.pop("render_options", None)

    def make() -> DMEnv:
        with _named_options(f"dm_control:{name}", domain, task, options):
            env = suite.load(domain, task, **options)
        return DMEnv(env, f"{domain}/{task}", render_options)

    if num_envs is None:
        return make()
    vector = {} if autoreset_mode is None else {"autoreset_mode": autoreset_mode}
    return gymnasium.vector.SyncVectorEnv([make] * num_envs, **vector)


@contextmanager
def _named_options(
    env_id: str, domain: str, task: str, options: Mapping[str, Any]
) -> Iterator[None]:
    """Explains errors for unknown arguments of a task of dm_control, or of its environment."""

    def of_suite() -> list[str]:
        _, _, *names = argument_names(import_module("dm_control.suite").load)
        return ["render_options", *names]

    def of_task() -> list[str]:
        suite = import_module(f"dm_control.suite.{domain}").SUITE
        return [one for one in argument_names(suite[task]) if one != "environment_kwargs"]

    def of_environment() -> list[str]:
        names = argument_names(import_module("dm_control.rl.control").Environment)
        return [one for one in names if one not in ("physics", "task", "time_limit")]

    with (
        named_arguments(env_id, options, of_suite),
        _nested_options("task_kwargs", env_id, options, of_task),
        _nested_options("environment_kwargs", env_id, options, of_environment),
    ):
        yield


def _nested_options(
    name: str, env_id: str, options: Mapping[str, Any], known: Callable[[], list[str]]
) -> AbstractContextManager[None]:
    given = check_mapping(name, options.get(name))
    return named_arguments(f"{name} of {env_id}", given, known)


def _generator_of(env: Any) -> Any:
    """Returns the generator of an environment of dm_control; None if there is none."""
    task = getattr(env, "task", None)
    for found in (getattr(env, "random_state", None), getattr(task, "random", None)):
        if isinstance(found, np.random.RandomState):
            return found
    return None


def _space(spec: Any, name: str) -> Space[Any]:
    """Returns the Gymnasium space of a spec, or of a nest of specs."""
    if isinstance(spec, Mapping):
        return spaces.Dict({key: _space(one, f"{name}/{key}") for key, one in spec.items()})
    if isinstance(spec, (list, tuple)):
        return spaces.Tuple([_space(one, f"{name}/{i}") for i, one in enumerate(spec)])
    dtype = np.dtype(spec.dtype)
    if hasattr(spec, "num_values"):
        return spaces.Discrete(int(spec.num_values))
    if dtype == np.bool_:
        return spaces.MultiBinary(spec.shape)
    if dtype.kind not in "iuf":
        raise TypeError(f"{name} has the dtype {dtype}, but only numbers and bools can be stored")
    return _box(spec, dtype)


def _box(spec: Any, dtype: np.dtype[Any]) -> spaces.Box:
    """Returns the Box space of a spec of numbers."""
    least, most = -np.inf, np.inf
    if dtype.kind != "f":
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    bounds = getattr(spec, "minimum", least), getattr(spec, "maximum", most)
    low, high = (np.broadcast_to(np.asarray(one, dtype), spec.shape) for one in bounds)
    return spaces.Box(low, high, spec.shape, dtype.type)
