"""Weight updates that wait until the workers have made a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trawl.collectors.weight_control import POLICY
from trawl.weight_update.layout import Slot
from trawl.weight_update.prepared import PreparedUpdate
from trawl.weight_update.scheme import WeightSyncScheme
from trawl.weight_update.store import Version
from trawl.weight_update.tensors import Weights, unpacked_extra


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
