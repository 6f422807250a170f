"""A collector with environments of TorchRL continues from a state, bit for bit."""

from functools import partial
from pathlib import Path

import nursery
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torchrl")

from torchrl.envs import Compose, GymEnv, ParallelEnv, RewardSum, StepCounter, TransformedEnv
from torchrl_parts import Different, halve
from torchrl_resuming_parts import (
    ENVS,
    RECURRENT,
    Objects,
    Unpicklable,
    Walk,
    collector_of,
    equal_batches,
    gym,
    normed,
    policy_for,
    through_a_file,
    tree_equal,
)

from trawl.collectors import Collector, MultiSyncCollector
from trawl.envs.capture.frames import to_plain
from trawl.errors import EnvStateError

# Warnings of TorchRL about VecNormV2 in a batch, and about itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Support of VecNormV2"),
    pytest.mark.filterwarnings("ignore:This class is to be deprecated"),
    pytest.mark.filterwarnings("ignore:The VecNorm class is to be deprecated"),
    pytest.mark.filterwarnings("ignore:frames_per_batch="),
]


def check(make, batches, later=3, trust=False):
    """Compares a collector with one that continues from its state."""
    with make() as collector, make() as other:
        collector.set_seed(1)
        for _ in range(batches):
            collector.next()
        state = through_a_file(collector.state_dict())
        expected = [collector.next() for _ in range(later)]
        other.next()  # what the other one has seen before must not matter
        other.load_state_dict(state, trust=trust)
        assert other.resumed
        for batch in expected:
            assert equal_batches(batch, other.next())


@pytest.mark.parametrize("policy", ["random", "stochastic"])
@pytest.mark.parametrize("name", ENVS)
@given(batches=st.integers(1, 4), frames=st.sampled_from([10, 2, 24]))
@settings(max_examples=2)
def test_a_collector_continues_bit_for_bit(name, policy, batches, frames):
    if policy == "stochastic" and "mask" in name:
        return  # it has no observation
    make = partial(collector_of, name, policy, frames_per_batch=frames)
    with make() as collector:
        assert " ".join(collector.env_state_methods()) == ENVS[name][1]
    check(make, batches)


@pytest.mark.parametrize("name", ["CartPole, VecNorm", "SerialEnv, transformed"])
def test_a_state_before_the_first_batch(name):
    check(partial(collector_of, name, "random", frames_per_batch=10), 0)


@pytest.mark.parametrize("policy", RECURRENT)
@pytest.mark.parametrize("name", ["CartPole, bare", "CartPole, VecNorm", "SerialEnv"])
@given(batches=st.integers(1, 4))
@settings(max_examples=2)
def test_recurrent_states_go_on(name, policy, batches):
    options = {"auto_register_policy_transforms": True, "max_frames_per_traj": 17}
    options = options if name == "CartPole, bare" else {"auto_register_policy_transforms": True}
    check(partial(collector_of, name, policy, **options), batches)


