"""The state of an environment is plain data, with which another environment continues."""

import copy
import time
from collections import deque
from enum import Enum
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.utils import EzPickle
from gymnasium.vector import SyncVectorEnv
from tensordict import NonTensorData, TensorDict, tensorclass

from tests.oracle.continuing import Pickled, Walk, saved, wrapped
from trawl.envs.capture import NONE, capture, codec, restore, way_of, ways_of
from trawl.envs.capture.codec import Encoder
from trawl.envs.capture.fixed import check_identity
from trawl.errors import EnvStateError
from trawl.testing import SelfResettingVectorEnv


class Constructed(Pickled, EzPickle):
    """An environment that would lose its state in a pickle."""

    def __init__(self):
        EzPickle.__init__(self)


def walk(**attributes):
    """Returns an environment in an episode, with attributes of its own."""
    env = Walk()
    env.reset(seed=1)
    vars(env).update(attributes)
    return env


def test_generators_of_spaces_go_on():
    env, other = gymnasium.make("Pendulum-v1"), gymnasium.make("Pendulum-v1")
    env.reset(seed=1)
    env.action_space.seed(1)
    other = restore(other, capture(env))
    assert [env.action_space.sample() for _ in range(3)] == [
        other.action_space.sample() for _ in range(3)
    ]


# --- what is not captured


def test_arrays_that_share_memory_still_share_it():
    env, other = walk(), walk()
    env.view, other.view = env.place[:1], other.place[:1]
    other = restore(other, capture(env))
    other.place[0] = 9
    assert other.view[0] == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tensors_that_share_memory_still_share_it(dtype):
    value = torch.arange(4).to(dtype)
    env = walk(value=value, part=value[1:3])
    assert way_of(env) == "attributes"
    state = capture(env)
    for each in (walk(), Walk()):
        made = restore(each, state)
        made.value[1] = 9
        assert made.part.tolist() == [9, 2]
        assert env.value[1] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_tensors_that_share_memory_with_an_array_are_not_captured_apart(dtype):
    env = walk(value=torch.zeros(4, dtype=dtype))
    env.view = env.value.numpy()[1:]
    assert way_of(env) == "pickle"
    other = restore(Walk(), capture(env))
    other.value[1] = 9
    assert other.view[0] == 9
    env = walk()
    env.value = torch.from_numpy(env.place)
    assert way_of(env) != "attributes"


def test_overlaps_are_found_among_many_values():
    parts = torch.zeros(40, dtype=torch.int16).numpy().reshape(20, 2)
    apart = [part.copy() for part in parts]
    values = [*map(torch.from_numpy, apart)]
    Encoder(fixed=()).encode(values)
    for shared in (apart[7], torch.from_numpy(apart[7][1:])):
        with pytest.raises(codec.NotPlain, match="shares its memory with"):
            Encoder(fixed=()).encode([*values, shared])


def test_a_pickled_tensor_has_its_gradient():
    env = walk(value=torch.ones(2, requires_grad=True))
    env.value.sum().backward()
    assert way_of(env) == "pickle"
    assert restore(Walk(), capture(env)).value.grad.tolist() == [1, 1]


def test_shared_memory_is_written_in_place():
    env, other = (walk(value=torch.full((2,), one).share_memory_()) for one in (5.0, 0.0))
    address = other.value.data_ptr()
    assert way_of(env) == "attributes"
    restore(other, capture(env))
    assert other.value.data_ptr() == address
    assert other.value.tolist() == [5, 5]


@tensorclass
class Ball:
    place: torch.Tensor


