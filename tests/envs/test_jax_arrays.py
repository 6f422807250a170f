"""Arrays of JAX as tensors, and the layout of observations and actions."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from trawl.envs import GymEnv, JaxEnv
from trawl.envs.entries.spaces import SpaceCodec
from trawl.extras.jax.arrays import as_plain, giver, jax_ops, viewer

jax = pytest.importorskip("jax")
jnp = jax.numpy
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bool])
def test_arguments_are_copies(dtype: torch.dtype) -> None:
    # JAX would read them later: test_arguments_are_read_later shows it.
    tensor = torch.ones(4096, 2, dtype=dtype)
    given = giver(CPU)(tensor)
    assert not np.shares_memory(given, tensor.numpy())
    assert given.dtype == {torch.int64: np.int32}.get(dtype, tensor.numpy().dtype)


def test_arguments_are_read_later() -> None:
    slow = jax.jit(lambda x, y: jax.lax.fori_loop(0, 2000, lambda i, z: jnp.sin(z) + x, y))
    start = jnp.zeros((4096, 2))
    give, tensor = giver(CPU), torch.ones(4096, 2)
    expected = np.asarray(slow(give(tensor), start))
    found = slow(give(tensor), start)
    tensor.fill_(5)
    assert np.array_equal(np.asarray(found), expected)


@pytest.mark.parametrize("dtype", ["bool", "int32", "float32", "uint8", "int8", "float16"])
def test_tensors_lie_in_the_memory_of_arrays(dtype: str) -> None:
    array = jnp.ones((5, 3), dtype)
    tensor = viewer(CPU)(array)
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert (tensor == 1).all()


Pair = namedtuple("Pair", ["left", "right"])


@jax.tree_util.register_dataclass
@dataclass
class Seen:
    board: Any
    pair: Pair
    more: tuple[Any, ...]
    nothing: Any = None


def seen(value: Any) -> Seen:
    pair = Pair(value > 2, {"deep": value.astype("int32")})
    return Seen(jnp.full((2, 3), 1, jnp.uint8), pair, (value, jnp.zeros(2)))


def test_plain() -> None:
    found = as_plain(seen(jnp.float32(1)))
    assert list(found) == ["board", "pair", "more"]
    assert list(found["pair"]) == ["left", "right"]
    assert isinstance(found["more"], tuple)


class Nested:
    """Environment with a nested observation and a nested action."""

    action_space = spaces.Dict(
        {
            "which": spaces.Discrete(3, start=5),
            "many": spaces.MultiDiscrete([2, 4]),
            "pair": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.MultiBinary(2)]),
        }
    )

    def reset(self, key: Any) -> Any:
        return jnp.float32(0), seen(jnp.float32(0))

    def step(self, key: Any, state: Any, action: Any) -> Any:
        one, two = action["pair"]
        total = action["which"] * 100 + action["many"].sum() * 10 + one.sum() + two.sum()
        return total, seen(total), total, False, False


def test_nested_observations_and_actions() -> None:
    env = JaxEnv(Nested(), 2)
    frame = env.rollout(1, lambda td: td.update(env.full_action_spec.rand()))[:, 0]
    assert frame["board"].dtype is torch.uint8
    assert frame["pair", "left"].shape == (2, 1)
    assert frame["pair", "left"].dtype is torch.bool
    assert frame["pair", "right", "deep"].dtype is torch.int32
    assert frame["more", "1"].shape == (2, 2)
    codec = SpaceCodec(Nested.action_space, "action")
    for row in frame.unbind(0):
        # The same actions in Gymnasium.
        action = codec.decode([row[leaf.key].numpy() for leaf in codec.leaves])
        one, two = action["pair"]
        total = action["which"] * 100 + action["many"].sum() * 10 + one.sum() + two.sum()
        assert row["next", "reward"].item() == pytest.approx(float(total))
        assert row["next", "more", "0"] == row["next", "reward"]
        assert row["next", "pair", "left"] == bool(total > 2)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=-1),
        spaces.Box(-1, 1, ()),
        spaces.Box(-9, 9, (2, 2), np.int64),
        spaces.MultiDiscrete([[2, 3], [1, 4]]),
        spaces.MultiBinary(3),
    ],
)
@pytest.mark.parametrize("categorical", [False, True])
def test_actions_are_decoded_as_in_gymnasium(space: Any, categorical: bool) -> None:
    codec = SpaceCodec(space, "action", categorical)
    decode, (leaf,) = SpaceCodec(space, "action", categorical, jax_ops()).decode, codec.leaves
    for _ in range(5):
        value = leaf.spec.rand()
        expected, found = codec.decode([value.numpy()]), decode([jnp.asarray(value.numpy())])
        assert np.shape(expected) == found.shape
        assert np.array_equal(expected, np.asarray(found))


def test_specs_of_actions_are_those_of_gym_env() -> None:
    class Pendulum:
        action_space = spaces.Box(-2, 2, (1,))

        def reset(self, key: Any) -> Any:
            return jnp.zeros(()), jnp.zeros(3)

        def step(self, key: Any, state: Any, action: Any) -> Any:
            return state, jnp.zeros(3), 0.0, False, False

    other = GymEnv("Pendulum-v1")
    env = JaxEnv(Pendulum(), 1)
    assert env.full_action_spec["action"] == other.full_action_spec["action"].expand(1)
    other.close()


class Broken(Nested):
    """Environment whose reset or step returns another value."""

    action_space = spaces.Discrete(2)

    def __init__(self, part: int, value: Any) -> None:
        self.part, self.value = part, value

    def reset(self, key: Any) -> Any:
        return {"a": jnp.zeros(2)}, {"x": jnp.zeros(2)}

    def step(self, key: Any, state: Any, action: Any) -> Any:
        result = [state, {"x": jnp.zeros(2)}, 1.0, False, False]
        result[self.part] = self.value
        return tuple(result)


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        (
            1,
            {"x": np.zeros(3)},
            r"observation 'x' must be the same .* of shape \(3,\) after a step",
        ),
        (1, {"x": np.zeros(2, "int32")}, "observation 'x' .* float32 of shape .* int32 of shape"),
        (1, {"y": np.zeros(2)}, "observation 'x' .* missing after a step"),
        (0, {"a": np.zeros(3)}, r"the entry \['a'\] of the state must be the same"),
        (0, {"a": np.zeros(2), "b": 1}, r"the entry \['b'\] of the state .* missing after a reset"),
        (2, np.zeros(3), r"Broken returned reward of shape \(3,\), but it must be a scalar"),
        (4, np.zeros(1, bool), r"truncated of shape \(1,\), but it must be a scalar"),
    ],
)
def test_a_step_must_return_what_a_reset_returns(part: int, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        JaxEnv(Broken(part, value), 2)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="num_envs must be at least 1, but it is 0"):
        JaxEnv(Nested(), 0)
    with pytest.raises(TypeError, match="seed must be an integer"):
        JaxEnv(Nested(), 1, seed="a")
    with pytest.raises(ValueError, match="params are for environments of gymnax"):
        JaxEnv(Nested(), 1, params=3)
    with pytest.raises(TypeError, match=r"env must be an environment .* but it is object"):
        JaxEnv(object(), 1)
    with pytest.raises(ValueError, match="device='meta': JAX has no such device"):
        JaxEnv(Nested(), 1, device="meta")
    env = JaxEnv(Nested(), 1)
    with pytest.raises(ValueError, match="take no options"):
        env.reset(options={"a": 1})


def test_spaces_that_do_not_fit() -> None:
    class NoSpace(Broken):
        action_space: Any = None

    class Text(Broken):
        action_space: Any = spaces.Text(3)

    class Named(Broken):
        def reset(self, key: Any) -> Any:
            return {"a": jnp.zeros(2)}, {"reward": jnp.zeros(2)}

    with pytest.raises(TypeError, match=r"NoSpace.action_space must be a gymnasium.Space"):
        JaxEnv(NoSpace(2, 1.0), 2)
    with pytest.raises(ValueError, match="must have a fixed shape and dtype"):
        JaxEnv(Text(2, 1.0), 2)
    with pytest.raises(ValueError, match="an observation 'reward'"):
        JaxEnv(Named(1, {"reward": np.zeros(2, "float32")}), 2)

    class Keyed(Broken):
        def reset(self, key: Any) -> Any:
            return {"a": jnp.zeros(2)}, {"x": jax.random.key(0)}

    with pytest.raises(TypeError, match="must have numbers or bools, but its dtype is key"):
        JaxEnv(Keyed(2, 1.0), 2)
