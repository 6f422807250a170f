"""Batches of environments of JAX: their seeds, their memory, and their arguments."""

from __future__ import annotations

import gc
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn

pytest.importorskip("jax")

from jax_parts import COUNT, INFOS, Scripted, scripted
from tensor_parts import assert_same, collected

from trawl.collectors import Collector, MultiAsyncCollector
from trawl.envs import JaxEnv


def _act(observation: Any) -> Any:
    return nn.functional.one_hot(observation.sum(-1).long() % 4, 4)


def plain() -> Any:
    return TensorDictModule(_act, in_keys=["observation"], out_keys=["action"])


batches = partial(collected, frames_per_batch=4 * COUNT)


class Reused(JaxEnv):
    """Environment that stays open, because it is compiled only once for many tests."""

    def close(self, **options: Any) -> None:
        pass


@pytest.fixture(scope="module")
def reused() -> JaxEnv:
    return Reused(Scripted(), COUNT, info_keys=INFOS)


@pytest.fixture
def fresh(reused: JaxEnv) -> JaxEnv:
    """Returns the environment as if it were new."""
    reused.set_seed(0)
    reused.begin(None)
    return reused


def test_seeds(fresh: JaxEnv) -> None:
    one, _ = batches(fresh, plain(), seed=5)
    again, _ = batches(fresh, plain(), seed=5)
    assert_same(one, again)
    other, _ = batches(fresh, plain(), seed=6)
    assert not torch.equal(one[0]["observation"], other[0]["observation"])
    numbers = one[0]["observation"][..., 0]
    assert len(set(numbers[:, 0].tolist())) == COUNT


def test_a_seed_beyond_32_bits(fresh: JaxEnv) -> None:
    first = []
    for seed in (1, 2**32 + 1):
        fresh.set_seed(seed)
        first.append(fresh.begin(None)[0].clone())
    assert not torch.equal(*first)


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
        import jax.numpy as jnp

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
        import jax

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
        import jax

        return jax.numpy.int32(0), jax.random.uniform(key, (1,))

    def step(self, key: Any, state: Any, action: Any) -> Any:
        import jax

        return state + 1, jax.random.uniform(key, (1,)), 1.0, state >= 3, False


def test_a_partial_reset_keeps_a_seed_that_waits() -> None:
    env = JaxEnv(Drawn(), 2)
    env.set_seed(5)
    wanted = env.reset()["observation"]
    env.set_seed(5)
    env.reset(env.fake_tensordict().set("_reset", torch.tensor([[True], [False]])))
    assert (env.reset()["observation"] == wanted).all()


def test_a_reset_of_all_environments_by_a_mask_uses_the_seed() -> None:
    env = JaxEnv(Drawn(), 2)
    env.set_seed(5)
    first = env.reset()
    wanted = first["observation"].clone()
    following = env.step(env.rand_action(first))["next"]
    env.set_seed(5)
    reset = env.reset(following.set("_reset", torch.ones(2, 1, dtype=torch.bool)))
    assert (reset["observation"] == wanted).all()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (("CartPole-v1", 4), {}, TypeError, "pass an id to the collector"),
        ((Drawn, 2), {}, TypeError, r"it is the class Drawn: pass an object"),
        ((Drawn(), 0), {}, ValueError, "num_envs must be at least 1"),
        ((Drawn(), 2), {"device": "nope"}, ValueError, "device 'nope' is not a device"),
        ((Drawn(), 2), {"jit": "no"}, TypeError, "jit must be"),
        (
            (Drawn(), 2),
            {"categorical_action_encoding": "yes"},
            TypeError,
            "categorical_action_encoding must be",
        ),
    ],
)
def test_bad_arguments(arguments: Any, options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        JaxEnv(*arguments, **options)


def test_a_count_of_numpy() -> None:
    assert JaxEnv(Drawn(), np.int64(2)).batch_size == (2,)  # type: ignore[arg-type]
