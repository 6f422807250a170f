"""Policy lag: the number of weight updates sent between a batch's start and its delivery."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

# Number of latest batches for which the number of updates before each is remembered.
_REMEMBERED = 256


class Lags:
    """Counts delivered frames by lag: the updates sent to their worker since the batch began."""

    def __init__(self) -> None:
        self._frames: Counter[int] = Counter()

    def add(self, lag: int, frames: int) -> None:
        """Counts frames that were delivered."""
        self._frames[lag] += frames

    def stats(self) -> dict[str, Any]:
        """Returns ``policy_lag_mean``, ``policy_lag_max``, and ``policy_lag_0``, … (frames)."""
        total = sum(self._frames.values())
        if not total:
            return {}
        mean = sum(lag * frames for lag, frames in self._frames.items()) / total
        facts = {"policy_lag_mean": mean, "policy_lag_max": max(self._frames)}
        return facts | {f"policy_lag_{lag}": self._frames[lag] for lag in sorted(self._frames)}


class LagBound:
    """Delays requests so that each batch can be delivered before its policy is too old.

    A new batch is delivered after the batches that are already under way. The bound assumes that
    the learner sends no more updates between the next deliveries than it sent between any two of
    the latest ones. Until the learner has sent updates, it assumes ``most`` of them (at least
    one). If the new batch could become too old under this assumption, its request has to wait.

    Args:
        most: maximum number of updates that a batch may be behind.
        newest: returns the number of updates that were sent to a worker.
    """

    def __init__(self, most: int, newest: Callable[[int], int]) -> None:
        self.most = most
        self._newest = newest
        # Number of updates before each of the latest batches.
        self._seen = deque([0], maxlen=_REMEMBERED)
        self._before: list[int] = []
        self._refused = 0
        # For each batch under way, its worker and the updates sent to that worker before the batch
        # began; until the batch is made, the updates sent before it was requested.
        self._since: dict[int, tuple[int, int]] = {}

    def grow(self, workers: Iterable[int]) -> None:
        """Adds workers."""
        self._before += [self._newest(index) for index in workers]

    def begin(self) -> None:
        """Notes the number of updates since the last call; called before each batch."""
        now = [self._newest(index) for index in range(len(self._before))]
        steps = [b - a for a, b in zip(self._before, now, strict=True)]
        # If no batch was under way, as before the first one, these updates made none older.
        if self._since:
            self._seen.append(max(*steps, self._refused))
        self._before, self._refused = now, 0

    @property
    def _step(self) -> int:
        return max(self._seen) or max(1, self.most)

    def room(self, later: bool) -> bool:
        """Returns True if another batch may be requested.

        Args:
            later: whether another batch is being delivered now, so that the new one is delivered
                at the next delivery or later.
        """
        return (len(self._since) + later) * self._step <= self.most

    def ordered(self, number: int, index: int) -> None:
        """Notes a request. Batches of random actions are not noted: they have no policy to age."""
        self._since[number] = index, self._newest(index)

    def made(self, number: int, weights: int) -> None:
        """Notes that a batch was made, by a policy after ``weights`` updates."""
        if number in self._since:
            self._since[number] = self._since[number][0], weights

    def delivered(self, number: int) -> None:
        """Notes that a batch is delivered."""
        self._since.pop(number, None)

    def choose(self, ready: Iterable[int]) -> int | None:
        """Returns the number of the ready batch to deliver, or None to wait for another batch."""
        ready = list(ready)
        for number in ready:
            if self._others_can_wait(number):
                return number
        oldest = max(self._since, key=self._age)
        return oldest if oldest in ready else None

    def _others_can_wait(self, number: int) -> bool:
        ages = sorted((self._age(one) for one in self._since if one != number), reverse=True)
        return all(age + (j + 1) * self._step <= self.most for j, age in enumerate(ages))

    def _age(self, number: int) -> int:
        index, weights = self._since[number]
        return self._newest(index) - weights

    def broken_by_update(self, workers: Iterable[int]) -> bool:
        """Returns True if an update of these workers would make a batch under way too old.

        If so, fewer batches are kept under way from the next :meth:`begin` on.
        """
        chosen = set(workers)
        broken = any(
            index in chosen and self._newest(index) + 1 - weights > self.most
            for index, weights in list(self._since.values())
        )
        if broken:
            self._refused = max(self._newest(i) - self._before[i] + 1 for i in chosen)
        return broken

    @contextmanager
    def updating(
        self,
        workers: Sequence[int],
        held: Callable[[], AbstractContextManager[Any]],
        batches: Callable[[], int],
    ) -> Iterator[None]:
        """Waits until an update of these workers is possible, and holds other threads meanwhile.

        Args:
            workers: numbers of the workers.
            held: returns a context in which no other thread takes batches.
            batches: returns the number of batches that were taken.

        Raises:
            RuntimeError: if the update would make a batch under way too old, and no background
                thread takes batches, so that waiting is no use.
        """
        before = -1
        while True:
            # With background collection, each try waits until the thread has taken a batch.
            with held():
                if not self.broken_by_update(workers):
                    yield
                    return
                if batches() == before:
                    break
                before = batches()
        raise RuntimeError(
            f"after this update a batch that is under way would be {self.most + 1} updates old, "
            f"but max_policy_lag={self.most}. Take a batch (next()) before the next update, or "
            "allow for more. The bound assumes that the learner updates no more often between "
            "the next two batches than it did so far"
        )
