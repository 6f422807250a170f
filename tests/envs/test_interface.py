"""The TensorDict interface, which all environments and batches of environments have."""

from functools import partial

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensor_parts import assert_same
from tensordict import TensorDict

from trawl.envs import GymEnv, ParallelEnv, SerialEnv
from trawl.testing import (
    FaultyEnv,
    ImageEnv,
    NestedEnv,
    NumberedEnv,
    RaggedEnv,
    SelfResettingVectorEnv,
)

STEP, ACTION = 2, 4


def functions(kind=NumberedEnv, count=3):
    """Environment ``i`` has episodes of ``2 + i`` steps."""
    return [partial(kind, i, lengths=[2 + i]) for i in range(count)]


threads = partial(ParallelEnv, backend="thread")
PLACES = {
    "one": lambda kind: GymEnv(kind(lengths=[2])),
    **{
        f"vector, {mode.value}": lambda kind, mode=mode: GymEnv(
            SyncVectorEnv(functions(kind), autoreset_mode=mode)
        )
        for mode in AutoresetMode
    },
    "serial": lambda kind: SerialEnv(3, functions(kind)),
    "threads": lambda kind: threads(3, functions(kind)),
    # The last process has fewer environments than the other.
    "processes": lambda kind: ParallelEnv(3, functions(kind), envs_per_worker=2),
}
KINDS = [NumberedEnv, ImageEnv, NestedEnv, RaggedEnv]
BATCHES = pytest.mark.parametrize("cls", [SerialEnv, threads], ids=["serial", "threads"])


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=PLACES)
def env(request, kind, opened):
    return opened(PLACES[request.param], kind)


def keys(tensordict):
    return set(tensordict.keys(True, True))


def test_a_step(env, kind):
    root = env.reset()
    assert root.batch_size == env.batch_size
    assert env.observation_spec == env.full_observation_spec
    assert env.observation_spec.is_in(root)
    for key in ("done", "terminated", "truncated"):
        assert root[key].shape == (*env.batch_size, 1)
        assert not root[key].any()
    root = env.rand_action(root)
    assert env.full_action_spec.is_in(root)
    frame = env.step(root)
    assert frame is root
    following = frame["next"]
    for spec in (env.full_observation_spec, env.full_reward_spec, env.full_done_spec):
        assert spec.is_in(following)
    assert following["reward"].dtype == torch.float32
    assert (following["reward"] == 1).all()
    numbers = kind.numbers(following)
    assert numbers[..., 0].tolist() == list(range(3)) if env.batch_size else [0]
    assert torch.equal(numbers[..., ACTION], kind.action_numbers(frame))
    fake = env.fake_tensordict()
    assert keys(fake) == keys(frame)
    assert fake.batch_size == frame.batch_size
    for key in keys(frame):
        assert fake.get(key).shape == frame.get(key).shape
        assert fake.get(key).dtype == frame.get(key).dtype


def test_a_reset_of_some(env, kind):
    steps = [2, 1, 1] if env.batch_size else [2]
    root = env.reset()
    for _ in range(2):
        frame, root = env.step_and_maybe_reset(env.rand_action(root))
        assert "reward" not in keys(root)
    # The first one has ended, and begins anew by itself.
    assert frame["next", "done"].flatten().tolist() == [True, False, False][: len(steps)]
    assert kind.numbers(frame["next"])[..., STEP].flatten().unique().tolist() == [2]
    assert kind.numbers(root)[..., STEP].flatten().tolist() == [0, 2, 2][: len(steps)]
    assert not root["done"].any()
    same = env.reset(root.copy().set("_reset", torch.zeros_like(root["done"])))
    assert torch.equal(kind.numbers(same), kind.numbers(root))
    if env.batch_size:
        mask = torch.tensor([[False], [True], [False]])
        fresh = env.reset(root.copy().set("_reset", mask))
        assert kind.numbers(fresh)[:, STEP].tolist() == [0, 0, 2]
        assert "_reset" not in keys(fresh)
        if kind is RaggedEnv:
            assert [text.split(".")[1] for text in fresh["text"]] == ["1", "1", "0"]
    # A plain step resets nothing.
    root = env.reset()
    for _ in range(2):
        root = env.step(env.rand_action(root)).get("next")
    assert root["done"].flatten().tolist() == [True, False, False][: len(steps)]
    fresh = env.reset(root.copy().set("_reset", root["done"]))
    assert kind.numbers(fresh)[..., STEP].flatten().tolist() == [0, 2, 2][: len(steps)]