@pytest.mark.parametrize("name", ["HalfCheetah-v5"])
def test_physics(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MuJoCo writes its log
    pytest.importorskip("mujoco", reason="MuJoCo is not installed")
    make = partial(normed, name, True)
    check(partial(Collector, make, frames_per_batch=30), 2)
    with Collector(make, frames_per_batch=10) as collector:
        assert collector.env_state_methods() == ["mujoco"]


def test_the_emulator_of_atari():
    pytest.importorskip("ale_py", reason="ale-py is not installed")

    def make():
        env = GymEnv("ALE/Pong-v5", frameskip=4, repeat_action_probability=0.0)
        env = TransformedEnv(env, Compose(RewardSum(), StepCounter()))
        return Collector(env, frames_per_batch=20)

    check(make, 2)
    with make() as collector:
        assert collector.env_state_methods() == ["ale"]


@pytest.mark.parametrize("method", ["inline", "forkserver"])
@pytest.mark.parametrize("name", ["CartPole, VecNorm", "native, transforms", "words"])
def test_workers_continue_bit_for_bit(name, method):
    make = ENVS[name][0]
    options = {"frames_per_batch": 40, "start_method": method}
    check(partial(MultiSyncCollector, [make] * 2, **options), 3)


@pytest.mark.parametrize(
    "options",
    [
        {"trajs_per_batch": 1, "traj_format": "cat"},
        {"max_frames_per_traj": 7},
        {"init_random_frames": 50},
    ],
    ids="-".join,
)
@pytest.mark.parametrize("name", ["words", "words, TorchRL", "CartPole, CatFrames"])
@pytest.mark.filterwarnings("ignore:init_random_frames=50")
def test_options(name, options):
    check(partial(collector_of, name, "stochastic", **options), 3)


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_agents_of_different_sizes(batch):
    """Their entries lie in lazy stacks."""
    check(lambda: Collector(Different(batch), halve, frames_per_batch=10), 2)


@pytest.mark.parametrize(
    ("name", "policy"), [("SerialEnv, transformed", "stochastic"), ("words", "random")]
)
def test_in_another_process(name, policy, tmp_path):
    path = str(tmp_path / "state.pt")
    with collector_of(name, policy) as collector:
        collector.set_seed(5)
        for _ in range(3):
            collector.next()
        torch.save(collector.state_dict(), path)
        expected = [collector.next() for _ in range(4)]
    call = f"main({name!r}, {policy!r}, {path!r}, 4)"
    code = f"from torchrl_resuming_parts import main; {call}"
    done = nursery.run(code, cwd=Path(__file__).parent, warn=["ignore"])
    assert done.returncode == 0, done.stderr
    found = torch.load(path + ".frames", weights_only=True)
    assert all(tree_equal(to_plain(one), other) for one, other in zip(expected, found, strict=True))


def test_a_state_in_memory_is_not_changed_by_those_that_loaded_it():
    make = partial(collector_of, "Pendulum, VecNormV2", "random")
    with make() as collector:
        collector.set_seed(1)
        collector.next()
        state = collector.state_dict()
        expected = [collector.next() for _ in range(3)]
    for _ in range(2):
        with make() as other:
            other.load_state_dict(state)
            for batch in expected:
                assert equal_batches(batch, other.next())


def test_the_state_of_transforms_is_a_copy():
    make = partial(collector_of, "Pendulum, VecNormV2", "random")
    with make() as collector, make() as other:
        collector.next()
        state = collector.state_dict()
        before = through_a_file(state["env_state_dict"])
        assert before
        collector.next()
        assert tree_equal(state["env_state_dict"], before)
        # Without an entry for the episodes, only the transforms continue.
        del state["resume"]
        other.load_state_dict(state)
        assert not other.resumed
        other.next()
        assert tree_equal(state["env_state_dict"], before)


def test_seeds_of_environments_that_are_rebuilt():
    class Fails(Walk):
        def _step(self, tensordict):
            if self.episodes["number"] == 4:
                raise RuntimeError("it fails")
            return super()._step(tensordict)

    make = partial(Collector, lambda: TransformedEnv(Fails(), RewardSum()), frames_per_batch=10)
    with pytest.warns(RuntimeWarning, match="rebuilt because"):
        check(partial(make, on_env_error="restart"), 3)


# --- ways


def test_pickles_of_another_process_need_trust():
    with Collector(Objects, frames_per_batch=10) as collector:
        collector.set_seed(1)
        collector.next()
        state = through_a_file(collector.state_dict())
        later = [collector.next() for _ in range(3)]
    state["resume"]["envs"][0]["objects"]["signature"] = b"of another process"
    with Collector(Objects, frames_per_batch=10) as other:
        with pytest.raises(EnvStateError, match=r"environment 0: .* load it with trust=True"):
            other.load_state_dict(state)
        other.load_state_dict(state, trust=True)
        assert all(equal_batches(batch, other.next()) for batch in later)


@pytest.mark.parametrize(
    "make",
    [
        Unpicklable,
        lambda: ParallelEnv(2, partial(GymEnv, "CartPole-v1"), mp_start_method="fork"),
    ],
    ids=["iterator", "processes"],
)
def test_without_any_way_new_episodes_begin(make):
    with Collector(make, frames_per_batch=10) as collector:
        assert set(collector.env_state_methods()) == {"none"}
        collector.next()
        state = collector.state_dict()
        assert "resume" not in state
        collector.load_state_dict(state)
        assert not collector.resumed
        collector.next()


# --- states that don't fit


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (partial(gym, "CartPole-v1", RewardSum), r"its transforms are .*StepCounter.* but those"),
        (partial(gym, "CartPole-v1", RewardSum, RewardSum), "its transforms are"),
        (partial(GymEnv, "CartPole-v1"), "its environments are TransformedEnv, GymEnv"),
        (lambda: TransformedEnv(Walk(), Compose(RewardSum(), StepCounter())), "environments are"),
        (partial(gym, "MountainCar-v0", RewardSum, StepCounter), "its arguments|its id"),
    ],
)
def test_the_state_of_another_environment_is_refused(make, match):
    with Collector(
        partial(gym, "CartPole-v1", RewardSum, StepCounter), frames_per_batch=10
    ) as collector:
        collector.next()
        state = collector.state_dict()
    with (
        Collector(make, frames_per_batch=10) as other,
        Collector(make, frames_per_batch=10) as twin,
    ):
        for one in (other, twin):
            one.set_seed(3)
            one.next()
        with pytest.raises(EnvStateError, match=f"environment 0: .*{match}"):
            other.load_state_dict(state)
        # Nothing was changed.
        assert equal_batches(other.next(), twin.next())
        state["env_state_dict"] = {}
        with pytest.warns(RuntimeWarning, match="new episodes begin in all environments"):
            other.load_state_dict(state, on_state_mismatch="new_episodes")
        assert not other.resumed


