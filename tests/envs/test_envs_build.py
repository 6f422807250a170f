"""What may stand for an environment, what is closed, and seeds."""

import gymnasium
import pytest
from gymnasium.vector import SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

from trawl.envs import GymEnv, SerialEnv
from trawl.envs.batches.serial import build_env
from trawl.envs.build import is_tensordict_env
from trawl.envs.seeding import check_seed, derive, next_seed
from trawl.testing import NumberedEnv, RaggedEnv


def vector():
    return SyncVectorEnv([NumberedEnv] * 2)


@pytest.mark.parametrize(
    ("source", "batch_size"),
    [
        ("CartPole-v1", ()),
        (NumberedEnv(), ()),
        (NumberedEnv, ()),
        (lambda: NumberedEnv(), ()),
        (lambda: "CartPole-v1", ()),
        (lambda: GymEnv(NumberedEnv()), ()),
        (gymnasium.make("CartPole-v1"), ()),
        (vector(), (2,)),
        (vector, (2,)),
        (GymEnv("CartPole-v1", num_envs=3), (3,)),
        (["CartPole-v1"] * 2, (2,)),
        ([NumberedEnv(), NumberedEnv, lambda: GymEnv(NumberedEnv())], (3,)),
        ((NumberedEnv, NumberedEnv), (2,)),
        ([vector, vector, vector()], (3, 2)),
        ([RaggedEnv, RaggedEnv], (2,)),
        (SerialEnv(2, NumberedEnv), (2,)),
    ],
)
def test_environments_come_in_many_ways(source, batch_size):
    env = build_env(source)
    assert env.batch_size == batch_size
    assert env.rollout(2).batch_size == (*batch_size, 2)


def test_a_tensordict_environment_stays_as_it_is():
    env = GymEnv(NumberedEnv())
    assert build_env(env) is env
    assert build_env(lambda: env) is env


def test_arguments_reach_what_makes_the_environment():
    assert build_env(NumberedEnv, {"lengths": [2]}).env.lengths == (2,)
    env = build_env("CartPole-v1", {"categorical_action_encoding": True})
    assert env.action_spec.shape == ()
    # They may differ within a list.
    for options, numbers in (([{"number": 4}, {"number": 7}], [4, 7]), ({"number": 5}, [5, 5])):
        env = build_env([NumberedEnv] * 2, options)
        assert [child.env.number for child in env.envs] == numbers
    with pytest.raises(ValueError, match=r"create_env_kwargs has 1 .* create_env_fn has 2"):
        build_env([NumberedEnv] * 2, [{}])


@pytest.mark.parametrize(
    ("source", "kind"), [(3, TypeError), (lambda: 3, TypeError), ([], ValueError)]
)
def test_errors_name_the_argument_of_the_caller(source, kind):
    with pytest.raises(kind, match=r"^eval_env"):
        build_env(source, name="eval_env")


def test_a_class_is_no_environment_but_makes_one():
    assert not is_tensordict_env(GymEnv)
    assert is_tensordict_env(GymEnv(NumberedEnv()))


# --- what is made is closed, whatever goes wrong


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


# --- one seed, many streams

seeds = st.integers(0, 2**32 - 1)
paths = st.lists(st.integers(0, 2**31) | st.text("abé", max_size=5), min_size=1, max_size=3)


@given(seed=seeds, path=paths)
def test_paths_lead_to_seeds_of_their_own(seed, path):
    assert derive(seed, *path) == derive(seed, *path)
    assert 0 <= derive(seed, *path) < 2**32
    found = [derive(seed, name, i) for name in ("torch", "numpy") for i in range(20)]
    assert len(set(found)) == len(found)


def test_seeds_are_the_same_on_every_machine():
    assert derive(12, "policy") == 1684568564
    assert derive(0, "torch") == 1670228095
    assert derive(0, "worker", 3) == 50163198
    # A seed may be any natural number.
    for seed in (0, 3, 2**63):
        assert check_seed(seed) == seed
        assert isinstance(derive(seed, "x"), int)


def test_a_chain_of_seeds_does_not_repeat_and_a_static_seed_stays():
    chain = [5]
    for _ in range(1000):
        chain.append(next_seed(chain[-1]))
    assert len(set(chain)) == len(chain)
    assert next_seed(5, static_seed=True) == 5
