"""Normalisation of frames: what is the same for arrays and for tensors.

:class:`FrameNormalizer` is the stage. :class:`BatchStatistics` decides which frames count, and when
the statistics are updated. :class:`DiscountedReturns` has the returns by which rewards are
normalised. All work with arrays of numpy and with tensors, and none waits for a device before the
batch is finished.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from trawl.envs.frame_stack import is_feature
from trawl.keys import DONE, MASK, RAW_REWARD, Key, next_of, show_key, show_keys
from trawl.rollout.batches import BatchOptions
from trawl.rollout.block import Block
from trawl.rollout.episodes import NEVER
from trawl.rollout.layout import Leaf
from trawl.rollout.moments import BaseMoments, Formula, RunningMoments
from trawl.rollout.normalization import (
    Normalization,
    NormalizeObservation,
    NormalizeOptions,
    NormalizeReward,
    Statistics,
)
from trawl.rollout.ops import column, operations
from trawl.rollout.policy.leaves import PolicyLeaves
from trawl.rollout.stages.stage import Rows, Stage, StageSetup, View
from trawl.supported import STAGE_LOOSE


class NormalizedEntry:
    """An observation that is normalised.

    Args:
        key: key of the observation.
        next_row: the normalised observations with which the next batch begins.
        options: how they are normalised.
        absent: key of the flag that is True for absent agents; None if no agent is ever absent.

    Attributes:
        leaf: shape of an observation.
        raw_next: the observations of the environment with which the next batch begins.
        formula: the formula, with the statistics that all rows from now on are normalised with.
        normalize: see :class:`~trawl.rollout.moments.Formula`.
    """

    def __init__(
        self, key: Key, next_row: Any, options: NormalizeObservation, absent: Key | None
    ) -> None:
        self.key, self.next_row, self.absent = key, next_row, absent
        self.leaf: tuple[int, ...] = tuple(next_row.shape[1:])
        self.raw_next: Any = operations(next_row).cast(next_row, next_row.dtype)
        self.formula = Formula(next_row, self.leaf, options.clip, options.epsilon)
        self.normalize = self.formula.normalize


class FrameNormalizer(Stage[Rows, View]):
    """Stage that normalises the frames of an environment.

    The statistics of observations are those of the frames: the observation with which each frame
    begins counts once. Rows without a frame and absent agents don't count. The observations of
    absent agents stay zero. Rewards are normalised with statistics that include the batch itself.

    Args:
        setup: what the stage is made from.

    Attributes:
        normalization: the statistics.

    Raises:
        KeyError, ValueError: if an observation can't be normalised.
    """

    normalization: Normalization
    _observations: Sequence[NormalizedEntry]
    # Entries of the batch that is being filled, with time first.
    _rows: Mapping[Key, Any]

    def __init__(self, setup: StageSetup[Rows]) -> None:
        options = setup.options.normalize
        self._options, self._num_envs = options, setup.num_envs
        # Entries with which the next batch begins, among them the flags of groups of agents.
        self._next_rows = setup.next_rows
        self._observations, self._rewards = [], list[DiscountedReturns]()
        if options.observations is not None:
            keys = _chosen(options.observations, setup)
            self._observations = self._new_observations(setup, keys, options.observations)
        if options.rewards is not None:
            self._rewards = [
                DiscountedReturns(key, options.rewards, setup.zeros(leaf))
                for key, leaf in setup.rewards.items()
            ]
        self.keys = [one.key for one in self._observations]
        self.more_leaves = {
            raw_reward_of(one.key): Leaf(tuple(one.carry.shape[1:]), torch.float32)
            for one in self._rewards
            if one.options.keep_raw
        }
        empty = {
            one.key: RunningMoments.empty(one.leaf, 0 if one.absent is None else 1)
            for one in self._observations
        }
        empty |= {one.key: RunningMoments.empty(one.components) for one in self._rewards}
        count = setup.envs_per_row
        self._statistics = BatchStatistics(options, empty, count, self._on_device)
        self.normalization = self._statistics.normalization
        # True for environments that were reset since the last batch. Their first observation is
        # normalised when the next batch begins, with the statistics of that batch.
        self._fresh: Any = setup.zeros(Leaf((), torch.bool)) == 0
        self._ops = operations(self._fresh)
        self._on_cpu = setup.home.type == "cpu"
        self._rows = {}

    @override
    @classmethod
    def is_needed(cls, options: BatchOptions) -> bool:
        return bool(options.normalize)

    @override
    @classmethod
    def reads(cls, setup: StageSetup[Any]) -> list[Key]:
        options, found = setup.options.normalize, list[Key]()
        if options.observations is not None:
            found += _chosen(options.observations, setup)
        if options.rewards is not None:
            for key in setup.loose:
                if key[0] == "next":
                    text = STAGE_LOOSE.text("normalize_rewards", against=show_key(key[1:]))
                    raise ValueError(text)
            found += setup.rewards
        return found

    @abstractmethod
    def _new_observations(
        self, setup: StageSetup[Rows], keys: Sequence[Key], options: NormalizeObservation
    ) -> Sequence[NormalizedEntry]:
        """Returns the observations that are normalised."""

    def _on_device(self, moments: RunningMoments) -> BaseMoments:
        """Brings statistics to the device of the data."""
        return moments

    # --- between batches

    @override
    def restart(self, mask: Any) -> None:
        chosen = self._fresh | True if mask is None else mask
        self._fresh |= chosen
        for reward in self._rewards:
            self._ops.clear(reward.carry, column(chosen, reward.carry))
        self._statistics.load()
        self._load()
        self._normalize_fresh()

    @abstractmethod
    def _normalize_fresh(self) -> None:
        """Normalises the observations of environments that were reset."""

    @override
    def renew(self, most_frames: float, in_groups: bool) -> Any:
        self._statistics.most_frames = most_frames
        self._statistics.begin(in_groups)
        self._load()
        if self._on_cpu and not self._fresh.any():
            return None
        self._normalize_fresh()
        fresh, self._fresh = self._fresh, self._fresh & False
        return fresh

    @override
    def check_policy(self, leaves: PolicyLeaves) -> None:
        for key in leaves.states:
            if key in self.keys:
                raise ValueError(
                    f"the policy writes {show_key(next_of(key))}, so the environment's own values "
                    "can't be normalised: leave the key out of NormalizeObservation(keys=...)"
                )

    @override
    def first_rows(self, rows: Mapping[Key, Rows]) -> Mapping[Key, Rows]:
        return {**rows, **{one.key: one.raw_next for one in self._observations}}

    @override
    def saved_rows(self) -> dict[str, Rows]:
        found = {f"raw {show_key(one.key)}": one.raw_next for one in self._observations}
        found |= {f"return {show_key(one.key)}": one.carry for one in self._rewards}
        return found | {"fresh": self._fresh}

    def _absent(self, key: Key) -> Key | None:
        """Returns the key of the flag that is True for absent agents of an entry's group."""
        flag = (key[0], DONE[-1])
        return flag if len(key) > 1 and flag in self._next_rows else None

    def _load(self) -> None:
        """Makes the newest statistics those of all rows from now on."""
        for one in self._observations:
            one.formula.load(self._statistics.of(one.key))

    def _counted(self, stop: int) -> Any:
        """Returns a mask of the frames up to a row that count; None if all of them do."""
        mask = self._rows[MASK][:stop] if MASK in self._rows else None
        if self._statistics.is_cut(stop):
            every = self._rows[DONE][:stop, :, 0] | True
            mask = self._statistics.cut(every if mask is None else mask)
        return mask

    # --- the end of a batch

    @override
    def finish(self, block: Block, filled: int) -> None:
        if filled:
            self._end_rows(filled)
            self._finish_rewards(filled)
        self._keep_last(filled)
        self.abandon()
        self._statistics.finish()

    @override
    def abandon(self) -> None:
        self._rows = {}

    @abstractmethod
    def _end_rows(self, stop: int) -> None:
        """Counts the frames up to a row."""

    @abstractmethod
    def _keep_last(self, filled: int) -> None:
        """Keeps the observations with which the next batch begins."""

    def _finish_rewards(self, filled: int) -> None:
        rows, ops = self._rows, self._ops
        statistics, counted = self._statistics, self._counted(filled)
        goes_on = ~rows[DONE][:filled, :, 0]
        if MASK in rows:
            # Another episode follows a row without a frame.
            goes_on = goes_on & rows[MASK][:filled]
        for one in self._rewards:
            rewards, options, present = rows[one.key][:filled], one.options, counted
            if options.keep_raw:
                rows[raw_reward_of(one.key)][:filled] = rewards
            keep, absent = column(goes_on, rewards), self._absent(one.key[1:])
            if absent is not None:
                keep = keep & ~rows[next_of(absent)][:filled]
                present = present_in(rows[absent][:filled], counted)
            returns, kept = (ops.cast(values, ops.float64) for values in (rewards, keep))
            # A return may be infinite, which is reported later.
            with np.errstate(invalid="ignore"):
                one.add(returns, kept * options.gamma, self._owners(filled))
            if statistics.training:
                statistics.add(one.key, self._return_moments(one, returns, present))
            one.formula.load(statistics.of(one.key))
            one.formula.normalize(rewards, rewards)

    def _owners(self, filled: int) -> list[int] | None:
        """Returns the environment of each row; None if a row has those of all."""
        return None

    @abstractmethod
    def _return_moments(self, one: DiscountedReturns, returns: Any, present: Any) -> BaseMoments:
        """Returns the moments of returns, of which all or those of a mask count."""


