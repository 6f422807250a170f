"""What a collector delivers is what a Gymnasium loop written by hand gets."""

import re
import warnings

import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as wrappers
from hypothesis import given, settings
from hypothesis import strategies as st
from vector_parts import (
    CASES,
    Undeclared,
    by_hand,
    check_same,
    collected,
    made,
    missing,
    policy_of,
)

from trawl.collectors import Collector
from trawl.envs import GymEnv
from trawl.envs.batches.autoreset import is_plain
from trawl.testing import Ledger, NumberedEnv

NEXT, SAME, DISABLED = (
    AutoresetMode.NEXT_STEP,
    AutoresetMode.SAME_STEP,
    AutoresetMode.DISABLED,
)
MODES = pytest.mark.parametrize("mode", AutoresetMode)


def build(name, mode, seed=0, count=2, bare=lambda env: env):
    """A wrapped vector environment; what Gymnasium itself warns of is left out."""
    case = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case.wrap(bare(made(seed, count, mode, case.kind)))


def collect(env, steps, per_batch, mode=None):
    """The frames of a collector after so many steps of each sub-environment."""
    each = env.num_envs
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*loses its state for all sub-environments")
        source = GymEnv(env, autoreset_mode=mode)
    policy = policy_of(env)
    batches = [per_batch] * (steps // per_batch) + [steps % per_batch] * bool(steps % per_batch)
    collector = Collector(source, policy, frames_per_batch=each * per_batch)
    found = [next(collector.iterator()) for _ in batches]
    return collector, collected(found), len(batches) * per_batch


def modes_of(name):
    """The modes with which Gymnasium lets the wrapper be used."""
    found = []
    for mode in AutoresetMode:
        try:
            build(name, mode).close()
        except ValueError as error:
            assert "autoreset_mode" in str(error)  # noqa: PT017 - it may be made as well
        except AssertionError as error:  # Gymnasium before 1.4 refuses a mode by a bare one
            assert not error.args  # noqa: PT017 - it may be made as well
        else:
            found.append(mode)
    return found


PAIRS = [
    pytest.param(name, mode, id=f"{name}-{mode.value}")
    for name, case in CASES.items()
    if not missing(case)
    for mode in modes_of(name)
] + [
    pytest.param(name, None, id=name, marks=pytest.mark.skip(f"needs {missing(case)}"))
    for name, case in CASES.items()
    if missing(case)
]
RUNS = given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 9))
FEW = settings(max_examples=2, deadline=None)


def test_all_wrappers_of_gymnasium_are_here():
    assert set(wrappers.__all__) <= CASES.keys()


@pytest.mark.parametrize(("name", "mode"), PAIRS)
@FEW
@RUNS
def test_frames_and_statistics_are_those_of_a_loop_by_hand(name, mode, seed, count, per_batch):
    collector, found, steps = collect(build(name, mode, seed, count), 25, per_batch)
    with collector:
        env = collector.env.env
        hand = build(name, mode, seed, count)
        expected = by_hand(hand, mode, steps)
        # Without a mask no step is spent on resets, and there are more frames than by hand.
        check_same(found, expected, exactly=mode is not NEXT or not is_plain(env))
        if CASES[name].state is not None:
            for ours, theirs in zip(CASES[name].state(env), CASES[name].state(hand), strict=True):
                np.testing.assert_array_equal(ours, theirs)
        hand.close()


@pytest.mark.parametrize(
    ("name", "mode", "final"),
    [
        ("none", NEXT, "final_obs"),
        ("none", SAME, "final_obs"),
        ("none", SAME, "final_observation"),
        ("none", DISABLED, "final_observation"),
        # Gymnasium takes such for NEXT_STEP.
        ("RecordEpisodeStatistics", NEXT, "final_obs"),
        ("NormalizeReward", NEXT, "final_obs"),
    ],
)
@FEW
@RUNS
def test_an_environment_that_declares_nothing_is_stepped_in_the_mode_that_is_stated(
    name, mode, final, seed, count, per_batch
):
    env = build(name, mode, seed, count, bare=lambda env: Undeclared(env, final))
    collector, found, steps = collect(env, 25, per_batch, mode)
    with collector:
        check_same(found, by_hand(build(name, mode, seed, count), mode, steps), exactly=True)


# --- what declares nothing, or something that it doesn't do


@MODES
@pytest.mark.parametrize("name", ["none", "RecordEpisodeStatistics"])
def test_an_environment_that_declares_nothing_is_refused(mode, name):
    env = build(name, mode, bare=Undeclared)
    with pytest.raises(ValueError, match=r"Undeclared.* state it|Undeclared.*doesn't state when"):
        Collector(env, frames_per_batch=4)


def test_a_mode_in_the_metadata_of_all_vector_environments_is_none(monkeypatch):
    # AtariVectorEnv writes its mode there.
    monkeypatch.setitem(VectorEnv.metadata, "autoreset_mode", NEXT)
    with pytest.raises(ValueError, match="doesn't state when it resets"):
        GymEnv(Undeclared(made(0, 2, SAME)))


