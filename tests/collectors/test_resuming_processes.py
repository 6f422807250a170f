"""Collectors of environments in processes continue from a state, bit for bit."""

import os
import select
import signal
from functools import partial

import gymnasium
import nursery
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from resuming_parts import (
    Drawing,
    Fragile,
    Masked,
    Pickled,
    Told,
    Walk,
    alike,
    check,
    check_piece,
    through_a_file,
)

from trawl.collectors import Collector, MultiSyncCollector
from trawl.envs import ParallelEnv, SerialEnv
from trawl.envs.capture import capture, check_state, restore
from trawl.errors import EnvStateError
from trawl.testing import ImageEnv, NestedEnv, RaggedEnv, SelfResettingVectorEnv

NAMES = ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "Blackjack-v1", "FrozenLake-v1"]
KINDS = [partial(gymnasium.make, name) for name in NAMES]
KINDS += [partial(kind, lengths=[3, 1, 7]) for kind in (NestedEnv, ImageEnv)]
KINDS += [Walk, Masked, Pickled]
RAGGED = partial(RaggedEnv, lengths=[3, 1, 7])
FAILS = pytest.mark.filterwarnings("ignore:environments? .* failed at step:RuntimeWarning")


def sync(mode):
    return SyncVectorEnv([Walk] * 2, autoreset_mode=AutoresetMode(mode))


NESTED = [partial(sync, mode.value) for mode in AutoresetMode]
NESTED += [partial(SelfResettingVectorEnv, [Walk] * 2), partial(SerialEnv, 2, [Walk, Walk])]


def parallel(kind=Walk, count=4, **options):
    return partial(ParallelEnv, count, kind, **options)


@given(
    kind=st.sampled_from([*KINDS, *NESTED, Drawing]),
    batches=st.integers(0, 4),
    seed=st.sampled_from([None, 1]),
    each=st.integers(1, 3),
    groups=st.sampled_from([1, 2]),
    limit=st.sampled_from([None, 7]),
)
@settings(max_examples=12)
def test_environments_in_processes(kind, batches, seed, each, groups, limit):
    """The state is one in each process, with its generators."""
    if groups == 2:
        each = min(each, 2)
    make = parallel(kind, envs_per_worker=each, groups=groups)
    limited = None if kind in (*NESTED[:1], NESTED[3]) else limit
    options = {"frames_per_batch": 80, "max_frames_per_traj": limited}
    check(lambda: Collector(make, **options), batches, seed=seed)


@given(
    kind=st.sampled_from([*KINDS, *NESTED]),
    batches=st.integers(0, 4),
    each=st.integers(1, 3),
)
@settings(max_examples=10)
def test_environments_in_threads(kind, batches, each):
    make = parallel(kind, envs_per_worker=each, backend="thread")
    check(lambda: Collector(make, frames_per_batch=80), batches)


@given(
    kind=st.sampled_from([RAGGED, Told]),
    batches=st.integers(0, 4),
    each=st.integers(1, 2),
    backend=st.sampled_from(["process", "thread"]),
)
@settings(max_examples=8)
def test_environments_that_exchange_messages(kind, batches, each, backend):
    make = parallel(kind, count=2, envs_per_worker=each, backend=backend)
    check(lambda: Collector(make, frames_per_batch=20), batches)


def test_tensordict_steps():
    """A policy of another kind lets the environment be stepped with TensorDicts."""
    env, other = parallel(count=2)(), parallel(count=2)()
    env.set_seed(1)
    root = env.reset()
    for _ in range(20):
        _, root = env.step_and_maybe_reset(env.rand_action(root))
    state = through_a_file(env.capture())
    other.reset()
    other.restore(state)
    second = root.clone()
    torch.manual_seed(0)
    actions = [env.rand_action() for _ in range(30)]
    for action in actions:
        frame, root = env.step_and_maybe_reset(root.update(action))
        again, second = other.step_and_maybe_reset(second.update(action.clone()))
        assert alike(frame, again)
        assert alike(root, second)
    env.close(), other.close()


@pytest.mark.parametrize("method", ["inline", "forkserver", "spawn"])
def test_workers_with_environments_in_processes(method):
    sources = [parallel(Drawing, count=2)] * 2
    options = {"frames_per_batch": 60, "start_method": method}
    check(lambda: MultiSyncCollector(sources, **options), 3)


@FAILS
@given(batches=st.integers(0, 5), each=st.integers(1, 2), groups=st.sampled_from([1, 2]))
@settings(max_examples=8)
def test_seeds_of_restarted_environments_are_derived_further(batches, each, groups):
    make = parallel(Fragile, envs_per_worker=each, groups=groups)
    check(lambda: Collector(make, frames_per_batch=80, on_env_error="restart"), batches)


def end(env, index):
    """Kills a process of an environment, and waits for its end."""
    pid = env.processes._workers[index].pid
    handle = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([handle], [], [])
    os.close(handle)


@pytest.mark.filterwarnings("ignore:environments? .* failed at step:RuntimeWarning")
@pytest.mark.parametrize("when", ["before", "at"])
def test_a_process_that_died(when):
    """Its environment goes on in another process, or begins anew in both collectors."""

    def make():
        return Collector(parallel(Walk, count=2), frames_per_batch=40, on_env_error="restart")

    with make() as collector, make() as other:
        collector.set_seed(1)
        collector.next()
        end(collector.env, 1)
        if when == "before":
            collector.next()
        state = through_a_file(collector.state_dict())
        other.load_state_dict(state)
        assert other.resumed
        for _ in range(5):
            assert alike(collector.next(), other.next())