def present_in(absent: Any, mask: Any) -> Any:
    """Returns True where an agent is present in a frame, ``(*size, agents)``.

    Args:
        absent: the flags of absent agents, ``(*size, agents, 1)``.
        mask: mask of the frames; None for all.
    """
    present = ~absent[..., 0]
    return present if mask is None else present & mask[..., None]


# Within a batch, the statistics are updated whenever their count has doubled. The first update is
# after this many frames.
_FIRST_FRAMES = 16
# What to do with observations that are no floating-point numbers.
_ADVICE = (
    "For images, leave the option out, and let the policy compute observation.float() / 255. Other "
    "numbers can be converted in the environment, such as with "
    "gymnasium.wrappers.DtypeObservation(env, np.float32)"
)


def _chosen(options: NormalizeObservation, setup: StageSetup[Any]) -> list[Key]:
    """Returns the keys of the observations to normalise."""
    setup.check_fixed("normalize_observations", options.keys)
    observed = setup.features if options.keys is None else setup.observed
    floats = [key for key, leaf in observed.items() if leaf.dtype.is_floating_point]
    if options.keys is None:
        found = [key for key in floats if is_feature(key)]
        if not found:
            raise ValueError(
                "normalize_observations needs an observation of floating-point numbers, but the "
                f"environment has only {_with_dtypes(observed)}. {_ADVICE}"
            )
        return found
    for key in options.keys:
        if key not in observed:
            raise KeyError(
                f"normalize_observations has the key {show_key(key)}, but the observations are "
                f"{show_keys(set(observed))}"
            )
        if key not in floats:
            raise ValueError(
                f"normalize_observations has the key {show_key(key)}, but its dtype is "
                f"{observed[key].dtype}: only floating-point numbers can be normalised. {_ADVICE}"
            )
    return list(options.keys)


