"""Sender of a collector's weights, which tracks the version of each worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from trawl.collectors.driver.policy_version import next_version
from trawl.collectors.driver.weights import POLICY, LocalModels, WorkerIds
from trawl.collectors.workers.lag import PassedUpdates
from trawl.collectors.workers.requests import NewWeights
from trawl.collectors.workers.setups import WorkerSetups
from trawl.collectors.workers.slot import WorkerSlot
from trawl.envs.transforms import PolicyVersion
from trawl.weights.groups import PreparedUpdate, ReceiverGroup
from trawl.weights.layout import FlatLayout, Slot
from trawl.weights.message_schemes import MessageWeightSyncScheme, NoWeightSyncScheme
from trawl.weights.messages import WeightMessage
from trawl.weights.scheme import WeightSyncScheme
from trawl.weights.store import Receiver, Version
from trawl.weights.tensors import Weights, unpacked_extra


@dataclass(frozen=True)
class SenderHost:
    """Functions of a collector that its weight sender needs.

    Attributes:
        update: updates the weights of one model, on behalf of its scheme.
        deliver: sends a message to a worker.
        paused: returns a context in which no batch is collected in this process.
        in_bounds: returns a context that waits until the given workers may receive an update.
    """

    update: Callable[[str, Any, WorkerIds], None]
    deliver: Callable[[int, NewWeights], None]
    paused: Callable[[], AbstractContextManager[None]]
    in_bounds: Callable[[Sequence[int]], AbstractContextManager[None]]


class WeightSender:
    """Sends weights to the workers of a collector, through a scheme for each model.

    Args:
        host: functions of the collector.
        schemes: schemes by model; the sender adds a scheme for the policy if there is none.
        setups: setup of each worker.
        tracker: counter of the policy's versions, or None.
        models: models in this process.
        workers_write: whether workers write into the replay buffer. If not, only this process has
            the buffer's models.

    Attributes:
        versions: version of the policy that was last sent to each worker.
        updates: number of updates of the policy that were sent to at least one worker.
        holding: True while updates wait until :meth:`release`, so that a batch that was requested
            ahead is made with one version.
        held: the updates that wait.
        received: number of updates of the policy that this collector has received itself, if it is
            the worker of another collector.
        passed: the received updates that were sent on to workers.
        on_sent: function that is called with weights of the policy that were sent, and each
            receiving worker's number of updates; or None.
    """

    def __init__(
        self,
        host: SenderHost,
        schemes: dict[str, WeightSyncScheme],
        setups: WorkerSetups,
        tracker: PolicyVersion | None,
        models: LocalModels,
        workers_write: bool,
    ) -> None:
        self._host = host
        self._schemes = schemes
        self._setups = setups
        self._tracker = tracker
        self._models = models
        self._workers_write = workers_write
        # True if the user gave the scheme of the policy weights to send.
        self._has_own_source = False
        self._lock = Lock()
        self._announced = self._version
        self.versions: list[Version] = [self._version] * setups.count
        self.updates = 0
        self.holding = False
        self.held = HeldUpdates()
        self.received = 0
        self.passed = PassedUpdates()
        # For each worker, weights that came through its handle after the last weights sent to it.
        self._handed: dict[int, Any] = {}
        # For each worker, its number of updates (see count()) when weights were last sent to it.
        self._sent: dict[int, int] = {}
        self.on_sent: Callable[[Sequence[PreparedUpdate], Mapping[int, int]], None] | None = None

    @property
    def _version(self) -> Version:
        return None if self._tracker is None else self._tracker.version

    # --- schemes

    def connect(self, collector: Any, new_scheme: Callable[[], WeightSyncScheme]) -> None:
        """Connects the schemes with a collector.

        Args:
            collector: the collector.
            new_scheme: function that makes a scheme for the policy, if the user gave none.

        Raises:
            RuntimeError: if a scheme is already in use.
            ValueError: if a scheme was initialised for other receivers than the workers.
        """
        self._schemes.setdefault(POLICY, new_scheme())
        attached: list[WeightSyncScheme] = []
        for model_id, scheme in self._schemes.items():
            if scheme.model_is_elsewhere or self._is_here(model_id):
                continue
            try:
                self._attach(scheme, model_id, collector)
            except BaseException:
                for other in attached:
                    other.shutdown()
                # The others may belong to another collector, and stay as they are.
                self._schemes = {}
                raise
            attached.append(scheme)
        self.policy_scheme = self._schemes[POLICY]
        if isinstance(self.policy_scheme, NoWeightSyncScheme):
            # Loaded states and versions must reach the workers even without weight updates.
            self.policy_scheme = new_scheme()
            self._attach(self.policy_scheme, POLICY, collector)

    def _attach(self, scheme: WeightSyncScheme, model_id: str, collector: Any) -> None:
        if scheme.attach(self, model_id, collector) and model_id == POLICY:
            self._has_own_source = True
        scheme.on_send = self._host.update

    def close(self) -> None:
        """Shuts the schemes down."""
        for scheme in self._schemes.values():
            scheme.shutdown()

    @property
    def _to_workers(self) -> dict[str, WeightSyncScheme]:
        """The schemes that send weights to workers, by model."""
        workers = {
            model_id: scheme
            for model_id, scheme in self._schemes.items()
            if not (scheme.model_is_elsewhere or self._is_here(model_id))
        }
        return {**workers, POLICY: self.policy_scheme}

    def _is_here(self, model_id: str) -> bool:
        """Returns True if a model is part of a replay buffer that only this process writes."""
        return model_id.startswith("replay_buffer") and not self._workers_write

    def deliver(self, model_id: str, worker: int, message: WeightMessage) -> None:
        """Delivers a scheme's message to a worker."""
        self._host.deliver(worker, NewWeights(model_id, message))

    def groups(self, model_id: str) -> list[ReceiverGroup]:
        """Returns groups of workers that get the same weights, with each group's local source."""
        if model_id != POLICY:
            return [ReceiverGroup.of(range(self._setups.count), None)]
        workers: dict[int, list[int]] = {}
        origins: dict[int, Any] = {}
        for index, policy in enumerate(self._setups.policies):
            origin = policy if policy is not None else self._setups.factory(index)
            origins[id(origin)] = policy
            workers.setdefault(id(origin), []).append(index)
        return [
            ReceiverGroup.of(own, origins[key] if isinstance(origins[key], nn.Module) else None)
            for key, own in workers.items()
        ]

    # --- workers

    def receivers(self, worker: int) -> dict[str, Receiver]:
        """Returns the receivers from which a worker gets new weights, by model."""
        return {
            model_id: scheme.receivers.reader(worker)
            for model_id, scheme in self._to_workers.items()
        }

    def set_layouts(self, worker: int, layouts: Mapping[str, FlatLayout]) -> None:
        """Sets the layouts of a worker's models, which the schemes may not know yet."""
        for model_id, layout in layouts.items():
            self._to_workers[model_id].receivers.set_layout(worker, layout)

    def count(self, worker: int) -> int:
        """Returns the number of updates of the policy that were sent to a worker."""
        return self.policy_scheme.receivers.count(worker)

    def check_growth(self) -> None:
        """Raises an error if workers can't be added, because a scheme can't have more receivers.

        Raises:
            TypeError: if a scheme has a fixed number of receivers.
        """
        for model_id, scheme in self._to_workers.items():
            if not isinstance(scheme, MessageWeightSyncScheme):
                raise TypeError(
                    f"workers can't be added, because {type(scheme).__name__} (the scheme of "
                    f"{model_id!r}) has a fixed number of receivers"
                )

    def grow(self, policy: Any) -> None:
        """Adds a worker.

        Args:
            policy: the worker's policy; None for the first worker's policy, with the newest
                weights of the first worker.
        """
        worker = len(self.versions)
        self.versions.append(self._version)
        if policy is None and 0 in self._handed:
            self._handed[worker] = self._handed[0]
        for model_id, scheme in self._to_workers.items():
            assert isinstance(scheme, MessageWeightSyncScheme)
            alone = policy is not None and model_id == POLICY
            source = policy if isinstance(policy, nn.Module) else None
            scheme.add_receiver(worker, ReceiverGroup.of([worker], source) if alone else None)

    def chosen(self, worker_ids: WorkerIds) -> list[int]:
        """Returns the numbers of the given workers, which may be named by their policies' devices.

        Raises:
            ValueError: if a worker does not exist, or no worker is given.
            TypeError: if an entry is neither a number nor a device.
        """
        given = list(worker_ids) if isinstance(worker_ids, Sequence) else [worker_ids]
        if not any(isinstance(one, torch.device) for one in given):
            return self.policy_scheme.receivers.chosen(worker_ids)
        numbers: list[Any] = []
        for one in given:
            named = [i for i, own in enumerate(self._setups) if own.policy_device == one]
            if isinstance(one, torch.device) and not named:
                raise ValueError(
                    f"worker_ids names the device {one}, but no worker's policy is on it"
                )
            numbers += named if isinstance(one, torch.device) else [one]
        return sorted(set(self.policy_scheme.receivers.chosen(numbers)))

    # --- updates

    def prepare(
        self, by_model: Mapping[str, Any], worker_ids: WorkerIds, new_version: bool
    ) -> Callable[[], None]:
        """Checks weights without changing anything; returns the function that sends them."""
        for model_id in by_model:
            if model_id not in self._schemes:
                raise KeyError(
                    f"there is no model {model_id!r} to send weights to; the models are "
                    f"{sorted(self._schemes)}. Any other model needs a scheme in "
                    "weight_sync_schemes"
                )
            if model_id != POLICY and by_model[model_id] is None:
                raise ValueError(
                    f"the weights of {model_id!r} must be passed, because only the workers have "
                    "that model"
                )
        chosen = self.chosen(worker_ids)
        loads: list[Callable[[], None]] = []
        elsewhere: list[tuple[WeightSyncScheme, list[PreparedUpdate]]] = []
        to_workers: dict[str, tuple[WeightSyncScheme, list[PreparedUpdate]]] = {}
        for model_id, new in by_model.items():
            if self._is_here(model_id):
                loads.append(self._models.prepare(model_id, new))
                continue
            if model_id == POLICY and new is not None:
                self._check_updatable(chosen)
            scheme = self._schemes[model_id]
            if scheme.model_is_elsewhere:
                elsewhere.append((scheme, scheme.prepare(new, scheme.receivers.workers)))
            else:
                to_workers[model_id] = scheme, scheme.prepare(new, chosen)

        def change() -> None:
            if loads:
                with self._host.paused():
                    for load in loads:
                        load()
            with self._host.in_bounds(chosen), self._lock:
                with next_version(self._tracker) if new_version else nullcontext():
                    for scheme, updates in elsewhere:
                        scheme.commit(updates, self._version)
                    self._send_or_hold(Outgoing(to_workers, self._version, received=self.received))
                self._announced = self._version

        sends = any(updates for _, updates in [*elsewhere, *to_workers.values()])
        return change if loads or sends else lambda: None

    def send_first(self) -> None:
        """Sends weights to workers whose policies begin with other weights than those to send.

        These are the policies that workers made themselves, and all policies if the user gave the
        scheme weights of its own. Nothing is sent if the policies differ, or if parameters have no
        shapes yet.
        """
        groups = self.policy_scheme.receivers
        ready = [i for group in groups if group.ready for i in group.workers]
        chosen = [i for i in ready if self._has_own_source or self._setups.makes_policy(i)]
        if chosen:
            self.prepare({POLICY: None}, chosen, new_version=False)()

    def _send_or_hold(self, outgoing: Outgoing) -> None:
        if self.holding:
            self.held.add(outgoing)
        else:
            self._send(outgoing)

    def _send(self, outgoing: Outgoing) -> None:
        for scheme, updates in outgoing.updates.values():
            scheme.commit(updates, outgoing.version)
        acting = outgoing.workers(POLICY)
        _, updates = outgoing.updates.get(POLICY, (None, ()))
        self._note_sent(acting, updates)
        for index in acting:
            self.versions[index] = outgoing.version
        # Workers that received only other models still need the new version.
        reached = (outgoing.workers(model_id) for model_id in outgoing.updates)
        told = outgoing.told.union(*reached) - acting
        late = [index for index in told if self.versions[index] != outgoing.version]
        self._send_version(late, outgoing.version)
        for index in acting | told:
            self.passed.note(index, self.count(index), outgoing.received)

    # --- updates that wait for a batch

    def hold(self) -> None:
        """Makes updates wait until :meth:`release`."""
        with self._lock:
            self.holding = True

    def release(self) -> None:
        """Sends the updates that wait."""
        with self._lock:
            self.holding = False
            for outgoing in self.held.pop():
                self._send(outgoing)

    def _check_updatable(self, chosen: Sequence[int]) -> None:
        """Raises a ``TypeError`` if a chosen worker's policy has no weights."""
        for index in chosen:
            policy = self._setups.policies[index]
            made = self._setups.makes_policy(index)
            if not (isinstance(policy, nn.Module) or made):
                kind = "RandomPolicy" if policy is None else type(policy).__name__
                raise TypeError(f"policy {kind} has no weights to update")

    def prepare_each(self, by_worker: Mapping[int, Any]) -> Callable[[], None]:
        """Checks weights of the policy for individual workers.

        Returns:
            The function that sends each worker its weights, with the version that the worker has.
        """
        prepared = {i: self.policy_scheme.prepare(new, [i]) for i, new in by_worker.items()}

        def change() -> None:
            with self._lock:
                for index, updates in prepared.items():
                    self.policy_scheme.commit(updates, self.versions[index])
                self._note_sent(prepared, [one for own in prepared.values() for one in own])

        return change

    def _note_sent(self, workers: Collection[int], updates: Sequence[PreparedUpdate]) -> None:
        self.updates += bool(workers)
        for index in workers:
            self._sent[index] = self.count(index)
            self._handed.pop(index, None)
        if self.on_sent is not None:
            self.on_sent(updates, self._sent)

    def newest(self, model_id: str) -> TensorDictBase | None:
        """Returns a copy of the first worker's newest weights; None if none were sent to it."""
        held = self.held.newest(model_id, 0)
        if model_id == POLICY and 0 in self._handed and not held.tensors:
            handed: TensorDictBase = self._handed[0].clone()
            return handed
        scheme = self._to_workers.get(model_id)
        sent = (None if scheme is None else scheme.receivers.newest(0)) or Weights({})
        newest = Weights(sent.tensors | held.tensors, sent.extra | held.extra)
        return newest.nested() if newest.tensors or newest.extra else None

    # --- versions

    def announce(self, worker_ids: WorkerIds = None) -> None:
        """Sends the version to workers that did not receive it with weights."""
        self._announced = self._version
        nobody = isinstance(worker_ids, Sequence) and not worker_ids
        chosen = [] if nobody else self.chosen(worker_ids)
        late = [i for i in chosen if self.versions[i] != self._version]
        if late or self.holding:
            with self._host.in_bounds(late), self._lock:
                self._send_or_hold(Outgoing({}, self._version, frozenset(chosen), self.received))

    def announce_changes(self) -> None:
        """Sends the version to all workers if the user has advanced the counter directly."""
        if self._version != self._announced:
            self.announce()

    def acknowledged(self, slot: WorkerSlot) -> Version:
        """Returns the version with which a worker collects, as far as it is known."""
        # A worker loads all that was sent to it before it begins anything.
        return slot.version if slot.collects else self.versions[slot.index]

    def set_version(self, version: Version) -> None:
        """Sets the version of the policy without sending it to workers, which already have it."""
        if self._tracker is not None and version is not None:
            self._tracker.version = self._announced = version

    def _send_version(self, workers: Collection[int], version: Version) -> None:
        """Tells workers that their weights have this version."""
        if self._tracker is not None:
            for index in workers:
                self.versions[index] = version
            self.policy_scheme.receivers.publish_version(version, workers)

    # --- weights that workers received through their handles

    def handed(self, worker: int) -> Any:
        """Returns weights that a worker received through its handle, if they are its newest."""
        return self._handed.get(worker)

    def adopt(self, worker: int, weights: Any, count: int, version: Version) -> None:
        """Records that a worker received weights through its handle.

        The call does nothing if the collector has sent the worker other weights meanwhile, because
        the worker loads those afterwards.

        Args:
            worker: number of the worker.
            weights: the worker's current weights.
            count: number of updates that the worker had received from the collector before.
            version: version that the worker gave to the weights.
        """
        with self._lock:
            if count < self._sent.get(worker, 0):
                return
            self._handed[worker] = weights
            if self._tracker is None or version is None:
                return
            if version != self._version and self.versions[worker] == self._version:
                # The first worker with these weights sets the version; the others adopt it.
                self.set_version(version)
            self.versions[worker] = self._version
            if version != self._version:
                self._send_version([worker], self._version)


