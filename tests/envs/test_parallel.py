"""Environments in processes of their own, stepped as one batch: as SerialEnv, but side by side."""

import gc
import os
import pickle
import random
import select
import signal
import subprocess
import time
import weakref
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from forked import Forked
from tensor_parts import assert_same

from trawl import Collector, MultiSyncCollector
from trawl.collectors import AsyncBatchedCollector
from trawl.envs import ParallelEnv, SerialEnv
from trawl.errors import WorkerDied, WorkerError
from trawl.testing import (
    FaultyEnv,
    NumberedEnv,
    RaggedEnv,
    SelfResettingVectorEnv,
)

STEP = 2


@pytest.fixture
def parallel(opened):
    """Environment ``i`` has episodes of ``2 + i`` steps."""

    def make(kind=NumberedEnv, count=3, cls=ParallelEnv, **options):
        makers = [lambda i=i: kind(i, lengths=[2 + i]) for i in range(count)]
        return opened(cls, count, makers, **options)

    return make


@pytest.fixture
def threads(parallel):
    """The same in threads of this process, for what doesn't depend on processes."""
    return partial(parallel, backend="thread")


def pids(env):
    return [worker.pid for worker in env.processes.started.workers]


def gone(pid):
    """Waits until a process has ended; False if it goes on."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 300)[0])
    finally:
        os.close(handle)


def rolled(env, steps=12):
    torch.manual_seed(1)
    return env.rollout(steps, break_when_any_done=False)


# --- the same as SerialEnv


class Drawing(gymnasium.Env):
    """Draws from the global generators of its process."""

    observation_space = gymnasium.spaces.Box(0, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, dies_at=None):
        self.level, self.dies_at, self.steps = random.random(), dies_at, 0

    def drawn(self):
        return np.array([np.random.rand(), torch.rand(()), self.level], "f4")

    def reset(self, *, seed=None, options=None):
        return self.drawn(), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.dies_at:
            os._exit(3)
        return self.drawn(), random.random(), bool(np.random.rand() < 0.2), False, {}


def drawn_action(observation):
    return torch.nn.functional.one_hot((observation[..., 0] > 0.5).long(), 2)


def drawn_by(make, cls=Collector, count=2, **options):
    with cls(make(), frames_per_batch=count * 20, **options) as collector:
        collector.set_seed(4)
        batch = collector.next()
        made = ~batch.get(("collector", "mask"), torch.zeros(batch.shape, dtype=torch.bool))
    return batch["observation"][..., :2], batch["next", "reward"], made


def test_global_generators_give_what_those_of_workers_give():
    one, again = (drawn_by(lambda: ParallelEnv(2, Drawing), policy=drawn_action) for _ in range(2))
    assert all(map(torch.equal, one[:2], again[:2]))
    assert len(one[0][..., 0].unique()) > 6
    other = drawn_by(lambda: [Drawing] * 2, MultiSyncCollector, policy=drawn_action)
    for mine, theirs in zip(one[:2], other[:2], strict=True):
        assert torch.equal(mine.flatten(), theirs.flatten())


def test_each_environment_of_a_first_ready_collector_repeats_its_draws():
    found = []
    for _ in range(2):
        with AsyncBatchedCollector(
            [Drawing] * 2, policy=drawn_action, frames_per_batch=20
        ) as collector:
            collector.set_seed(4)
            frames = torch.cat([collector.next().clone() for _ in range(3)])
        found.append([frames[frames["env_index"] == env]["observation"] for env in range(2)])
    for mine, theirs in zip(*found, strict=True):
        count = min(len(mine), len(theirs))
        assert torch.equal(mine[:count, :2], theirs[:count, :2])


@pytest.mark.filterwarnings("ignore:.*exited with status 3:RuntimeWarning")
def test_a_process_that_replaces_another_repeats_its_draws():
    def draws():
        env = ParallelEnv(2, [partial(Drawing, dies_at=7), Drawing])
        with Collector(env, frames_per_batch=40, on_env_error="restart") as collector:
            collector.set_seed(4)
            batch = collector.next()
        # The level of the replacement was drawn while it was made.
        return torch.cat(
            [batch["observation"][:, :6, :2].flatten(), batch["observation"][0, 8:].flatten()]
        )

    assert torch.equal(draws(), draws())


def test_a_batch_of_parallel_batches(opened):
    env = opened(ParallelEnv, 2, lambda: ParallelEnv(2, NumberedEnv))
    other = opened(SerialEnv, 2, lambda: SerialEnv(2, NumberedEnv))
    assert_same([rolled(env)], [rolled(other)])


def test_actions_may_come_in_another_dtype(opened):
    frames = []
    for cls in (ParallelEnv, SerialEnv):
        env = opened(cls, 2, "Pendulum-v1")
        env.set_seed(0)
        root = env.reset()
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            action = torch.tensor([[0.1], [0.7]], dtype=dtype)
            root = env.step(root.set("action", action)).get("next")
        frames.append(root)
    assert_same(frames[:1], frames[1:])


def test_actions_are_checked(parallel):
    env = parallel()
    root = env.reset()
    with pytest.raises(KeyError, match="no action 'action'"):
        env.step(root)
    with pytest.raises(ValueError, match=r"shape \(3, 1\), but .* says \(3, 4\)"):
        env.step(root.set("action", torch.ones(3, 1)))


def test_environments_that_were_registered_here_are_known_there(opened):
    # Before: processes come from one that is there from now on.
    opened(ParallelEnv, 1, NumberedEnv)
    gymnasium.register("Trawl/Parallel-v0", lambda: NumberedEnv(number=7))
    try:
        env = opened(ParallelEnv, 1, "Trawl/Parallel-v0")
        assert NumberedEnv.numbers(env.reset())[0, 0] == 7
    finally:
        del gymnasium.registry["Trawl/Parallel-v0"]


def test_it_is_not_pickled(parallel):
    with pytest.raises(TypeError, match="pass a function that makes it"):
        pickle.dumps(parallel())


# --- in a collector


def collected(source, **options):
    """Batches of environments that ``cls`` steps."""
    with Collector(source, frames_per_batch=60, **options) as collector:
        collector.set_seed(0)
        for _ in range(4):
            yield collector.next().clone()


def in_bfloat16(observation):
    return observation[..., :1].to(torch.bfloat16)


def self_resetting(first):
    makers = [partial(NumberedEnv, 2 * first + i, lengths=[2 + i]) for i in range(2)]
    return SelfResettingVectorEnv(makers)


@pytest.mark.parametrize(
    ("source", "each", "options"),
    [
        ("Pendulum-v1", 1, {"policy": in_bfloat16, "max_frames_per_traj": 7}),
        (self_resetting, 2, {}),
    ],
)
def test_collected_data_is_that_of_a_serial_environment(source, each, options, opened):
    makers = source if isinstance(source, str) else [partial(source, i) for i in range(3)]
    env, other = opened(ParallelEnv, 3, makers, envs_per_worker=each), opened(SerialEnv, 3, makers)
    assert_same([*collected(env, **options)], [*collected(other, **options)])


def test_a_limit_needs_environments_that_can_be_restarted(opened):
    env = opened(ParallelEnv, 2, [partial(self_resetting, i) for i in range(2)], backend="thread")
    with pytest.raises(ValueError, match="SelfResettingVectorEnv, which can't restart"):
        Collector(env, frames_per_batch=4, max_frames_per_traj=2)


def test_environments_of_torchrl(opened):
    torchrl_envs = pytest.importorskip("torchrl.envs")
    make = [[lambda: torchrl_envs.GymEnv("CartPole-v1")] * 2] * 2
    env, other = opened(ParallelEnv, 2, make, backend="thread"), opened(SerialEnv, 2, make)
    env.set_seed(0)
    other.set_seed(0)
    assert_same([rolled(env, 30)], [rolled(other, 30)])


# --- what goes wrong


def test_an_error_while_an_environment_is_made_comes_back():
    def fail():
        raise OSError("no display")

    with pytest.raises(OSError, match="in environment 1: OSError: no display") as raised:
        ParallelEnv(2, [NumberedEnv, fail])
    assert isinstance(raised.value, WorkerError)
    with pytest.raises(OSError, match="while making environment 1"):
        ParallelEnv(2, [NumberedEnv, fail], envs_per_worker=2)


@pytest.mark.parametrize("kind", ["array", "messages"])
def test_an_error_in_a_step_comes_back_and_the_rest_goes_on(kind, opened):
    class Unfit(FaultyEnv):
        def __init__(self):
            super().__init__(1, ZeroDivisionError("by me"))
            if kind == "messages":
                self.observation_space = RaggedEnv().observation_space

        def _observe(self):
            obs = super()._observe()
            extra = {"text": "0", "taken": (), "graph": RaggedEnv().reset()[0]["graph"]}
            return {"observation": obs, **extra} if kind == "messages" else obs

    env = opened(ParallelEnv, 2, [NumberedEnv if kind == "array" else RaggedEnv, Unfit])
    _, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
    with pytest.raises(ZeroDivisionError, match="in environment 1: ZeroDivisionError: by me"):
        env.step(env.rand_action(root))
    fresh = env.reset()
    assert fresh["observation"][:, STEP].tolist() == [0, 0]
    assert fresh["observation"][0, 3] == 2


def test_an_error_in_a_reset_comes_back(opened):
    class Once(NumberedEnv):
        def reset(self, **kwargs):
            if self._episode == 0:
                raise ZeroDivisionError("by me")
            return super().reset(**kwargs)

    env = opened(ParallelEnv, 2, [NumberedEnv, lambda: Once(lengths=[2])])
    with pytest.raises(ZeroDivisionError, match="while resetting GymEnv"):
        env.rollout(3, break_when_any_done=False)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("kind", "end", "words"),
    [
        (NumberedEnv, kill, "its process was killed by SIGKILL"),
        (RaggedEnv, partial(os._exit, 3), "its process exited with status 3"),
    ],
)
def test_a_death_is_noticed(kind, end, words, opened):
    class Mortal(kind):
        def step(self, action):
            if len(self.actions) == 2:
                end()
            return super().step(action)

    env = opened(ParallelEnv, 2, [lambda: kind(lengths=[9]), lambda: Mortal(1, lengths=[9])])
    with pytest.raises(WorkerDied, match=f"environment 1: {words}"):
        env.rollout(5)
    # And it is not forgotten.
    with pytest.raises(WorkerDied, match="environment 1"):
        env.reset()


@pytest.mark.parametrize(
    ("options", "killed", "match"),
    [
        ({}, 2, "environment 2"),
        ({"count": 5, "envs_per_worker": 2}, 1, "environments 2 to 3: its process was killed"),
    ],
)
def test_a_death_between_steps_is_noticed(options, killed, match, parallel):
    env = parallel(**options)
    root = env.rand_action(env.reset())
    assert len(pids(env)) == 3
    os.kill(pids(env)[killed], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=match):
        env.step(root)


def test_an_error_in_a_process_of_several_names_its_environment(opened):
    makers = [NumberedEnv, NumberedEnv, lambda: FaultyEnv(1, ZeroDivisionError("by me"))]
    env = opened(ParallelEnv, 3, makers, envs_per_worker=3)
    _, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
    with pytest.raises(ZeroDivisionError, match="in environment 2: ZeroDivisionError: by me"):
        env.step(env.rand_action(root))
    # The others have taken the step.
    assert env.buffers.observed["observation",][:, STEP].tolist()[:2] == [2, 2]


def test_an_interrupted_step_is_ended_before_the_next(parallel):
    """Ctrl-C, when one process was told to step, and the others were not yet."""
    env = parallel()
    root = env.rand_action(env.reset())
    wakers = env.processes.started.wakers
    waker = wakers[1]

    def interrupted(_):
        raise KeyboardInterrupt

    wakers[1] = interrupted
    with pytest.raises(KeyboardInterrupt):
        env.step(root)
    wakers[1] = waker
    frame = env.step(root)
    assert NumberedEnv.numbers(frame["next"])[:, STEP].tolist() == [2, 2, 2]


# --- the end


def test_closing_closes_every_environment(opened, tmp_path):
    class Closing(NumberedEnv):
        def close(self):
            (tmp_path / str(self.number)).touch()

    env = opened(ParallelEnv, 2, [lambda i=i: Closing(i) for i in range(2)])
    processes = pids(env)
    env.close()
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    assert all(map(gone, processes))
    env.close(raise_if_closed=False)
    with pytest.raises(RuntimeError, match="already closed"):
        env.close()
    with pytest.raises(RuntimeError, match="already closed"):
        env.reset()


def test_what_goes_wrong_while_it_is_closed_is_told(opened):
    class Closing(NumberedEnv):
        def close(self):
            raise OSError("stuck")

    env = opened(ParallelEnv, 2, Closing)
    with pytest.raises(OSError, match=r"in environment \d: OSError: stuck"):
        env.close()


def test_what_is_not_closed_ends_with_its_last_reference():
    env = ParallelEnv(2, "CartPole-v1")
    processes, known = pids(env), weakref.ref(env)
    before = len(os.listdir("/proc/self/fd"))
    del env
    gc.collect()
    assert known() is None
    assert all(map(gone, processes))
    assert len(os.listdir("/proc/self/fd")) < before


def test_no_descriptor_is_left():
    ParallelEnv(2, NumberedEnv).close()
    gc.collect()
    before, rounds = len(os.listdir("/proc/self/fd")), 4
    for _ in range(rounds):
        env = ParallelEnv(2, NumberedEnv)
        env.rollout(3)
        env.close()
        del env
    gc.collect()
    # Threads of other libraries may open some of their own meanwhile.
    assert len(os.listdir("/proc/self/fd")) < before + rounds


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), 9)", "raise SystemExit"])
def test_nothing_is_left_when_its_process_ends(end):
    program = f"""
        import os
        from trawl.envs import ParallelEnv
        env = ParallelEnv(2, "CartPole-v1")
        env.rollout(3)
        print(*[worker.pid for worker in env.processes.started.workers], flush=True)
        {end}
    """
    # The pipe of its standard output ends when the last process that has it is gone.
    told, _ = Forked(program, stdout=subprocess.PIPE).communicate()
    processes = told.split()
    assert len(processes) == 2
    assert all(gone(int(pid)) for pid in processes)


def test_an_environment_may_keep_its_action(opened):
    class Keeping(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
        action_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
        kept = np.zeros(1, np.float32)

        def reset(self, *, seed=None, options=None):
            return self.kept, {}

        def step(self, action):
            before, self.kept = self.kept, action
            return before, 0.0, False, False, {}

    env = opened(ParallelEnv, 1, Keeping)
    root = env.reset()
    seen = []
    for value in (1.0, 2.0, 3.0):
        root = env.step(root.set("action", torch.full((1, 1), value))).get("next")
        seen.append(root["observation"].item())
    assert seen == [0.0, 1.0, 2.0]


# --- groups in turn


def by_step(observation):
    return torch.nn.functional.one_hot(observation[..., STEP].long() % 4, 4)


def acted(env, frames=120, **options):
    """Batches of a policy that draws, with the newest of each environment's observations."""
    torch.manual_seed(0)

    def policy(observation):
        calls.append(tuple(observation.shape))
        return torch.nn.functional.one_hot(torch.randint(4, observation.shape[:-1]), 4)

    calls = []
    with Collector(env, policy, frames_per_batch=frames, **options) as collector:
        collector.set_seed(0)
        return [collector.next() for _ in range(3)], calls