class OwnDict(TensorDict):
    """A TensorDict of another class."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnDict({"x": torch.zeros(2)}, [2]),
        lambda: TensorDict({"x": Ball(place=torch.zeros(2), batch_size=[2])}, [2]),
        lambda: Ball(place=torch.zeros(2), batch_size=[2]),
        lambda: TensorDict({"x": NonTensorData("text", [2])}, [2]),
    ],
)
def test_classes_of_tensordicts_stay(make):
    env, other = walk(data=make()), walk(data=make())
    other = restore(other, capture(env))
    assert type(other.data) is type(env.data)
    for name in ("x", "place"):
        assert type(other.data.get(name, None)) is type(env.data.get(name, None))


def test_a_value_that_was_left_out_leaves_no_memory_behind():
    env = Walk()
    env.a = [torch.zeros(2), iter(())]
    env.b = env.a[0][:1]
    env.c = env.a[0]
    found = Encoder(in_blocks=True).attributes(env, some=True)
    assert "a" not in found
    assert "data" in found["b"]
    assert found["b"]["block"] == found["c"]["block"]


def test_a_kind_may_be_registered_later(monkeypatch):
    class Late:
        __slots__ = ()

    monkeypatch.setattr(codec, "_KINDS", dict(codec._KINDS))
    monkeypatch.setattr(codec, "_TYPES", dict(codec._TYPES))
    with pytest.raises(codec.NotPlain):
        Encoder().encode(Late())
    codec.register("late", Late, lambda encoder, value: {}, lambda decoder, data, present: Late())
    assert Encoder().encode(Late()) == {"number": 0, "kind": "late"}


def test_a_state_from_before_a_space_was_made():
    env, other = walk(extra=None), walk(extra=gymnasium.spaces.Discrete(3))
    other.extra.seed(0)
    with pytest.raises(EnvStateError, match="was just made"):
        restore(other, capture(env))


def test_without_any_way_an_error_lists_the_reasons():
    env = Constructed()
    env.reset(seed=1)
    assert way_of(env) == NONE
    with pytest.raises(
        EnvStateError, match=r"can't be captured: attributes: Constructed.seen.*pickle: with"
    ):
        capture(env)


def test_a_pickle_of_another_process_needs_trust():
    env = Pickled()
    env.reset(seed=1)
    state = capture(env)
    state["state"]["signature"] = b"of another process"
    with pytest.raises(EnvStateError, match="load it with trust=True"):
        restore(Pickled(), state)
    assert restore(Pickled(), state, trust=True).place.tolist() == env.place.tolist()


class Slots(Walk):
    __slots__ = ("hidden",)


class Phase(Enum):
    DAY = 0


_called = []


def _with_defaults(memory=[0]):  # noqa: B006
    memory[0] += 1
    return memory[0]


def _with_attribute():
    _with_attribute.count += 1
    return _with_attribute.count


_with_attribute.count = 0


def _with_global():
    global _called
    _called = [*_called, 1]
    return len(_called)


def counter():
    count = 0

    def function():
        nonlocal count
        count += 1

    return function


@pytest.mark.parametrize(
    "value",
    [
        Phase.DAY,
        counter(),
        Walk().reset,
        {1, 2},
        np.ma.masked_array([1], [True]),
        np.zeros(1, [("a", int)]),
        np.asfortranarray(np.zeros((2, 2))),
        _with_defaults,
        _with_attribute,
        _with_global,
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_what_data_would_hold_only_in_part_is_not_data(value):
    env = Walk()
    env.value = value
    assert way_of(env) != "attributes"
    for other in (Slots(), wrappers.TransformReward(Walk(), deque([1.0]).append)):
        assert way_of(other) != "attributes"


def test_functions_that_call_themselves():
    def repeat(count):
        return 0 if not count else repeat(count - 1)

    env = walk(function=repeat)
    assert way_of(env) == "attributes"


def test_an_environment_with_an_ezpickle_inside_is_not_pickled():
    env = Walk()
    env.inner = {Constructed()}
    assert way_of(env) == NONE


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda: gymnasium.make("MountainCar-v0"), "arguments|id"),
        (lambda: gymnasium.make("CartPole-v1", sutton_barto_reward=True), "arguments"),
        (lambda: wrapped(partial(gymnasium.make, "CartPole-v1")), "wrapper chain"),
    ],
)
def test_the_state_of_another_environment_is_refused(other, what):
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=1)
    with pytest.raises(EnvStateError, match=f"one of another environment: its ({what}) is"):
        restore(other(), capture(env))


class Bonus(gymnasium.Wrapper):
    """Adds a bonus to each reward, on a machine that stands still now and then."""

    def __init__(self, bonus):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.bonus, self.taken = bonus, 0

    def step(self, action):
        time.sleep(0.04)
        obs, reward, *rest = super().step(action)
        self.taken += 1
        return obs, reward + self.bonus[self.taken], *rest


def test_a_state_with_which_a_later_step_fails_is_refused_however_slow_the_machine_is():
    good, bad = Bonus([0.0] * 100), Bonus([0.0] * 5 + ["much"] * 95)
    good.reset(seed=0), bad.reset(seed=0)
    with pytest.raises(EnvStateError, match="TypeError"):
        restore(good, saved(capture(bad)))


def test_the_state_of_another_version_is_refused():
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=1)
    state = capture(env)
    assert state["identity"]["package"] == f"gymnasium {gymnasium.__version__}"
    state["identity"]["package"] = "gymnasium 0.1"
    with pytest.raises(EnvStateError, match=r"its package is gymnasium 0\.1"):
        restore(env, state)


def test_states_with_infos_of_earlier_versions_are_refused():
    env = wrapped(Walk)
    env.reset(seed=1)
    state = capture(env)
    names = state["identity"]["wrapper chain"].split(" > ")
    names.insert(1, "trawl.envs.info_wrappers.InfoSingle")
    state["identity"]["wrapper chain"] = " > ".join(names)
    state["state"]["wrappers"].insert(1, {})
    with pytest.raises(EnvStateError, match="saved with info_keys by an earlier version"):
        restore(env, state)


@pytest.mark.parametrize(
    "identity",
    [
        {"list of objects": "trawl.envs.tensor_infos.InfoTensors tests.World"},
        {"class": "InfoEnvPool", "seed": "1"},
    ],
)
def test_graphs_and_pools_with_infos_of_earlier_versions_are_refused(identity):
    with pytest.raises(EnvStateError, match="saved with info_keys by an earlier version"):
        check_identity(identity, identity, "the environment")


# --- vector environments


class Pole(gymnasium.Wrapper):
    """A CartPole with a set, which only a pickle holds."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.found = {1}


