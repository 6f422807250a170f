"""The collector that runs in the process of its caller."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule
from typing_extensions import override

from trawl.collectors.arguments import CollectorArguments, accepts, describe
from trawl.collectors.base import View
from trawl.collectors.config import CollectorConfig, option_names, warn
from trawl.collectors.delivery import BatchDelivery
from trawl.collectors.dispatch import (
    backend_arguments,
    chosen_backend,
    elsewhere,
)
from trawl.collectors.inference_service import is_service, use_service
from trawl.collectors.multi_config import MultiConfig
from trawl.collectors.normalizing import normalize_options
from trawl.collectors.options import unknown_options
from trawl.collectors.placing import (
    compiler,
    on_device,
    resolve_devices,
    tensors_of,
)
from trawl.collectors.resuming import ResumableCollector
from trawl.collectors.rollouts import overrides_rollout
from trawl.collectors.torchrl import give_specs, is_random, names
from trawl.collectors.weak import weak
from trawl.envs.base import TensorDictEnv
from trawl.envs.build import check_rebuildable
from trawl.envs.frame_stack import as_frame_stack
from trawl.envs.reset_kwargs import with_reset_kwargs
from trawl.envs.seeding import check_seed, derive, stream_seed
from trawl.envs.serial import build_env, close_made, given_envs
from trawl.envs.tensor_env import TensorEnv
from trawl.keys import STEP_COUNT, Key, as_key
from trawl.paths import get_path
from trawl.rollout.batch_writer import BatchOptions
from trawl.rollout.env_restarts import EnvRestarts
from trawl.rollout.fixed_layout_writer import FixedLayoutWriter
from trawl.rollout.policy import Policy
from trawl.rollout.random_policy import RandomPolicy
from trawl.rollout.resolving import resolve
from trawl.rollout.rng import RandomStream
from trawl.rollout.trial import kept_envs


@describe(CollectorArguments)
class Collector(ResumableCollector):
    """Collects experience in this process.

    A batch is a TensorDict of shape ``(frames_per_batch,)``. If the environment has a batch size
    ``B``, the shape is ``(*B, frames_per_batch / prod(B))``. The last dimension is time. For each
    frame, a batch holds the observations, the entries that the policy wrote, and ``done``,
    ``terminated`` and ``truncated`` (bool). Under ``"next"`` it holds the observations,
    ``reward`` (float32) and flags after the step. ``("collector", "traj_ids")`` (int64) holds the
    id of each frame's trajectory.

    Batches belong to the caller: a batch stays valid as long as anything refers to it. Afterwards,
    its memory is reused.

    Args:
        create_env_fn: a Gymnasium id; a ``gymnasium.Env``, ``gymnasium.vector.VectorEnv``,
            EnvPool, Trawl or TorchRL environment; a function that makes one; or a list of
            these, stepped as one batch.
        policy: a TensorDict module; an ``nn.Module`` or a function whose parameters are named
            after observations; or None for random actions.
        **options: options of the collector, which
            :class:`~trawl.collectors.config.CollectorConfig` documents.

    Raises:
        TypeError: if an argument is unknown or has the wrong type.
        ValueError: if a value is out of range, or arguments contradict each other.
        KeyError: if the policy writes no action.

    Examples:
        >>> from trawl.collectors import Collector
        >>> with Collector("CartPole-v1", frames_per_batch=50, total_frames=200) as collector:
        ...     for batch in collector:
        ...         reward = batch["next", "reward"]
        >>> reward.shape
        torch.Size([50, 1])
    """

    env_device: torch.device | None
    storing_device: torch.device | None
    trust_policy: bool
    # True if episodes can be limited even if the environment counts its steps itself.
    _counts_twice = False

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **options: Any) -> Any:
            """Returns a collector in this process, or one with workers if options ask for them."""
            made = elsewhere(args, options) if cls is Collector else None
            return super().__new__(cls) if made is None else made

    @accepts(CollectorArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        if more:
            raise TypeError(
                f"{type(self).__name__} takes at most 2 positional arguments (create_env_fn, "
                f"policy), but got {2 + len(more)}: pass the others by name"
            )
        chosen_backend(backend_arguments(options, type(self) is Collector))
        unknown = sorted(set(options) - set(option_names()))
        if unknown:
            workers = {one.name for one in fields(MultiConfig)} & set(unknown)
            if workers:
                raise TypeError(
                    f"{type(self).__name__} got unknown arguments: {', '.join(unknown)}. Only "
                    "collectors with workers, such as MultiSyncCollector, have "
                    f"{', '.join(sorted(workers))}"
                )
            raise unknown_options(type(self).__name__, unknown, option_names())
        if "frames_per_batch" not in options:
            raise TypeError(f"{type(self).__name__} needs the argument frames_per_batch")
        if is_service(policy):
            use_service(policy, 1, options)
            (options["policy_factory"],) = options["policy_factory"]
            policy = None
        config = CollectorConfig(**options)
        if policy is not None and config.policy_factory is not None:
            raise TypeError("policy and policy_factory can't both be given")
        super().__init__(config)
        devices = resolve_devices(config)
        self._make_env = partial(build_env, create_env_fn, config.create_env_kwargs)
        # The seed, whether it is static, and the number of rebuilds before it was set.
        self._seed: tuple[int, bool, int] | None = None
        self._restarts: EnvRestarts | None = None
        # Index of the first environment among those of all workers.
        self._first_env = 0
        self._next_episodes = np.zeros(1, np.int64)
        # What the user made is left open, and as it was, if this constructor fails.
        before = kept_envs(given_envs(create_env_fn))
        self.env = self._make_env()
        try:
            if config.on_env_error == "restart":
                check_rebuildable(self.env, create_env_fn)
                self._restarts = EnvRestarts(
                    partial(warn, category=RuntimeWarning), weak(self._remake_env)
                )
            self._build(policy, devices.policy, devices.env, devices.storing)
            self._connect_schemes()
        except BaseException:
            self.shutdown(close_env=False, raise_on_error=False)
            with suppress(Exception):
                close_made(self.env, create_env_fn)
            before.restore()
            raise

    def _build(
        self,
        policy: Any,
        policy_device: torch.device | None,
        env_device: torch.device | None,
        storing_device: torch.device | None,
    ) -> None:
        config = self.config
        if env_device is not None:
            self.env = self.env.to(env_device)
        if storing_device is None and isinstance(self.env, TensorEnv):
            storing_device = self.env.device  # all entries of its batches are there
        self.env_device = env_device if env_device is not None else self.env.device
        self.policy_device, self.storing_device = policy_device, storing_device
        self._build_policy(policy)
        self._next_episodes = np.zeros(max(1, self.env.batch_size.numel()), np.int64)
        self._give_reset_kwargs()
        self._add_transforms()
        self._delivery = BatchDelivery(
            config, storing_device, self._truncated_keys(), self._takes_first_ready
        )
        num_envs = max(1, self.env.batch_size.numel())
        each = self._set_frames_per_batch(num_envs)
        self.frames_per_batch = each
        self.n_env = num_envs
        self._rollout = self._new_rollout(
            BatchOptions(
                steps=1 if config.adds_steps else each,
                limit=config.max_frames_per_traj or None,
                track_traj_ids=config.track_traj_ids,
                compact=config.compact_obs,
                recycle=config.use_buffers is not False,
                is_init=config.auto_register_policy_transforms,
                restarts=self._restarts,
                frame_stack=as_frame_stack("frame_stack", config.frame_stack),
                normalize=normalize_options(config),
            )
        )
        writer = self._rollout.writer
        self.normalization = writer.normalization
        if isinstance(writer, FixedLayoutWriter):
            self._delivery.expect(writer.layout.leaves)
        self._connect_tracer()
        if config.storage_ndim > 1 and not overrides_rollout(self):
            self._delivery.check_storage(self._rollout.writer.fake())
        for doubt in self._rollout.writer.warnings:
            warn(doubt)
        parts = self.env.parts if isinstance(self.env, TensorDictEnv) else ()
        grouped = any(getattr(part, "groups", 1) > 1 for part in parts)
        if grouped and not self._rollout.writer.in_groups:
            warn(
                "groups of a ParallelEnv have no effect here: they need a collector whose only "
                "environment is the ParallelEnv, and a policy that writes tensors"
            )
        if (
            config.adds_steps
            and self.env.batch_size
            and not hasattr(config.replay_buffer, "extend")
        ):
            raise TypeError(
                "replay_buffer must have a method extend() to take the steps of a batch of "
                f"environments, but {type(config.replay_buffer).__name__} has none"
            )
        if config.set_truncated and not self._truncated_keys():
            raise RuntimeError(
                "set_truncated=True needs a 'truncated' flag, but the environment has only "
                f"{self.env.done_keys}"
            )

    # --- construction

    def _build_policy(self, policy: Any) -> None:
        config = self.config
        if policy is None:
            factory = config.policy_factory
            policy = RandomPolicy(self.env.full_action_spec) if factory is None else factory()
            if policy is None:
                raise TypeError(
                    f"policy_factory must return a policy, but {factory!r} returned None"
                )
        _register(policy, self)
        _register(self.env, self)
        give_specs(policy, self.env)
        trusted = config.trust_policy
        if trusted is None:
            trusted = isinstance(policy, CudaGraphModule) or is_random(policy)
        self.trust_policy = trusted
        self._source = policy
        moved = on_device(policy, self.policy_device)
        if self.policy_device is not None and not trusted and not tensors_of(policy):
            warn(f"policy has no parameters to move to policy_device {self.policy_device}")
        self._copied = moved is not policy
        self.policy = moved
        transform = compiler(config.compile_policy, config.cudagraph_policy, self.policy_device)
        self._resolved = Policy(
            resolve(moved, self.env, trusted, as_frame_stack("frame_stack", config.frame_stack)),
            config.exploration_type,
            self.policy_device,
            transform,
        )

    def _add_transforms(self) -> None:
        """Makes TorchRL's environments count steps and mark starts, by transforms around them."""
        limit = self.config.max_frames_per_traj
        if (
            limit
            and not self._counts_twice
            and STEP_COUNT[0] in names(self.env.full_observation_spec)
        ):
            raise ValueError(
                f"max_frames_per_traj={limit} counts steps in the entry 'step_count', which the "
                "environment already has: limit the episodes in the environment instead"
            )
        if isinstance(self.env, TensorDictEnv) or not hasattr(self.env, "append_transform"):
            return
        marks = self.config.auto_register_policy_transforms
        if marks is None:
            marks = self._resolved.reads_is_init
        if limit or marks:
            from trawl.collectors.torchrl_transforms import add_transforms

            self.env = add_transforms(self.env, limit or None, marks, self.policy)

    def _remake_env(self) -> Any:
        """Replaces a failed environment that isn't Trawl's own, and returns the new environment."""
        assert self._restarts is not None
        with suppress(Exception):
            self.env.close(raise_if_closed=False)
        self.env = self._make_env()
        if self.env_device is not None:
            self.env = self.env.to(self.env_device)
        _register(self.env, self)
        self._give_reset_kwargs()
        self._add_transforms()
        if self._seed is not None:
            seed, static, before = self._seed
            again = derive(seed, "rebuild", self._restarts.count + 1 - before)
            self.env.set_seed(again, static_seed=static)
        return self.env

    def _give_reset_kwargs(self) -> None:
        given = self.config.reset_kwargs
        if given is not None:
            self.env = with_reset_kwargs(self.env, given, self._first_env, self._next_episodes)

    def number_environments(self, first: int) -> int:
        """Gives the environments the indices with which ``reset_kwargs`` is called.

        Args:
            first: index of the first environment. If it changes, the environments are reset.

        Returns:
            The number of environments.
        """
        with self._held():
            if first != self._first_env:
                self._first_env = first
                self._give_reset_kwargs()
                self._load_begun(np.zeros_like(self._next_episodes))
                self._restart()
        return len(self._next_episodes)

    def _truncated_keys(self) -> list[Key]:
        return [key for key in map(as_key, self.env.done_keys) if key[-1] == "truncated"]

    # --- control

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Begins new trajectories.

        Args:
            index: environments of the batch to reset: any index into an array of shape
                ``env.batch_size``. None resets all environments.
            **kwargs: arguments of the environment's reset.
        """
        self._check_open("reset()")
        with self._held():
            self._finish_interrupted()
            self._restart(None if index is None else self._mask(index), **kwargs)

    def _mask(self, index: Any) -> NDArray[np.bool_]:
        mask = np.zeros(tuple(self.env.batch_size) or (1,), dtype=np.bool_)
        mask[index] = True
        return mask.reshape(-1)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the environment, the policy and random actions, and resets the environment.

        Two collectors with the same arguments and the same seed collect equal batches. A collector
        draws from its own random stream, so random numbers drawn elsewhere don't affect it. The
        exception is background collection (:meth:`start`): threads share the generators, so the
        policy's random numbers depend on what other threads draw.

        Args:
            seed: a non-negative integer.
            static_seed: True to give all environments of a batch the same seed.

        Returns:
            A seed for a further environment (equal to ``seed`` if ``static_seed`` is True).

        Raises:
            TypeError: if the seed is not an integer.
            ValueError: if the seed is negative.
        """
        seed = check_seed(seed)
        self._check_open("set_seed()")
        with self._held():
            self._finish_interrupted()
            following = self.env.set_seed(seed, static_seed=static_seed)
            rebuilds = 0 if self._restarts is None else self._restarts.count
            self._seed = (seed, static_seed, rebuilds)
            self._load_begun(np.zeros_like(self._next_episodes))
            self._rollout.stream = RandomStream(stream_seed(seed), self._rollout.generator_device)
            self._restart()
        return int(following)

    def fake_tensordict(self) -> TensorDictBase:
        """Returns a batch of zeros with the layout of a delivered batch."""
        batch = self._rollout.writer.fake()
        self._stamp(batch, None if self._version is None else self._version.version)
        fake: TensorDictBase = self._fake(batch)
        return fake

    def getattr_policy(self, attr: str) -> Any:
        """Returns the attribute of the policy at path ``attr``."""
        return get_path(self.policy, attr)

    def getattr_env(self, attr: str) -> Any:
        """Returns the attribute of the environment at path ``attr``."""
        with self._held():
            return get_path(self.env, attr)

    @override
    def stats(self, workers: View = "aggregate") -> dict[str, Any]:
        """Returns statistics of the collector as a flat dict.

        Besides the statistics of every collector, the dict contains:

        - ``env_path``, which is ``"array"`` on the fast path, and ``policy_path``, which is
          ``"direct"`` on the fast path. For a slower path, ``env_path_reason`` or
          ``policy_path_reason`` has the reason.
        - For policies that draw actions from a distribution, ``distribution_path``, which is
          ``"recorded"`` if samples are drawn without distribution objects, and else ``"objects"``.
          In that case, ``distribution_path_reason`` has the reason.
        - ``env_time_share``, the environment's share of the loop's time.
        - On the array path, ``batches_held``, the number of batches that are still referred to,
          and ``memory_bytes``, the memory of these batches and of spare blocks.
        - With ``on_env_error="restart"``, ``env_restarts``, the number of times that an
          environment was rebuilt. If a process of a :class:`~trawl.envs.ParallelEnv` dies, each of
          its environments is rebuilt and counted.

        Args:
            workers: ``"aggregate"``, ``"both"``, or ``"per_worker"``, which returns an empty dict.

        Raises:
            ValueError: if ``workers`` has another value.
        """
        return super().stats(workers)

    @override
    def _aggregate(self) -> dict[str, Any]:
        facts = super()._aggregate()
        if self._restarts is not None:
            facts["env_restarts"] = self._restarts.count
        facts.update(self._rollout.writer.describe())
        facts["env_time_share"] = self._rollout.times.env_share
        return facts

    def _close(self, close_env: bool) -> None:
        try:
            self._close_updater()
        finally:
            own = self.config.reset_kwargs is not None and isinstance(self.env, TensorDictEnv)
            if own and not close_env:
                self.env.set_reset_kwargs(None, 0, self._next_episodes)
            if close_env and not getattr(self.env, "is_closed", False):
                self.env.close(raise_if_closed=False)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(env={self.env!r}, policy={type(self.policy).__name__}, "
            f"frames_per_batch={self.requested_frames_per_batch}, "
            f"total_frames={self.config.total_frames})"
        )


def _register(target: Any, collector: Collector) -> None:
    register = getattr(target, "register_collector", None)
    if callable(register):
        register(collector)
