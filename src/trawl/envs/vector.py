"""Adapters that make all vector environments end and begin episodes in the same way.

The step that ends an episode returns its true last observation, and a new episode begins with an
explicit restart.

Gymnasium has three ways to reset a sub-environment (``AutoresetMode``), and EnvPool has a fourth.
Each adapter translates one of these ways into ``step`` and ``restart(mask)``, so the loop needs to
support only one way. The exception is an environment that spends a whole step on each reset. Its
adapter, :class:`StepResetVector`, reports which rows of a step were resets, and these rows never
count as experience.

The modes are described at https://farama.org/Vector-Autoreset-Mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from torch import Tensor
from typing_extensions import override

from trawl.envs.batches.autoreset import (
    ModeCheck,
    autoreset_mode,
    forgetful_wrapper,
    is_plain,
    is_restartable,
    resets_twice,
)
from trawl.envs.batches.envpool_calls import EnvPoolCalls, refuse_seed
from trawl.envs.capture.codec import Decoder, Encoder, NotPlain
from trawl.envs.capture.pool_log import PoolLog, with_rows
from trawl.envs.capture.ways import chain
from trawl.envs.entries.infos import BatchReader, InfoCodec, InfoReader
from trawl.envs.entries.masks import newest_masks, warn_late
from trawl.envs.entries.spaces import SpaceCodec
from trawl.envs.outcomes import (
    MUST_RETURN,
    Outcome,
    OutcomeCheck,
    checked_info,
    reset_results,
    reward_shape_of,
    step_results,
)
from trawl.envs.reset_kwargs import copied
from trawl.envs.source import Source
from trawl.errors import EnvStateError, add_note
from trawl.foreign.environments import state_of, statistics_key
from trawl.memory import Array, Mask
from trawl.supported import MODE_ENVPOOL

Step = tuple[list[Array], Array, Array, Array]

#: Description of environments that can restart sub-environments at any time, for error messages.
RESTARTABLE = (
    "a list of factories, or a gymnasium.vector.SyncVectorEnv with stateful wrappers only around "
    "its sub-environments"
)


class VectorAdapter:
    """Vector environment whose sub-environments are restarted by the caller.

    Args:
        env: the vector environment.
        codec: codec for the observations of one sub-environment.
        check: check that the environment behaves according to its autoreset mode.

    Attributes:
        num_envs: number of sub-environments.
        can_restart: True if :meth:`restart` may be called for any sub-environment at any time.
        is_begun: True once the environment was reset.
        masks: the newest action mask of each row, of shape ``(num_envs, choices)``; None if the
            ``info`` of the last full reset had no mask.
        log: log of all resets and steps, if the environment keeps one.
        autoresets: None if the collector begins all episodes; otherwise a text that says how the
            environment begins them.
        reset_kwargs: arguments that all resets get besides those of the caller.
    """

    can_restart = True
    autoresets: str | None = None
    reset_kwargs: Mapping[str, Any] = MappingProxyType({})
    # Attributes that decide what comes next.
    state_names: tuple[str, ...] = ("_shown", "masks")
    log: PoolLog | None = None

    def __init__(self, env: Any, codec: SpaceCodec, check: ModeCheck) -> None:
        self.env = env
        self.codec = codec
        self.num_envs = int(env.num_envs)
        self._check = check
        self._reader = check.reader
        self._check_outcome = OutcomeCheck(env, self.num_envs, reward_shape_of(env))
        self._shown: list[Array] = []
        self.masks: Array | None = None
        # Sub-environments whose episode has ended, if they begin the next one by themselves.
        self._ended = np.zeros(self.num_envs, dtype=np.bool_)
        self.is_begun = False
        self._has_stepped = False

    def reset(self, seeds: Sequence[int] | None = None, **kwargs: Any) -> list[Array]:
        """Begins an episode in every sub-environment.

        Args:
            seeds: one seed for each sub-environment; ignored if ``kwargs`` has a ``seed``.
            **kwargs: arguments of the environment's ``reset``.

        Returns:
            The observation leaves, each of shape ``(num_envs, ...)``.
        """
        if seeds is not None:
            # Gymnasium's own classes accept one seed per sub-environment. Other environments derive
            # all seeds from one.
            several = isinstance(self.env.unwrapped, (SyncVectorEnv, AsyncVectorEnv, Source))
            kwargs.setdefault("seed", list(seeds) if several else seeds[0])
        kwargs = copied(self.reset_kwargs) | kwargs
        obs, info = reset_results(self.env.reset(**kwargs), self.env)
        if isinstance(obs, Tensor):
            raise TypeError(
                f"{self.env!r} returns torch tensors, but does not state their device: set the "
                "attribute device of the environment, or pass TorchVectorEnv(env)"
            )
        if info is not None:
            checked_info(info, "reset", self.env)
        self.masks = newest_masks(None, info)
        self._ended = np.zeros(self.num_envs, dtype=np.bool_)
        self.is_begun = True
        self._shown = self._reader.read(obs, info)
        return self._shown

    def step(self, action: Any) -> Step:
        """Steps every sub-environment.

        Returns:
            The observation leaves, the rewards, and the terminated and truncated flags, each with
            ``num_envs`` rows. Where an episode ended, the leaves have its true last observation.
        """
        leaves, outcome, info = self._step(action)
        if self._check.sees_observations:
            self._check.last(leaves, outcome.terminated | outcome.truncated, info)
        return leaves, *outcome

    def _step(self, action: Any) -> tuple[list[Array], Outcome, Any]:
        """Steps the environment itself, and checks the rewards and flags."""
        try:
            found = step_results(self.env.step(action), self.env)
        except ValueError as error:
            if "values to unpack (expected 5" in str(error):
                add_note(error, f"step of each sub-environment {MUST_RETURN}")
            raise
        obs, reward, terminated, truncated, info = found
        outcome = self._check_outcome(reward, terminated, truncated)
        if not self._has_stepped:
            self._has_stepped = True
            if info is not None:
                checked_info(info, "step", self.env)
            if self.masks is None:
                warn_late(self.env.single_action_space, info, self.env)
        if self.masks is not None:
            self.masks = newest_masks(self.masks, info)
        self._shown = leaves = self._reader.read_step(obs, info, outcome)
        return leaves, outcome, info

    def _with_final(self, leaves: list[Array], ended: Mask, info: Any) -> list[Array]:
        """Returns the observations with the last ones of the episodes that ended, in ``info``."""
        # Leaves without a fixed layout are tuples.
        merged: list[Any] = [
            np.array(leaf) if isinstance(leaf, np.ndarray) else list(leaf) for leaf in leaves
        ]
        for row in np.flatnonzero(ended):
            final = self._check.required_final(info, int(row))
            for target, value in zip(merged, final, strict=True):
                target[row] = value
        return merged

    def restart(self, mask: Mask, **kwargs: Any) -> list[Array]:
        """Begins new episodes where ``mask`` is True; returns the observations of all rows."""
        kwargs = copied(self.reset_kwargs) | kwargs
        options = {**(kwargs.pop("options", None) or {}), "reset_mask": mask.copy()}
        verifies = self._check.sees_observations and not mask.all()
        # A copy: the environment may write the new observations into the same memory.
        before = [np.array(leaf) for leaf in self._shown] if verifies else []
        obs, info = reset_results(self.env.reset(options=options, **kwargs), self.env)
        if self.masks is not None:
            self.masks = newest_masks(self.masks, info)
        self._shown = leaves = self._reader.read_reset(obs, info, mask, self._shown)
        if verifies:
            self._check.others(before, leaves, mask)
        return leaves

    def begin_next(self, ended: Mask) -> tuple[Any, list[Array]]:
        """Begins new episodes where the last step has ended one.

        Args:
            ended: mask of the sub-environments, at least one.

        Returns:
            The index of some rows, among them those where ``ended`` is True, and their
            observations. The observations of the other rows remain those of the last step.
        """
        return ..., self.restart(ended)

    def autoreset_mask(self) -> Mask | None:
        """Returns a mask of the rows whose last step was only a reset, or None."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the adapter, without the environment's, as plain data.

        Raises:
            EnvStateError: if it can't be captured.
        """
        values = {name: _copied(getattr(self, name)) for name in self.state_names}
        try:
            encoded: dict[str, Any] = Encoder().encode(values)
        except NotPlain as error:
            raise EnvStateError(f"the state of {self.env} can't be captured: {error}") from error
        return encoded

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that :meth:`state_dict` returned."""
        values = Decoder().decode(state)
        for name in self.state_names:
            setattr(self, name, values[name])

    @property
    def can_replay(self) -> bool:
        """True if a new environment would repeat all steps and resets from now on."""
        return False

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()

    def abandon(self) -> None:
        """Closes the environment after a failure."""
        inner = self.env.unwrapped if hasattr(self.env, "unwrapped") else self.env
        state = state_of(inner, AsyncState.DEFAULT)
        if not isinstance(inner, AsyncVectorEnv) or state is AsyncState.DEFAULT:
            self.env.close()
            return
        # A process died while the environment waited for it, and close() would wait for it again.
        for process in inner.processes:
            process.terminate()
        for pipe in inner.parent_pipes:
            if pipe is not None:
                pipe.close()
        for process in inner.processes:
            process.join()
        inner.closed = True