@dataclass(frozen=True)
class Outgoing:
    """Checked weights for workers, and the version that the workers get with them.

    Attributes:
        updates: for each model, its scheme and its updates.
        version: the version.
        told: workers that get only the version.
        received: number of updates that the sending collector had received itself until then.
    """

    updates: Mapping[str, tuple[WeightSyncScheme, Sequence[PreparedUpdate]]]
    version: Version
    told: frozenset[int] = frozenset()
    received: int = 0

    def workers(self, model_id: str) -> set[int]:
        """Returns the workers that get weights of a model."""
        _, updates = self.updates.get(model_id, (None, ()))
        return {worker for update in updates for worker in update.workers}


@dataclass(frozen=True)
class _Held:
    """An update that waits, with copies of its weights.

    Attributes:
        outgoing: the update.
        copies: for each model, each update, and the slot that holds a copy of its weights.
    """

    outgoing: Outgoing
    copies: Mapping[str, Sequence[tuple[PreparedUpdate, Slot]]]

    @classmethod
    def of(cls, outgoing: Outgoing) -> _Held:
        copies = {
            model_id: [update.copy() for update in prepared]
            for model_id, (_, prepared) in outgoing.updates.items()
        }
        updates = {
            model_id: (scheme, [update for update, _ in copies[model_id]])
            for model_id, (scheme, _) in outgoing.updates.items()
        }
        return cls(replace(outgoing, updates=updates), copies)

    def replaces(self, other: _Held) -> bool:
        """Returns True if nothing is left of an earlier update once this update is loaded."""
        mine, theirs = self.contents(), other.contents()
        return mine.keys() == theirs.keys() and all(mine[key] >= theirs[key] for key in theirs)

    def contents(self) -> dict[tuple[str, tuple[int, ...]], set[str]]:
        """Returns the names of the weights, by model and by the workers that get them."""
        found = {
            (model_id, update.workers): {*slot.named(), *(["extra state"] if update.extra else [])}
            for model_id, own in self.copies.items()
            for update, slot in own
        }
        return found | {("", tuple(sorted(self.outgoing.told))): set()}


