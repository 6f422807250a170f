"""Declares options, each with its default, its check, and tags for collectors with workers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from inspect import getattr_static, isfunction
from typing import Any, Final

from trawl.checks import check_bool, check_number, did_you_mean
from trawl.docstrings import entries
from trawl.envs.arguments import argument_names
from trawl.envs.gym import GymEnv

#: Function that checks the value of an option. It is called with the option's name and the given
#: value, and returns the value, possibly converted.
Check = Callable[[str, Any], Any]

# Tags of an option, which determine who acts on it.
DRIVER: Final = "only the driver acts on it; workers' collectors don't get it"
EACH: Final = "each worker applies it by itself, so collector_kwargs may differ between workers"
LIST: Final = "it may be a list, with an entry for each worker"
WHOLE: Final = "it concerns all workers together, so collector_kwargs can't have it"
WRITER: Final = "a worker that writes into the replay buffer itself acts on it, although a DRIVER"
TUNED: Final = "a step takes longer or shorter with it, so trawl.tune measures with it"
EVALUATOR: Final = "an evaluator sets it, or has another argument for it"


@dataclass(frozen=True)
class Flag:
    """The argument of the command line with which an option of ``CollectorConfig`` is set.

    Its type is the first one of the option's annotation that a command line can have: ``bool`` (a
    switch without a value), ``int``, ``float``, ``str``, or the choices of a ``Literal``.

    Attributes:
        commands: commands that have the argument: ``"collect"``, ``"tune"`` and ``"evaluate"``.
        kind: type of the argument, if the annotation doesn't say it.
        metavar: placeholder for the value in the command's help.
        least: smallest number that is accepted.
    """

    commands: tuple[str, ...]
    kind: Any = None
    metavar: str | None = None
    least: int | None = None


@dataclass(frozen=True)
class Option:
    """An entry of the table of options, besides the name, type, default and docstring.

    Attributes:
        check: function that checks a given value, and may convert it. None: bools, and the choices
            of a ``Literal``, are checked by the option's annotation.
        tags: any of :data:`DRIVER`, :data:`EACH`, :data:`LIST`, :data:`WHOLE`, :data:`WRITER`,
            :data:`TUNED` and :data:`EVALUATOR`.
        flag: the argument of the command line; None if there is none.
        record: function that returns what the record of a dataset, and the state of a collector,
            say about a checked value: a number, a bool, or None, which a dataset leaves out. None
            if no frame depends on the option.
    """

    check: Check | None = None
    tags: tuple[str, ...] = ()
    flag: Flag | None = None
    record: Callable[[Any], Any] | None = None


def option(
    default: Any,
    check: Check | None = None,
    *tags: str,
    flag: Flag | None = None,
    record: Callable[[Any], Any] | None = None,
) -> Any:
    """Declares an option as a field of a dataclass, which has to call :func:`validate`.

    The option's meaning is its entry in the docstring of the dataclass; the first sentence is also
    shown in tables and in the command's help.

    Args:
        default: default value of the option.
        check: see :class:`Option`.
        *tags: see :class:`Option`.
        flag: see :class:`Option`.
        record: see :class:`Option`.
    """
    return field(default=default, metadata={"option": Option(check, tags, flag, record)})


def table(cls: Any) -> dict[str, Option]:
    """Returns the entries of a dataclass's options, by name."""
    return {one.name: one.metadata.get("option", Option()) for one in fields(cls) if one.init}


def validate(options: Any) -> None:
    """Checks and converts each option of a dataclass.

    Raises:
        TypeError: for a value of the wrong type. For example, an option of type bool doesn't
            accept a string, because a string that isn't empty would count as True.
        ValueError: for a value that is out of range.
    """
    for one in fields(options):
        value = getattr(options, one.name)
        if one.type in ("bool", "bool | None"):
            check_bool(one.name, value)
        check = one.metadata["option"].check if "option" in one.metadata else None
        check = check or _check_of_type(str(one.type))
        if check is not None:
            checked = check(one.name, value)
            if checked is not value:
                object.__setattr__(options, one.name, checked)


