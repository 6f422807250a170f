"""Options that stack frames and normalise values: ``--frame-stack`` and ``--normalize-*``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

from trawl.cli.arguments import CollectArguments, EvaluateArguments, TuneArguments
from trawl.cli.errors import CliError, message_of
from trawl.collectors import NormalizeReward
from trawl.envs.agents.groups import groups_of
from trawl.envs.frame_stack import FrameStack
from trawl.envs.specs import Bounded, Spec, Unbounded, is_of_tensors
from trawl.keys import as_key

_NAMES = ("frame_stack", "normalize_observations", "normalize_rewards")


def check_transforms(args: CollectArguments | EvaluateArguments | TuneArguments) -> None:
    """Checks the options.

    Raises:
        CliError: if a stack has fewer than two frames.
    """
    size = args.frame_stack
    if size is not None and size < 2:
        raise CliError(f"--frame-stack must be at least 2, but it is {size}")


def transform_options(args: CollectArguments | TuneArguments) -> dict[str, Any]:
    """Returns the options of a collector."""
    options: dict[str, Any] = {}
    if args.frame_stack is not None:
        options["frame_stack"] = args.frame_stack
    if args.normalize_observations:
        options["normalize_observations"] = True
    if args.normalize_rewards:
        # A dataset also has the environment's rewards, from which the returns are computed.
        options["normalize_rewards"] = NormalizeReward(keep_raw=True)
    return options


def transform_facts(args: CollectArguments) -> dict[str, Any]:
    """Returns the options that are used, for the record of a dataset."""
    return {name: value for name in _NAMES if (value := getattr(args, name))}


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
        for name in (*_NAMES, "normalization"):
            if text.startswith(name):
                raise CliError(f"--{name.replace('_', '-')}{text[len(name) :]}") from error
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
    if args.normalize_observations:
        return None
    if args.frame_stack is None:
        return env
    boxed = isinstance(env.observation_space, spaces.Box)
    return FrameStackObservation(env, args.frame_stack) if boxed else None