class SameStepVector(VectorAdapter):
    """Adapter for ``AutoresetMode.SAME_STEP``: an episode's last step begins the next episode.

    This step returns the first observation of the next episode. The adapter holds the observation
    back until :meth:`restart`, and reads the true last observation from ``info["final_obs"]``.
    """

    autoresets = "resets them in the step that ends them"
    state_names = (*VectorAdapter.state_names, "_fresh", "_ended")

    def __init__(self, env: Any, codec: SpaceCodec, check: ModeCheck) -> None:
        super().__init__(env, codec, check)
        self.can_restart = is_plain(env) or is_restartable(env)
        # The first observations of the next episodes.
        self._fresh: list[Array] = []

    @override
    def step(self, action: Any) -> Step:
        leaves, outcome, info = self._step(action)
        self._ended = outcome.terminated | outcome.truncated
        if self._ended.any():
            self._fresh = leaves
            leaves = self._with_final(leaves, self._ended, info)
        return leaves, *outcome

    @override
    def restart(self, mask: Mask, **kwargs: Any) -> list[Array]:
        more = mask & ~self._ended
        self._ended = self._ended & ~mask
        if more.any():
            if not self.can_restart:
                raise _cant_restart(self.env)
            # A partial reset also returns the newest observations of the other rows. For a row
            # whose episode has ended, this is the first observation of the next episode.
            self._fresh = super().restart(more, **kwargs)
        return self._fresh


