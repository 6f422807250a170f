"""The arguments that set options of collectors: their checks, values and records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

from trawl.collectors import CollectorConfig, NormalizeReward
from trawl.collectors.options import recorded
from trawl.envs.agents.groups import groups_of
from trawl.envs.frame_stack import FrameStack
from trawl.envs.specs import Bounded, Spec, Unbounded, is_of_tensors
from trawl.extras.cli.arguments import CollectArguments
from trawl.extras.cli.errors import CliError, message_of
from trawl.extras.cli.flags import option_of, table_flags
from trawl.keys import as_key


def check_options(options: Any) -> None:
    """Checks the arguments that set options of collectors, by the checks of the table.

    Raises:
        CliError: if a value is out of range.
    """
    for flag in table_flags():
        value = getattr(options, flag.name, None)
        if flag.least is not None and value is not None and value < flag.least:
            name = option_of(flag.name)
            raise CliError(f"{name} must be at least {flag.least}, but it is {value}")
    with named_transforms():
        _config(options)


def _config(options: Any) -> CollectorConfig:
    return CollectorConfig(frames_per_batch=1, **given_options(options))


def given_options(options: Any) -> dict[str, Any]:
    """Returns the options of a collector that were given."""
    given = ((one, getattr(options, one.name)) for one in fields(options))
    found = {one.name: value for one, value in given if value != one.default}
    if found.get("normalize_rewards"):
        # A dataset also has the environment's rewards, from which the returns are computed.
        found["normalize_rewards"] = NormalizeReward(keep_raw=True)
    return found


def recorded_options(options: Any) -> dict[str, Any]:
    """Returns the options on which frames depend, for the record of a dataset."""
    return recorded(_config(options))


def show_transforms(info: dict[str, Any]) -> str:
    """Returns a description of a dataset's stacks and normalised values; empty if it has none.

    Examples:
        >>> show_transforms({"frame_stack": 4, "normalize_rewards": True})
        'stacks of 4 frames, normalised rewards'
    """
    size = info.get("frame_stack")
    stacks = [f"stacks of {size} frames"] if isinstance(size, int) else []
    named = [one for one in ("observations", "rewards") if info.get(f"normalize_{one}") is True]
    return ", ".join([*stacks, *(f"normalised {one}" for one in named)])


@contextmanager
def named_transforms() -> Iterator[None]:
    """Replaces the name of a collector's option in an error by that of the command's option.

    Raises:
        CliError: if the collector raised an error about one of the options.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        text = message_of(error)
        for name in (*(one.name for one in table_flags()), "normalization"):
            if re.match(rf"{name}(=| must | can't | doesn't | needs )", text):
                raise CliError(f"{option_of(name)}{text[len(name) :]}") from error
        raise


# --- stacks


class StackedObservations:
    """Environment with the observation specs that the policy sees, which are those of stacks.

    All other attributes are those of the environment.

    Args:
        env: the environment, whose specs are those of single frames.
        size: number of frames in a stack.
    """

    def __init__(self, env: Any, size: int) -> None:
        self._env = env
        single = {as_key(key): spec for key, spec in env.observation_spec.items(True, True)}
        batch, groups = env.batch_size, groups_of(env)
        fixed = (key for key, spec in single.items() if is_of_tensors(spec))
        stacked = env.observation_spec.clone()
        for key in FrameStack(size).stacked(fixed, groups):
            stacked[key] = _stacked(single[key], size, len(batch) + (key[0] in groups))
        self.observation_spec = self.full_observation_spec = stacked

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)


def stacked_env(env: Any, size: int | None) -> Any:
    """Returns the environment with the specs that a policy sees.

    Args:
        env: the environment.
        size: number of frames in a stack; None for single frames.
    """
    return env if size is None else StackedObservations(env, size)


def _stacked(spec: Any, size: int, axis: int) -> Any:
    if not isinstance(spec, Spec):
        return torch.stack([spec] * size, axis)  # of another library
    if isinstance(spec, Bounded):
        bounds = (bound.expand(spec.shape) for bound in (spec.low, spec.high))
        low, high = (torch.stack([bound] * size, axis) for bound in bounds)
        return Bounded(low, high, spec.dtype, spec.device)
    shape = (*spec.shape[:axis], size, *spec.shape[axis:])
    return Unbounded(shape, spec.dtype, spec.device)


def minari_env(args: CollectArguments, env: Any) -> Any:
    """Returns the environment that a Minari dataset describes, with the dataset's observations.

    Args:
        args: arguments of the command.
        env: environment of Gymnasium.

    Returns:
        The environment; None if no environment has these observations.
    """
    options = args.options
    if options.normalize_observations:
        return None
    if options.frame_stack is None:
        return env
    boxed = isinstance(env.observation_space, spaces.Box)
    return FrameStackObservation(env, options.frame_stack) if boxed else None
