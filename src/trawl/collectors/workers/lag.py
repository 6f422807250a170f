"""Policy lag: the number of weight updates sent between a batch's start and its delivery.

If workers have workers of their own, the lag spans all levels.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

# Number of recent batches for each of which a LagBound keeps the number of updates before it.
_REMEMBERED = 256


class Lags:
    """Counts delivered frames by policy lag.

    The lag is the number of updates that were sent to the worker since it began the batch.

    Attributes:
        last: lag of the frames that were counted last.
    """

    def __init__(self) -> None:
        self._frames: Counter[int] = Counter()
        self.last = 0

    def add(self, lag: int, frames: int) -> None:
        """Counts delivered frames with the given lag."""
        self._frames[lag] += frames
        self.last = lag

    def stats(self) -> dict[str, Any]:
        """Returns the mean and the maximum lag, and the number of frames with each lag.

        The keys are ``policy_lag_mean``, ``policy_lag_max``, and ``policy_lag_0``, … for each lag.
        """
        # A copy, because another thread may add frames.
        counts = dict(self._frames)
        total = sum(counts.values())
        if not total:
            return {}
        mean = sum(lag * frames for lag, frames in counts.items()) / total
        facts = {"policy_lag_mean": mean, "policy_lag_max": max(counts)}
        return facts | {f"policy_lag_{lag}": counts[lag] for lag in sorted(counts)}


class PassedUpdates:
    """Tells which of its own updates a collector has passed on to its workers.

    A collector that is a worker itself receives updates. What it passes on is counted anew for each
    of its workers, because it may skip updates, or send some of its own.
    """

    def __init__(self) -> None:
        # For each worker, the number of updates sent to it and the number received until then, for
        # each update that was passed on and may have made frames that are not delivered yet.
        self._passed: dict[int, deque[tuple[int, int]]] = {}

    def note(self, worker: int, sent: int, received: int) -> None:
        """Records that the last update sent to a worker passes on all received updates.

        Args:
            worker: number of the worker.
            sent: number of updates that were sent to the worker.
            received: number of updates that the collector has received.
        """
        passed = self._passed.setdefault(worker, deque([(0, 0)]))
        if passed[-1][1] != received:
            passed.append((sent, received))

    def received(self, worker: int, sent: int) -> int:
        """Returns the number of received updates that a worker's weights include.

        Args:
            worker: number of the worker.
            sent: number of updates that the worker had. It must not decrease between calls.
        """
        passed = self._passed.get(worker, deque([(0, 0)]))
        while len(passed) > 1 and passed[1][0] <= sent:
            passed.popleft()
        return passed[0][1]


class LagBound:
    """Delays requests so that each batch can be delivered before its policy becomes too old.

    A new batch is delivered after the batches that are already under way. The bound counts the
    updates between recent deliveries, and assumes that the learner will not send more than the
    largest of these counts between two deliveries. Until the learner has sent updates, the bound
    assumes ``most`` updates, but at least one. If the new batch could become too old under this
    assumption, its request has to wait.

    Args:
        most: maximum number of updates by which a batch may be behind.
        newest: function that takes a worker's index, and returns the number of updates that were
            sent to this worker.
        in_turn: whether each worker answers requests in the order in which it begins their batches.
    """

    def __init__(self, most: int, newest: Callable[[int], int], in_turn: bool = True) -> None:
        self.most = most
        self._in_turn = in_turn
        self._newest = newest
        # Number of updates before each of the latest batches.
        self._seen = deque([0], maxlen=_REMEMBERED)
        self._before: list[int] = []
        self._refused = 0
        # For each batch under way, its worker, and the number of updates sent to the worker before
        # the batch began. Until the batch is made, the number at the time of its request is used.
        self._since: dict[int, tuple[int, int]] = {}

    def grow(self, workers: Iterable[int]) -> None:
        """Adds workers."""
        self._before += [self._newest(index) for index in workers]

    def begin(self) -> None:
        """Records the number of updates since the last call; must be called before each batch."""
        now = [self._newest(index) for index in range(len(self._before))]
        steps = [b - a for a, b in zip(self._before, now, strict=True)]
        # If no batch was under way (before the first one, for example), no batch became older.
        if self._since:
            self._seen.append(max(*steps, self._refused))
        self._before, self._refused = now, 0

    @property
    def _step(self) -> int:
        return max(self._seen) or max(1, self.most)

    def room(self, later: bool) -> bool:
        """Returns True if another batch may be requested.

        Args:
            later: True if another batch is being delivered now. The new batch can then be
                delivered in the next delivery at the earliest.
        """
        return (len(self._since) + later) * self._step <= self.most

    def ordered(self, number: int, index: int) -> None:
        """Records the request of a batch.

        Batches of random actions are not recorded: without a policy, they can't become too old.
        """
        self._since[number] = index, self._newest(index)

    def made(self, number: int, weights: float) -> None:
        """Records that a batch was made with the weights after ``weights`` updates.

        Args:
            number: number of the request that the batch answers.
            weights: the number of updates; infinite for random actions, which can't be too old.
        """
        if number not in self._since:
            return
        index, since = self._since[number]
        if not self._in_turn:
            # The batch may have begun for another request, whose own batch still has to come. Each
            # batch has the weights of its request's time or newer ones, so it is safe to assume the
            # newest of the possible requests.
            possible = [
                (other, one)
                for one, (worker, other) in self._since.items()
                if worker == index and one >= number and other <= weights
            ]
            if possible:
                self._since[max(possible)[1]] = index, since
        if weights == math.inf:
            del self._since[number]
        else:
            self._since[number] = index, int(weights)

    def delivered(self, number: int) -> None:
        """Records that a batch is delivered."""
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
        """Returns True if an update of these workers would make a batch in progress too old.

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
        """Waits until these workers may be updated; other threads are paused within the block.

        Args:
            workers: indices of the workers.
            held: function that returns a context in which no other thread takes batches.
            batches: function that returns the number of batches taken so far.

        Raises:
            RuntimeError: if the update would make a batch in progress too old, and waiting would
                not help because no background thread takes batches.
        """
        before = -1
        while True:
            # With background collection, each attempt waits until the thread has taken a batch.
            with held():
                if not self.broken_by_update(workers):
                    yield
                    return
                if batches() == before:
                    break
                before = batches()
        raise RuntimeError(
            f"after this update, a batch that is being collected would be {self.most + 1} "
            f"updates old, but max_policy_lag={self.most}. Take a batch with next() before the "
            "next update, or raise max_policy_lag. The bound assumes that the learner updates no "
            "more often between the next two batches than it did so far"
        )
