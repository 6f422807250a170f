"""States of collectors whose environments are in processes: refusals and what is kept."""

import os
import select
import signal

import gymnasium
import pytest

from tests.oracle.continuing import (
    assert_continues,
    equal,
    following,
    parallel,
    row,
    saved,
)
from trawl.collectors import Collector
from trawl.envs.capture import capture, check_state, restore
from trawl.errors import EnvStateError


def end(env, index):
    """Kills a process of an environment, and waits for its end."""
    pid = env.processes.started.workers[index].pid
    handle = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([handle], [], [])
    os.close(handle)


@pytest.mark.filterwarnings("ignore:environments? .* failed at step:RuntimeWarning")
@pytest.mark.parametrize("when", ["before", "at"])
def test_a_process_that_died(when):
    """Its environment goes on in another process, or begins anew in both collectors."""

    def make():
        return Collector(parallel(), frames_per_batch=40, on_env_error="restart")

    with make() as collector, make() as other:
        collector.set_seed(1)
        collector.next()
        end(collector.env, 1)
        if when == "before":
            collector.next()
        other.load_state_dict(saved(collector.state_dict()))
        assert other.resumed
        assert equal(following(other, 5), following(collector, 5))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (parallel(count=3), "the state has 2 environments, but ParallelEnv.* has 3"),
        (parallel(envs_per_worker=2), "the state has 2 processes .* but .* has 1"),
        (parallel(backend="thread"), "the state has 2 processes .* but .* has 0"),
        (parallel(lambda: gymnasium.make("CartPole-v1")), r"in environment \d.* its id is"),
    ],
    ids=["number", "processes", "threads", "kind"],
)
def test_the_state_of_others_is_refused(make, match):
    first, env = parallel()(), make()
    first.reset()
    env.reset()
    state, before = first.capture(), env.capture()
    with pytest.raises(EnvStateError, match=match):
        env.restore(state)
    assert str(env.capture()) == str(before)
    first.close(), env.close()


def test_members_of_other_libraries_are_captured_by_their_methods():
    """What their transforms read in the next step is part of the state, too."""
    torchrl = pytest.importorskip("torchrl.envs", reason="TorchRL is not installed")

    class Summed(torchrl.TransformedEnv):
        def __init__(self):
            env = torchrl.GymEnv("CartPole-v1")
            super().__init__(env, torchrl.Compose(torchrl.RewardSum(), torchrl.StepCounter()))

        state_methods = ("attributes",)

        def capture(self):
            return capture(self.base_env._env)

        def check_state(self, state):
            check_state(self.base_env._env, state)

        def restore(self, state, trust):
            restore(self.base_env._env, state, trust)

    assert_continues(row(parallel(Summed, backend="thread"), frames_per_batch=20))