@cache
def _check_of_type(annotation: str) -> Check | None:
    """Returns the check of an option that accepts only some values, as its annotation says."""
    choices = re.fullmatch(r"Literal(\[.*\])( \| None)?", annotation)
    if choices is None:
        return None
    return one_of(*ast.literal_eval(choices[1]), *([None] if choices[2] else []))


def tagged(cls: Any, tag: str) -> frozenset[str]:
    """Returns the names of a dataclass's options that have a tag."""
    return frozenset(name for name, one in table(cls).items() if tag in one.tags)


def frame_options(options: Any) -> dict[str, Any]:
    """Returns the options on which frames depend, by name, as plain data.

    Args:
        options: a dataclass of options, which have been checked.
    """
    return {
        name: one.record(getattr(options, name))
        for name, one in table(type(options)).items()
        if one.record is not None
    }


def recorded(options: Any) -> dict[str, Any]:
    """Returns what a dataset's record says about the options with which it was collected.

    Args:
        options: a dataclass of options, which have been checked.
    """
    return {name: value for name, value in frame_options(options).items() if value is not None}


def meanings(cls: Any, title: str = "Attributes") -> dict[str, Sequence[str]]:
    """Returns the lines of each option's entry in the docstrings of a dataclass and its bases.

    Args:
        cls: the dataclass.
        title: title of another section to read.
    """
    found: dict[str, Sequence[str]] = {}
    for base in reversed(cls.__mro__):
        found |= entries(base.__doc__, title)
    return found


# Names that other libraries have for the number of environments, and for options.
_COUNTS = {"num_envs", "n_envs", "n_env", "nenvs", "number_of_envs", "num_environments"}
_OTHER_NAMES = {
    "create_env_fn": {"env", "envs", "env_fn", "env_fns", "env_id", "env_name", "make_env"},
    "frame_stack": {"n_stack", "num_stack", "stack", "stack_size"},
    "frames_per_batch": {
        "batch_size",
        "n_steps",
        "num_steps",
        "rollout_length",
        "rollout_steps",
        "steps",
        "steps_per_batch",
    },
    "normalize_observations": {"norm_obs", "obs_norm", "normalize_obs"},
    "normalize_rewards": {"norm_reward", "reward_norm"},
    "num_workers": {"workers", "n_workers", "nworkers", "n_jobs", "num_processes", "n_processes"},
    "total_frames": {"total_timesteps", "total_steps", "num_timesteps", "timesteps", "num_frames"},
}
# What else has what these options ask for.
_ELSEWHERE = {
    "backend": "Only Collector, AsyncBatchedCollector and DistributedCollector have backend",
    "update_interval": (
        "Only DistributedCollector and DistributedSyncCollector have update_interval; elsewhere, "
        "update_policy_weights_() sends weights to workers"
    ),
    **dict.fromkeys(
        ["progress", "progress_bar", "verbose"],
        "CollectionProgress(collector), of trawl.observe, shows the progress",
    ),
}


def check_names(kind: str, given: Iterable[str], cls: Any, workers: Any = None) -> None:
    """Checks that all given options exist, and that those that are needed are given.

    Args:
        kind: name of the collector's class.
        given: names of the given options.
        cls: the dataclass of the collector's options.
        workers: the dataclass of a collector with workers, if this one has none.

    Raises:
        TypeError: if an option is unknown or missing. For an unknown one, the message suggests
            similar names, or says where the option belongs.
    """
    known, given = table(cls), set(given)
    unknown = sorted(given - known.keys())
    if unknown:
        hint = _hint(unknown, known, () if workers is None else table(workers))
        raise TypeError(f"{kind} got unknown arguments: {', '.join(unknown)}{hint}")
    if "frames_per_batch" not in given:
        raise TypeError(f"{kind} needs the argument frames_per_batch")


