"""The weights of a collector with workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from trawl.collectors.config import warn
from trawl.collectors.driver.budget import FrameBudget
from trawl.collectors.driver.parts import weak
from trawl.collectors.driver.policy_version import next_version
from trawl.collectors.driver.weights import (
    POLICY,
    CollectorWeights,
    Updater,
    WorkerIds,
    check_reach,
)
from trawl.collectors.workers.assembler import WorkerBatch
from trawl.collectors.workers.lag import LagBound, Lags
from trawl.collectors.workers.pool import WorkerPool
from trawl.collectors.workers.requests import NewWeights, StateChanged
from trawl.collectors.workers.setups import WorkerSetups
from trawl.collectors.workers.weight_sender import SenderHost, WeightSender
from trawl.foreign.torch import writes_of
from trawl.weights.store import Receiver, Version, WeightUpdate
from trawl.weights.tensors import weights_of

# Number of checks before the warning, counted from the first one that finds a change. The first
# change is not enough, because some learners send weights rarely.
_PATIENCE = 4
# Maximum number of batches of each worker between two checks.
_LONGEST_PAUSE = 64


class UnsentWeights:
    """Warns the user once if the policy's weights change but are never sent to the workers.

    With TorchRL, programs work without any update, because workers on the same machine share the
    learner's memory. Changes through ``parameter.data`` are not detected.

    Args:
        policies: the policies of which the workers have copies.
        parts: number of calls of :meth:`settled` in which each worker makes one batch.
        sent: function that returns the number of updates so far.
    """

    def __init__(self, policies: Sequence[Any], parts: int, sent: Callable[[], int]) -> None:
        self._modules = {id(one): one for one in policies if isinstance(one, nn.Module)}.values()
        self._sent, self._before = sent, (sent(), self._state())
        self._parts, self._calls, self._found, self._due = parts, 0, 0, 1

    def _state(self) -> list[tuple[int, int]]:
        """Returns values that change if a parameter is written to, replaced or given new memory."""
        return [
            (writes_of(one), one.data_ptr())
            for module in self._modules
            for one in module.parameters()
            if not (is_lazy(one) or one.is_inference())
        ]

    def settled(self) -> bool:
        """Warns if needed; called before each batch.

        To save time, the weights are checked only after each worker has made 1, 2, 4, …, 64, 128,
        192, … batches. After a check that finds a change, the next checks follow at intervals of
        1, 2 and 4 batches.

        Returns:
            True if no further call is needed, because weights were sent or the warning was given.
        """
        rounds, rest = divmod(self._calls, self._parts)
        self._calls += 1
        if rest or rounds != self._due:
            return False
        sent, state = self._before
        if self._sent() != sent:
            return True
        if self._found or self._state() != state:
            self._due += 2**self._found
            self._found += 1
        else:
            self._due += min(rounds, _LONGEST_PAUSE)
        if self._found < _PATIENCE:
            return False
        warn(
            "the policy's weights have changed, but update_policy_weights_() was never called: "
            "workers still act with the weights that the policy had when the collector was made. "
            "Call update_policy_weights_() after each optimiser step, or pass "
            "update_at_each_batch=True. If you mean to send the weights later, ignore this "
            "warning"
        )
        return True


class WorkersWeights(CollectorWeights):
    """The weights of a collector with workers, which are sent to the workers.

    Weights and versions are kept for workers that replace dead ones.

    Args:
        collector: the collector, to which the object has no strong reference.
        setups: setup of each worker.
        workers_write: True if workers write into the replay buffer themselves.
        every: number of a worker's batches after which weights are sent to it; None if the user
            sends them.
        in_turn: True if a worker makes one batch after the other.

    Attributes:
        sender: the object that sends weights to workers.
        lags: number of frames with each lag.
        bound: delays requests and updates so that no batch becomes too old; None if batches may.
        pool: the workers.
    """

    pool: WorkerPool

    def __init__(
        self,
        collector: Any,
        setups: WorkerSetups,
        workers_write: bool,
        every: int | None,
        in_turn: bool,
    ) -> None:
        super().__init__(collector)
        self._budget: FrameBudget = collector.parts.budget
        self._options, self._setups = setups.config, setups
        self.schemes.update(setups.config.weight_sync_schemes or {})
        host = SenderHost(
            update=weak(self.update_model),
            deliver=weak(self._deliver_message),
            paused=weak(self._background.held),
            in_bounds=weak(self.in_bounds),
        )
        self.sender = WeightSender(
            host, self.schemes, setups, self.tracker, self.models, workers_write
        )
        most = setups.config.max_policy_lag
        self.bound: LagBound | None = None
        if most is not None and not collector.sync:
            self.bound = LagBound(most, self.sender.count, in_turn)
        self.lags, self._oldest = Lags(), math.inf
        # Number of each worker's batches since weights were last sent to it.
        self._every, self._since = every, dict[int, int]()
        self._unsent: UnsentWeights | None = None

    @override
    def begin(self) -> None:
        """Sends the first weights; called when there are workers."""
        self.sender.send_first()
        super().begin()
        # The user's weight updater may share memory with workers.
        by_itself = self._options.update_at_each_batch or self._every is not None
        if not (by_itself or self._options.weight_updater):
            parts = 1 if self._owner().sync else self._setups.count
            self._unsent = UnsentWeights(self._setups.policies, parts, weak(self._count_updates))

    @override
    def check_updater(self, updater: Updater) -> None:
        check_reach(updater)

    # --- batches

    def before_request(self) -> None:
        """Sends workers the weights and the version that are due before a batch is requested."""
        due = [i for i, count in self._since.items() if count >= (self._every or math.inf)]
        if due:
            self._owner().update_policy_weights_(worker_ids=sorted(due))
            for index in due:
                del self._since[index]
        self.load_new()
        unsent = self._unsent
        if unsent is not None and unsent.settled():
            self._unsent = None
        self.sender.announce_changes()
        if self._options.update_at_each_batch:
            self._owner().update_policy_weights_()

    def may_be_sent(self) -> None:
        """Notes that weights may be sent in ways that this object doesn't see."""
        self._unsent = None

    def note_batches(self, parts: Sequence[WorkerBatch]) -> None:
        """Counts workers' batches, after which weights may be due."""
        if self._every is not None:
            for part in parts:
                self._since[part.index] = self._since.get(part.index, 0) + 1

    def count_lags(self, parts: Sequence[WorkerBatch]) -> None:
        """Counts the updates since these batches began, with those that their delivery brought."""
        for part in parts:
            # After the collector is closed, the number of updates is unknown.
            if not part.answer.random and not self._lifetime.closed:
                index, weights = part.index, part.answer.weights
                newest = self.sender.count(index) + self.sender.held.count(index)
                self.lags.add(newest - weights, part.answer.frames)
                self._oldest = min(self._oldest, self.sender.passed.received(index, weights))

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
        self.pool.queue_message(index, message)
        # If another thread is collecting, that thread sends the message.
        lock = self._background.lock
        if self._background.thread is None and lock.acquire(blocking=False):
            try:
                self.pool.send_messages()
            finally:
                lock.release()

    def note_change(self, index: int, changed: StateChanged) -> None:
        """Records state that a call through a worker's handle changed, for use by a replacement."""
        if changed.seed is not None:
            self._setups[index].seed = changed.seed
        if changed.env_state is not None:
            self._setups[index].env_state = changed.env_state
        if changed.weights is not None:
            self.sender.adopt(index, changed.weights, changed.count, changed.version)

    @override
    def prepare(
        self,
        by_model: Mapping[str, Any],
        worker_ids: WorkerIds,
        new_version: bool = True,
    ) -> Callable[[], None]:
        return self.sender.prepare(by_model, worker_ids, new_version)

    def in_bounds(self, chosen: Sequence[int]) -> AbstractContextManager[None]:
        """Returns a context that waits until an update would not exceed ``max_policy_lag``."""
        if self.bound is None:
            return nullcontext()
        return self.bound.updating(chosen, self._background.held, lambda: self._budget.batches)

    @property
    @override
    def version(self) -> Version:
        """The newest version of the policy that all workers have acknowledged."""
        if self.tracker is None or len(set(self.sender.versions)) > 1:
            return None
        known = {self.sender.acknowledged(slot) for slot in self.pool.slots}
        if len(known) == 1:
            return known.pop()
        numbers = [one for one in known if isinstance(one, int)]
        return min(numbers) if numbers and len(numbers) == len(known) else None

    @override
    def announce_version(self, worker_ids: WorkerIds = None) -> None:
        self.sender.announce(worker_ids)

    @override
    def increment_version(self) -> None:
        """Advances to the next version of the policy, if versions are tracked."""
        if self.tracker is not None:
            with next_version(self.tracker):
                self.sender.announce()

    @override
    def receive(self, model_id: str, receiver: Receiver) -> WeightUpdate:
        changes: list[Callable[[], None]] = []

        def prepare(update: WeightUpdate) -> None:
            # Weights that don't fit stay in the receiver, so each call raises the error again.
            if update.slot is not None:
                fresh = update.version is None
                changes.append(self.prepare({model_id: update.copy()}, None, fresh))

        update = receiver.receive(prepare)
        known = self.tracker is not None and update.version is not None
        if self.tracker is not None and update.version is not None:
            self.tracker.version = update.version
        if model_id == POLICY:
            self.sender.received = receiver.count
        for change in changes:
            change()
        if known:
            self.announce_version()
        return update

    def get_cached_weights(self, model_id: str) -> TensorDictBase | None:
        """Returns the weights of a model that were last sent to the first worker.

        Returns:
            A copy of the weights. Before the first update, a copy of the initial weights of the
            first worker's policy. None if this process has no weights of the model.
        """
        sent = self.sender.newest(model_id)
        if sent is not None:
            return sent
        if model_id != POLICY:
            return None
        policy = self._setups[0].packed_policy()
        found: TensorDictBase | None = None
        if isinstance(policy, nn.Module):
            found = weights_of(policy).nested()
        return found

    def _count_updates(self) -> int:
        """Returns a number that grows with each weight update and each new source of updates."""
        ways = (self.updater is not None) + len(self.receivers)
        return ways + self.sender.updates
