"""How far the policy that made a batch may be behind the newest when the batch is delivered."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

# Batches after which a time of more updates is forgotten.
_REMEMBERED = 256


class Lags:
    """Counts frames by lag: the updates that their worker was sent since it began the batch."""

    def __init__(self) -> None:
        self._frames: Counter[int] = Counter()

    def add(self, lag: int, frames: int) -> None:
        """Counts frames that were delivered."""
        self._frames[lag] += frames

    def stats(self) -> dict[str, Any]:
        """``policy_lag_mean``, ``policy_lag_max``, and ``policy_lag_0``, … (frames)."""
        total = sum(self._frames.values())
        if not total:
            return {}
        mean = sum(lag * frames for lag, frames in self._frames.items()) / total
        facts = {"policy_lag_mean": mean, "policy_lag_max": max(self._frames)}
        return facts | {f"policy_lag_{lag}": self._frames[lag] for lag in sorted(self._frames)}


class LagBound:
    """Holds workers back, so that each batch can be delivered before its policy is too old.

    A batch that is ordered now is delivered when those that were ordered before it are. For each
    of them there may be as many updates as there were between two deliveries at most; before there
    were any, as many as are allowed. If these are too many, the order has to wait.

    Args:
        most: how many updates a batch may be behind.
        newest: how many updates were sent to a worker.
        workers: how many there are.
    """

    def __init__(self, most: int, newest: Callable[[int], int], workers: int) -> None:
        self.most = most
        self._newest = newest
        # How many updates there were before the last batches, each.
        self._seen = deque([0], maxlen=_REMEMBERED)
        self._before = [newest(index) for index in range(workers)]
        self._refused = 0
        # Of each batch under way: its worker, and how many updates that had been sent.
        self._since: dict[int, tuple[int, int]] = {}

    def grow(self, workers: Iterable[int]) -> None:
        """There are more workers."""
        self._before += [self._newest(index) for index in workers]

    def begin(self) -> None:
        """A batch is asked for: learns how many updates there were since the last one."""
        now = [self._newest(index) for index in range(len(self._before))]
        steps = [b - a for a, b in zip(self._before, now, strict=True)]
        # Updates before the first batch are over when it begins.
        if self._since:
            self._seen.append(max(*steps, self._refused))
        self._before, self._refused = now, 0

    @property
    def _step(self) -> int:
        return max(self._seen) or max(1, self.most)

    def room(self, later: bool) -> bool:
        """Whether another batch may be ordered.

        Args:
            later: whether it has to wait for the next delivery, as another is chosen for this one.
        """
        return (len(self._since) + later) * self._step <= self.most

    def ordered(self, number: int, index: int) -> None:
        """A batch was ordered. One of random actions has no policy that could be old."""
        self._since[number] = index, self._newest(index)

    def made(self, number: int, weights: int) -> None:
        """A batch was made, after so many updates."""
        if number in self._since:
            self._since[number] = self._since[number][0], weights

    def delivered(self, number: int) -> None:
        """A batch is delivered."""
        self._since.pop(number, None)

    def choose(self, ready: Iterable[int]) -> int | None:
        """Which of the batches that are ready is to be delivered; None to wait for another."""
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
        """Whether a batch under way would be too old if these workers were sent an update.

        If so, there will be fewer under way the next time.
        """
        chosen = set(workers)
        broken = any(
            index in chosen and self._newest(index) + 1 - weights > self.most
            for index, weights in list(self._since.values())
        )
        if broken:
            self._refused = max(self._newest(i) - self._before[i] + 1 for i in chosen)
        return broken
