"""Collectors of vector environments continue from a state, bit for bit."""

from functools import partial

import gymnasium
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers
from hypothesis import given, settings
from hypothesis import strategies as st
from resuming_parts import Fragile, Masked, Pickled, Walk, check, check_piece, through_a_file

from trawl.collectors import Collector, MultiSyncCollector
from trawl.envs import GymEnv
from trawl.errors import EnvStateError
from trawl.testing import ImageEnv, NestedEnv, NumberedEnv, RaggedEnv, SelfResettingVectorEnv

MODES = sorted(mode.value for mode in AutoresetMode)
NAMES = ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "Blackjack-v1", "FrozenLake-v1"]
KINDS = [partial(gymnasium.make, name) for name in NAMES]
KINDS += [partial(kind, lengths=[3, 1, 7]) for kind in (NestedEnv, ImageEnv, RaggedEnv)]
KINDS += [Walk, Masked, Pickled]
OPTIONS = [{}, {"max_frames_per_traj": 17}, {"trajs_per_batch": 2, "traj_format": "cat"}]


def sync(mode, makes, **options):
    return SyncVectorEnv(makes, autoreset_mode=AutoresetMode(mode), **options)


def wrapped(env):
    if env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP:
        env = wrappers.NormalizeObservation(env)
    return wrappers.NormalizeReward(env)


@pytest.mark.parametrize("mode", MODES)
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(1, 3),
    batches=st.integers(0, 5),
    seed=st.sampled_from([None, 1]),
    options=st.sampled_from(OPTIONS),
    copy=st.booleans(),
)
@settings(max_examples=20)
def test_each_mode(mode, kind, count, batches, seed, options, copy):
    make = partial(sync, mode, [kind] * count, copy=copy)
    check(lambda: Collector(make, frames_per_batch=30, **options), batches, seed=seed)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@given(kind=st.sampled_from(KINDS[:3]), batches=st.integers(0, 5))
@settings(max_examples=10)
def test_wrappers(mode, kind, batches):
    make = partial(sync, mode, [kind] * 2)
    check(lambda: Collector(lambda: wrapped(make()), frames_per_batch=30), batches)


class Held(SelfResettingVectorEnv):
    """A vector environment with a set, which only a pickle holds."""

    def __init__(self):
        super().__init__([Walk] * 2)
        self.found = set()


@given(
    make=st.sampled_from(
        [
            Held,
            partial(gymnasium.make_vec, "CartPole-v1", 3, vectorization_mode="vector_entry_point"),
            partial(SelfResettingVectorEnv, [Walk] * 2),
            partial(GymEnv, "CartPole-v1", num_envs=2),
        ]
    ),
    batches=st.integers(0, 5),
)
def test_custom_vector_environments(make, batches):
    check(lambda: Collector(make, frames_per_batch=30), batches)


def test_several_vector_environments():
    makes = [partial(sync, mode, [Walk] * 2) for mode in ("SameStep", "Disabled")]
    check(lambda: Collector(makes, frames_per_batch=40), 3)
    check(lambda: MultiSyncCollector(makes, frames_per_batch=40), 3)


@pytest.mark.filterwarnings("ignore:environments? .* failed at step:RuntimeWarning")
@pytest.mark.parametrize("mode", MODES)
def test_seeds_of_rebuilt_environments_are_derived_further(mode):
    make = partial(sync, mode, [Fragile] * 2)
    check(lambda: Collector(make, frames_per_batch=60, on_env_error="restart"), 4)


def test_ways_are_told():
    with Collector(partial(sync, "SameStep", [Walk, Pickled]), frames_per_batch=10) as collector:
        assert collector.env_state_methods() == ["attributes", "pickle"]
    make = partial(AsyncVectorEnv, [Walk] * 2, context="fork")
    with Collector(make, frames_per_batch=10) as collector:
        assert collector.env_state_methods() == ["none", "none"]


FAILS = pytest.mark.filterwarnings("ignore:environments? .* failed at step:RuntimeWarning")
# Each is a piece of the state of a vector environment, and where it decides what comes next.
TENS = partial(sync, "NextStep", [partial(NumberedEnv, lengths=[10])] * 2)
PIECES = {
    "sub-environments": (partial(sync, "NextStep", [Walk] * 2), ("env", "state", "base", "envs")),
    "wrappers": (lambda: wrapped(sync("SameStep", [Walk] * 2)), ("env", "state", "wrappers")),
    "adapter": (lambda: wrapped(TENS()), ("vector",)),
    "masks": (partial(sync, "NextStep", [Masked] * 2), ("vector",)),
    "rebuilds": (partial(sync, "SameStep", [Fragile] * 2), ("rebuilds",)),
}


@FAILS
@pytest.mark.parametrize("piece", PIECES)
def test_each_piece_of_the_state_counts(piece):
    make, path = PIECES[piece]
    options = {
        "frames_per_batch": 20,
        "on_env_error": "restart" if "Fragile" in repr(make) else "raise",
    }
    # In the last step of the first batch, an episode of ten steps ends.
    batches = 1 if piece == "adapter" else 3
    check_piece(lambda: Collector(make, **options), ("resume", "envs", 0, *path), batches)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ([Walk] * 3, "environment 0: .* number of environments is 2, but that of .* is 3"),
        ([Walk, Masked], "environment 0: .* its wrapper chain is .*Walk, but that of .*Masked"),
    ],
    ids=["number", "kind"],
)
def test_the_state_of_another_vector_environment_is_refused(other, match):
    with Collector(partial(sync, "SameStep", [Walk] * 2), frames_per_batch=12) as collector:
        state = collector.state_dict()
    with Collector(partial(sync, "SameStep", other), frames_per_batch=12) as collector:
        collector.next()
        before = through_a_file(collector.state_dict())
        with pytest.raises(EnvStateError, match=match):
            collector.load_state_dict(state)
        assert str(collector.state_dict()) == str(before)