def test_the_policy_acts_for_one_group_at_a_time(parallel):
    _, calls = acted(parallel(count=4, groups=2, backend="thread"), frames=40)
    # The first two calls find out what the policy writes.
    assert set(calls[2:]) == {(2, 5)}


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"groups": 3}, ValueError, r"groups=3 can't be formed from 4 environments .* 1, 2, 4"),
        ({"groups": 2, "envs_per_worker": 4}, ValueError, "envs_per_worker=4, .* may be 1$"),
        ({"groups": 0}, ValueError, "groups"),
        ({"envs_per_worker": 0}, ValueError, "envs_per_worker"),
        ({"envs_per_worker": "2"}, TypeError, "envs_per_worker"),
        ({"envs_per_worker": True}, TypeError, "envs_per_worker"),
        ({"start_method": "fork"}, ValueError, "start_method must be one of"),
    ],
)
def test_wrong_arguments_are_named(options, error, match):
    with pytest.raises(error, match=match):
        ParallelEnv(4, "Pendulum-v1", **options)


def test_groups_in_a_list_have_no_effect(threads):
    with pytest.warns(UserWarning, match="groups of a ParallelEnv have no effect here"):
        Collector([threads(count=2, groups=2)], by_step, frames_per_batch=80).shutdown()


def test_waiting_for_groups_is_time_of_the_environment(opened):
    class Slow(NumberedEnv):
        def step(self, action):
            time.sleep(0.005)
            return super().step(action)

    def share():
        env = opened(ParallelEnv, 2, Slow, groups=2)
        with Collector(env, by_step, frames_per_batch=40) as collector:
            collector.next()
            return collector.stats()["env_time_share"]

    # A busy machine may stand still for longer in other code, but not each time.
    assert any(share() > 0.5 for _ in range(20))
