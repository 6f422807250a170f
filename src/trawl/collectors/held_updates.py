"""Weight updates that wait until the workers have made a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trawl.collectors.weight_control import POLICY
from trawl.weight_update.layout import Slot
from trawl.weight_update.prepared import PreparedUpdate
from trawl.weight_update.scheme import WeightSyncScheme
from trawl.weight_update.store import Version


@dataclass(frozen=True)
class Outgoing:
    """Checked weights for workers, and the version that the workers get with them.

    Attributes:
        updates: for each model, its scheme and its updates.
        version: the version.
    """

    updates: Mapping[str, tuple[WeightSyncScheme, Sequence[PreparedUpdate]]]
    version: Version

    def workers(self, model_id: str) -> set[int]:
        """Returns the workers that get weights of a model."""
        _, updates = self.updates.get(model_id, (None, ()))
        return {worker for update in updates for worker in update.workers}


@dataclass(frozen=True)
class _Held:
    """An update that waits, with copies of its weights.

    Attributes:
        outgoing: the update.
        copies: for each model, the workers of each copy, and the slot that holds it.
    """

    outgoing: Outgoing
    copies: Mapping[str, Sequence[tuple[tuple[int, ...], Slot]]]

    @classmethod
    def of(cls, outgoing: Outgoing) -> _Held:
        updates, copies = {}, {}
        for model_id, (scheme, prepared) in outgoing.updates.items():
            pairs = [update.copy() for update in prepared]
            updates[model_id] = scheme, [update for update, _ in pairs]
            copies[model_id] = [(update.workers, slot) for update, slot in pairs]
        return cls(Outgoing(updates, outgoing.version), copies)

    def replaces(self, other: _Held) -> bool:
        """Returns True if nothing is left of an earlier update once this update is loaded."""
        complete = all(slot.complete for own in self.copies.values() for _, slot in own)
        return complete and self.reach() == other.reach()

    def reach(self) -> set[tuple[str, tuple[int, ...], bool]]:
        """Returns the models and workers of the update, and whether there is extra state."""
        return {
            (model_id, update.workers, bool(update.extra))
            for model_id, (_, updates) in self.outgoing.updates.items()
            for update in updates
        }


@dataclass
class HeldUpdates:
    """Updates that wait until :meth:`pop`, in the order in which they were made.

    An update is dropped if a later update replaces all its weights.

    Attributes:
        late: workers that wait for the current version.
    """

    late: set[int] = field(default_factory=set)
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

    def newest(self, model_id: str, worker: int) -> dict[str, Tensor]:
        """Returns copies of a model's newest tensors for a worker, by name."""
        return {
            name: tensor.clone()
            for held in self._updates
            for workers, slot in held.copies.get(model_id, ())
            if worker in workers
            for name, tensor in slot.named().items()
        }