@MODES
@pytest.mark.parametrize("spelt", [lambda mode: mode, lambda mode: mode.value])
def test_a_mode_may_be_given_by_its_value(mode, spelt):
    env = GymEnv(Undeclared(made(0, 2, mode)), autoreset_mode=spelt(mode))
    assert (env.autoreset_mask() is not None) == (mode is NEXT)
    env.close()


def undeclared(metadata=None):
    env = Undeclared(made(0, 2, NEXT))
    env.metadata = metadata or {}
    return env


WORDS = r"autoreset_mode must be one of 'NextStep', .* but it is"


@pytest.mark.parametrize(
    ("make", "given", "words"),
    [
        *((undeclared, value, WORDS) for value in ("next_step", "", 1)),
        (
            lambda: undeclared({"autoreset_mode": "sometimes"}),
            None,
            r"metadata\['autoreset_mode'\] .* it is 'sometimes'",
        ),
        (lambda: made(0, 2, NEXT), SAME, r"'SameStep' contradicts .*made with .*'NextStep'"),
    ],
)
def test_modes_that_are_none_or_contradict_gymnasiums_own(make, given, words):
    with pytest.raises(ValueError, match=words):
        GymEnv(make(), autoreset_mode=given)
    GymEnv(made(0, 2, NEXT), autoreset_mode=NEXT).close()


@MODES
def test_a_mode_with_an_id(mode):
    env = GymEnv("CartPole-v1", num_envs=2, autoreset_mode=mode)
    assert env.env.metadata["autoreset_mode"] is mode
    env.close()


def run(env, stated, steps=30):
    with Collector(GymEnv(env, autoreset_mode=stated), frames_per_batch=2 * steps) as collector:
        collector.next()


@pytest.mark.parametrize(
    ("actual", "stated", "options", "error"),
    [
        (NEXT, SAME, {}, "returned no info['final_obs']"),
        (DISABLED, SAME, {}, "returned no info['final_obs']"),
        (SAME, SAME, {"final": None}, "returned no info['final_obs']"),
        (SAME, NEXT, {}, "an observation that differs from info['final_obs']"),
        (SAME, DISABLED, {}, "an observation that differs from info['final_obs']"),
        (NEXT, DISABLED, {"masks": False}, "changed sub-environment"),
        (DISABLED, DISABLED, {"masks": False}, "changed sub-environment"),
    ],
)
def test_a_mode_that_the_environment_does_not_have(actual, stated, options, error):
    # In the info of SAME_STEP is what the others lack, and the other way round.
    with pytest.raises((KeyError, ValueError), match=re.escape(error)):
        run(Undeclared(made(3, 2, actual), **options), stated)


def numbered(*lengths):
    """Declares nothing, and resets in the step that ends an episode without showing its end."""
    functions = [lambda i=i, n=n: NumberedEnv(i, lengths=[n]) for i, n in enumerate(lengths)]
    return Undeclared(SyncVectorEnv(functions, autoreset_mode=SAME), final=None)


def test_rewards_in_steps_that_should_be_resets():
    with pytest.warns(UserWarning, match="should be a reset, returned a reward of 3"):
        run(numbered(2, 3), NEXT)


def test_an_episode_that_ends_in_a_step_that_should_be_a_reset():
    with pytest.raises(ValueError, match="also ended an episode, so it was not a reset"):
        run(numbered(1, 3), NEXT)


# --- Gymnasium's processes


@pytest.mark.parametrize(("mode", "shared"), [(NEXT, False), (SAME, True), (DISABLED, False)])
def test_processes_after_a_reset_by_the_user(mode, shared):
    lengths = [[2], [3]]
    functions = [lambda i=i: NumberedEnv(i, lengths[i]) for i in range(2)]
    env = AsyncVectorEnv(functions, shared_memory=shared, autoreset_mode=mode, context="fork")
    ledger = Ledger([NumberedEnv(i, lengths[i]) for i in range(2)])
    # The first episode ends with a batch, and what begins the next is no step but a reset.
    with Collector(env, frames_per_batch=4) as collector:
        for _ in range(5):
            ledger.add(collector.next())
            collector.reset()
            # Without shared memory, Gymnasium's processes reset once more in the next step.
            ledger.reset()
            ledger.reset()
    assert ledger.frames > 10


# --- limits


@pytest.mark.parametrize("name", ["RecordEpisodeStatistics", "NormalizeReward"])
@pytest.mark.parametrize("mode", [NEXT, SAME])
def test_a_limit_is_refused_where_a_wrapper_counts_on_the_mode(name, mode):
    with pytest.raises(ValueError, match=f"with {name}, which can't restart only some"):
        Collector(build(name, mode), frames_per_batch=8, max_frames_per_traj=3)


@pytest.mark.parametrize("name", ["RecordEpisodeStatistics", "NormalizeReward"])
def test_statistics_that_partial_resets_confuse_are_warned_of(name):
    with pytest.warns(UserWarning, match=f"{name} loses its state for all sub-environments"):
        Collector(build(name, DISABLED), frames_per_batch=8).shutdown()


# --- environments that step some only


def test_an_environment_that_steps_some_of_its_environments_at_once():
    env = Undeclared(made(0, 4, NEXT))
    env.batch_size = 2
    with pytest.raises(ValueError, match=r"Undeclared must .*batch_size=2 and num_envs=4"):
        Collector(env, frames_per_batch=8)