def _with_dtypes(observed: Mapping[Key, Leaf]) -> str:
    return ", ".join(f"{show_key(key)} ({leaf.dtype})" for key, leaf in observed.items()) or "none"


def raw_reward_of(key: Key) -> Key:
    """Returns the key of the environment's own reward, for the key of a normalised one."""
    return (*key[:-1], RAW_REWARD)


class BatchStatistics:
    """Statistics of all frames before a batch and of the frames of the batch so far.

    Args:
        options: options of everything that is normalised.
        empty: statistics of no frames, by key of the entry.
        num_envs: number of environments.
        load: function that brings statistics to the device of the data.

    Attributes:
        normalization: the statistics of all frames before the batch.
        most_frames: largest number of frames of the batch that count.
        first: first row of the batch that has not been counted.
        due: row of the step after which the statistics are to be updated.
    """

    def __init__(
        self,
        options: NormalizeOptions,
        empty: Statistics,
        num_envs: int,
        load: Callable[[RunningMoments], BaseMoments],
    ) -> None:
        self.normalization = Normalization(options, empty)
        self.most_frames = math.inf
        self.first, self.due = 0, NEVER
        self._observed = None if options.observations is None else next(iter(empty))
        self._num_envs = num_envs
        self._load = load
        self._base: dict[Key, BaseMoments] = {}
        self._delta: dict[Key, BaseMoments] = {}

    @property
    def training(self) -> bool:
        """False if the statistics are frozen."""
        return self.normalization.training

    def load(self) -> None:
        """Loads the newest statistics, between two batches."""
        found = self.normalization.share().statistics
        self._base = {key: self._load(one) for key, one in found.items()}
        self._delta = {}

    def begin(self, in_groups: bool) -> None:
        """Begins a batch.

        Args:
            in_groups: True if the rows of a step are not filled all at once.
        """
        self.load()
        self.first, self.due = 0, NEVER
        if self._observed is not None and self.training and not in_groups:
            self._before = self.normalization.of(self._observed).count
            self.set_due(0)

    def set_due(self, row: int) -> None:
        """Sets ``due`` after an update of the statistics.

        Args:
            row: the first row that the update did not count.
        """
        # The number of frames may be known only to the device, so rows without frames count here.
        before = self._before + row * self._num_envs
        self.due = row + -(-max(before, _FIRST_FRAMES) // self._num_envs) - 1

    def is_cut(self, rows: int) -> bool:
        """Returns True if some frames of the first ``rows`` rows of a batch don't count."""
        return self.most_frames < rows * self._num_envs

    def cut(self, mask: Any) -> Any:
        """Returns the mask of the frames that count.

        Args:
            mask: True where a row holds a frame, ``(rows, num_envs)``, from the batch's first row.
        """
        order = mask.reshape(-1).cumsum(0).reshape(mask.shape)
        return mask & (order <= self.most_frames)

    def add(self, key: Key, moments: BaseMoments) -> None:
        """Adds the statistics of frames of the batch."""
        self._delta[key] = self._delta[key].merged(moments) if key in self._delta else moments

    def of(self, key: Key) -> BaseMoments:
        """Returns the statistics of all frames that have been counted, on the device."""
        base = self._base[key]
        return base.merged(self._delta[key]) if key in self._delta else base

    def finish(self) -> None:
        """Adds the batch's frames to the statistics, which may wait for the device."""
        delta, self._delta = self._delta, {}
        if delta:
            self.normalization.merge({key: one.on_host() for key, one in delta.items()})


class DiscountedReturns:
    """Discounted returns of the environments, by which a reward is normalised.

    Args:
        key: key of the reward.
        options: the options.
        rewards: zeros with the shape and the dtype of the rewards of a step.

    Attributes:
        carry: discounted return of each environment's episode so far, to add to its next reward.
        formula: the formula, with the statistics that the next rewards are normalised with.
    """

    def __init__(self, key: Key, options: NormalizeReward, rewards: Any) -> None:
        self.key, self.options, self._ops = key, options, operations(rewards)
        self.carry: Any = self._ops.cast(rewards, self._ops.float64)
        clip, epsilon = options.clip, options.epsilon
        self.formula = Formula(rewards, self.components, clip, epsilon, keeps_mean=True)

    @property
    def components(self) -> tuple[int, ...]:
        """Shape of the statistics; rewards may have several components."""
        found = tuple(self.carry.shape[1:])[-1:]
        return () if found == (1,) else found

    def add(self, returns: Any, keep: Any, owners: Any = None) -> None:
        """Turns rewards into discounted returns, in place.

        Args:
            returns: rewards of the environment, ``(steps, *shape)``, float64; overwritten.
            keep: factor of each return in the next one: gamma, or 0 where an episode ends,
                float64.
            owners: the environment of each row, if a row has only one; None if it has all.
        """
        # The reward of an episode's last step still belongs to the episode's return.
        carry, multiply = self.carry, self._ops.multiply
        each: Iterable[Any] = repeat(carry, len(returns))
        if owners is not None:
            each = (carry[owner : owner + 1] for owner in owners)
        for row, kept, part in zip(returns, keep, each, strict=True):
            row += part  # in place
            multiply(row, kept, out=part)