class EnvPoolVector(VectorAdapter):
    """Adapter for EnvPool, which can reset sub-environments by their ids at any time."""

    autoresets = "takes no arguments for a reset"

    def __init__(self, env: Any, codec: SpaceCodec, check: ModeCheck) -> None:
        super().__init__(env, codec, check)
        self._calls = EnvPoolCalls(env, reads_infos=isinstance(codec, InfoCodec))
        self._ids = np.arange(self.num_envs, dtype=np.int32)
        self._used = False

    @override
    def reset(self, seeds: Sequence[int] | None = None, **kwargs: Any) -> list[Array]:
        refuse_seed(kwargs.get("seed") if seeds is None else seeds)
        self._used = True
        if self.log is not None:
            self.log.reset(None)
        return super().reset()

    @property
    @override
    def can_replay(self) -> bool:
        # Steps that were taken before would be missing.
        return not self._used

    @override
    def step(self, action: Any) -> Step:
        calls = self._calls
        if not calls.quick or self.masks is not None:
            leaves, outcome, _ = self._step(action)
            return leaves, *outcome
        calls.send(action, self._ids)
        _, obs, *results, _ = calls.read(calls.receive_raw())
        outcome = self._check_outcome(*results)
        self._shown = leaves = self.codec.encode(obs)
        return leaves, *outcome

    @override
    def restart(self, mask: Mask, **kwargs: Any) -> list[Array]:
        if self.log is not None:
            self.log.reset(mask)
        rows, begun = self.begin_next(mask)
        return with_rows(self._shown, rows, begun)

    @override
    def begin_next(self, ended: Mask) -> tuple[Any, list[Array]]:
        obs, rows, info = self._calls.reset(self._ids[ended])
        return rows, self._reader.read(obs, info)


class StepResetVector(VectorAdapter):
    """Adapter for ``AutoresetMode.NEXT_STEP`` without partial resets.

    The step after the end of an episode is a reset.
    """

    autoresets = "resets them in the step after their end"
    can_restart = False
    state_names = (*VectorAdapter.state_names, "_resetting", "_ended")

    def __init__(self, env: Any, codec: SpaceCodec, check: ModeCheck) -> None:
        super().__init__(env, codec, check)
        self._resetting = np.zeros(self.num_envs, dtype=np.bool_)
        self._resets_twice = resets_twice(env)

    @override
    def reset(self, seeds: Sequence[int] | None = None, **kwargs: Any) -> list[Array]:
        ended = self._ended
        leaves = super().reset(seeds, **kwargs)
        self._resetting = np.zeros(self.num_envs, dtype=np.bool_)
        if self._resets_twice:
            self._ended = ended
        return leaves

    @override
    def step(self, action: Any) -> Step:
        resetting = self._resetting = self._ended
        leaves, outcome, info = self._step(action)
        self._ended = ended = outcome.terminated | outcome.truncated
        if ended.any():
            self._check.last(leaves, ended, info)
        if resetting.any():
            self._check.reset_step(resetting, outcome)
        return leaves, *outcome

    @override
    def restart(self, mask: Mask, **kwargs: Any) -> list[Array]:
        if (mask & ~self._ended).any():
            if not mask.all():
                raise _cant_restart(self.env)
            return self.reset(**kwargs)
        # The environment resets in the next step.
        return self._shown

    @override
    def autoreset_mask(self) -> Mask | None:
        return self._resetting