PIECES = {
    "environment": (Walk, ("envs", 2)),
    "numbers": (Drawing, ("generators", 1)),
    "numpy": (Drawing, ("generators", 0, "numpy")),
    "torch": (Drawing, ("generators", 0, "torch")),
    "python": (Drawing, ("generators", 0, "python")),
    "restarts": (Fragile, ("restarts",)),
}


@FAILS
@pytest.mark.parametrize("piece", PIECES)
def test_each_piece_of_the_state_counts(piece):
    kind, path = PIECES[piece]
    make = parallel(kind, envs_per_worker=2)
    options = {"frames_per_batch": 80, "on_env_error": "restart"}
    check_piece(lambda: Collector(make, **options), ("resume", "envs", 0, *path))


# --- trust


def test_pickles_of_the_same_program_need_no_trust():
    make = parallel(Pickled, count=2, start_method="forkserver")
    check(lambda: Collector(make, frames_per_batch=40), 2)
    options = {"frames_per_batch": 40, "start_method": "forkserver"}
    check(lambda: MultiSyncCollector([Pickled] * 2, **options), 2)
    check(lambda: MultiSyncCollector([make] * 2, **options), 2)


def test_pickles_of_processes_that_were_spawned_need_no_trust_either():
    """A worker gets the key from here, and gives it to a process of its own."""
    make = parallel(Pickled, count=1, start_method="spawn")
    options = {"frames_per_batch": 40, "start_method": "spawn"}
    check(lambda: MultiSyncCollector([make], **options), 2)


PROGRAM = """
import sys, torch
from test_resuming_processes import parallel, Pickled
from trawl.collectors import Collector

state = torch.load("state", weights_only=True)
if __name__ == "__main__":
    with Collector(parallel(Pickled, count=2), frames_per_batch=40) as collector:
        collector.load_state_dict(state, trust=sys.argv[1] == "trust")
        torch.save([collector.next().to_dict() for _ in range(4)], "found")
"""


@pytest.mark.parametrize("trust", ["trust", "replay"])
def test_another_program_opens_the_pickle_or_replays_the_episode(trust, tmp_path):
    with Collector(parallel(Pickled, count=2), frames_per_batch=40) as collector:
        collector.set_seed(1)
        collector.next()
        torch.save(collector.state_dict(), tmp_path / "state")
        expected = [collector.next() for _ in range(4)]
    done = nursery.run(PROGRAM, trust, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "found", weights_only=True)
    for one, batch in zip(found, expected, strict=True):
        assert alike(type(batch)(one, batch.shape), batch)


# --- states that don't fit


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (parallel(count=3), "the state has 2 environments, but ParallelEnv.* has 3"),
        (parallel(count=2, envs_per_worker=2), "the state has 2 processes .* but .* has 1"),
        (parallel(count=2, backend="thread"), "the state has 2 processes .* but .* has 0"),
        (
            parallel(lambda: gymnasium.make("CartPole-v1"), count=2),
            r"in environment \d.* its id is",
        ),
    ],
    ids=["number", "processes", "threads", "kind"],
)
def test_the_state_of_others_is_refused(make, match):
    first, env = parallel(count=2)(), make()
    first.reset()
    env.reset()
    state, before = first.capture(), env.capture()
    with pytest.raises(EnvStateError, match=match):
        env.restore(state)
    assert str(env.capture()) == str(before)
    first.close(), env.close()


def test_no_worker_is_changed_if_the_environments_of_another_one_differ():
    options = {"frames_per_batch": 40, "start_method": "inline"}
    with MultiSyncCollector([Walk, Walk], **options) as collector:
        state = collector.state_dict()
    with (
        MultiSyncCollector([Walk, Masked], **options) as other,
        MultiSyncCollector([Walk, Masked], **options) as untouched,
    ):
        other.set_seed(1), untouched.set_seed(1)
        with pytest.raises(EnvStateError, match=r"worker 1.* its wrapper chain is .*Walk"):
            other.load_state_dict(state)
        assert alike(other.next(), untouched.next())


def test_ways_are_told():
    env = ParallelEnv(2, [partial(SyncVectorEnv, [Walk, Pickled])] * 2)
    env.reset()
    assert env.state_methods == ["attributes", "pickle"] * 2
    env.close()


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

    check(lambda: Collector(ParallelEnv(2, Summed), frames_per_batch=20), 3)
    with Collector(ParallelEnv(2, Summed), frames_per_batch=20) as collector:
        assert collector.env_state_methods() == ["attributes"] * 2


def test_members_of_torchrl():
    """One of their processes has two, and the other one has one."""
    torchrl = pytest.importorskip("torchrl.envs", reason="TorchRL is not installed")
    make = parallel(partial(torchrl.GymEnv, "CartPole-v1"), 3, envs_per_worker=2)
    check(lambda: Collector(make, frames_per_batch=30), 3)


@given(batches=st.integers(0, 6), each=st.integers(1, 2), seed=st.sampled_from([None, 1]))
@settings(max_examples=4)
def test_closed_environments_are_replayed(batches, each, seed):
    pytest.importorskip("Box2D", reason="Box2D is not installed")
    make = parallel("LunarLander-v3", 2, envs_per_worker=each)
    options = {"frames_per_batch": 60, "max_frames_per_traj": 45}
    check(lambda: Collector(make, **options), batches, seed=seed)
