"""The collector that runs in the process of its caller."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule
from typing_extensions import override

from trawl.collectors.arguments import CollectorArguments, accepts, describe
from trawl.collectors.base import BaseCollector, module_of
from trawl.collectors.config import CollectorConfig, option_names, resolve_devices, warn
from trawl.collectors.delivery import Delivery, count_frames, experience
from trawl.collectors.dispatch import (
    backend_arguments,
    chosen_backend,
    elsewhere,
)
from trawl.collectors.local_models import LocalModels
from trawl.collectors.options import did_you_mean
from trawl.collectors.placing import compiler, on_device, tensors_of
from trawl.collectors.policy_version import stamp
from trawl.collectors.torchrl import add_transforms, give_specs, is_random, names
from trawl.collectors.weak import weak
from trawl.collectors.weights import POLICY, WorkerIds
from trawl.envs.base import TensorDictEnv
from trawl.envs.build import check_rebuildable
from trawl.envs.seeding import check_seed, derive
from trawl.envs.serial import build_env
from trawl.paths import get_path
from trawl.rollout.batch_writer import BatchOptions
from trawl.rollout.block import Block
from trawl.rollout.loop import Rollout
from trawl.rollout.policy import Policy, resolve
from trawl.rollout.random_policy import RandomPolicy
from trawl.rollout.restarts import Restarts
from trawl.rollout.rng import RandomStream
from trawl.tensordicts import drop_private
from trawl.weight_update.store import Receiver, WeightUpdate


@describe(CollectorArguments)
class Collector(BaseCollector):
    """Collects experience in this process.

    A batch is a TensorDict of shape ``(frames_per_batch,)``. With a batch of environments of size
    ``B``, its shape is ``(*B, frames_per_batch / prod(B))``. The last dimension is time. For each
    frame, a batch holds the observations, the entries that the policy wrote, and ``done``,
    ``terminated`` and ``truncated`` (bool). Under ``"next"`` it holds the observations,
    ``reward`` (float32) and flags after the step. ``("collector", "traj_ids")`` (int64) tells
    trajectories apart.

    Batches belong to the caller: a batch stays valid as long as anything refers to it. After
    that, its memory is used again.

    Args:
        create_env_fn: a Gymnasium id; a ``gymnasium.Env``, ``gymnasium.vector.VectorEnv``,
            EnvPool, Trawl or TorchRL environment; a function that makes one; or a list of
            these, stepped as one batch.
        policy: a TensorDict module; an ``nn.Module`` or a function whose parameters are named
            after observations; or None for random actions.
        **options: the attributes of :class:`~trawl.collectors.config.CollectorConfig`.

    Raises:
        TypeError: for an unknown argument, or one of a wrong type.
        ValueError: for a value that is out of range, or arguments that contradict each other.
        KeyError: if the policy writes no action.

    Example:
        >>> from trawl.collectors import Collector
        >>> with Collector("CartPole-v1", frames_per_batch=50, total_frames=200) as collector:
        ...     for batch in collector:
        ...         reward = batch["next", "reward"]
        >>> reward.shape
        torch.Size([50, 1])
    """

    frames_per_batch: int
    env_device: torch.device | None
    policy_device: torch.device | None
    storing_device: torch.device | None
    trust_policy: bool

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **options: Any) -> Any:
            """Returns a collector in this process, or the one that ``backend`` asks for."""
            made = elsewhere(args, options) if cls is Collector else None
            return super().__new__(cls) if made is None else made

    @accepts(CollectorArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        if more:
            raise TypeError(
                f"{type(self).__name__} takes at most 2 positional arguments (create_env_fn, "
                f"policy), but got {2 + len(more)}; give the others by name"
            )
        chosen_backend(backend_arguments(options, type(self) is Collector))
        unknown = sorted(set(options) - set(option_names()))
        if unknown:
            raise TypeError(
                f"{type(self).__name__} got unknown arguments: {', '.join(unknown)}"
                f"{did_you_mean(unknown, option_names())}"
            )
        if "frames_per_batch" not in options:
            raise TypeError(f"{type(self).__name__} needs the argument frames_per_batch")
        config = CollectorConfig(**options)
        if policy is not None and config.policy_factory is not None:
            raise TypeError("policy and policy_factory can't both be given")
        super().__init__(config)
        devices = resolve_devices(config)
        self._make_env = partial(build_env, create_env_fn, config.create_env_kwargs)
        # The seed, whether it is static, and the number of rebuilds before it was set.
        self._seed: tuple[int, bool, int] | None = None
        self._in_turn = False
        # What the driver of a worker decided for a batch: random actions, and when to stop.
        self._ordered: tuple[bool, Callable[[], bool] | None] | None = None
        # Makes the context of writing a batch to the replay buffer, from its number of frames.
        self._writing: Callable[[int], AbstractContextManager[None]] = _written_by_itself
        self._restarts: Restarts | None = None
        self._models = LocalModels(weak(self.get_model))
        self.env = self._make_env()
        try:
            if config.on_env_error == "restart":
                check_rebuildable(self.env, create_env_fn)
                self._restarts = Restarts(
                    partial(warn, category=RuntimeWarning), weak(self._remake_env)
                )
            self._build(policy, devices.policy, devices.env, devices.storing)
            for model_id, scheme in (config.weight_sync_schemes or {}).items():
                if not scheme.initialized_on_sender:
                    scheme.init_on_sender(model_id=model_id, context=self)
                    scheme.on_send = weak(self._update_model)
                self._weight_sync_schemes[model_id] = scheme
            self._init_weights()
        except BaseException:
            self.shutdown(raise_on_error=False)
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
        self.env_device = env_device if env_device is not None else self.env.device
        self.policy_device, self.storing_device = policy_device, storing_device
        self._build_policy(policy)
        self._add_transforms()
        self._delivery = Delivery(config, storing_device, self._truncated_keys())
        num_envs = max(1, self.env.batch_size.numel())
        each = self._set_frames_per_batch(num_envs)
        self.frames_per_batch = each
        self.n_env = num_envs
        self._at_start = True
        self._rollout = Rollout(
            self.env,
            self._resolved,
            BatchOptions(
                steps=1 if self._adds_steps else each,
                limit=config.max_frames_per_traj or None,
                track_traj_ids=config.track_traj_ids,
                compact=config.compact_obs,
                recycle=config.use_buffers is not False,
                is_init=config.auto_register_policy_transforms,
                restarts=self._restarts,
            ),
            config.exploration_type,
        )
        for doubt in self._rollout.writer.warnings:
            warn(doubt)
        if self._adds_steps and num_envs > 1 and not hasattr(config.replay_buffer, "extend"):
            raise TypeError(
                "replay_buffer must have a method extend() to take the steps of several "
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
        _tell(policy, self)
        _tell(self.env, self)
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
            resolve(moved, self.env, trusted),
            config.exploration_type,
            self.policy_device,
            transform,
        )

    def _add_transforms(self) -> None:
        """Adds the transforms by which TorchRL's environments count steps and mark starts."""
        limit = self.config.max_frames_per_traj
        if limit and "step_count" in names(self.env.full_observation_spec):
            raise ValueError(
                f"max_frames_per_traj={limit} counts steps under 'step_count', which the "
                "environment has already; limit the episodes there"
            )
        if isinstance(self.env, TensorDictEnv) or not hasattr(self.env, "append_transform"):
            return
        marks = self.config.auto_register_policy_transforms
        if marks is None:
            marks = self._resolved.reads_is_init
        if limit or marks:
            self.env = add_transforms(self.env, limit or None, marks, self.policy)

    def _remake_env(self) -> Any:
        """Replaces a failed environment that isn't Trawl's own by a new one, and returns that."""
        assert self._restarts is not None
        with suppress(Exception):
            self.env.close(raise_if_closed=False)
        self.env = self._make_env()
        if self.env_device is not None:
            self.env = self.env.to(self.env_device)
        _tell(self.env, self)
        self._add_transforms()
        if self._seed is not None:
            seed, static, before = self._seed
            again = derive(seed, "rebuild", self._restarts.count + 1 - before)
            self.env.set_seed(again, static_seed=static)
        return self.env

    @property
    def _adds_steps(self) -> bool:
        return self.config.replay_buffer is not None and not self.config.extend_buffer

    def _truncated_keys(self) -> list[Any]:
        return [
            key
            for key in self.env.done_keys
            if (key if isinstance(key, str) else key[-1]) == "truncated"
        ]

    # --- collecting

    def rollout(self) -> TensorDictBase:
        """Collects a batch, without processing or counting it.

        Iteration, background collection and workers get their batches from this method, so a
        subclass can override it to change how a batch is collected. The override returns the
        batch; its last dimension is time, and may have any length. With ``extend_buffer=False``
        iteration adds each step to the replay buffer within this call, which then returns None.
        """
        self._check_open("rollout()")
        with self._held():
            self._prepare()
            if self._in_turn and self._adds_steps:
                return self._collect_steps()
            batch = self._run()
            if self._whole is not None and not self._in_turn:
                self._whole.miss(batch)
            return batch

    def _turn(self) -> TensorDictBase | None:
        """Calls :meth:`rollout` for a batch to deliver.

        Returns:
            The batch; None if its steps were added to the replay buffer one by one.

        Raises:
            TypeError: if an override of :meth:`rollout` does not return a batch.
        """
        self._in_turn = True
        # Rows stay empty only if a batch of the usual length is interrupted.
        self._rollout.filled = self.frames_per_batch
        try:
            batch: Any = self.rollout()
        finally:
            self._in_turn = False
        if batch is None and self._adds_steps:
            return None
        if not isinstance(batch, TensorDictBase) or not batch.ndim:
            raise TypeError(
                f"{type(self).__name__}.rollout() must return the batch that it collected, a "
                f"TensorDict whose last dimension is time, but it returned {batch!r}"
            )
        if batch.shape[-1] != self.frames_per_batch:
            self._rollout.filled = batch.shape[-1]
        return batch

    def _prepare(self) -> None:
        """Takes new weights, calls the hook and resets, as options ask for before a batch."""
        self._take_weights()
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        if self.config.reset_at_each_iter and not self._at_start:
            self._restart()

    def _restart(self, mask: NDArray[np.bool_] | None = None, **kwargs: Any) -> None:
        self._rollout.reset(mask, **kwargs)
        self._at_start = mask is None

    def _run(self) -> TensorDictBase:
        # The batch has the version of its start, even if another thread advances it meanwhile.
        version = None if self._version is None else self._version.version
        self._at_start = False
        random, stopped = self._ordered or (self._is_random(), self._stopped())
        batch = self._rollout.run(random, stopped, not self.is_running())
        self._stamp(batch, version)
        return batch

    def _run_into(
        self, block: Block | None, random: bool, stopped: Callable[[], bool] | None
    ) -> TensorDictBase | None:
        """Collects a batch for a worker, which counts it and passes it on.

        Returns:
            None if the batch was written into ``block``, else the batch.
        """
        if overrides_rollout(self):
            self._ordered = random, stopped
            try:
                return self._turn()
            finally:
                self._ordered = None
        self._prepare()
        self._at_start = False
        if block is None:
            return self._rollout.run(random, stopped)
        return self._rollout.run_into(block, random, stopped)

    def _stamp(self, batch: TensorDictBase, version: int | str | None) -> None:
        if version is not None:
            stamp(batch, version, after=not self.config.compact_obs)

    def _is_random(self) -> bool:
        first = self.config.init_random_frames
        if not first:
            return False
        buffer = self.config.replay_buffer
        # The buffer may hold frames of other writers, and may count rows of several environments.
        seen = max(self._frames, getattr(buffer, "write_count", 0))
        return bool(seen < first)

    def _stopped(self) -> Callable[[], bool] | None:
        stop = self.config.interruptor
        if stop is None:
            return None
        return stop if callable(stop) else stop.collection_stopped

    def _collect(self) -> Any:
        batch = self._turn()
        if batch is None:
            return None
        filled = self._rollout.filled
        delivered = count_frames(batch, filled)
        if self._whole is not None:
            self._whole.add([(0, math.inf, self._delivery.frames(batch, filled))])
            self._frames += delivered
            return None
        batch = self._delivery.deliver(batch, filled)
        if self.config.replay_buffer is not None:
            with self._writing(delivered):
                self._write(batch)
        self._frames += delivered
        self._batches += 1
        self._record(batch)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return None if self.config.replay_buffer is not None else batch

    def _write(self, batch: TensorDictBase) -> None:
        """Writes a batch into the replay buffer, frame by frame if it has no ``extend()``."""
        buffer = self.config.replay_buffer
        if hasattr(buffer, "extend"):
            buffer.extend(batch)
        else:
            for frame in batch:
                buffer.add(frame)

    @override
    def _note_whole(self, batch: Any) -> None:
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)

    def _collect_steps(self) -> Any:
        """Adds single steps to the buffer, until the batch or the budget ends, or it is stopped."""
        stopped = self._stopped() or (lambda: False)
        last = False
        for t in range(self.frames_per_batch):
            step = self._run()
            frames = count_frames(step, self._rollout.filled)
            last = t + 1 == self.frames_per_batch or not self._has_budget(frames) or stopped()
            if last and self.config.set_truncated:
                self._delivery.truncate_last(step, 1)
            frame = drop_private(experience(self._delivery.stored(step)))
            # There is no frame if all environments spent the step on a reset, or failed.
            if self.env.batch_size:
                if frames:
                    self.config.replay_buffer.extend(frame)
            elif frames:
                frame = frame[0]
                self.config.replay_buffer.add(frame)
            self._frames += frames
            if frames:
                self._record(frame)
            if self.post_collect_hook is not None:
                self.post_collect_hook(frame)
            if last:
                break
        self._batches += 1

    # --- control

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Begins new trajectories.

        Args:
            index: environments of the batch to reset (anything that indexes ``env.batch_size``);
                None for all.
            **kwargs: arguments of the environment's reset.
        """
        self._check_open("reset()")
        with self._held():
            self._restart(None if index is None else self._mask(index), **kwargs)

    def _mask(self, index: Any) -> NDArray[np.bool_]:
        mask = np.zeros(tuple(self.env.batch_size) or (1,), dtype=np.bool_)
        mask[index] = True
        return mask.reshape(-1)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds environment, policy sampling and random actions, and resets.

        Two collectors with the same arguments give equal batches from the same seed. A collector
        draws from its own random stream, so random numbers drawn elsewhere change nothing. The
        exception is background collection (:meth:`start`): threads share the generators, so the
        policy's draws depend on those of other threads.

        Args:
            seed: a number that is not negative.
            static_seed: gives all environments of a batch the same seed.

        Returns:
            A seed for another environment (the same, if static).

        Raises:
            TypeError, ValueError: if the seed is no integer, or negative.
        """
        seed = check_seed(seed)
        self._check_open("set_seed()")
        with self._held():
            following = self.env.set_seed(seed, static_seed=static_seed)
            rebuilds = 0 if self._restarts is None else self._restarts.count
            self._seed = (seed, static_seed, rebuilds)
            self._rollout.stream = RandomStream(derive(seed, "policy"), self.policy_device)
            self._restart()
        return int(following)

    @override
    def _prepare_weights(
        self,
        by_model: Mapping[str, Any],
        worker_ids: WorkerIds,
        new_version: bool = True,
    ) -> Callable[[], None]:
        if worker_ids is not None and not self._weight_sync_schemes:
            raise TypeError(
                f"worker_ids={worker_ids!r} can't be given to a collector without workers"
            )
        prepared = [
            self._prepare_load(model_id, new)
            for model_id, new in by_model.items()
            if model_id not in self._models_elsewhere
        ]
        loads = [load for load in prepared if load is not None]
        sent = [
            (scheme, scheme.prepare(by_model[model_id], scheme.receivers.chosen(worker_ids)))
            for model_id, scheme in self._weight_sync_schemes.items()
            if model_id in by_model
        ]

        def change() -> None:
            # If the acting policy is the learner's own, there is nothing to load, and no need to
            # wait for the batch under way.
            with self._held() if loads else nullcontext():
                for load in loads:
                    load()
                if new_version and self._version is not None:
                    self._version.increment_version()
                for scheme, parcels in sent:
                    if not scheme.synchronized_on_sender:
                        scheme.connect()
                    scheme.commit(parcels, self.policy_version)

        return change

    def _update_model(self, model_id: str, weights: Any, worker_ids: WorkerIds) -> None:
        self.update_policy_weights_(weights_dict={model_id: weights}, worker_ids=worker_ids)

    def _prepare_load(self, model_id: str, new: Any) -> Callable[[], None] | None:
        """Checks weights for a model of this collector.

        Returns:
            The function that loads them; None if the model has its weights already.
        """
        if new is None and model_id == POLICY and self._copied:
            new = self._source
        if new is None:
            if model_id != POLICY:
                self._models.live(model_id)  # raises an exception if there is no such model
                raise ValueError(f"the weights of {model_id!r} have to be given")
            return None
        return self._models.prepare(model_id, new)

    @override
    def _take(self, model_id: str, receiver: Receiver) -> WeightUpdate:
        def load(update: WeightUpdate) -> None:
            if update.slot is not None:
                update.load(self._models.live(model_id))

        update = receiver.receive(load)
        if self._version is not None and model_id == POLICY:
            if update.version is None:
                self._version.increment_version()
            else:
                self._version.version = update.version
        return update

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to continue from: counts, weights, and the environment's state.

        With ``trajs_per_batch`` it includes the whole trajectories that are not delivered yet.
        """
        with self._held():
            state: dict[str, Any] = {
                "env_state_dict": _env_state(self.env),
                "frames": self._frames,
                "iter": self._batches,
                "traj_pool": {"traj_id": torch.tensor(self._rollout.writer.episodes.next_id)},
            }
            module = module_of(self.policy)
            if module is not None:
                state["policy_state_dict"] = module.state_dict()
            if self._version is not None:
                state["policy_version"] = self._version.version
            state |= self._whole_state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restores a state from :meth:`state_dict`; new trajectories begin.

        Args:
            state_dict: the state.
            strict: whether weights that don't fit exactly are an error.

        Raises:
            KeyError: if an entry is missing.
        """
        needed = ["frames", "iter"]
        module = module_of(self.policy)
        if strict and module is not None:
            needed.append("policy_state_dict")
        for name in needed:
            if name not in state_dict:
                raise KeyError(f"state_dict has no {name!r}; it has {sorted(state_dict)}")
        with self._held():
            if module is not None and "policy_state_dict" in state_dict:
                module.load_state_dict(state_dict["policy_state_dict"], strict=strict)
            if state_dict.get("env_state_dict"):
                self.env.load_state_dict(state_dict["env_state_dict"], strict=strict)
            if not self._at_start:
                self._restart()
            self._frames = int(state_dict["frames"])
            self._batches = int(state_dict["iter"])
            if "traj_pool" in state_dict:
                self._rollout.writer.episodes.load(int(state_dict["traj_pool"]["traj_id"]))
            if self._version is not None and "policy_version" in state_dict:
                self._version.version = state_dict["policy_version"]
            self._load_whole(state_dict)

    def fake_tensordict(self) -> TensorDictBase:
        """Returns a batch of zeros with the layout of a delivered batch."""
        batch = self._rollout.writer.fake()
        self._stamp(batch, None if self._version is None else self._version.version)
        fake: TensorDictBase = self._fake(batch)
        return fake

    def get_model(self, model_id: str) -> Any:
        """Returns the model named ``model_id``: ``"policy"``, or a path in this collector."""
        return self.policy if model_id == "policy" else get_path(self, model_id)

    def getattr_policy(self, attr: str) -> Any:
        """Returns the attribute of the policy at path ``attr``."""
        return get_path(self.policy, attr)

    def getattr_env(self, attr: str) -> Any:
        """Returns the attribute of the environment at path ``attr``."""
        return get_path(self.env, attr)

    def stats(self) -> dict[str, Any]:
        """Returns statistics of the collector as a flat dict.

        They include those of every collector, and:

        - ``env_path`` (``"array"`` is the fast one) and ``policy_path`` (``"direct"`` is the fast
          one), each with a ``_reason`` if it is not the fast one;
        - ``env_time_share``, the environment's share of the loop's time;
        - on the array path, ``batches_held``, the number of batches that are still referred to,
          and ``memory_bytes``, the memory of these and of spare ones;
        - with ``on_env_error="restart"``, ``env_restarts``, the number of times that an
          environment was built anew.
        """
        facts = super().stats()
        if self._restarts is not None:
            facts["env_restarts"] = self._restarts.count
        facts.update(self._rollout.writer.describe())
        facts["env_time_share"] = self._rollout.env_share
        return facts

    def _close(self, close_env: bool) -> None:
        try:
            self._close_updater()
        finally:
            if close_env and not getattr(self.env, "is_closed", False):
                self.env.close(raise_if_closed=False)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(env={self.env!r}, policy={type(self.policy).__name__}, "
            f"frames_per_batch={self.requested_frames_per_batch}, "
            f"total_frames={self.config.total_frames})"
        )


def _written_by_itself(frames: int) -> AbstractContextManager[None]:
    return nullcontext()


def _tell(target: Any, collector: Collector) -> None:
    register = getattr(target, "register_collector", None)
    if callable(register):
        register(collector)


def _env_state(env: Any) -> Any:
    transform = getattr(env, "transform", None)
    return env.state_dict() if transform is None else transform.state_dict()


def overrides_rollout(collector: Collector) -> bool:
    """Returns True if the collector's class overrides ``rollout()``."""
    return type(collector).rollout is not Collector.rollout
