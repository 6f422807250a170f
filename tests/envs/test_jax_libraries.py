"""Environments of gymnax, Brax and Jumanji, compared with loops written by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from trawl import Collector
from trawl.envs import GymEnv, JaxEnv
from trawl.envs.build import build_one
from trawl.extras.jax.functions import functions_of

jax = pytest.importorskip("jax")
jnp = jax.numpy
COUNT, STEPS = 5, 40
# Of some environments of gymnax.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning"),
]


def by_hand(
    functions: Any, actions: np.ndarray[Any, Any], seed: int, raw: Any = lambda obs: obs
) -> dict[str, np.ndarray[Any, Any]]:
    """Steps each environment on its own, with the keys that `JaxEnv` gives it.

    `functions` have a reset and a step that return a state, an observation, and after a step the
    reward and the two flags.
    """
    keys = jax.random.split(jax.random.PRNGKey(seed), (2, COUNT))
    reset, step = jax.jit(jax.vmap(functions.reset)), jax.jit(jax.vmap(functions.step))
    fold = jax.jit(jax.vmap(jax.random.fold_in))
    episodes = np.zeros(COUNT, np.uint32)
    state, obs = reset(fold(keys[1], episodes))
    rows: dict[str, list[Any]] = {name: [] for name in ("old", "new", "reward", "ended", "cut")}
    for t, action in enumerate(actions):
        rows["old"].append(raw(obs))
        own = fold(keys[0], np.full(COUNT, t, np.uint32))
        state, obs, reward, terminated, truncated = step(own, state, action)
        for name, value in (
            ("new", raw(obs)), ("reward", reward), ("ended", terminated), ("cut", truncated)
        ):  # fmt: skip
            rows[name].append(value)
        over = np.asarray(terminated | truncated)
        episodes += 1
        fresh = reset(fold(keys[1], episodes))
        episodes -= ~over
        state, obs = jax.tree.map(
            lambda new, now, over=over: jnp.where(
                over.reshape(-1, *[1] * (now.ndim - 1)), new, now
            ),
            fresh,
            (state, obs),
        )
    return {name: np.stack([np.asarray(row) for row in found], 1) for name, found in rows.items()}


def collected(env: JaxEnv, actions: Any, seed: int = 1) -> TensorDict:
    """Collects a batch with given actions."""
    rows = iter(actions)

    def policy(td: Any) -> Any:
        return td.set("action", next(rows))

    # The first call only finds out what the policy writes.
    rows = iter([actions[0], *actions])
    with Collector(env, policy, frames_per_batch=COUNT * STEPS) as collector:
        collector.set_seed(seed)
        return next(iter(collector)).clone()


def assert_same(batch: Any, found: Any, key: str = "observation") -> None:
    # A fused step may round differently from the parts that it is made of.
    for rows, name in ((batch, "old"), (batch["next"], "new")):
        assert torch.allclose(rows[key].float(), torch.tensor(found[name]).float(), rtol=1e-5)
    following = batch["next"]
    assert torch.allclose(following["reward"][..., 0], torch.tensor(found["reward"]).float())
    assert np.array_equal(following["terminated"][..., 0], found["ended"])
    assert np.array_equal(following["truncated"][..., 0], found["cut"])


@pytest.fixture(scope="module")
def cartpole() -> Any:
    gymnax = pytest.importorskip("gymnax")
    env, params = gymnax.make("CartPole-v1")
    return env, replace(params, max_steps_in_episode=12)


def test_gymnax(cartpole: Any) -> None:
    env, params = cartpole

    def step(key: Any, state: Any, action: Any) -> Any:
        obs, state, reward, done, _ = env.step_env(key, state, action, params)
        late = state.time >= params.max_steps_in_episode
        fell = (abs(state.x) > params.x_threshold) | (
            abs(state.theta) > params.theta_threshold_radians
        )
        assert done.dtype == bool
        return state, obs, reward, done & fell, done & late & ~fell

    functions = SimpleNamespace(
        reset=lambda key: tuple(reversed(env.reset_env(key, params))), step=step
    )
    choice = np.random.default_rng(0).integers(0, 2, (STEPS, COUNT))
    found = by_hand(functions, choice, 1)
    made = JaxEnv((env, params), COUNT)
    batch = collected(made, torch.nn.functional.one_hot(torch.from_numpy(choice), 2))
    assert_same(batch, found)
    assert found["ended"].any()
    assert found["cut"].any()
    assert made.name == "gymnax CartPole-v1"


def test_brax() -> None:
    pytest.importorskip("brax")
    from brax import envs

    env = envs.create("fast", episode_length=7, auto_reset=False)

    def reset(key: Any) -> Any:
        state = env.reset(key)
        return state, state.obs

    def step(key: Any, state: Any, action: Any) -> Any:
        state = env.step(state, action)
        cut = state.info["truncation"] > 0
        return state, state.obs, state.reward, (state.done > 0) & ~cut, cut

    choice = np.random.default_rng(0).uniform(-1, 1, (STEPS, COUNT, 1)).astype(np.float32)
    found = by_hand(SimpleNamespace(reset=reset, step=step), choice, 1)
    made = JaxEnv(env, COUNT)
    batch = collected(made, torch.from_numpy(choice))
    assert_same(batch, found)
    assert found["cut"][:, 6::7].all()
    assert found["cut"].sum() == COUNT * (STEPS // 7)
    assert made.name == "brax Fast"


def test_observations_of_brax_in_a_dict() -> None:
    pytest.importorskip("brax")
    options = {"num_envs": 2, "episode_length": 3, "obs_mode": "dict_state"}
    env = build_one("brax:fast", options)
    frames = env.rollout(4, break_when_any_done=False)
    assert frames["state"].shape == (2, 4, 2)
    assert frames["next", "truncated"][:, 2].all()


def test_jumanji() -> None:
    jumanji = pytest.importorskip("jumanji")
    from jumanji.environments.logic.sliding_tile_puzzle.generator import RandomWalkGenerator

    generator = RandomWalkGenerator(grid_size=2, num_random_moves=2)
    env = jumanji.make("SlidingTilePuzzle-v0", generator=generator, time_limit=9)

    def reset(key: Any) -> Any:
        state, first = env.reset(key)
        return state, first.observation

    def step(key: Any, state: Any, action: Any) -> Any:
        state, found = env.step(state, action)
        last = found.step_type == 2
        dead = found.discount == 0
        return state, found.observation, found.reward, last & dead, last & ~dead

    choice = np.random.default_rng(0).integers(0, 4, (STEPS, COUNT))
    functions = SimpleNamespace(reset=reset, step=step)
    found = by_hand(functions, choice, 1, lambda obs: obs.puzzle)
    batch = collected(JaxEnv(env, COUNT), torch.nn.functional.one_hot(torch.from_numpy(choice), 4))
    assert_same(batch, found, "puzzle")
    assert batch["action_mask"].dtype is torch.bool
    assert batch["step_count"].shape == (COUNT, STEPS, 1)
    assert found["ended"].any()


def test_random_actions_respect_the_mask_of_each_agent_of_jumanji() -> None:
    jumanji = pytest.importorskip("jumanji")
    from jumanji import specs, types

    class Seen(NamedTuple):
        action_mask: Any

    class Turning(jumanji.Environment):  # type: ignore[misc, name-defined]
        """Environment of three agents, each of which may do another thing in each step."""

        observation_spec = specs.Spec(
            Seen, "Seen", action_mask=specs.BoundedArray((3, 4), bool, False, True)
        )
        action_spec = specs.MultiDiscreteArray(jnp.full(3, 4))

        def _seen(self, step: Any) -> Any:
            return Seen(jax.nn.one_hot((step + jnp.arange(3)) % 4, 4, dtype=bool))

        def reset(self, key: Any) -> Any:
            return 0, types.restart(self._seen(0))

        def step(self, state: Any, action: Any) -> Any:
            return state + 1, types.transition(jnp.zeros(()), self._seen(state + 1))

    with Collector(
        JaxEnv(Turning(), 2, categorical_action_encoding=True), frames_per_batch=20
    ) as collector:
        batch = collector.next()
    assert batch["action_mask"].shape[-2:] == (3, 4)
    assert batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).all()
    assert batch["action"].unique().tolist() == [0, 1, 2, 3]


def test_ends_of_jumanji_by_the_discount() -> None:
    jumanji = pytest.importorskip("jumanji")
    types = pytest.importorskip("jumanji.types")
    specs = pytest.importorskip("jumanji.specs")

    class Ending(jumanji.Environment):  # type: ignore[misc, name-defined]
        """Environment whose first step is its last one, with the action as its discount."""

        observation_spec = specs.Array((), float)
        action_spec = specs.BoundedArray((), float, 0, 1)

        def reset(self, key: Any) -> Any:
            return key, types.restart(jnp.zeros(()))

        def step(self, state: Any, action: Any) -> Any:
            return state, types.truncation(jnp.zeros(()), jnp.zeros(()), action)

    env = JaxEnv(Ending(), 2)
    frame = env.rollout(1, lambda td: td.set("action", torch.tensor([[0.0], [1.0]])))
    assert frame["next", "terminated"].flatten().tolist() == [True, False]
    assert frame["next", "truncated"].flatten().tolist() == [False, True]


def test_parameters_of_gymnax() -> None:
    pytest.importorskip("gymnax")
    options = {"num_envs": 2, "max_steps_in_episode": 3, "seed": 0}
    env = build_one("gymnax:Pendulum-v1", options)
    frames = env.rollout(3)
    assert frames["next", "truncated"][:, 2].all()
    assert not frames["next", "terminated"].any()
    assert build_one("gymnax:CartPole-v1").batch_size == (1,)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("Breakout-MinAtar", (10, 10, 4), torch.float32),
        ("Catch-bsuite", (10, 5), torch.float32),
        ("FourRooms-misc", (4,), torch.int32),
        ("PointRobot-misc", (6,), torch.float32),
    ],
)
def test_layouts_of_gymnax(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gymnax = pytest.importorskip("gymnax")
    spec = JaxEnv(gymnax.make(name), 2).observation_spec["observation"]
    assert (spec.shape, spec.dtype) == ((2, *shape), dtype)


def test_a_time_limit_of_gymnax_that_marks_the_state() -> None:
    """Breakout writes every end into its state, so that its state does not tell the reason."""
    pytest.importorskip("gymnax")
    env = build_one("gymnax:Breakout-MinAtar", {"num_envs": 3, "max_steps_in_episode": 4})
    flags = env.rollout(4, break_when_any_done=False)["next"]
    assert flags["truncated"][:, 3].all()
    assert not flags["terminated"].any()


def of_brax(*names: str) -> Any:
    """Returns an environment of Brax in its wrappers."""
    pytest.importorskip("brax")
    from brax.envs import base, get_environment
    from brax.envs.wrappers import training

    env = get_environment("fast")
    for name in names:
        env = getattr(base if name == "Wrapper" else training, name)(env)
    return env


def of_jumanji(*names: str) -> Any:
    """Returns an environment of Jumanji in its wrappers."""
    jumanji, wrappers = map(pytest.importorskip, ("jumanji", "jumanji.wrappers"))
    outer = type("Outer", (wrappers.Wrapper,), {})
    env = jumanji.make("Snake-v1")
    for name in names:
        env = outer(env) if name == "Outer" else getattr(wrappers, name)(env)
    return env


def of_gymnax() -> Any:
    gymnax, wrappers = map(pytest.importorskip, ("gymnax", "gymnax.wrappers"))
    return wrappers.LogWrapper(gymnax.make("CartPole-v1")[0])


HIDES, BATCHES = "AutoResetWrapper hides the last observation", "VmapWrapper makes a batch of envir"


@pytest.mark.parametrize(
    ("make", "wrappers", "error", "words"),
    [
        (of_brax, ["AutoResetWrapper"], ValueError, HIDES),
        (of_brax, ["AutoResetWrapper", "Wrapper"], ValueError, HIDES),
        (of_brax, ["VmapWrapper"], ValueError, BATCHES),
        (of_jumanji, ["AutoResetWrapper"], ValueError, HIDES),
        (of_jumanji, ["AutoResetWrapper", "Outer"], ValueError, HIDES),
        (of_jumanji, ["VmapWrapper", "Outer"], ValueError, BATCHES),
        (of_gymnax, [], TypeError, "A wrapper of gymnax has no step_env"),
    ],
)
def test_wrappers_that_make_batches_or_reset_are_refused(
    make: Any, wrappers: list[str], error: Any, words: str
) -> None:
    with pytest.raises(error, match=words):
        JaxEnv(make(*wrappers), 2)


def test_several_rewards_of_jumanji() -> None:
    jumanji = pytest.importorskip("jumanji")
    from jumanji.wrappers import MultiToSingleWrapper

    env = jumanji.make("LevelBasedForaging-v0")
    with pytest.raises(ValueError, match=r"has several rewards.*MultiToSingleWrapper"):
        functions_of(env)
    assert functions_of(MultiToSingleWrapper(env)).action_space.shape == (2,)


def test_a_collector_asks_for_a_batch(cartpole: Any) -> None:
    for source in (cartpole[0], lambda: cartpole[0], lambda: cartpole):
        with pytest.raises(
            TypeError, match=r"pass JaxEnv\(env, num_envs=...\) instead of CartPole"
        ):
            Collector(source, frames_per_batch=2)
    with pytest.raises(TypeError, match="or one of JAX to JaxEnv"):
        GymEnv(cartpole[0])


# --- infos


def test_infos_of_gymnax() -> None:
    pytest.importorskip("gymnax")
    options = {"num_envs": 2, "max_steps_in_episode": 3, "seed": 0, "info_keys": ["discount"]}
    env = build_one("gymnax:CartPole-v1", options)
    # The info of a step has the discount after it, and that of a reset has none.
    with Collector(env, frames_per_batch=8) as collector:
        batch = collector.next()[0]
    found = [part["info", "discount"].flatten().tolist() for part in (batch, batch["next"])]
    assert found == [[0, 1, 1, 0], [1, 1, 0, 1]]


def test_infos_of_brax() -> None:
    pytest.importorskip("brax")
    from brax.envs import get_environment
    from brax.envs.base import Wrapper
    from brax.envs.wrappers.training import EpisodeWrapper

    class Measured(Wrapper):  # type: ignore[misc]
        def reset(self, rng: Any) -> Any:
            return self.env.reset(rng).replace(metrics={"speed": jnp.float32(5)})

        def step(self, state: Any, action: Any) -> Any:
            speed = 10 * state.metrics["speed"]
            return self.env.step(state, action).replace(metrics={"speed": speed})

    keys = ["steps", "metrics", "episode_metrics/length"]
    env = JaxEnv(EpisodeWrapper(Measured(get_environment("fast")), 3, 1), 1, info_keys=keys)
    with Collector(env, frames_per_batch=4) as collector:
        infos = collector.next()["next", "info"][0]
    assert infos["steps"].flatten().tolist() == [1, 2, 3, 1]
    assert infos["metrics", "speed"].flatten().tolist() == [50, 500, 5000, 50]
    assert infos["episode_metrics", "length"].flatten().tolist() == [1, 2, 3, 1]


def test_infos_of_jumanji() -> None:
    jumanji = pytest.importorskip("jumanji")
    from jumanji import specs, types

    class Counting(jumanji.Environment):  # type: ignore[misc, name-defined]
        observation_spec = specs.Array((), float)
        action_spec = specs.BoundedArray((), float, 0, 1)

        def reset(self, key: Any) -> Any:
            return 0, types.restart(jnp.zeros(()), {"count": 7})

        def step(self, state: Any, action: Any) -> Any:
            return state + 1, types.transition(0.0, jnp.zeros(()), extras={"count": state})

    env = JaxEnv(Counting(), 1, info_keys=["count"])
    with Collector(env, frames_per_batch=4) as collector:
        batch = collector.next()[0]
    found = [part["info", "count"].flatten().tolist() for part in (batch, batch["next"])]
    assert found == [[7, 0, 1, 2], [0, 1, 2, 3]]
