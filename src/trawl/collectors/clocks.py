"""Alignment of a worker's clock with the driver's, by the messages that they exchange anyway."""

from __future__ import annotations

import math

from typing_extensions import override


class SharedClock:
    """Clock of a worker on this machine, which is the driver's own clock."""

    @property
    def offset(self) -> float:
        """Best estimate of the clock's offset from the driver's clock, in seconds."""
        return 0.0

    @property
    def used(self) -> float:
        """Estimate of the offset when it was first needed."""
        return 0.0

    def add_request(self, sent: float, received: float) -> None:
        """Ignores the times of a request."""

    def add_answer(self, sent: float, received: float) -> None:
        """Ignores the times of an answer."""

    def error(self, offset: float) -> float:
        """Returns 0: the clocks are the same."""
        return 0.0


class RemoteClock(SharedClock):
    """Clock of a worker on another machine, aligned as in the Network Time Protocol.

    A message arrives after it was sent. Each request is therefore an upper bound of the offset of
    the worker's clock from the driver's, and each answer a lower bound. The true offset lies
    between the tightest bounds of all messages, as long as both clocks run at the same rate.

    Attributes:
        low: lower bound of the offset, in seconds.
        high: upper bound of the offset.
        drift: seconds by which a message contradicted the bounds, because the clocks' rates differ.
    """

    def __init__(self) -> None:
        self.low, self.high = -math.inf, math.inf
        self.drift = 0.0
        self._used: float | None = None

    @override
    def add_request(self, sent: float, received: float) -> None:
        """Adds a message to the worker.

        Args:
            sent: time at which it was sent, by the driver's clock.
            received: time at which it arrived, by the worker's clock.
        """
        bound = received - sent
        if bound < self.low:
            self.drift = max(self.drift, self.low - bound)
        else:
            self.high = min(self.high, bound)

    @override
    def add_answer(self, sent: float, received: float) -> None:
        """Adds a message from the worker.

        Args:
            sent: a time before it was sent, by the worker's clock.
            received: time at which it arrived, by the driver's clock.
        """
        bound = sent - received
        if bound > self.high:
            self.drift = max(self.drift, bound - self.high)
        else:
            self.low = max(self.low, bound)

    @property
    @override
    def offset(self) -> float:
        """Middle between the bounds."""
        if math.isfinite(self.low) and math.isfinite(self.high):
            return self.low + (self.high - self.low) / 2
        return next((bound for bound in (self.low, self.high) if math.isfinite(bound)), 0.0)

    @property
    @override
    def used(self) -> float:
        """Estimate when it was first needed, which never changes again."""
        if self._used is None:
            self._used = self.offset
        return self._used

    @override
    def error(self, offset: float) -> float:
        """Returns the maximum error of an estimate, which is infinite without both bounds."""
        return max(self.high - offset, offset - self.low) + self.drift