def test_the_ways_of_sub_environments_are_told():
    makes = [partial(gymnasium.make, "CartPole-v1"), Pole]
    env = SyncVectorEnv(makes)
    env.reset(seed=1)
    assert ways_of(env) == ["attributes", "pickle"]
    assert ways_of(SelfResettingVectorEnv([Walk] * 2)) == ["attributes"] * 2


def test_an_error_names_the_sub_environment():
    env = SyncVectorEnv([Walk, Constructed])
    env.reset(seed=1)
    with pytest.raises(EnvStateError, match="parts: sub-environment 1: the state of"):
        capture(env)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (partial(SyncVectorEnv, [Walk] * 3), "number of environments is 2"),
        (partial(SelfResettingVectorEnv, [Walk] * 2), "wrapper chain is .*SyncVectorEnv"),
    ],
    ids=["number", "kind"],
)
def test_the_state_of_another_vector_environment_is_refused(other, what):
    env, other = SyncVectorEnv([Walk, Walk]), other()
    env.reset(seed=1)
    with pytest.raises(EnvStateError, match=f"one of another environment: its {what}"):
        restore(other, capture(env))


def test_nothing_is_changed_if_one_sub_environment_differs():
    def made(second):
        return SyncVectorEnv([partial(gymnasium.make, "Pendulum-v1"), second])

    env = made(partial(gymnasium.make, "Pendulum-v1", g=3))
    other = made(partial(gymnasium.make, "Pendulum-v1"))
    env.reset(seed=1), other.reset(seed=2)
    before = capture(other)
    with pytest.raises(EnvStateError, match="its arguments is g=3"):
        restore(other, capture(env))
    assert capture(other) == before


# --- states of strangers


def tampered(state, kind, **changes):
    """Returns a copy of a state in which the first value of a kind has other fields."""
    state = copy.deepcopy(state)

    def visit(value):
        if isinstance(value, dict):
            if value.get("kind") == kind:
                value.update(changes)
                return True
            return any(map(visit, value.values()))
        return isinstance(value, list) and any(map(visit, value))

    assert visit(state)
    return state


@pytest.mark.parametrize("name", ["test", "os", "Generator", "seed", "BitGenerator", None, 5, ""])
def test_a_generator_is_made_only_of_known_kinds(name, tmp_path, monkeypatch):
    (tmp_path / "conftest.py").write_text("open('ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    env = CartPoleEnv()
    env.reset(seed=0)
    state = capture(env)
    pairs = state["state"]["base"]["_np_random"]["state"]["items"]
    pairs[[key for key, _ in pairs].index("bit_generator")][1] = name
    with pytest.raises(EnvStateError, match=r"\['bit_generator'\] must be"):
        restore(env, state)
    assert [path.name for path in tmp_path.iterdir()] == ["conftest.py"]


class Windowed(CartPoleEnv):
    """A CartPole with a view of an array."""

    def reset(self, **kwargs):
        self.rows = np.arange(12.0)
        self.window = self.rows[2:8:2]
        return super().reset(**kwargs)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "O"},
        {"dtype": "O8,O8"},
        {"dtype": "f8,i4"},
        {"dtype": "(2)f8"},
        {"dtype": 5},
        {"offset": -8},
        {"offset": 2**62},
        {"strides": [2**40]},
        {"strides": [-16]},
        {"shape": [2**40]},
        {"shape": [-1]},
        {"shape": [2**62, 2**62], "strides": [0, 0]},
        {"shape": "ab"},
        {"of": 5},
    ],
    ids=repr,
)
def test_a_view_lies_within_its_array(changes):
    env = Windowed()
    env.reset(seed=0)
    state = capture(env)
    with pytest.raises(EnvStateError):
        restore(env, tampered(state, "view", **changes))
    restore(env, state)
    assert env.window.base is env.rows


@pytest.mark.parametrize("name", ["reset", "step", "unwrapped", "__class__", "spec", "metadata"])
def test_attributes_hide_nothing_of_the_class(name):
    env = CartPoleEnv()
    env.reset(seed=0)
    state = capture(env)
    state["state"]["base"][name] = 5
    with pytest.raises(EnvStateError):
        restore(env, state)
    assert name not in vars(env) or vars(env)[name] != 5
