"""What is made is closed, whatever goes wrong."""

import pytest

from trawl.envs import SerialEnv
from trawl.envs.batches.serial import build_env
from trawl.testing import NumberedEnv


class Door(NumberedEnv):
    """Remembers that it was closed; may fail at it."""

    def __init__(self, closed, number, broken=False):
        super().__init__()
        self.closed = closed
        self.own = number
        self.broken = broken

    def close(self):
        self.closed.append(self.own)
        if self.broken:
            raise OSError("stuck")


def test_all_are_closed_when_one_fails_to():
    closed = []
    env = SerialEnv(3, [lambda i=i: Door(closed, i, broken=i == 0) for i in range(3)])
    with pytest.raises(OSError, match="stuck"):
        env.close()
    assert sorted(closed) == [0, 1, 2]


def test_those_made_are_closed_when_one_can_not_be():
    closed = []

    def fail():
        raise RuntimeError("no display")

    with pytest.raises(RuntimeError, match="no display"):
        build_env([lambda: Door(closed, 0), lambda: Door(closed, 1), fail])
    assert sorted(closed) == [0, 1]


def test_one_simulator_is_not_two_environments():
    simulator = NumberedEnv()
    with pytest.raises(ValueError, match="environments 0 and 2 of one batch are the same object"):
        build_env([simulator, NumberedEnv(), lambda: simulator])
