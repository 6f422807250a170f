"""Limit to the age of frames from environments that step each at its own pace."""

import copy
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trawl.rollout.ready.serving import LagLimit, lag_limit


class Loop:
    """A loop over batches, whose environments finish their steps in random order."""

    def __init__(self, most, rows, count, seed):
        self.version, self.rng = 0, random.Random(seed)
        self.rows = rows
        self.limit = LagLimit(most, rows, count, lambda: self.version)
        self.idle, self.stepping, self.due = list(range(count)), {}, []

    def batch(self):
        """Returns the ages of the frames of a batch when it is delivered."""
        self.limit.begin()
        found = []
        while len(found) < self.rows:
            count = self.limit.to_act_for(self.idle, self.rows - len(found))
            acted, self.idle = self.idle[:count], self.idle[count:]
            self.limit.acted(acted)
            self.stepping |= dict.fromkeys(acted, self.version)
            assert self.stepping or self.due, "nothing would ever become ready"
            for env in self.rng.sample(sorted(self.stepping), min(len(self.stepping), 2)):
                self.due.append((env, self.stepping.pop(env)))
            self.due.sort(key=lambda one: self.limit.slack(one[0]))
            while self.due and len(found) < self.rows:
                env, version = self.due[0]
                if not self.limit.may_record(env, self.rows - len(found)):
                    break
                del self.due[0]
                self.limit.recorded(env)
                found.append(version)
                self.idle.append(env)
        return [self.version - version for version in found]


@given(
    most=st.integers(0, 4),
    rows=st.integers(1, 9),
    count=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_no_frame_is_older_than_the_limit(most, rows, count, seed):
    loop = Loop(most, rows, count, seed)
    for _ in range(20):
        assert max(loop.batch()) <= most
        loop.version += 1


@given(updates=st.integers(1, 3), seed=st.integers(0, 1000))
def test_several_updates_for_each_batch(updates, seed):
    loop = Loop(updates, 5, 7, seed)
    for _ in range(20):
        assert max(loop.batch()) <= updates
        loop.version += updates


def test_without_updates_environments_step_ahead():
    loop = Loop(2, 4, 8, seed=0)
    for _ in range(5):
        loop.batch()
    assert loop.stepping or loop.due


def test_there_is_no_limit_by_default():
    assert lag_limit(None, 8, [[0, 1]], lambda: 0) is None


def test_processes_with_several_environments_are_refused():
    with pytest.raises(ValueError, match="max_policy_lag=1 needs processes with one environment"):
        lag_limit(1, 8, [[0, 1], [2, 3]], lambda: 0)


# --- a state


def continued(loop, most, state):
    """Returns a copy of a loop whose limit is a new one with a state."""
    other = copy.deepcopy(loop)
    other.limit = LagLimit(most, loop.rows, len(state["open"]), lambda: other.version)
    other.limit.load_state_dict(state)
    return other


def run(loop, rng, batches):
    """Returns the ages of the frames of batches, with up to two updates after each batch."""
    found = []
    for _ in range(batches):
        found.append(loop.batch())
        loop.version += rng.randint(0, 2)
    return found


ARGUMENTS = {"rows": st.integers(1, 9), "count": st.integers(1, 12), "seed": st.integers(0, 1000)}


@given(most=st.integers(0, 4), before=st.integers(0, 9), **ARGUMENTS)
def test_a_limit_continues_from_its_state(most, before, rows, count, seed):
    loop = Loop(most, rows, count, seed)
    run(loop, random.Random(seed), before)
    other = continued(loop, most, loop.limit.state_dict())
    assert run(loop, random.Random(seed), 9) == run(other, random.Random(seed), 9)


@pytest.mark.parametrize("piece", ["seen", "now", "open", "chosen"])
def test_each_piece_of_the_state_of_a_limit_counts(piece):
    def differs(seed):
        loop = Loop(2, 3, 6, seed)
        state = loop.limit.state_dict()
        run(loop, random.Random(seed), 5)
        state = {**loop.limit.state_dict(), piece: state[piece]}
        other = continued(loop, 2, state)
        return run(loop, random.Random(seed), 9) != run(other, random.Random(seed), 9)

    assert any(map(differs, range(50)))
