"""Option that stacks the last frames of observations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from tensordict import TensorDictBase

from trawl.checks import check_number
from trawl.envs.agents.arrays import AGENT_MASK
from trawl.envs.dm import DISCOUNT
from trawl.envs.entries.info_keys import INFO_KEY
from trawl.envs.entries.masks import MASK_KEY
from trawl.keys import Key, as_key, distinct_keys, show_keys

_PADDINGS = ("reset", "zero")


def is_feature(key: Key) -> bool:
    """Returns True for observations that are normalised or stacked unless keys are chosen.

    Action masks, entries of ``info`` and the discount of dm_env are none of them.
    """
    return INFO_KEY not in key and key[-1] != MASK_KEY and key != (DISCOUNT,)


@dataclass(frozen=True)
class FrameStack:
    """Option of a collector that stacks the last frames of an episode.

    Args:
        size: number of frames in a stack, at least 2.
        padding: frames that fill a stack at the beginning of an episode. ``"reset"`` repeats the
            episode's first frame, and ``"zero"`` uses frames of zeros.
        keys: keys of the observations to stack. None stacks all observations except action masks,
            entries of ``info``, and the discount of dm_env.

    Raises:
        TypeError: if ``size`` is not an integer.
        ValueError: if ``size`` is below 2, ``padding`` is unknown, or ``keys`` is empty.

    Examples:
        >>> from trawl.collectors import Collector
        >>> from trawl.envs import FrameStack
        >>> stack = FrameStack(3, padding="zero")
        >>> with Collector("CartPole-v1", frames_per_batch=10, frame_stack=stack) as collector:
        ...     batch = next(iter(collector))
        >>> batch["observation"].shape
        torch.Size([10, 3, 4])
    """

    size: int
    padding: Literal["reset", "zero"] = "reset"
    keys: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_number("size", self.size, least=2))
        if self.padding not in _PADDINGS:
            raise ValueError(f"padding must be 'reset' or 'zero', but it is {self.padding!r}")
        if self.keys is None:
            return
        keys = distinct_keys(self.keys)
        if not keys:
            raise ValueError(
                "keys must name the observations to stack, but it is empty: leave it out to stack "
                "all observations"
            )
        object.__setattr__(self, "keys", keys)

    def stacked(self, observed: Iterable[Key], groups: Collection[str] = ()) -> list[Key]:
        """Returns the keys of the observations that are stacked.

        Args:
            observed: keys of all observations of fixed shape and dtype.
            groups: keys of the groups of agents.

        Raises:
            ValueError: if there is no observation of a given key, or none to stack.
        """
        # Whether agents act is no observation of theirs.
        found = [key for key in observed if key[-1] != AGENT_MASK or key[0] not in groups]
        if self.keys is None:
            keys = [key for key in found if is_feature(key)]
            if not keys:
                raise ValueError(
                    "frame_stack needs an observation that is neither an action mask nor an entry "
                    f"of info, but the environment has only {show_keys(set(found))}: name the keys "
                    "to stack in FrameStack(size, keys=[...])"
                )
            return keys
        missing = set(self.keys) - set(found)
        if missing:
            raise ValueError(
                f"frame_stack has the keys {show_keys(missing)}, but the environment's "
                f"observations are {show_keys(set(found))}"
            )
        return list(self.keys)

    def repeated(self, frames: TensorDictBase, groups: Collection[str]) -> TensorDictBase:
        """Returns observations in which each stacked entry is a stack of equal frames.

        Args:
            frames: the observations.
            groups: keys of the groups of agents.
        """
        fixed = [as_key(k) for k, v in frames.items(True, True) if isinstance(v, torch.Tensor)]
        for key in self.stacked(fixed, groups):
            axis = frames.ndim + (key[0] in groups)
            frames.set(key, torch.stack([frames.get(key)] * self.size, axis))
        return frames


#: A number of frames, or the stacks themselves.
FrameStackLike: TypeAlias = int | FrameStack


def as_frame_stack(name: str, value: Any) -> FrameStack | None:
    """Returns the value of an option as a :class:`FrameStack`, or None.

    Args:
        name: name of the option.
        value: a number of frames, a :class:`FrameStack`, or None.
    """
    if value is None or isinstance(value, FrameStack):
        return value
    if isinstance(value, (Mapping, list, tuple)):
        raise TypeError(
            f"{name} must be a number of frames or a FrameStack, but it is {value!r}. To stack "
            "some observations only, pass FrameStack(size, keys=[...])"
        )
    return FrameStack(check_number(name, value, least=2))
