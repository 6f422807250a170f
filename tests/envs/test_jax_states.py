"""States of environments of JAX: runs that continue bit for bit."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from gymnasium import spaces
from jax_parts import Scripted
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.envs import JaxEnv
from trawl.errors import EnvStateError

jax = pytest.importorskip("jax")
jnp = jax.numpy


def policy() -> Any:
    """Returns a policy that draws its actions."""

    def act(observation: Any) -> Any:
        logits = observation[..., :1] % 7 + torch.arange(4.0)
        return nn.functional.one_hot(torch.distributions.Categorical(logits=logits).sample(), 4)

    return TensorDictModule(act, in_keys=["observation"], out_keys=["action"])


def saved(state: Any) -> Any:
    """Returns a state as it comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.fixture(scope="module")
def pair() -> Any:
    """Two equal environments, which are compiled once for all tests."""
    return JaxEnv(Odd(), 3), JaxEnv(Odd(), 3)


def test_a_seed_that_waits_for_the_next_reset(pair: Any) -> None:
    one, other = pair
    one.set_seed(1)
    other.set_seed(2)
    one.begin(None)
    other.begin(None)
    one.set_seed(5)
    other.restore(saved(one.capture()))
    action = torch.tensor([[1, 0]] * 3)
    first, second = (env.rollout(1, lambda td: td.set("action", action)) for env in (one, other))
    assert torch.equal(first["next", "observation"], second["next", "observation"])


class Odd:
    """Environment whose state has a typed key, and numbers that numpy does not know."""

    action_space = spaces.Discrete(2)

    def reset(self, key: Any) -> Any:
        return (jax.random.wrap_key_data(key), jnp.bfloat16(0.5)), jnp.zeros(1)

    def step(self, key: Any, state: Any, action: Any) -> Any:
        own, number = state
        own, used = jax.random.split(own)
        number = (number * 3 + 1) % 5
        obs = jax.random.uniform(used, (1,)) + number.astype(jnp.float32)
        return (own, number.astype(jnp.bfloat16)), obs, 0.0, False, False


def test_states_with_other_dtypes(pair: Any) -> None:
    one, other = pair
    one.set_seed(1)
    other.set_seed(2)
    action = torch.tensor([[1, 0]] * 3)
    one.begin(None)
    other.begin(None)
    assert not torch.equal(one.advance([action]).last[0], other.advance([action]).last[0])
    other.restore(saved(one.capture()))
    for _ in range(3):
        assert torch.equal(one.advance([action]).last[0], other.advance([action]).last[0])


def test_a_captured_state_does_not_change(pair: Any) -> None:
    env, _ = pair
    env.begin(None)
    state = env.capture()
    copies = [array.clone() for array in state["arrays"]]
    env.advance([torch.tensor([[1, 0]] * 3)])
    assert all(torch.equal(*pair) for pair in zip(state["arrays"], copies, strict=True))


def test_states_of_other_environments_are_refused(pair: Any) -> None:
    state = pair[0].capture()
    with pytest.raises(EnvStateError, match=r"its number of environments is 3, but .* is 2"):
        JaxEnv(Odd(), 2).restore(state)
    with pytest.raises(EnvStateError, match=r"its name is Odd, but the name of .* is Scripted"):
        JaxEnv(Scripted(), 3).restore(state)
    Changed = type("Odd", (Odd,), {"reset": lambda self, key: (jnp.zeros(2), jnp.zeros(1))})
    Changed.step = lambda self, key, state, action: (state, jnp.zeros(1), 0.0, False, False)
    with pytest.raises(EnvStateError, match=r"its layout is .*, but"):
        JaxEnv(Changed(), 3).restore(state)
