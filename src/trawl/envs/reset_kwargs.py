"""Arguments of resets, such as options, that may depend on the environment and the episode."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trawl.errors import add_note
from trawl.foreign.torchrl import reset_of, wrapped_env
from trawl.keys import RESET_MASK
from trawl.supported import RESET_ARGUMENTS_BEGUN, RESET_FUNCTION_BATCH

#: A mapping of arguments, or a function of the environment's index and the episode's number.
ResetKwargs: TypeAlias = Mapping[str, Any] | Callable[[int, int], Mapping[str, Any] | None]
Counts = NDArray[np.int64]
_EXAMPLE = "{'options': {'level': 1}}"


def check_reset_kwargs(name: str, value: Any) -> Any:
    """Returns the value of the option ``reset_kwargs``.

    Raises:
        TypeError: if it is neither a mapping of arguments nor a function of two numbers.
        ValueError: if it is a mapping with a seed.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        _check_mapping(name, value)
        if value.get("seed") is not None:
            raise ValueError(
                f"{name} has seed={value['seed']!r}, with which all episodes would begin alike: "
                "call set_seed(), or pass a function that returns a seed for each episode"
            )
        return value
    if not callable(value) or isinstance(value, type):
        raise TypeError(
            f"{name} must be a mapping of arguments for reset, such as {_EXAMPLE}, or a function "
            f"of the environment's index and the episode's number, but it is {value!r}"
        )
    try:
        inspect.signature(value).bind(0, 0)
    except TypeError as error:
        raise TypeError(
            f"{name} must be a function of two arguments, the environment's index and the "
            f"episode's number, but {value!r} can't be called with them: {error}"
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    return value


def _check_mapping(name: str, value: Mapping[Any, Any]) -> None:
    """Checks arguments, from the user or from the user's function."""
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{name} must map names of arguments to values, but it has {key!r}")
    options = value.get("options")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"the options in {name} must be a mapping, but they are {options!r}")