def test_the_state_of_another_policy_is_refused():
    with collector_of("CartPole, bare", "stochastic") as collector:
        collector.next()
        state = collector.state_dict()
    with collector_of("CartPole, bare", "random") as other:
        match = "the state has .* in 'mean', but the collector has no entry"
        with pytest.raises(ValueError, match=match):
            other.load_state_dict(state, strict=False)


# --- each piece counts


def pieces(data, path=()):
    """Paths of the contents of arrays, tensors and generators in a state."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from pieces(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from pieces(value, (*path, index))
    elif isinstance(data, bytes):
        yield path


@pytest.mark.parametrize("name", ["native", "Pendulum, VecNormV2", "CartPole, CatFrames"])
def test_each_tensor_of_the_state_counts(name):
    """With the one of an earlier state, later batches are others, or loading fails."""
    make = partial(collector_of, name, "random", frames_per_batch=10)
    with make() as collector:
        collector.set_seed(1)
        collector.next()
        before = through_a_file(collector.state_dict())["resume"]["envs"][0]
        collector.next()
        state = through_a_file(collector.state_dict())
        expected = [collector.next() for _ in range(4)]
    found = 0
    for path in pieces(state["resume"]["envs"][0]["objects"]):
        changed = through_a_file(state)
        place, old = changed["resume"]["envs"][0]["objects"], before["objects"]
        for key in path[:-1]:
            place, old = place[key], old[key]
        if place[path[-1]] == old[path[-1]]:
            continue
        place[path[-1]] = old[path[-1]]
        found += 1
        with make() as other:
            other.load_state_dict(changed)
            try:
                assert not all(equal_batches(batch, other.next()) for batch in expected), path
            except ValueError:
                continue  # rewards are not numbers
    assert found


@pytest.mark.parametrize("key", ["mean", "step_count", "episode_reward"])
def test_each_entry_that_a_step_begins_with_counts(key):
    def make():
        env = gym("CartPole-v1", RewardSum, StepCounter)
        return Collector(env, policy_for(env), frames_per_batch=10)

    with make() as collector:
        collector.next()
        state = through_a_file(collector.state_dict())
    del state["resume"]["rollout"]["writer"]["rows"]["entries"][key]
    with make() as other:
        if key == "mean":  # the policy writes it before anything reads it
            other.load_state_dict(state)
        else:
            with pytest.raises(ValueError, match=f"the state has no entry in '{key}'"):
                other.load_state_dict(state)


def test_masks_of_actions_count():
    def make():
        return Collector(ENVS["native, mask"][0], frames_per_batch=3)

    with make() as collector, make() as other:
        collector.set_seed(1)
        collector.next()
        state = through_a_file(collector.state_dict())
        assert any(one["masks"] for one in state["resume"]["envs"][0]["objects"])
        for one in state["resume"]["envs"][0]["objects"]:
            one["masks"] = {}
        with pytest.raises(EnvStateError, match="differs from the state"):
            other.load_state_dict(state)
