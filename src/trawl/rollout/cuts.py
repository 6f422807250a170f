"""Episodes that are cut off: which steps are their last ones, and the flags that are written there.

An environment ends its episodes itself, as terminated or truncated. All other ends are cuts:

- An episode is at the limit ``max_frames_per_traj``: :func:`is_late` says so where steps are
  counted one by one (tensors, loose frames, frames in order of arrival). Steppers of arrays know
  the row before, by :func:`steps_to_limit` (``EpisodeEnds``, ``VectorEnds`` in
  ``rollout/episodes.py``).
- An environment fails and is rebuilt, or its worker dies: the frame before the failure is the last
  one (``discard_step`` and ``end_open`` in ``rollout/episodes.py``; ``data/trajectories.py``).
- The user wants batches to end like episodes (``set_truncated=True``), although these go on.
- A trajectory that goes on is written in a format of whole episodes (``data/sinks/episodes.py``).

All of them have ``truncated`` written by :func:`mark_cut`. Steppers of arrays have set ``done``
before (``EpisodeEnds``, ``VectorEnds``); ``rollout/steppers/tensors.py``,
``rollout/writers/tensordicts.py`` and ``rollout/ready/writer.py`` mark the limit of the others. The
reset that follows, the ids and the step counts are those of any other end. Environments of TorchRL
count and mark their steps with a transform of TorchRL (``collectors/local/torchrl_transforms.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from trawl.keys import DONE, TRUNCATED, Key, as_key, next_of
from trawl.tensordicts import broadcastable


def is_late(limit: int, steps: Any, skipped: Any = None) -> Any:
    """Returns True for episodes that are at the limit after so many steps, and so are cut off.

    Args:
        limit: number of steps after which an episode is cut off.
        steps: number of steps of each episode, an array or a tensor.
        skipped: True where a step was only a reset, so that it belongs to no episode; None for no
            step.
    """
    late = steps >= limit
    return late if skipped is None else late & ~skipped


def steps_to_limit(limit: int, steps: int) -> int:
    """Returns how many more steps an episode takes until :func:`is_late` is True."""
    return limit - steps


def mark_cut(truncated: Any, done: Any, cut: Any, ended_too: bool = True) -> None:
    """Marks steps as the last ones of episodes that are cut off, in place.

    Args:
        truncated: the flags ``truncated``, an array or a tensor.
        done: the flags ``done``, of the same kind.
        cut: True for the steps to mark.
        ended_too: False to leave ``truncated`` as it is where ``done`` is set already.
    """
    truncated |= cut if ended_too else cut & ~done
    done |= cut


def mark_rows(
    arrays: Mapping[Key, Any], rows: int | slice, cut: Any, groups: Sequence[str] = ()
) -> None:
    """Marks steps in rows as the last ones of episodes that are cut off, for agents that go on.

    Args:
        arrays: the arrays of the environments, or their tensors, by key.
        rows: a row, or several.
        cut: True for the steps to mark; of the shape of the rows.
        groups: names of the groups of agents that have flags of their own.
    """
    mark_cut(arrays[TRUNCATED][rows, ..., 0], arrays[DONE][rows, ..., 0], cut)
    for group in groups:
        done, truncated = (arrays[next_of((group, name))][rows] for name in ("done", "truncated"))
        mark_cut(truncated, done, cut[..., None, None], ended_too=False)


def mark_frame(
    frame: TensorDictBase, done_keys: Iterable[Key], cut: Tensor, ended_too: Collection[Key] = ()
) -> None:
    """Marks a frame as the last one of episodes that are cut off.

    The function sets new tensors, because the next step shares the existing ones.

    Args:
        frame: a frame, or its part under ``"next"``.
        done_keys: keys of the flags; others than ``done`` are ignored.
        cut: mask of the environments; bool, of the frame's batch size.
        ended_too: keys of the flags ``done`` of which ``truncated`` is set even where they are set.
    """
    for key in done_keys:
        if key[-1] == "done":
            _mark_entries(frame, key, cut, key in ended_too, frame.set)


def mark_steps(following: TensorDictBase, cut: Tensor, always: Sequence[Key] = ()) -> None:
    """Marks steps of a batch as the last ones of episodes that are cut off, in place.

    Agents that have flags of their own are marked unless they are done.

    Args:
        following: the TensorDict under ``"next"``, with all its flags.
        cut: mask of the steps; bool, of the batch size.
        always: keys of agents' flags that are set even for agents that are done.
    """
    keys = {as_key(key) for key in following.keys(True, True)}
    for key in keys:
        done_key = (*key[:-1], "done")
        if key[-1] == "truncated" and done_key in keys:
            ended_too = len(key) == 1 or key in always
            _mark_entries(following, done_key, cut, ended_too, following.set_)


def _mark_entries(
    frames: TensorDictBase, key: Key, cut: Tensor, ended_too: bool, write: Any
) -> None:
    """Marks frames in the flag ``done`` with this key, and in ``truncated`` beside it if it exists.

    Args:
        frames: the frames.
        key: the key.
        cut: mask of the frames.
        ended_too: see :func:`mark_cut`.
        write: function that sets an entry. A lazy stack returns copies of its entries.
    """
    other = (*key[:-1], "truncated")
    done, before = frames.get(key).clone(), frames.get(other, None)
    truncated = torch.zeros_like(done) if before is None else before.clone()
    mark_cut(truncated, done, broadcastable(cut, done), ended_too)
    write(key, done)
    if before is not None:
        write(other, truncated)