def adapt(env: Any, codec: SpaceCodec, given: AutoresetMode | str | None = None) -> VectorAdapter:
    """Returns the adapter for a Gymnasium ``VectorEnv`` or an EnvPool environment.

    Args:
        env: the environment.
        codec: codec for the observations of one sub-environment.
        given: the autoreset mode stated by the user, or None.

    Raises:
        ValueError: if the environment steps only some of its sub-environments at once, or if its
            autoreset mode is unknown or contradicts ``given``.
    """
    _check_batch_size(env)
    if is_envpool(env):
        if given is not None:
            raise MODE_ENVPOOL.error("autoreset_mode", str(given))
        reader = array_reader(env, codec, None)
        return EnvPoolVector(env, codec, ModeCheck(env, reader, AutoresetMode.DISABLED))
    mode = autoreset_mode(env, given)
    check = ModeCheck(env, array_reader(env, codec, mode, int(env.num_envs)), mode)
    if mode is AutoresetMode.SAME_STEP:
        return SameStepVector(env, codec, check)
    if mode is AutoresetMode.DISABLED:
        wrapper = forgetful_wrapper(env)
        if wrapper is not None:
            warnings.warn(
                f"{wrapper} loses its state for all sub-environments when one of them is reset, "
                "which happens after each episode with AutoresetMode.DISABLED: its statistics "
                "will be wrong. Make the vector environment with another mode",
                stacklevel=2,
            )
        return VectorAdapter(env, codec, check)
    if is_restartable(env):
        return VectorAdapter(env, codec, check)
    return StepResetVector(env, codec, check)


def array_reader(
    env: Any, codec: SpaceCodec, mode: AutoresetMode | None, num_envs: int | None = None
) -> BatchReader:
    """Returns the reader of the observations of a vector environment, and of its infos.

    Args:
        env: the environment.
        codec: codec for the observations of one sub-environment.
        mode: the environment's autoreset mode; None if it has none.
        num_envs: number of rows; None if an info says it.
    """
    if not isinstance(codec, InfoCodec):
        return BatchReader(codec)
    names = {leaf.path[0] for leaf in codec.merge.layout.leaves}
    outside = [name for name in statistics_of(env) if name in names]
    return InfoReader(codec, codec.merge, num_envs, mode is AutoresetMode.SAME_STEP, outside)


def statistics_of(env: Any) -> Iterator[str]:
    """Yields the names under which the wrappers around ``env`` report statistics of episodes."""
    for wrapper in chain(env)[:-1]:
        name = statistics_key(wrapper)
        if type(wrapper).__name__ == "RecordEpisodeStatistics" and name is not None:
            yield name


def _check_batch_size(env: Any) -> None:
    """Rejects an environment that steps only some of its sub-environments at once."""
    pool = is_envpool(env)
    together = env.config["batch_size"] if pool else getattr(env.unwrapped, "batch_size", None)
    if isinstance(together, int) and together != env.num_envs:
        name = "EnvPool" if pool else type(env.unwrapped).__name__
        raise ValueError(
            f"{name} must step all of its environments at once, but it has batch_size={together} "
            f"and num_envs={env.num_envs}: make it without batch_size"
        )


def is_envpool(env: object) -> bool:
    """Returns True if ``env`` is an EnvPool environment."""
    return all(hasattr(env, name) for name in ("async_reset", "send", "recv", "config"))


def is_vector_env(env: object) -> bool:
    """Returns True if ``env`` steps several sub-environments at once."""
    return isinstance(env, VectorEnv) or is_envpool(env)


def _copied(value: Any) -> Any:
    """Returns a copy of arrays in C's order, in which they can be captured."""
    if isinstance(value, list):
        return [_copied(part) for part in value]
    return np.array(value, order="C") if isinstance(value, np.ndarray) else value


def _cant_restart(env: Any) -> ValueError:
    return ValueError(
        f"{type(env).__name__} resets its sub-environments by itself when their episodes end, "
        "and can't restart only some of them. For max_frames_per_traj and for reset(index), use "
        f"{RESTARTABLE}."
    )
