"""Entries of the infos of environments of JAX, and their action masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from trawl import Collector
from trawl.envs import InfoKey, JaxEnv

jax = pytest.importorskip("jax")
jnp = jax.numpy


class Telling:
    """Environment whose infos are functions of the number of the step; an episode has 3 steps.

    Args:
        first: makes the info of a reset.
        then: makes the info of a step.
        space: action space.
    """

    def __init__(
        self,
        first: Callable[[Any], Any] = lambda step: {},
        then: Callable[[Any], Any] = lambda step: {"x": step},
        space: Any = None,
    ) -> None:
        self.first, self.then = first, then
        self.action_space = space or spaces.Discrete(3)

    def reset(self, key: Any) -> Any:
        return 0, jnp.zeros(2), self.first(0)

    def step(self, key: Any, state: Any, action: Any) -> Any:
        shown = jnp.stack([state, action.sum()]).astype(jnp.float32)
        return state + 1, shown, 0.0, state >= 2, False, self.then(state + 1)


def rows(env: JaxEnv, key: Any, frames: int = 4) -> tuple[list[Any], list[Any]]:
    """Returns an entry of the first environment at the root and under "next"."""
    with Collector(env, frames_per_batch=frames * env.batch_size[0]) as collector:
        batch = collector.next()
        assert collector.stats()["env_path"] == "tensor"
    one = batch[0]
    return one[key].squeeze(-1).tolist(), one["next", key].squeeze(-1).tolist()


def test_a_dtype_holds_the_values_of_resets_and_steps() -> None:
    env = JaxEnv(Telling(lambda _: {"x": 7}, lambda step: {"x": step / 2}), 1, info_keys=["x"])
    assert env.observation_spec["info", "x"].dtype is torch.float32
    assert rows(env, ("info", "x")) == ([7, 0.5, 1, 7], [0.5, 1, 1.5, 0.5])


@pytest.mark.parametrize("categorical", [True, False])
def test_spaces_encode_values(categorical: bool) -> None:
    keys = {
        "kind": spaces.Discrete(5, start=3),
        "pair": spaces.MultiDiscrete([2, 3]),
        "wide": spaces.Box(0, 2**40, (1,), np.int64),
    }
    told = Telling(
        then=lambda step: {"kind": step + 3, "pair": jnp.array([0, 2]), "wide": jnp.array([step])}
    )
    env = JaxEnv(told, 2, info_keys=keys, categorical_action_encoding=categorical)
    frames = env.rollout(2)
    found = {name: frames["next", "info", name][0] for name in keys}
    if not categorical:
        assert found["kind"].tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0]]
        assert found["pair"].tolist() == [[1, 0, 0, 0, 1]] * 2
    else:
        assert found["kind"].tolist() == [1, 2]
        assert found["pair"].tolist() == [[0, 2]] * 2
    assert found["wide"].dtype is torch.int64
    assert found["wide"].tolist() == [[1], [2]]
    assert not frames["info", "wide"][:, 0].any()


class Odd:
    """An object that is no array."""


@pytest.mark.parametrize(
    ("told", "keys", "error", "words"),
    [
        (Telling(), ["y"], ValueError, r"'y', but the info of Telling has only \['x'\]$"),
        (Telling(), {"y": spaces.Box(0, 1)}, ValueError, r"'y', but the info .* only \['x'\]$"),
        (Telling(then=lambda step: {"x": {"y": step}}), ["z"], ValueError, r"\['x', 'x/y'\]$"),
        (Telling(then=lambda _: {"x": "text", "y": Odd()}), ["x"], ValueError, r"has only \[\]$"),
        (
            Telling(lambda _: {"m": {"x": jnp.zeros(1, jnp.bfloat16)}}),
            ["m/x"],
            ValueError,
            r"'m/x', whose dtype bfloat16 is not",
        ),
        (Telling(), {"x": object}, ValueError, "JAX has only numbers and arrays"),
        (Telling(), "x", TypeError, "must be a list of names"),
        (Telling(), ["x", "x"], ValueError, "more than once"),
        (Telling(), [InfoKey("x", key="observation")], ValueError, "already has one"),
        (Telling(), [InfoKey("x", key="action")], ValueError, "needs that key for an action"),
        (Telling(), {"x": spaces.Box(0, 1, (3,))}, ValueError, r"shape \(\), .* shape \(3,\)"),
        (
            Telling(then=lambda step: {"x": step / 2}),
            {"x": spaces.Box(0, 9, (1,), np.int32)},
            TypeError,
            r"info\['x'\] is float32, but .* int32: state its space",
        ),
        (
            Telling(lambda _: {"x": jnp.zeros(2)}),
            ["x"],
            ValueError,
            r"shape \(2,\), .* shape \(1,\)",
        ),
        (Telling(lambda _: {"x": {"y": 1}}), ["x"], TypeError, r"has the entries \['y'\]"),
        (Telling(lambda _: 3), ["x"], TypeError, "an info must be a dict of arrays, .* is int"),
        (Telling(lambda _: {"action_mask": 1}), [], ValueError, "but step does not: return a mask"),
        (
            Telling(*[lambda step, n=n: {"action_mask": jnp.ones(n)} for n in (2, 3)]),
            [],
            ValueError,
            r"has shape \(2,\) after a reset, but \(3,\) after a step",
        ),
    ],
)
def test_mistakes_are_errors_of_the_constructor(
    told: Any, keys: Any, error: Any, words: str
) -> None:
    with pytest.raises(error, match=words):
        JaxEnv(told, 2, info_keys=keys)


@pytest.mark.parametrize(
    ("reset", "step", "words"),
    [
        (3, 5, "reset of .* must return a state, an observation, and may return an info"),
        (2, 6, "step of .* may return an info after them, but it returned 7 values"),
        (None, 5, "but it returned DynamicJaxprTracer"),
    ],
)
def test_results_that_are_no_info_are_refused(reset: Any, step: int, words: str) -> None:
    class Wrong:
        action_space = spaces.Discrete(2)

        def reset(self, key: Any) -> Any:
            return key if reset is None else (0, jnp.zeros(1), {}, {})[: reset + 1]

        def step(self, key: Any, state: Any, action: Any) -> Any:
            return (0, jnp.zeros(1), 0.0, False, False, {}, {})[: step + 1]

    with pytest.raises(ValueError, match=words):
        JaxEnv(Wrong(), 1)


@pytest.mark.parametrize(
    ("keys", "space"), [([], spaces.Discrete(3)), (["action_mask"], spaces.MultiBinary(3))]
)
def test_a_reset_without_a_mask_allows_everything(keys: Any, space: Any) -> None:
    told = Telling(then=lambda _: {"action_mask": jnp.array([0, 1, 0])}, space=space)
    env = JaxEnv(told, 64, info_keys=keys)
    with Collector(env, frames_per_batch=64 * 6) as collector:
        batch = collector.next()
    assert batch["action"][:, [0, 3]].sum((0, 1)).all()
    assert (batch["action"][:, [1, 2, 4, 5]] == torch.tensor([0, 1, 0])).all()
    if keys:
        assert not batch["info", "action_mask"][:, [0, 3]].any()


def test_an_observed_mask_is_preferred() -> None:
    class Both(Telling):
        def reset(self, key: Any) -> Any:
            return 0, {"action_mask": jnp.array([0, 1, 0])}, {"action_mask": jnp.array([1, 0, 0])}

        def step(self, key: Any, state: Any, action: Any) -> Any:
            return 0, {"action_mask": jnp.array([0, 0, 1])}, action, False, False, self.reset(0)[2]

    env = JaxEnv(Both(), 2, categorical_action_encoding=True)
    with Collector(env, frames_per_batch=6) as collector:
        assert collector.next()["action"].tolist() == [[1, 2, 2]] * 2


def test_the_masks_of_several_choices_may_be_in_a_tuple() -> None:
    def mask(_: Any) -> Any:
        return {"action_mask": (jnp.array([0, 1]), [1, 0, 0])}

    env = JaxEnv(
        Telling(mask, mask, space=spaces.MultiDiscrete([2, 3])), 2, categorical_action_encoding=True
    )
    assert env.rollout(20)["action"].unique(dim=1).tolist() == [[[1, 0]], [[1, 0]]]


def test_a_dict_of_masks_is_no_mask() -> None:
    told = Telling(*[lambda step: {"action_mask": {"agent": jnp.zeros(3)}}] * 2)
    env = JaxEnv(told, 2, info_keys=["action_mask"])
    assert env.rollout(2)["info", "action_mask", "agent"].shape == (2, 2, 3)
    assert env.action_mask() is None
