"""The part of a collector with workers that hands weights to the weight sender and the pool."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torch import nn
from typing_extensions import override

from trawl.collectors.assembler import WorkerBatch
from trawl.collectors.base import BaseCollector
from trawl.collectors.lag import LagBound, Lags
from trawl.collectors.multi_config import MultiConfig
from trawl.collectors.policy_version import next_version
from trawl.collectors.pool import WorkerPool
from trawl.collectors.requests import NewWeights, StateChanged
from trawl.collectors.scheduler import Scheduler
from trawl.collectors.setups import WorkerSetups
from trawl.collectors.slot import WorkerSlot
from trawl.collectors.unsent import UnsentWeights
from trawl.collectors.weak import weak
from trawl.collectors.weight_control import POLICY, LocalModels, WorkerIds
from trawl.collectors.weight_sender import SenderHost, WeightSender
from trawl.weight_update import strategy
from trawl.weight_update.store import Receiver, Version, WeightUpdate

if TYPE_CHECKING:
    OptionAttributes = MultiConfig
else:
    OptionAttributes = object


class WorkerWeights(BaseCollector, OptionAttributes):  # type: ignore[misc]  # see BaseCollector
    """The part of a collector with workers that sends them weights.

    Weights and versions are kept for workers that replace dead ones.

    Attributes:
        num_workers: number of workers.
        policy: the policy as it was given; workers have copies.
    """

    config: MultiConfig
    sync: bool
    num_workers: int
    policy: Any
    _pool: WorkerPool
    _setups: WorkerSetups
    _sender: WeightSender
    _scheduler: Scheduler
    _unsent: UnsentWeights | None
    _lags: Lags
    _oldest = math.inf

    @property
    def _batches_at_once(self) -> int:
        """Number of batches that a worker makes at the same time."""
        return 1

    def _new_sender(self) -> WeightSender:
        """Makes the weight sender, which has no strong reference to this collector."""
        host = SenderHost(
            update=weak(self._update_model),
            deliver=weak(self._deliver_message),
            paused=weak(self._held),
            in_bounds=weak(self._in_bounds),
        )
        models = LocalModels(weak(self.get_model))
        schemes, tracker = self._weight_sync_schemes, self._version
        return WeightSender(host, schemes, self._setups, tracker, models, self._workers_write)

    @property
    @abstractmethod
    def _workers_write(self) -> bool:
        """True if workers write into the replay buffer themselves."""

    def _before_request(self) -> None:
        """Sends workers the weights and the version that are due before a batch is requested."""
        self._load_new_weights()
        unsent = self._unsent
        if unsent is not None and unsent.settled():
            self._unsent = None
        self._sender.announce_changes()
        if self.config.update_at_each_batch:
            self.update_policy_weights_()

    def _count_lags(self, parts: Sequence[WorkerBatch]) -> None:
        """Counts the updates since these batches began, with those that their delivery brought."""
        for part in parts:
            # After the collector is closed, the number of updates is unknown.
            if not part.answer.random and not self.closed:
                index, weights = part.index, part.answer.weights
                newest = self._sender.count(index) + self._sender.held.count(index)
                self._lags.add(newest - weights, part.answer.frames)
                self._oldest = min(self._oldest, self._sender.passed.received(index, weights))

    def pop_oldest(self) -> float:
        """Returns how many received updates the oldest weights include that made recent batches.

        Returns:
            The number of updates that this collector had received when these weights were sent to
            its workers. It counts the batches since the last call. Infinite if there were none, or
            if all actions were random.
        """
        oldest, self._oldest = self._oldest, math.inf
        return oldest

    def _deliver_message(self, index: int, message: NewWeights) -> None:
        """Sends a message to a worker. Any thread may call this."""
        self._pool.queue_message(index, message)
        # If another thread is collecting, that thread sends the message.
        if self._background is None and self._lock.acquire(blocking=False):
            try:
                self._pool.send_messages()
            finally:
                self._lock.release()

    def _note_change(self, index: int, changed: StateChanged) -> None:
        """Records state that a call through a worker's handle changed, for use by a replacement."""
        if changed.seed is not None:
            self._setups[index].seed = changed.seed
        if changed.env_state is not None:
            self._setups[index].env_state = changed.env_state
        if changed.weights is not None:
            self._sender.adopt(index, changed.weights, changed.count, changed.version)

    @override
    def _prepare_weights(
        self,
        by_model: Mapping[str, Any],
        worker_ids: WorkerIds,
        new_version: bool = True,
    ) -> Callable[[], None]:
        return self._sender.prepare(by_model, worker_ids, new_version)

    def _lag_bound(self) -> LagBound | None:
        most = self.config.max_policy_lag
        if most is None:
            return None
        return LagBound(most, self._sender.count, in_turn=self._batches_at_once == 1)

    def _in_bounds(self, chosen: Sequence[int]) -> AbstractContextManager[None]:
        """Returns a context that waits until an update would not exceed ``max_policy_lag``."""
        bound = getattr(self._scheduler, "bound", None)
        if bound is None:
            return nullcontext()
        return bound.updating(chosen, self._held, lambda: self._batches)  # type: ignore[no-any-return]

    @property
    @override
    def policy_version(self) -> int | str | None:
        """The newest version of the policy that all workers have acknowledged.

        A worker that waits for its next request acknowledges an update at once, and a worker that
        collects acknowledges it with its first batch afterwards. The value is None if versions are
        not tracked, after an update that was sent to some workers only, and while workers differ
        in versions that are not numbers. :meth:`worker_policy_versions` has the version of each
        worker, and ``policy_version_tracker.version`` the newest version that was sent.
        """
        if self._version is None or len(set(self._sender.versions)) > 1:
            return None
        known = {self._acknowledged(slot) for slot in self._pool.slots}
        if len(known) == 1:
            return known.pop()
        numbers = [one for one in known if isinstance(one, int)]
        return min(numbers) if numbers and len(numbers) == len(known) else None

    def _acknowledged(self, slot: WorkerSlot) -> Version:
        """Returns the version with which a worker collects, as far as it is known."""
        # A worker loads all that was sent to it before it begins anything.
        return slot.version if slot.collects else self._sender.versions[slot.index]

    @override
    def _announce_version(self, worker_ids: WorkerIds = None) -> None:
        self._sender.announce(worker_ids)

    def increment_version(self) -> None:
        """Advances to the next version of the policy, if versions are tracked."""
        if self._version is not None:
            with next_version(self._version):
                self._sender.announce()

    @override
    def _receive(self, model_id: str, receiver: Receiver) -> WeightUpdate:
        changes: list[Callable[[], None]] = []

        def prepare(update: WeightUpdate) -> None:
            # Weights that don't fit stay in the receiver, so each call raises the error again.
            if update.slot is not None:
                fresh = update.version is None
                changes.append(self._prepare_weights({model_id: update.copy()}, None, fresh))

        update = receiver.receive(prepare)
        known = self._version is not None and update.version is not None
        if self._version is not None and update.version is not None:
            self._version.version = update.version
        if model_id == POLICY:
            self._sender.received = receiver.count
        for change in changes:
            change()
        if known:
            self._announce_version()
        return update

    def get_cached_weights(self, model_id: str) -> TensorDictBase | None:
        """Returns the weights of a model that were last sent to the first worker.

        Returns:
            A copy of the weights. Before the first update, a copy of the initial weights of the
            first worker's policy. None if this process has no weights of the model.
        """
        sent = self._sender.newest(model_id)
        if sent is not None:
            return sent
        if model_id != POLICY:
            return None
        policy = self._setups[0].packed_policy()
        found: TensorDictBase | None = None
        if isinstance(policy, nn.Module):
            found = strategy.WeightStrategy().extract_weights(policy)
        return found

    def _has_source(self) -> bool:
        """Returns True if there are weights to send when the user passes none."""
        given = self.config.weight_updater is not None
        return given or self._setups.all_modules

    @property
    def _sends_by_itself(self) -> bool:
        """True if weights are sent without a call by the user."""
        return self.config.update_at_each_batch

    def _count_updates(self) -> int:
        """Returns a number that grows with each weight update and each new source of updates."""
        ways = (self.weight_updater is not None) + len(self._receivers)
        return ways + self._sender.updates
