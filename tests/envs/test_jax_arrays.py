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
from trawl.extras.jax.arrays import giver

jax = pytest.importorskip("jax")
jnp = jax.numpy


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bool])
def test_arguments_are_copies(dtype: torch.dtype) -> None:
    """JAX may read them after the call that they were given to."""
    tensor = torch.ones(4096, 2, dtype=dtype)
    given = giver(torch.device("cpu"))(tensor)
    assert not np.shares_memory(given, tensor.numpy())
    assert given.dtype == {torch.int64: np.int32}.get(dtype, tensor.numpy().dtype)


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


@pytest.mark.parametrize("categorical", [False, True])
def test_nested_observations_and_actions(categorical: bool) -> None:
    env = JaxEnv(Nested(), 2, categorical_action_encoding=categorical)
    frame = env.rollout(1, lambda td: td.update(env.full_action_spec.rand()))[:, 0]
    assert frame["board"].dtype is torch.uint8
    assert frame["pair", "left"].shape == (2, 1)
    assert frame["pair", "left"].dtype is torch.bool
    assert frame["pair", "right", "deep"].dtype is torch.int32
    assert frame["more", "1"].shape == (2, 2)
    codec = SpaceCodec(Nested.action_space, "action", categorical)
    for row in frame.unbind(0):
        # The same actions in Gymnasium.
        action = codec.decode([row[leaf.key].numpy() for leaf in codec.leaves])
        one, two = action["pair"]
        total = action["which"] * 100 + action["many"].sum() * 10 + one.sum() + two.sum()
        assert row["next", "reward"].item() == pytest.approx(float(total))
        assert row["next", "more", "0"] == row["next", "reward"]
        assert row["next", "pair", "left"] == bool(total > 2)


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
        (1, {"x": np.zeros(3)}, r"observation 'x' must be the same .* of shape \(3,\) after"),
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


def odd(part: int = 2, value: Any = 1.0, **attributes: Any) -> Any:
    """Returns an environment with attributes or methods of its own."""
    return type("Odd", (Broken,), attributes)(part, value)


def shows(value: Any) -> Any:
    """Returns a reset that shows a value."""
    return lambda self, key: ({"a": jnp.zeros(2)}, value(key))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((Nested(), 0), {}, ValueError, "num_envs must be at least 1, but it is 0"),
        ((Nested(), 1), {"seed": "a"}, TypeError, "seed must be an integer"),
        ((Nested(), 1), {"params": 3}, ValueError, "params are for environments of gymnax"),
        ((Nested(), 1), {"device": "meta"}, ValueError, "device='meta': JAX has no such device"),
        ((Nested(), 1), {"device": "nope"}, ValueError, "device 'nope' is not a device"),
        ((Nested(), 1), {"jit": "no"}, TypeError, "jit must be"),
        (
            (Nested(), 1),
            {"categorical_action_encoding": "yes"},
            TypeError,
            "categorical_action_enc.* must",
        ),
        ((object(), 1), {}, TypeError, r"env must be an environment .* but it is object"),
        (("CartPole-v1", 4), {}, TypeError, "pass an id to the collector"),
        ((Nested, 2), {}, TypeError, r"it is the class Nested: pass an object"),
        ((odd(action_space=None), 2), {}, TypeError, "Odd.action_space must be a gymnasium.Space"),
        (
            (odd(action_space=spaces.Text(3)), 2),
            {},
            ValueError,
            "must have a fixed shape and dtype",
        ),
        (
            (
                odd(
                    1,
                    {"reward": np.zeros(2, "float32")},
                    reset=shows(lambda key: {"reward": jnp.zeros(2)}),
                ),
                2,
            ),
            {},
            ValueError,
            "an observation 'reward'",
        ),
        (
            (odd(reset=shows(lambda key: {"x": jax.random.key(0)})), 2),
            {},
            TypeError,
            "must have numbers or bools, but its dtype is key",
        ),
    ],
)
def test_bad_arguments(arguments: Any, options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        JaxEnv(*arguments, **options)


def test_a_reset_takes_no_options_and_a_count_may_be_one_of_numpy() -> None:
    env = JaxEnv(Nested(), np.int64(2))  # type: ignore[arg-type]
    assert env.batch_size == (2,)
    with pytest.raises(ValueError, match="take no options"):
        env.reset(options={"a": 1})