@dataclass
class HeldUpdates:
    """Updates that wait until :meth:`pop`, in the order in which they were made.

    An update is dropped if a later update replaces all its weights.
    """

    _updates: list[_Held] = field(default_factory=list)
    _counts: Counter[int] = field(default_factory=Counter)

    def add(self, outgoing: Outgoing) -> None:
        """Adds an update, with copies of its weights: the learner may change the originals."""
        held = _Held.of(outgoing)
        self._updates = [one for one in self._updates if not held.replaces(one)] + [held]
        self._counts.update(outgoing.workers(POLICY))

    def pop(self) -> list[Outgoing]:
        """Removes and returns all updates."""
        updates, self._updates = self._updates, []
        self._counts.clear()
        return [held.outgoing for held in updates]

    def count(self, worker: int) -> int:
        """Returns the number of times that a worker's policy was updated, dropped updates too."""
        return self._counts[worker]

    def newest(self, model_id: str, worker: int) -> Weights:
        """Returns copies of a model's newest weights for a worker, as far as they wait."""
        found = Weights({})
        for held in self._updates:
            for update, slot in held.copies.get(model_id, ()):
                if worker in update.workers:
                    found.tensors.update({k: one.clone() for k, one in slot.named().items()})
                    found.extra.update(unpacked_extra(update.extra))
        return found
