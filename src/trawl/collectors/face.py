"""The methods of collectors that are those of their parts, with the names that users know."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from tensordict import TensorDictBase
from torch import nn
from torch.utils.data import IterableDataset
from typing_extensions import Self

from trawl.collectors.config import CollectorConfig
from trawl.collectors.driver.access import Access
from trawl.collectors.driver.background import BackgroundCollection
from trawl.collectors.driver.budget import FrameBudget, FrameCounts
from trawl.collectors.driver.checkpoints import Checkpoints, Mismatch, resumed
from trawl.collectors.driver.lifetime import Lifetime
from trawl.collectors.driver.outbox import BatchOutbox
from trawl.collectors.driver.parts import of_part
from trawl.collectors.driver.state import CollectorState
from trawl.collectors.driver.weights import POLICY, CollectorWeights, live_weights
from trawl.collectors.options import check_callable
from trawl.collectors.watch import watching
from trawl.collectors.watch.figures import Figures
from trawl.collectors.watch.profile import ProfileConfig, Profiling
from trawl.collectors.watch.timeline import Tracing
from trawl.collectors.watch.watching import Watch
from trawl.paths import get_local, get_path
from trawl.rollout.normalization import Normalization
from trawl.weights.scheme import WeightSyncScheme


class Parts:
    """The parts of a collector.

    Attributes:
        lifetime: the time in which the collector is open.
        budget: the frames that have been delivered, and those that are left.
        watch: times and recent episodes.
        background: the thread that fills the replay buffer.
        checkpoints: the folder with checkpoints.
        outbox: batches on their way to the user.
        access: what paths lead to.
        profiling: the profile that is made.
        figures: figures of those who collect.
        timeline: the timeline that is written.
        weights: the weights of the policies, and their versions.
        state: the state of those who collect.
    """

    lifetime: Lifetime
    budget: FrameBudget
    watch: Watch
    background: BackgroundCollection
    checkpoints: Checkpoints
    outbox: BatchOutbox
    access: Access
    profiling: Profiling
    figures: Figures
    timeline: Tracing
    weights: CollectorWeights
    state: CollectorState


class CollectorParts(IterableDataset[Any], ABC):
    """Methods that users call on a collector, and that its parts do.

    Attributes:
        config: the options.
        parts: the parts.
        policy_version_tracker: the :class:`~trawl.collectors.PolicyVersion` in use; None if
            versions are not tracked.
        verbose: always False, because collectors write no log.
    """

    config: CollectorConfig
    parts: Parts
    policy: Any
    pre_collect_hook: Callable[[], Any] | None
    policy_version_tracker: Any
    verbose = False

    # --- frames

    @property
    def requested_frames_per_batch(self) -> int:
        """Number of frames in each batch."""
        return self.parts.budget.requested

    @requested_frames_per_batch.setter
    def requested_frames_per_batch(self, frames: int) -> None:
        self.parts.budget.requested = frames

    @property
    def progress(self) -> FrameCounts:
        """The counts of frames and trajectories that ``stats()`` has; a copy."""
        return self.parts.budget.counts

    @property
    def _iter(self) -> int:
        """Number of batches collected so far."""
        return self.parts.budget.batches

    def __len__(self) -> int:
        return self.parts.budget.count_batches()

    # --- the background

    start = of_part("background", BackgroundCollection.start)
    sample = of_part("background", BackgroundCollection.sample)
    is_running = of_part("background", BackgroundCollection.is_running)
    pause = of_part("background", BackgroundCollection.pause)

    # --- checkpoints

    checkpoint = of_part("checkpoints", Checkpoints.checkpoint)
    load_checkpoint = of_part("checkpoints", Checkpoints.load_checkpoint)

    @classmethod
    def resume(
        cls,
        path: str | os.PathLike[str],
        *args: Any,
        trust: bool = False,
        on_state_mismatch: Mismatch = "raise",
        **options: Any,
    ) -> Self:
        """Makes a collector that continues from the newest checkpoint in a folder.

        Args:
            path: path of the folder.
            *args: arguments of the constructor, the same as for the collector that saved the
                checkpoint.
            trust: see :meth:`load_checkpoint`.
            on_state_mismatch: see :meth:`load_checkpoint`.
            **options: keyword arguments of the constructor.

        Returns:
            The collector. Its attribute :attr:`extra` has the user data of the checkpoint.

        Raises:
            FileNotFoundError: if the folder has no checkpoint, or does not exist.
            StateError, EnvStateError: see :meth:`load_checkpoint`.

        Examples:
            >>> import tempfile
            >>> from trawl import Collector
            >>> folder = tempfile.mkdtemp()
            >>> with Collector("CartPole-v1", frames_per_batch=50, total_frames=200) as collector:
            ...     batch = collector.next()
            ...     path = collector.checkpoint(folder, extra={"learned": 1})
            >>> with Collector.resume(
            ...     folder, "CartPole-v1", frames_per_batch=50, total_frames=200
            ... ) as collector:
            ...     print(collector.extra, sum(batch.numel() for batch in collector))
            {'learned': 1} 150
        """
        mismatch = {"trust": trust, "on_state_mismatch": on_state_mismatch}
        return resumed(partial(cls, *args, **options), path, **mismatch)

    @property
    def extra(self) -> dict[str, Any]:
        """User data from the checkpoint that was loaded last; empty before the first one."""
        return self.parts.checkpoints.extra

    @extra.setter
    def extra(self, data: dict[str, Any]) -> None:
        self.parts.checkpoints.extra = data

    @property
    def normalization(self) -> Normalization | None:
        """Statistics with which observations and rewards are normalised; None if they are not."""
        return self.parts.state.normalization

    @property
    def resumed(self) -> bool:
        """True if the episodes of the state that was loaded last go on."""
        return self.parts.state.resumed

    @resumed.setter
    def resumed(self, goes_on: bool) -> None:
        self.parts.state.resumed = goes_on

    # --- timelines, profiles

    # The option of this name is an attribute of the configuration only.
    trace = of_part("timeline", Tracing.trace)

    enable_profile = of_part("profiling", Profiling.enable_profile)
    disable_profile = of_part("profiling", Profiling.disable_profile)

    @property
    def profile_config(self) -> ProfileConfig | None:
        """Options given to :meth:`enable_profile`; None if there is no profile."""
        return self.parts.profiling.config

    # --- versions

    @property
    def policy_version(self) -> int | str | None:
        """Version of the policy that collects; None if versions are not tracked.

        With workers, it is the newest version that all workers have acknowledged. A worker that
        waits for its next request acknowledges an update at once, and a worker that collects
        acknowledges it with its first batch afterwards. The value is None after an update that was
        sent to some workers only, and while workers differ in versions that are not numbers.
        ``worker_policy_versions()`` has the version of each worker, and
        ``policy_version_tracker.version`` the newest version that was sent.
        """
        return self.parts.weights.version

    def get_policy_version(self) -> int | str | None:
        """Returns :attr:`policy_version`."""
        return self.policy_version

    increment_version = of_part("weights", CollectorWeights.increment_version)

    # --- weights

    update_policy_weights_ = of_part("weights", CollectorWeights.update_policy_weights_)
    receive_weights = of_part("weights", CollectorWeights.receive_weights)
    register_scheme_receiver = of_part("weights", CollectorWeights.register_scheme_receiver)
    init_updater = of_part("weights", CollectorWeights.init_updater)
    deliver_weights = of_part("weights", CollectorWeights.deliver_weights)

    @property
    def weight_updater(self) -> Any:
        """Updater that sends weights to workers in place of weight-sync schemes, or None.

        An updater of Trawl or TorchRL can be assigned, or a class or function that makes one.
        """
        return self.parts.weights.updater

    @weight_updater.setter
    def weight_updater(self, updater: Any) -> None:
        self.parts.weights.updater = updater

    @property
    def weight_sync_schemes(self) -> Mapping[str, WeightSyncScheme]:
        """The weight-sync schemes that send weights, keyed by model."""
        return MappingProxyType(self.parts.weights.schemes)

    @property
    def _weight_sync_schemes(self) -> Mapping[str, WeightSyncScheme]:
        return self.parts.weights.schemes

    @property
    def _receiver_schemes(self) -> Mapping[str, WeightSyncScheme]:
        return self.parts.weights.receiver_schemes

    def get_model(self, model_id: str) -> Any:
        """Returns the model named ``model_id`` (``"policy"``, or a path) in this process."""
        return self.policy if model_id == POLICY else get_local(self, model_id)

    @property
    def policy_weights(self) -> TensorDictBase:
        """Parameters and buffers of the policy; empty if the policy is not a module.

        The tensors share memory with the policy's tensors, and are detached from autograd.
        """
        return live_weights(getattr(self, "policy", None))

    @property
    def get_weights_fn(self) -> Callable[[], TensorDictBase] | None:
        """Function that returns the policy's weights; None if the policy is not a module.

        If the policy was copied to another device, these are the weights of the original.
        """
        source = getattr(self.parts.weights, "source", getattr(self, "policy", None))
        return partial(live_weights, source) if isinstance(source, nn.Module) else None

    @property
    def compiled_policy(self) -> bool:
        """True if the policy is compiled."""
        return getattr(self, "compile_policy", None) not in (False, None)

    # --- access by path

    map_fn = of_part("access", Access.map_fn)
    get_distant_attr = of_part("access", Access.get_distant_attr)
    cascade_execute = of_part("access", Access.cascade_execute)
    getattr_policy = of_part("access", Access.getattr_policy)
    getattr_env = of_part("access", Access.getattr_env)

    def getattr_rb(self, attr: str) -> Any:
        """Returns the replay buffer's attribute at path ``attr``.

        Raises:
            AttributeError: if there is no attribute at that path, or no replay buffer.
        """
        if self.config.replay_buffer is None:
            raise AttributeError(f"there is no replay buffer to get {attr!r} from")
        return get_path(self.config.replay_buffer, attr)

    @property
    def worker_idx(self) -> int:
        """Index of the worker that this collector belongs to.

        Raises:
            RuntimeError: if the collector does not belong to a worker.
        """
        if self.config.worker_idx is None:
            raise RuntimeError("worker_idx was not set: this collector does not belong to a worker")
        return self.config.worker_idx

    # --- statistics

    log = of_part("watch", Watch.log)
    bottleneck = watching.bottleneck
    report = watching.report

    # --- hooks, the end

    @property
    def post_collect_hook(self) -> Callable[[Any], Any] | None:
        """Function that is called with each delivered batch."""
        return self.parts.outbox.hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        # The constructor replaces what is set before it.
        if "parts" in vars(self):
            self.parts.outbox.hook = hook

    def set_post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        """Sets the function that is called with each delivered batch; None removes it."""
        self.post_collect_hook = check_callable("hook", hook)

    def add_close_callback(self, callback: Callable[[Self], object]) -> None:
        """Adds a function that is called with the collector, once the collector is closed.

        The function is called whether :meth:`shutdown`, an error, the garbage collector or the
        exit of the interpreter closes the collector, by the thread that closes it. If the
        collector is closed already, the function is called at once.

        Args:
            callback: the function. It must return quickly and raise no error.

        Examples:
            >>> from trawl import Collector
            >>> collector = Collector("CartPole-v1", frames_per_batch=10, total_frames=10)
            >>> collector.add_close_callback(lambda collector: print(collector.closed))
            >>> collector.shutdown()
            True
        """
        self.parts.lifetime.add(callback, self)

    def remove_close_callback(self, callback: Callable[[Self], object]) -> None:
        """Removes a function that was added by :meth:`add_close_callback`, if it is still there."""
        self.parts.lifetime.remove(callback)

    @property
    def closed(self) -> bool:
        """True once the collector has been shut down."""
        return self.parts.lifetime.closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        self.parts.lifetime.closed = closed
