"""The collector that runs in the process of its caller."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule
from typing_extensions import override

from trawl.collectors.arguments import CollectorArguments, accepts, describe
from trawl.collectors.base import BaseCollector, View
from trawl.collectors.config import CollectorConfig, warn
from trawl.collectors.dispatch import (
    backend_arguments,
    chosen_backend,
    elsewhere,
)
from trawl.collectors.driver.delivery import BatchDelivery
from trawl.collectors.driver.parts import of_part, weak
from trawl.collectors.face import Parts
from trawl.collectors.inference_service import is_service, use_service
from trawl.collectors.local.env_loop import EnvLoop
from trawl.collectors.local.first_ready import (
    VERSION,
    check_pool_options,
    new_ready_rollout,
    pool_batching,
    pool_of,
)
from trawl.collectors.local.placing import Devices, compiler, resolve_devices
from trawl.collectors.local.state import LoopState
from trawl.collectors.local.turns import Turns
from trawl.collectors.local.weights import DirectWeights
from trawl.collectors.multi_config import MultiConfig
from trawl.collectors.options import check_names
from trawl.collectors.torchrl import give_specs, is_random
from trawl.collectors.watch.figures import RolloutFigures
from trawl.envs.base import TensorDictEnv
from trawl.envs.batches.serial import build_env, close_made, given_envs
from trawl.envs.build import check_rebuildable
from trawl.envs.frame_stack import as_frame_stack
from trawl.envs.seeding import check_seed
from trawl.envs.tensor_env import TensorEnv
from trawl.rollout.batches import BatchOptions
from trawl.rollout.loop import Rollout
from trawl.rollout.policy.kinds import on_device, resolve, tensors_of
from trawl.rollout.policy.policy import Policy
from trawl.rollout.policy.random_policy import RandomPolicy
from trawl.rollout.ready.loop import ReadyRollout
from trawl.rollout.ready.serving import ServingOptions
from trawl.rollout.restarts import EnvRestarts
from trawl.rollout.trial import kept_envs
from trawl.rollout.writers.fixed_layout import FixedLayoutWriter


class LoopParts(Parts):
    """The parts of a collector without workers.

    Attributes:
        loop: the environment, and the loop that steps it.
        turns: collects batches by the loop.
    """

    weights: DirectWeights
    figures: RolloutFigures
    state: LoopState
    loop: EnvLoop
    turns: Turns


@describe(CollectorArguments)
class Collector(BaseCollector):
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

    parts: LoopParts
    frames_per_batch: int
    env_device: torch.device | None
    policy_device: torch.device | None
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
        check_names(type(self).__name__, options, CollectorConfig, workers=MultiConfig)
        if is_service(policy):
            use_service(policy, 1, options)
            (options["policy_factory"],) = options["policy_factory"]
            policy = None
        config = CollectorConfig(**options)
        if policy is not None and config.policy_factory is not None:
            raise TypeError("policy and policy_factory can't both be given")
        super().__init__(config)
        self.parts.weights = DirectWeights(self)
        self.parts.outbox.hook = config.post_collect_hook
        devices = resolve_devices(config)
        # What the user made is left open, and as it was, if this constructor fails.
        before = kept_envs(given_envs(create_env_fn))
        make, register = partial(build_env, create_env_fn, config.create_env_kwargs), self._register
        self.parts.loop = EnvLoop(
            config, self.parts.budget, make, weak(register), self._counts_twice
        )
        try:
            if config.on_env_error == "restart":
                check_rebuildable(self.env, create_env_fn)
                told = partial(warn, category=RuntimeWarning)
                self.parts.loop.restarts = EnvRestarts(told, weak(self.parts.loop.remake))
            self._build(policy, devices)
            self.parts.weights.connect()
            self._apply_seed()
        except BaseException:
            self.shutdown(close_env=False, raise_on_error=False)
            with suppress(Exception):
                close_made(self.env, create_env_fn)
            before.restore()
            raise

    def _build(self, policy: Any, devices: Devices) -> None:
        config, loop = self.config, self.parts.loop
        loop.device = devices.env
        if devices.env is not None:
            loop.env = loop.env.to(devices.env)
        self.storing_device = devices.storing
        if devices.storing is None and isinstance(loop.env, TensorEnv):
            self.storing_device = loop.env.device  # all entries of its batches are there
        self.env_device = devices.env if devices.env is not None else loop.env.device
        self.policy_device = devices.policy
        self._build_policy(policy)
        loop.prepare()
        self.parts.outbox.delivery = delivery = BatchDelivery(
            config, self.storing_device, loop.truncated_keys, self._takes_first_ready
        )
        self.n_env = loop.num_envs
        if self._takes_first_ready:
            self.parts.budget.exact, each = True, config.frames_per_batch
        else:
            each = self.parts.budget.divide(loop.num_envs)
        self.frames_per_batch = each
        self.parts.turns = Turns(self, loop, each, self._takes_first_ready, overrides_rollout)
        loop.rollout = rollout = self._new_rollout(
            BatchOptions(
                steps=1 if config.adds_steps else each,
                limit=config.max_frames_per_traj or None,
                track_traj_ids=config.track_traj_ids,
                compact=config.compact_obs,
                recycle=config.use_buffers is not False,
                is_init=config.auto_register_policy_transforms,
                restarts=loop.restarts,
                frame_stack=as_frame_stack("frame_stack", config.frame_stack),
                normalize=config.normalize,
            )
        )
        writer = rollout.writer
        self.parts.state = LoopState(self, loop, weak(self._finish_interrupted))
        if isinstance(writer, FixedLayoutWriter):
            delivery.expect(writer.layout.leaves)
        self.parts.figures.rollout, self.parts.figures.restarts = rollout, loop.restarts
        self.parts.figures.connect(self.parts.timeline.tracer)
        if config.storage_ndim > 1 and not overrides_rollout(self):
            delivery.check_storage(writer.fake())
        for doubt in writer.warnings:
            warn(doubt)
        self._check_env()

    def _check_env(self) -> None:
        """Warns of options that have no effect, and refuses those that can't have any."""
        config, env = self.config, self.parts.loop.env
        parts = env.parts if isinstance(env, TensorDictEnv) else ()
        grouped = any(getattr(part, "groups", 1) > 1 for part in parts)
        if grouped and not self.parts.loop.rollout.writer.in_groups:
            warn(
                "groups of a ParallelEnv have no effect here: they need a collector whose only "
                "environment is the ParallelEnv, and a policy that writes tensors"
            )
        if config.adds_steps and env.batch_size and not hasattr(config.replay_buffer, "extend"):
            raise TypeError(
                "replay_buffer must have a method extend() to take the steps of a batch of "
                f"environments, but {type(config.replay_buffer).__name__} has none"
            )
        if config.set_truncated and not self.parts.loop.truncated_keys:
            raise RuntimeError(
                "set_truncated=True needs a 'truncated' flag, but the environment has only "
                f"{env.done_keys}"
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
        policy = give_specs(policy, self.env)
        self._register(policy)
        self._register(self.env)
        trusted = config.trust_policy
        if trusted is None:
            trusted = isinstance(policy, CudaGraphModule) or is_random(policy)
        self.trust_policy = trusted
        self.parts.weights.source = policy
        moved = on_device(policy, self.policy_device)
        if self.policy_device is not None and not trusted and not tensors_of(policy):
            warn(f"policy has no parameters to move to policy_device {self.policy_device}")
        self.parts.weights.copied = moved is not policy
        self.policy = self.parts.loop.module = moved
        transform = compiler(config.compile_policy, config.cudagraph_policy, self.policy_device)
        self.parts.loop.policy = Policy(
            resolve(moved, self.env, trusted, as_frame_stack("frame_stack", config.frame_stack)),
            config.exploration_type,
            self.policy_device,
            transform,
        )

    def _new_rollout(self, options: BatchOptions) -> Rollout:
        """Returns the inner loop of this collector."""
        pool = pool_of(self.parts.loop.env)
        if pool is not None:
            check_pool_options(self.config, self.parts.loop.env, pool)
            return self._new_ready_rollout(options, ServingOptions(pool_batching(pool), VERSION))
        return Rollout(
            self.parts.loop.env, self.parts.loop.policy, options, self.config.exploration_type
        )

    def _new_ready_rollout(self, options: BatchOptions, serving: ServingOptions) -> ReadyRollout:
        serving = replace(serving, ends_idle=self.config.reset_at_each_iter)
        if self.parts.weights.tracker is None:
            serving = replace(serving, version_key=None)
        return new_ready_rollout(
            self.parts.loop.env,
            self.parts.loop.policy,
            options,
            self.config.exploration_type,
            serving,
            weak(self._version),
        )

    @property
    def _takes_first_ready(self) -> bool:
        """True if batches hold the frames of whichever environments are ready."""
        return pool_of(self.parts.loop.env) is not None

    def _version(self) -> int:
        return int(self.parts.weights.version or 0)

    @override
    def _new_parts(self) -> LoopParts:
        return LoopParts()

    @override
    def _new_figures(self) -> RolloutFigures:
        return RolloutFigures(self.config, self.parts.budget, self.parts.watch)

    @property
    def env(self) -> Any:
        """The environment."""
        return self.parts.loop.env

    @env.setter
    def env(self, env: Any) -> None:
        # The constructor replaces what is set before it.
        if "parts" in vars(self):
            self.parts.loop.env = env

    def number_environments(self, first: int) -> int:
        """Gives the environments the indices with which ``reset_kwargs`` is called.

        Args:
            first: index of the first environment. If it changes, the environments are reset.

        Returns:
            The number of environments.
        """
        with self.parts.background.held():
            self.parts.loop.number(first)
        return self.parts.loop.num_envs

    def _register(self, target: Any) -> None:
        """Tells a policy or an environment of this collector, if it wants to know."""
        register = getattr(target, "register_collector", None)
        if callable(register):
            register(self)

    # --- batches

    def rollout(self) -> TensorDictBase:
        """Collects a batch, without processing or counting it.

        Iteration, background collection and workers get their batches from this method, so a
        subclass can override it to change how a batch is collected. An override must return a
        batch whose last dimension is time; this dimension may have any length. During iteration
        with ``extend_buffer=False``, this method adds each step to the replay buffer and returns
        None.
        """
        self.parts.lifetime.check_open("rollout()")
        with self.parts.background.held():
            if not self.parts.turns.active:
                self._finish_interrupted()
            return self.parts.turns.rollout()

    @property
    def pre_collect_hook(self) -> Callable[[], Any] | None:
        """Function that is called before each batch."""
        return self.parts.loop.hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        # The constructor replaces what is set before it.
        if "parts" in vars(self):
            self.parts.loop.hook = hook

    @override
    def _collect(self) -> Any:
        return self.parts.turns.collect()

    @override
    def _is_under_way(self) -> bool:
        return self.parts.loop.rollout.paused

    # --- control, state

    env_state_methods = of_part("state", LoopState.env_state_methods)
    state_dict = of_part("state", LoopState.state_dict)
    load_state_dict = of_part("state", LoopState.load_state_dict)

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Begins new trajectories.

        Args:
            index: environments of the batch to reset: any index into an array of shape
                ``env.batch_size``. None resets all environments.
            **kwargs: arguments of the environment's reset.
        """
        self.parts.lifetime.check_open("reset()")
        with self.parts.background.held():
            self._finish_interrupted()
            self.parts.loop.restart(
                None if index is None else self.parts.loop.mask(index), **kwargs
            )

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
        self.parts.lifetime.check_open("set_seed()")
        with self.parts.background.held():
            self._finish_interrupted()
            return self.parts.loop.set_seed(seed, static_seed)

    def fake_tensordict(self) -> TensorDictBase:
        """Returns a batch of zeros with the layout of a delivered batch."""
        batch = self.parts.loop.rollout.writer.fake()
        self.parts.loop.stamp(batch, self.parts.weights.version)
        fake: TensorDictBase = self.parts.outbox.fake(batch)
        return fake

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

    def _close(self, close_env: bool) -> None:
        try:
            if "weights" in vars(self.parts):
                self.parts.weights.close()
        finally:
            if "loop" in vars(self.parts):
                self.parts.loop.close(close_env)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(env={self.env!r}, policy={type(self.policy).__name__}, "
            f"frames_per_batch={self.requested_frames_per_batch}, "
            f"total_frames={self.config.total_frames})"
        )


def overrides_rollout(collector: Any) -> bool:
    """Returns True if a collector has a ``rollout()`` of its own."""
    return getattr(collector.rollout, "__func__", None) is not Collector.rollout