def test_rollouts(env, kind):
    batch = env.batch_size
    frames = env.rollout(6)
    assert frames.batch_size == (*batch, 2)
    assert frames.names == [*[None] * len(batch), "time"]
    assert frames["next", "done"].reshape(-1, 2)[0].tolist() == [False, True]
    steps = [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]]
    frames = env.rollout(6, break_when_any_done=False)
    assert frames.batch_size == (*batch, 6)
    assert kind.numbers(frames)[..., STEP].reshape(-1, 6).tolist() == steps[: batch.numel()]
    after = kind.numbers(frames["next"])[..., STEP].reshape(-1, 6) - 1
    assert after.tolist() == steps[: batch.numel()]


def test_what_was_given_stays_as_it_is(env, kind):
    root, given = env.reset(), []
    for _ in range(6):
        frame, root = env.step_and_maybe_reset(env.rand_action(root))
        given += [(frame, frame.clone()), (root, root.clone())]
        before = keys(frame)
        root = root.copy()
        # Nor does the frame before have what is put into the root after it.
        root.set("more", torch.zeros(*env.batch_size, 1))
        assert keys(frame) == before
    for one, copy in given:
        assert torch.equal(kind.numbers(one), kind.numbers(copy))
        assert keys(one) == keys(copy)


def test_a_policy_s_entries_are_kept(opened):
    for make in PLACES.values():
        env = opened(make, NumberedEnv)
        size = env.batch_size
        root = env.rand_action(env.reset()).set(("next", "memory"), torch.ones(*size, 2))
        frame, root = env.step_and_maybe_reset(root)
        assert (frame["next", "memory"] == 1).all()
        assert frame["next", "reward"].shape == (*size, 1)
        assert (root["memory"] == 1).all()
        # Random actions need nothing.
        assert env.rand_action(TensorDict({}, size))["action"].shape == (*size, 4)
        env.reset()
        assert (env.rand_step()["next", "reward"] == 2).all()


def test_specs_of_a_batch_are_the_same_in_processes(kind, opened):
    env, other = (opened(PLACES[place], kind) for place in ("processes", "serial"))
    for what in ("full_observation_spec", "full_action_spec", "action_spec_unbatched"):
        assert getattr(env, what) == getattr(other, what)
    assert env.fixed_layout == other.fixed_layout == (kind is not RaggedEnv)
    frames = []
    for one in (env, other):
        torch.manual_seed(1)
        frames.append(one.rollout(12, break_when_any_done=False))
    assert_same(frames[:1], frames[1:])


def test_devices(opened):
    for make in (GymEnv, partial(SerialEnv, 2), partial(threads, 2), partial(ParallelEnv, 2)):
        source = NumberedEnv() if make is GymEnv else NumberedEnv
        env = opened(make, source, device="cpu")
        frames = env.rollout(6, break_when_any_done=False)
        assert frames.device == torch.device("cpu")
        assert env.full_observation_spec["observation"].device == torch.device("cpu")
        assert opened(make, source).reset().device is None
        env = opened(make, source)
        _, root = env.step_and_maybe_reset(env.rand_action(env.reset()).to("cpu"))
        assert root.device == torch.device("cpu")
        assert env.to("cpu").reset().device == torch.device("cpu")


# --- batches of environments


@BATCHES
def test_batches_may_be_nested(cls, opened):
    def vector(first):
        return SyncVectorEnv([partial(NumberedEnv, first + i, lengths=[2 + i]) for i in range(2)])

    env = opened(cls, 3, [partial(vector, 2 * i) for i in range(3)])
    inner = opened(cls, 3, [partial(cls, 2, functions(count=2)) for i in range(3)])
    for one, numbers in ((env, [[0, 1], [2, 3], [4, 5]]), (inner, [[0, 1]] * 3)):
        frames = one.rollout(4, break_when_any_done=False)
        assert frames.batch_size == (3, 2, 4)
        assert NumberedEnv.numbers(frames)[..., 0, 0].tolist() == numbers
        steps = NumberedEnv.numbers(frames)[..., STEP]
        assert steps.tolist() == [[[0, 1, 0, 1], [0, 1, 2, 0]]] * 3
        assert one.action_spec.shape == (3, 2, 4)
        assert one.action_spec_unbatched.shape == (4,)


@BATCHES
def test_a_step_that_was_spent_on_resetting_is_known(cls, opened):
    def vector(length):
        return SelfResettingVectorEnv([partial(NumberedEnv, lengths=[length])])

    env = opened(cls, 2, [partial(vector, 1), partial(vector, 3)])
    root = env.reset()
    masks = []
    for _ in range(3):
        _, root = env.step_and_maybe_reset(env.rand_action(root))
        masks.append(env.autoreset_mask().flatten().tolist())
    assert masks == [[False, False], [True, False], [False, False]]
    assert opened(cls, 2, NumberedEnv).autoreset_mask() is None