def _hint(unknown: list[str], known: Iterable[str], of_workers: Collection[str]) -> str:
    """Returns what to use instead of unknown options; empty if nothing is similar.

    Args:
        unknown: names of the unknown options.
        known: names of the options that the collector has.
        of_workers: names of the options that a collector with workers has, if this one has none.
    """
    names = {other: name for name, others in _OTHER_NAMES.items() for other in others}
    meant = [names.get(name, name) for name in unknown]
    if found := [name for name in meant if name in of_workers and name not in known]:
        only = "Only collectors with workers, such as MultiSyncCollector, have"
        return f". {only} {', '.join(found)}"
    for name in unknown:
        if name in _ELSEWHERE:
            return f". {_ELSEWHERE[name]}"
    if "policy_backend" in known and {"num_workers"}.union(_COUNTS) & set(meant):
        return (
            ". create_env_fn is a list with an entry for each environment, such as "
            "['CartPole-v1'] * 4"
        )
    if "create_env_fn" in meant:
        return ". The environment is the first argument, create_env_fn"
    if arguments := [name for name in unknown if name in argument_names(GymEnv)]:
        return (
            ". Arguments of the environment are passed in create_env_kwargs, such as "
            f"create_env_kwargs={{{arguments[0]!r}: ...}}"
        )
    if not _COUNTS.isdisjoint(unknown):
        return (
            ". To step several environments, pass a list of ids or of functions that make "
            "them, such as ['CartPole-v1'] * 4, or a ParallelEnv, which steps them in processes"
        )
    if found := sorted({name for name in meant if name in known}):
        return f"; did you mean {' or '.join(found)}?"
    return did_you_mean(unknown, known)


# --- checks of one value


def check_callable(name: str, value: Any) -> Any:
    """Returns the value; raises a ``TypeError`` if it is neither None nor callable."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, but it is {type(value).__name__}: {value!r}")
    return value


def check_switch(name: str, value: Any) -> Any:
    """Returns the value, which must be None, a bool or a mapping of keyword arguments."""
    if value is not None and not isinstance(value, (bool, Mapping)):
        raise TypeError(
            f"{name} must be a bool or a mapping of keyword arguments, but it is "
            f"{type(value).__name__}: {value!r}"
        )
    return value


def at_least(least: int, check: Callable[[str, Any, float], int] = check_number) -> Check:
    """Returns a check that accepts None, and integers that are at least ``least``."""
    return lambda name, value: None if value is None else check(name, value, least)


def one_of(*choices: Any) -> Check:
    """Returns a check that accepts only the given values."""

    def check(name: str, value: Any) -> Any:
        if value in choices and not isinstance(value, bool):
            return value
        shown = [repr(choice) for choice in choices if choice is not None]
        raise ValueError(
            f"{name} must be {', '.join(shown[:-1])} or {shown[-1]}, but it is {value!r}"
        )

    return check


def switch_or(options: type[Any]) -> Check:
    """Returns a check that accepts a bool, or an instance of a class; True becomes an instance."""

    def check(name: str, value: Any) -> Any:
        if value is None or value is False:
            return False
        if value is True:
            return options()
        if not isinstance(value, options):
            raise TypeError(
                f"{name} must be True, False or a {options.__name__}, but it is {value!r}"
            )
        return value

    return check


def check_instance(name: str, value: Any, method: str) -> Any:
    """Returns the value; raises a ``TypeError`` if it is a class instead of an instance.

    However, a class is accepted if ``method`` can be called without an instance.
    """
    if isinstance(value, type) and isfunction(getattr_static(value, method, None)):
        raise TypeError(
            f"{name} must be an object, but it is the class {value.__name__}: pass an instance, "
            f"{name}={value.__name__}(...)"
        )
    return value
