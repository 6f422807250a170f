"""Batches of environments of JAX: their seeds, their memory, and their arguments."""

from __future__ import annotations

import gc
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from jax_parts import COUNT, Scripted, scripted
from tensor_parts import assert_same
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import Collector, MultiAsyncCollector
from trawl.envs import JaxEnv
from trawl.errors import EnvStateError

jax = pytest.importorskip("jax")
jnp = jax.numpy


def _act(observation: Any) -> Any:
    return nn.functional.one_hot(observation.sum(-1).long() % 4, 4)


def plain() -> Any:
    return TensorDictModule(_act, in_keys=["observation"], out_keys=["action"])


def test_seeds() -> None:
    env, found = scripted(), []
    for seed in (5, 5, 6):
        env.set_seed(seed)
        found.append(env.rollout(8, plain(), break_when_any_done=False)["observation"].clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert len(found[0][:, 0, 0].unique()) == COUNT


def test_a_worker_gets_a_copy_of_an_environment() -> None:
    options: dict[str, Any] = {"frames_per_batch": 12, "total_frames": 36}
    found = []
    for source, method in ((scripted(), "forkserver"), (scripted, "inline")):
        with MultiAsyncCollector([source], plain(), start_method=method, **options) as collector:
            collector.set_seed(0)
            found.append([batch.clone() for batch in collector])
    assert_same(*found)


class Delayed(JaxEnv):
    """Environment whose constructor has arguments of its own."""

    def __init__(self, first: int, env: Any, *, delay: int = 0) -> None:
        super().__init__(env, 2)
        self.first, self.delay = first, delay


def test_a_copy_has_the_class_and_the_arguments_of_the_original() -> None:
    copied = pickle.loads(pickle.dumps(Delayed(3, Scripted(), delay=4)))
    assert type(copied) is Delayed
    assert (copied.first, copied.delay, copied.batch_size) == (3, 4, (2,))
    assert copied.rollout(1).shape == (2, 1)
    assert next(iter(inspect.signature(JaxEnv).parameters)) == "env"


def test_without_compiling() -> None:
    actions = torch.eye(2).long()
    found = []
    for jit in (True, False):
        env = JaxEnv(Drawn(), 2, jit=jit, seed=0)
        found.append([env.rollout(2, lambda td: td.set("action", actions))])
    assert_same(*found)


class Growing(Scripted):
    """Environment whose observations change in its first step."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change, self.calls = change, 0

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        state, obs, *rest, _ = super().step(key, state, action)
        self.calls += 1
        # The first call finds out the layout.
        return (state, self.change(obs) if self.calls == 2 else obs, *rest)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda obs: obs[:2], r"'observation' of a step is float32 of shape \(2,\)"),
        (lambda obs: obs.astype("int32"), r"is int32 of shape \(4,\), but before it was float32"),
    ],
)
def test_changes_are_refused(change: Any, text: str) -> None:
    env = JaxEnv(Growing(change), COUNT, jit=False)
    with (
        Collector(env, plain(), frames_per_batch=3) as collector,
        pytest.raises(ValueError, match=text),
    ):
        next(iter(collector))


class Remembering(Scripted):
    """Environment whose state is the last action, and whose observation is the one before."""

    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, key: Any) -> tuple[Any, Any]:
        return jnp.zeros(2), jnp.zeros(2)

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        # Without any arithmetic, JAX may use the memory of its argument for the result.
        return action, state, 0.0, False, False


def test_the_environment_keeps_no_memory_of_the_batch() -> None:
    env = JaxEnv(Remembering(), 64)
    env.begin(None)
    # As in a batch: rows that a later batch overwrites, each aligned as JAX wants it.
    rows = torch.rand(3, 64, 2)
    kept = rows.clone()
    for t in range(3):
        step = env.advance([rows[t]])
        rows[t] = 7
        assert torch.equal(step.last[0], kept[t - 1] if t else torch.zeros(64, 2))


class Slow(Remembering):
    """Environment that is still computing when its step returns."""

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        found = jax.lax.fori_loop(0, 2000, lambda i, x: x + action, state)
        return found, found, found[0], found[1] > 1, False


def test_results_are_waited_for() -> None:
    env = JaxEnv(Slow(), 4096)
    env.begin(None)
    rows = torch.ones(4096, 2)
    found = env.advance([rows])
    rows.fill_(5)
    assert (found.last[0] == 2000).all()
    assert (found.rewards[0] == 2000).all()
    assert found.terminated.all()
    assert (env.begin_next(found.terminated)[0] == 0).all()


def test_tensors_keep_the_memory_of_their_arrays() -> None:
    env = JaxEnv(Remembering(), 1000)
    env.begin(None)
    actions = [torch.full((1000, 2), float(t)) for t in range(20)]
    held = [env.advance([action]).last[0] for action in actions]
    del env
    gc.collect()
    for t, tensor in enumerate(held):
        assert (tensor == max(t - 1, 0)).all()


class Drawn:
    """Observes a random number of the episode."""

    action_space = spaces.Discrete(2)

    def reset(self, key: Any) -> Any:
        return jax.numpy.int32(0), jax.random.uniform(key, (1,))

    def step(self, key: Any, state: Any, action: Any) -> Any:
        return state + 1, jax.random.uniform(key, (1,)), 1.0, state >= 3, False


def test_a_seed_waits_for_a_reset_of_all_environments() -> None:
    env = JaxEnv(Drawn(), 2)
    env.set_seed(5)
    first = env.reset()
    wanted = first["observation"].clone()
    for rows, seeded in ((torch.tensor([[True], [False]]), False), (torch.ones(2, 1) > 0, True)):
        following = env.step(env.rand_action(first))["next"]
        env.set_seed(5)
        found = env.reset(following.copy().set("_reset", rows))["observation"]
        assert torch.equal(found, wanted) == seeded
        if not seeded:
            assert torch.equal(env.reset()["observation"], wanted)
    env.set_seed(2**32 + 5)
    assert not torch.equal(env.reset()["observation"], wanted)


# --- states


def saved(state: Any) -> Any:
    """Returns a state as it comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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