class Listening(NumberedEnv):
    """Shows the option ``"more"`` of a reset in its observation."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs + (options or {}).get("more", 0), info


@BATCHES
def test_arguments_reach_each_environment(cls, opened):
    def make(length=3):
        made.append(length)
        return NumberedEnv(lengths=[length])

    made = []
    assert opened(cls, 3, make).batch_size == (3,)
    opened(cls, 2, make, create_env_kwargs={"length": 4})
    env = opened(cls, 2, make, create_env_kwargs=[{"length": 1}, {"length": 2}])
    assert sorted(made) == [1, 2, 3, 3, 3, 4, 4]
    assert env.step(env.rand_action(env.reset()))["next", "done"].tolist() == [[True], [False]]
    found = opened(cls, 2, Listening).reset(options={"more": 7})
    assert found["observation"][:, STEP].tolist() == [7, 7]


@BATCHES
def test_seeds_of_a_batch_are_those_of_its_environments_in_turn(cls, opened):
    env = opened(cls, 3, "CartPole-v1")
    following = env.set_seed(3)
    first = env.reset()["observation"]
    assert len(first.unique(dim=0)) == 3
    assert env.set_seed(3) == following != 3
    assert torch.equal(env.reset()["observation"], first)
    assert torch.equal(
        env.reset(seed=5)["observation"], SerialEnv(3, "CartPole-v1").reset(seed=5)["observation"]
    )
    assert env.set_seed(3, static_seed=True) == 3
    assert len(env.reset()["observation"].unique(dim=0)) == 1
    seed, expected = 3, []
    for _ in range(3):
        one = GymEnv("CartPole-v1")
        seed = one.set_seed(seed)
        expected.append(one.reset()["observation"])
    assert torch.equal(first, torch.stack(expected))


CLASSES = pytest.mark.parametrize("cls", [SerialEnv, ParallelEnv])


@CLASSES
@pytest.mark.parametrize(
    ("count", "source", "options", "error", "words"),
    [
        *[(count, NumberedEnv, {}, ValueError, "num_workers must be") for count in (0, -1)],
        *[(count, NumberedEnv, {}, TypeError, "num_workers must be") for count in (1.5, True)],
        (NumberedEnv, 2, {}, TypeError, "num_workers must be .*: the number of environments comes"),
        (3, [NumberedEnv] * 2, {}, ValueError, "create_env_fn has 2 entries, but num_workers is 3"),
        (
            3,
            NumberedEnv,
            {"create_env_kwargs": [{}] * 2},
            ValueError,
            "create_env_kwargs has 2 entries, but num_workers is 3",
        ),
        *[
            (2, [NumberedEnv, other], {}, ValueError, f"environment 1 has {what}")
            for other, what in (
                (ImageEnv, "observation 'observation'"),
                (
                    lambda: GymEnv(NumberedEnv(), categorical_action_encoding=True),
                    "action 'action'",
                ),
                (lambda: SyncVectorEnv([NumberedEnv]), "batch_size"),
            )
        ],
    ],
)
def test_wrong_arguments_of_a_batch(cls, count, source, options, error, words):
    with pytest.raises(error, match=words):
        cls(count, source, **options)


@CLASSES
def test_it_tells_what_it_is(cls, opened):
    env = opened(cls, 3, functions())
    assert repr(env) == f"{cls.__name__}(3 x GymEnv(NumberedEnv))"
    assert env.name == "NumberedEnv"


@BATCHES
def test_an_error_passes_through(cls, opened):
    env = opened(cls, 2, [NumberedEnv, lambda: FaultyEnv(1, OSError("no display"))])
    with pytest.raises(OSError, match="no display"):
        env.rollout(3)


@pytest.mark.parametrize("source", ["CartPole-v1", lambda: GymEnv("CartPole-v1")])
def test_an_environment_may_come_in_several_ways(source):
    assert SerialEnv(2, source).rollout(3).batch_size == (2, 3)


# --- the end


class Closing(gymnasium.Wrapper):
    """Tells that it is closed."""

    def __init__(self, closed):
        super().__init__(NumberedEnv())
        self.closed = closed

    def close(self):
        self.closed.append(True)


@pytest.mark.parametrize("place", ["one", "serial", "threads"])
def test_closing_closes_every_environment_once(place):
    closed = []
    make = partial(Closing, closed)
    cls = {"one": lambda count, make: GymEnv(make()), "serial": SerialEnv, "threads": threads}
    env = cls[place](2, make)
    env.close()
    env.close(raise_if_closed=False)
    assert env.is_closed
    assert closed == [True] * (1 if place == "one" else 2)
    with pytest.raises(RuntimeError, match="already closed"):
        env.close()