class ResetArguments:
    """Arguments for the resets of one environment, which also counts the episodes.

    Args:
        given: the option.
        index: index of the environment.
        names: names of the arguments that the environment's reset takes; None for any.
        counts: array of one element, the number of the next episode.
    """

    def __init__(
        self, given: ResetKwargs, index: int, names: frozenset[str] | None, counts: Counts
    ) -> None:
        self._given, self._index, self._names, self._counts = given, index, names, counts
        if isinstance(given, Mapping):
            self._check(given, "reset_kwargs")

    def following(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of the next reset, and counts it.

        Args:
            kwargs: arguments that the caller of the reset has given, which take precedence.
        """
        episode = int(self._counts[0])
        self._counts[0] = episode + 1
        if isinstance(self._given, Mapping):
            return copied(self._given) | copied(kwargs)
        own = self._given(self._index, episode)
        if own is None:
            return copied(kwargs)
        what = f"what reset_kwargs returned for environment {self._index} and episode {episode}"
        if not isinstance(own, Mapping):
            raise TypeError(
                f"{what} must be a mapping of arguments for reset, such as {_EXAMPLE}, or None, "
                f"but it is {own!r}"
            )
        _check_mapping(what, own)
        self._check(own, what)
        # A seed for each episode is meant to decide it, also after set_seed().
        seed = {"seed": _number(own["seed"], what)} if own.get("seed") is not None else {}
        return copied(own) | copied(kwargs) | seed

    def _check(self, given: Mapping[str, Any], what: str) -> None:
        unknown = [] if self._names is None else sorted(set(given) - self._names)
        if unknown:
            known = ", ".join(sorted(self._names or ())) or "no arguments"
            raise TypeError(
                f"{what} has {', '.join(unknown)}, but the reset of environment {self._index} "
                f"takes {known}"
            )


def _number(seed: Any, what: str) -> int:
    """Returns a seed as the integer that environments take, which is none of numpy's."""
    try:
        return operator.index(seed)
    except TypeError:
        raise TypeError(f"the seed in {what} must be an integer, but it is {seed!r}") from None


def copied(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of arguments, because environments may change their options."""
    return {key: dict(one) if isinstance(one, Mapping) else one for key, one in given.items()}


def names_taken(layers: Sequence[Any]) -> frozenset[str] | None:
    """Returns the names of the arguments that the resets of all layers take; None for any.

    Args:
        layers: the wrappers around an environment, and the environment itself.
    """
    found: frozenset[str] | None = None
    for layer in layers:
        try:
            parameters = inspect.signature(layer.reset).parameters.values()
        except (AttributeError, TypeError, ValueError):
            continue
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
            continue
        names = frozenset(one.name for one in parameters)
        found = names if found is None else found & names
    return found


def arguments_of_all(
    given: ResetKwargs | None,
    first: int,
    layers: Sequence[Any],
    counts: Counts,
    begun: str | None,
) -> Mapping[str, Any]:
    """Returns the arguments that all resets of a vector environment get.

    Args:
        given: the option; None for no arguments.
        first: index of the first sub-environment.
        layers: the wrappers around the environment, and the environment itself.
        counts: number of the next episode of each sub-environment.
        begun: text that says how the environment begins episodes by itself; None if it does not.

    Raises:
        TypeError: if the environment's reset doesn't take an argument.
        ValueError: if the arguments differ between sub-environments, or the environment begins
            episodes by itself.
    """
    if given is None:
        return {}
    if begun is not None:
        raise RESET_ARGUMENTS_BEGUN.error(against=repr(layers[0]), why=begun)
    if not isinstance(given, Mapping):
        raise RESET_FUNCTION_BATCH.error(against=repr(layers[0]))
    ResetArguments(given, first, names_taken(layers), counts)
    return given


def with_reset_kwargs(env: Any, given: ResetKwargs, first: int, counts: Counts) -> Any:
    """Returns an environment whose resets get arguments.

    Args:
        env: the environment. Trawl's environments are changed, and others are wrapped.
        given: the option.
        first: index of the first environment in ``env``.
        counts: number of the next episode of each environment in ``env``; changed by the resets.

    Raises:
        TypeError: if the environment's reset doesn't take an argument.
        ValueError: if the environment takes no arguments, or begins its episodes itself.
    """
    if hasattr(type(env), "set_reset_kwargs"):
        env.set_reset_kwargs(given, first, counts)
        return env
    return _torchrl_env(env, given, first, counts)


def _torchrl_env(env: Any, given: ResetKwargs, first: int, counts: Counts) -> Any:
    """Returns a TorchRL environment whose resets get arguments."""
    from torchrl.envs.batched_envs import BatchedEnvBase

    made = getattr(type(env), "is_of_trawl", False)
    inner = env.base_env if made else env
    several, count = isinstance(inner, BatchedEnvBase), len(counts)
    if not isinstance(given, Mapping) and count > 1 and (not several or len(env.batch_size) > 1):
        raise RESET_FUNCTION_BATCH.error(against=repr(inner))
    names = None if several else _names_of_torchrl(inner)
    wrapper = env if made else _wrapper_class()(env)
    wrapper.has_one = not several
    wrapper.reset_arguments = [
        ResetArguments(given, first + row, names, counts[row : row + 1]) for row in range(count)
    ]
    return wrapper


@cache
def _wrapper_class() -> Any:
    """Returns the class of TorchRL environments whose resets get arguments."""
    from torchrl.envs import TransformedEnv

    class ResetKwargsEnv(TransformedEnv):  # type: ignore[misc]
        """Environment whose resets get arguments.

        Attributes:
            reset_arguments: arguments of each environment in it.
            has_one: True if it is not a batch of environments with arguments of their own.
        """

        is_of_trawl = True

        def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
            count = len(self.reset_arguments)
            flags = [True] * count
            if tensordict is not None and RESET_MASK in tensordict.keys():  # noqa: SIM118
                flags = tensordict.get(RESET_MASK).reshape(count, -1).any(-1).tolist()
            own = {
                row: arguments.following(kwargs)
                for row, arguments in enumerate(self.reset_arguments)
                if flags[row]
            }
            given = next(iter(own.values()), kwargs)
            if not self.has_one:
                given = {"list_of_kwargs": [own.get(row, {}) for row in range(count)]}
            try:
                return super()._reset(tensordict, **given)
            except TypeError as error:
                add_note(error, "with the arguments from reset_kwargs")
                raise

    return ResetKwargsEnv


def _names_of_torchrl(env: Any) -> frozenset[str] | None:
    """Returns the names of the arguments that a TorchRL environment's reset takes; None: any."""
    while hasattr(env, "base_env"):
        env = env.base_env
    parameters = inspect.signature(reset_of(env)).parameters.values()
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return frozenset(one.name for one in parameters) - {"tensordict"}
    # Wrappers pass the arguments on to an environment of another library.
    inner = wrapped_env(env)
    return None if inner is None else names_taken([inner])


def sliced(counts: Counts, sizes: Sequence[int]) -> Iterator[tuple[int, Counts]]:
    """Yields the first row and the counts of each of several environments of these sizes."""
    start = 0
    for size in sizes:
        yield start, counts[start : start + size]
        start += size
