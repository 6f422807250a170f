"""Collectors of environments whose state can't be read continue bit for bit, by a replay."""

from collections import defaultdict
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import nursery
import pytest
import torch
from closed_envs import ACTIONS, Closed, Forgetful, Pickled
from gymnasium import wrappers
from hypothesis import given, settings
from hypothesis import strategies as st
from multi_parts import TRAJ_IDS, same
from resuming_parts import through_a_file
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from trawl.envs import GymEnv
from trawl.envs.capture import replay as replays
from trawl.errors import EnvStateError

FOLDER = Path(__file__).parent


class Noisy(nn.Module):
    """A policy with noise, which chooses one of three actions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 3)

    def forward(self, observation):
        scores = self.net(observation) + torch.randn(*observation.shape[:-1], 3)
        return nn.functional.one_hot(scores.argmax(-1), 3)


class Small(nn.Module):
    """A policy whose actions are bfloat16."""

    def forward(self, observation):
        noise = torch.rand(*observation.shape[:-1], 2)
        return ((observation.tanh() + noise) / 2).to(torch.bfloat16)


def policy(net=Noisy):
    return TensorDictModule(net(), ["observation"], ["action"])


def wrapped(actions="discrete"):
    env = wrappers.NormalizeReward(wrappers.NormalizeObservation(Closed(actions)))
    return wrappers.RecordEpisodeStatistics(env)


def failing():
    return Closed(fails_at=(45, 46))


class Stop:
    """Interrupts each third batch after some steps."""

    def __init__(self):
        self.calls = 0

    def collection_stopped(self):
        self.calls += 1
        return self.calls % 97 == 0


def alike(one, other):
    return (one is None) == (other is None) and (one is None or same(one, other))


def go_on(collector, other, later=6):
    """Loads the state of a collector into another one, and compares what they deliver."""
    other.load_state_dict(through_a_file(collector.state_dict()))
    assert other.resumed
    for _ in range(later):
        assert alike(collector.next(), other.next())


def check(make, batches, later=6):
    with make() as collector, make() as other:
        collector.set_seed(1)
        for _ in range(batches):
            collector.next()
        if isinstance(collector, Collector):
            assert set(collector.env_state_methods()) == {"replay"}
        go_on(collector, other, later)


OPTIONS = [
    {},
    {"max_frames_per_traj": 17},
    {"init_random_frames": 100},
    {"trajs_per_batch": 2, "traj_format": "cat", "max_frames_per_traj": 23},
    {"compact_obs": True, "reset_at_each_iter": True},
]
warned = pytest.mark.filterwarnings("ignore:init_random_frames=100", "ignore:frames_per_batch=60")
named = partial(pytest.mark.parametrize, ids=lambda options: "-".join(options) or "plain")


@warned
@named("options", OPTIONS)
@given(batches=st.integers(0, 6), envs=st.integers(1, 3), make=st.sampled_from([Closed, wrapped]))
@settings(max_examples=10)
def test_a_collector_continues_bit_for_bit(options, batches, envs, make):
    source = [make] * envs if envs > 1 else make
    check(lambda: Collector(source, policy(), frames_per_batch=60, **options), batches)


@pytest.mark.parametrize("actions", sorted(ACTIONS))
def test_random_actions_of_every_kind(actions):
    for envs in (1, 2):
        source = [partial(Closed, actions)] * envs
        check(lambda source=source: Collector(source, frames_per_batch=50), 3)


def test_actions_of_half_precision():
    check(lambda: Collector(partial(Closed, "box"), policy(Small), frames_per_batch=50), 3)


@given(
    calls=st.lists(
        st.sampled_from(["next", "next", "reset", "reset one", "seed", "rollout"]), max_size=8
    )
)
@settings(max_examples=15)
def test_resets_and_seeds_between_batches(calls):
    """A state is taken after any calls, and continues a state that was loaded itself."""

    def make():
        return Collector([wrapped] * 2, policy(), frames_per_batch=40, max_frames_per_traj=30)

    with make() as collector, make() as other, make() as third:
        collector.set_seed(1)
        for call in calls:
            if call == "next":
                collector.next()
            elif call == "rollout":
                collector.rollout()
            elif call == "seed":
                collector.set_seed(7)
            else:
                collector.reset(*[0] * (call == "reset one"))
        go_on(collector, other, later=3)
        go_on(other, third, later=3)


def test_batches_that_are_cut_short():
    def make():
        return Collector(wrapped, policy(), frames_per_batch=40, interruptor=Stop())

    with make() as collector, make() as other:
        collector.set_seed(1)
        lengths = set()
        for _ in range(8):
            lengths.add(collector.next()[TRAJ_IDS].ge(0).sum().item())
        assert len(lengths) > 1
        other.config.interruptor.calls = collector.config.interruptor.calls
        go_on(collector, other)


@pytest.mark.filterwarnings("ignore:environment . failed at step")
@pytest.mark.parametrize("batches", [3, 4, 5])
def test_environments_that_fail_and_are_made_again(batches):
    def make():
        return Collector([failing] * 2, policy(), frames_per_batch=40, on_env_error="restart")

    with make() as collector, make() as other:
        collector.set_seed(1)
        for _ in range(batches):
            collector.next()
        assert collector.stats()["env_restarts"] > 0
        go_on(collector, other)


def test_single_steps_for_a_replay_buffer():
    def make():
        frames = []
        buffer = type("Buffer", (), {"add": lambda self, frame: frames.append(frame.clone())})()
        return frames, Collector(
            Closed, policy(), frames_per_batch=20, replay_buffer=buffer, extend_buffer=False
        )

    (frames, collector), (again, other) = make(), make()
    with collector, other:
        collector.set_seed(1)
        for _ in range(3):
            collector.next()
        other.load_state_dict(through_a_file(collector.state_dict()))
        frames.clear()
        for _ in range(3):
            collector.next(), other.next()
        assert len(frames) == 60
        assert all(map(same, frames, again))


def test_frames_without_a_fixed_layout():
    """A policy that writes text needs batches of TensorDicts."""

    def speak(tensordict):
        tensordict.set_non_tensor("word", "yes")
        scores = torch.randn(*tensordict.batch_size, 3)
        return tensordict.set("action", nn.functional.one_hot(scores.argmax(-1), 3))

    def make():
        return Collector([wrapped] * 2, speak, frames_per_batch=40, max_frames_per_traj=17)

    with make() as collector, make() as other:
        collector.set_seed(1)
        for _ in range(3):
            collector.next()
        assert collector.stats()["env_path"] == "tensordict"
        go_on_without_words(collector, other)


def go_on_without_words(collector, other):
    other.load_state_dict(through_a_file(collector.state_dict()))
    assert other.resumed
    for _ in range(4):
        assert same(collector.next().exclude("word"), other.next().exclude("word"))


@pytest.mark.parametrize("method", ["inline", "forkserver"])
def test_synchronous_workers_continue_bit_for_bit(method):
    options = {"frames_per_batch": 60, "start_method": method, "max_frames_per_traj": 17}
    check(lambda: MultiSyncCollector([[wrapped] * 2] * 2, policy(), **options), 3)


def test_each_asynchronous_worker_continues_bit_for_bit():
    def streams(collector):
        found = defaultdict(list)
        for _ in range(12):
            batch = collector.next()
            found[int(batch[TRAJ_IDS][0]) % 2].append(batch)
        return found

    def make():
        return MultiAsyncCollector([Closed] * 2, policy(), frames_per_batch=30)

    with make() as collector, make() as other:
        collector.set_seed(1)
        for _ in range(5):
            collector.next()
        other.load_state_dict(through_a_file(collector.state_dict()))
        one, two = streams(collector), streams(other)
    for worker in (0, 1):
        pairs = list(zip(one[worker], two[worker], strict=False))
        assert len(pairs) > 1
        assert all(same(*pair) for pair in pairs)


def test_another_process_continues(tmp_path):
    program = (
        "import sys, torch\n"
        f"sys.path[:0] = [{str(FOLDER)!r}, {str(FOLDER.parent)!r}]\n"
        "from test_resuming_replay import *\n"
        "with Collector([wrapped] * 2, policy(), frames_per_batch=60) as other:\n"
        "    other.load_state_dict(torch.load('state', weights_only=True))\n"
        "    batches = [other.next()['next', 'observation'].clone() for _ in range(4)]\n"
        "torch.save(batches, 'batches')\n"
    )
    with Collector([wrapped] * 2, policy(), frames_per_batch=60) as collector:
        collector.set_seed(1)
        for _ in range(3):
            collector.next()
        torch.save(collector.state_dict(), tmp_path / "state")
        expected = [collector.next()["next", "observation"].clone() for _ in range(4)]
    done = nursery.run(program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "batches", weights_only=True)
    assert all(map(torch.equal, expected, found))


def pong(noops=30):
    ale = pytest.importorskip("ale_py", reason="ale-py is not installed")
    pytest.importorskip("cv2", reason="OpenCV, which the preprocessing needs, is not installed")
    gymnasium.register_envs(ale)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.25)
    return wrappers.FrameStackObservation(wrappers.AtariPreprocessing(env, noops), 4)


def test_sticky_atari():
    check(lambda: Collector(pong, frames_per_batch=50), 3, later=4)


def test_an_episode_that_began_between_the_first_steps():
    """Gymnasium's checker keeps the screen of the first step until the second one.

    One no-op follows each reset, so the checker has seen one step when the saved episode begins.
    The other environment is reset once more, so that its checker has seen two.
    """
    source = partial(pong, 1)
    with (
        Collector(source, frames_per_batch=50) as collector,
        Collector(source, frames_per_batch=50) as other,
    ):
        collector.set_seed(1)
        collector.next()
        for _ in range(2):
            other.reset()
        go_on(collector, other, later=2)


# --- what falls short


def test_a_failed_replay_names_environment_way_and_entry():
    with Collector([Closed, Forgetful], frames_per_batch=40) as collector:
        collector.set_seed(1)
        collector.next()
        state = collector.state_dict()
    with Collector([Closed, Forgetful], frames_per_batch=40) as other:
        match = r"environment 1: \d+ steps of .*Forgetful.* were replayed, but the observation"
        with pytest.raises(EnvStateError, match=match):
            other.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="new episodes begin in all environments"):
            other.load_state_dict(state, on_state_mismatch="new_episodes")
        assert not other.resumed
        other.next()


def test_a_long_episode_begins_anew(monkeypatch):
    monkeypatch.setattr(replays, "MOST_STEPS", 30)
    with Collector(partial(Closed, "box"), frames_per_batch=31) as collector:
        collector.set_seed(3)
        while collector.env_state_methods() == ["replay"]:
            collector.next()
        assert "resume" not in collector.state_dict()


def test_a_batch_that_was_given_up_is_not_replayed():
    class Broken(nn.Module):
        fails = False

        def forward(self, observation):
            if self.fails:
                raise KeyboardInterrupt
            return nn.functional.one_hot(torch.zeros((), dtype=torch.int64), 3)

    net = Broken()
    collector = Collector(
        Closed, TensorDictModule(net, ["observation"], ["action"]), frames_per_batch=5
    )
    rollout = collector._rollout
    rollout.run()
    net.fails = True
    with pytest.raises(KeyboardInterrupt):
        rollout.run()
    net.fails = False
    rollout.writer.begin()
    assert collector.env_state_methods() == ["none"]
    collector.shutdown()


def test_a_log_is_kept_only_where_it_is_needed():
    with Collector(["CartPole-v1", "Pendulum-v1"][:1] * 2, frames_per_batch=10) as collector:
        assert all(env.log is None for env in collector.env.envs)
    with Collector([Closed, Pickled], frames_per_batch=10) as collector:
        assert all(env.log is not None for env in collector.env.envs)
        assert collector.env_state_methods() == ["replay", "pickle"]


def test_the_log_holds_only_the_current_episode():
    with Collector(Closed, frames_per_batch=200) as collector:
        collector.set_seed(1)
        for _ in range(3):
            batch = collector.next()
            ended = np.flatnonzero(batch["next", "done"].numpy())
            assert len(ended)
            assert collector.env.log.steps == 200 - 1 - ended[-1]


def test_a_wrapped_environment_is_a_plain_chain():
    env = GymEnv(wrapped())
    with Collector(env, frames_per_batch=10) as collector:
        collector.next()
        names = [type(member).__name__ for member in replays.chain(env.env)]
    assert names == ["RecordEpisodeStatistics", "NormalizeReward", "NormalizeObservation", "Closed"]


# --- every piece counts


@pytest.mark.parametrize("piece", ["origin", "actions", "steps", "wrappers"])
def test_each_piece_of_the_state_counts(piece):
    """With a piece of an earlier state, loading fails, or the batches are others."""

    def make():
        return Collector(wrapped, policy(), frames_per_batch=30)

    with make() as collector:
        collector.set_seed(1)
        collector.next()
        before = through_a_file(collector.state_dict())
        for _ in range(4):
            collector.next()
        state = through_a_file(collector.state_dict())
        expected = [collector.next() for _ in range(4)]
    place, old = (one["resume"]["envs"][0]["env"]["replay"] for one in (state, before))
    assert place["steps"] != old["steps"]
    place[piece] = old[piece]
    with make() as other:
        if piece == "wrappers":
            other.load_state_dict(state)
            assert not all(same(other.next(), batch) for batch in expected)
        else:
            with pytest.raises(EnvStateError):
                other.load_state_dict(state)
