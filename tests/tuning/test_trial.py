"""The measurement of a single layout."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tuning_parts import candidate

import trawl
from trawl.extras.tuning import Trial
from trawl.extras.tuning.trial import Measurement, first_line, measure, undisturbed
from trawl.testing import FaultyEnv, NumberedEnv


class Watched:
    """Makes a collector, and remembers it."""

    def __init__(self, source, **options):
        self._arguments = source, options
        self.made = None

    def __call__(self):
        source, options = self._arguments
        self.made = trawl.Collector(source, frames_per_batch=10, **options)
        return self.made


@pytest.mark.parametrize(
    "options",
    [{}, {"num_collectors": 2, "sync": True}, {"num_collectors": 2, "sync": False}],
    ids=["direct", "sync", "async"],
)
def test_batches_are_counted_and_the_collector_is_closed(options):
    make, seen = Watched(NumberedEnv, **options), []
    found = measure(make, 0.0, seen.append)
    warm = 1 if options.get("sync", True) else 4
    assert len(seen) == 2 * warm
    assert found.frames == 10 * warm
    assert found.seconds > 0
    assert all(0 <= share <= 1 for share in found.shares.values())
    assert "env_time_share" in found.shares
    with pytest.raises(RuntimeError):
        make.made.next()


def test_the_time_is_used():
    times = iter(range(100))
    found = measure(Watched(NumberedEnv), 5.0, clock=lambda: float(next(times)))
    # The clock says 0 at the beginning, 1 after the first batch, and then one more for each batch.
    assert found == Measurement(40, 5.0, found.shares)


@pytest.mark.parametrize(
    ("error", "options"),
    [(ZeroDivisionError, {}), (KeyboardInterrupt, {"num_collectors": 2, "sync": True})],
)
def test_an_error_or_interruption_closes_the_collector(error, options):
    make = Watched(NumberedEnv, **options)

    def fail(batch):
        raise error

    with pytest.raises(error):
        measure(make, 60.0, fail)
    with pytest.raises(RuntimeError):
        make.made.next()


def test_errors_of_workers_are_one_line():
    make = Watched(lambda: FaultyEnv(at=3, fault=ValueError("no\nat all")), num_collectors=1)
    with pytest.raises(ValueError, match="no") as raised:
        measure(make, 60.0)
    assert first_line(raised.value) == "in worker 0: ValueError: no"
    assert first_line(OSError()) == "OSError"


def test_random_generators_are_restored_and_warnings_are_muted():
    def drawn():
        return torch.rand(1).item(), np.random.rand(), random.random()

    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = drawn()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    with undisturbed():
        drawn()
        # Warns that this is no multiple of the number of environments.
        trawl.Collector([NumberedEnv] * 3, frames_per_batch=10).shutdown()
    assert drawn() == expected


def test_a_trial_adds_up_measurements():
    trial = Trial(candidate(0))
    assert (trial.measured, trial.frames_per_second, trial.env_share) == (False, 0.0, None)
    # Newer names of shares come first.
    trial = trial.add(Measurement(10, 2.0, {"env_time_share": 0.5, "env_share": 0.25}))
    assert (trial.env_share, trial.frames_per_second, trial.seconds) == (0.25, 5.0, 2.0)
    # A measurement without shares leaves the last ones; they are means over time.
    assert trial.add(Measurement(1, 1.0)).env_share == 0.25
    assert trial.add(Measurement(10, 6.0, {"env_share": 0.65})).env_share == pytest.approx(0.55)
