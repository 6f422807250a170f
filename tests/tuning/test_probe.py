"""What one environment shows before layouts are measured."""

from __future__ import annotations

import time
from pathlib import Path

import gymnasium
import pytest

from trawl.extras.tuning.trial import probe, undisturbed


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(),
    reason="the system doesn't tell how long a process waits for a processor",
)
def test_an_environment_that_computes_does_not_wait():
    # A virtual machine may stand still for a while, which looks like waiting.
    assert any(not probe("Pendulum-v1", None, {}).waits for _ in range(50))


def test_an_environment_that_waits_is_recognised_and_the_size_of_a_batch_is_found():
    class Waiting(gymnasium.Wrapper):
        def step(self, action):
            time.sleep(0.02)
            return self.env.step(action)

    # On a busy machine, a process may run or queue for longer than it waits.
    seen = (probe(lambda: Waiting(gymnasium.make("CartPole-v1")), None, {}) for _ in range(50))
    found = next(one for one in seen if one.waits)
    assert found.env_batch == 0
    assert found.seconds_per_frame >= 0.02
    with undisturbed():
        assert probe(lambda: gymnasium.make_vec("CartPole-v1", 3), None, {}).env_batch == 3
