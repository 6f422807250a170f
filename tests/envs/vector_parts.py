"""Seeded vector environments under every wrapper, and a Gymnasium loop written by hand."""

from collections import defaultdict
from dataclasses import dataclass
from importlib.util import find_spec

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TransformAction as SingleTransformAction
from gymnasium.wrappers import TransformObservation as SingleTransformObservation
from gymnasium.wrappers import TransformReward as SingleTransformReward
from gymnasium.wrappers import vector as wrappers
from packaging.version import Version
from tensordict.nn import TensorDictModule


class Walk(gymnasium.Env):
    """A random walk whose episodes end at random, by termination or truncation or both."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 - as Gymnasium
    render_mode = "rgb_array"
    observation_space = spaces.Box(-100, 100, (3,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def reset(self, *, seed=None, options=None):
        self.x = self.random.normal(size=3)
        self.left = self.random.integers(1, 6)
        self.end = self.random.choice(["terminated", "truncated", "both"])
        return self.observe(), {}

    def step(self, action):
        self.x = 0.9 * self.x + action[0] + self.random.normal(size=3)
        self.left -= 1
        over = bool(self.left == 0)
        terminated, truncated = over and self.end != "truncated", over and self.end != "terminated"
        return self.observe(), 1 + self.x.sum(), terminated, truncated, {"sum": self.x.sum()}

    def observe(self):
        return self.x.astype(np.float32)

    def render(self):
        return np.zeros((8, 8, 3), np.uint8)


class Picture(Walk):
    # What shows pictures to people waits as long as one is to be seen.
    metadata = {**Walk.metadata, "render_fps": 1000}  # noqa: RUF012 - as Gymnasium
    observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)

    def observe(self):
        return np.resize((self.x * 20 + 128).clip(0, 255), (8, 8, 3)).astype(np.uint8)


class Parts(Walk):
    observation_space = spaces.Dict(a=Walk.observation_space, b=spaces.Box(-100, 100, (2,)))

    def observe(self):
        return {"a": self.x.astype(np.float32), "b": self.x[:2].astype(np.float32)}


@dataclass
class Case:
    """A wrapper.

    Attributes:
        wrap: puts it around a vector environment.
        kind: the sub-environments that it is for.
        state: what it knows after a run, to be compared.
        needs: modules without which it does not work.
    """

    wrap: object
    kind: type = Walk
    state: object = None
    needs: tuple = ()


def wrapped(name, *args, **kwargs):
    return lambda env: getattr(wrappers, name)(env, *args, **kwargs)


def running(statistics):
    return [np.asarray(statistics.mean), np.asarray(statistics.var), statistics.count]


def of_episodes(env):
    return [list(env.return_queue), list(env.length_queue), int(env.episode_count)]


def half(value):
    return value / 2


def more(value):
    return value + 1


class Drifting:
    """A transformation that counts its calls, as one with statistics of its own would."""

    def __init__(self):
        self.calls = 0

    def __call__(self, value):
        self.calls += 1
        return (value + 0.01 * self.calls).astype(value.dtype)


def around_torch(name):
    return lambda env: getattr(wrappers, name)(wrappers.NumpyToTorch(env))


_ARRAYS = ("array_api_compat",)
CASES = {
    "none": Case(lambda env: env),
    **{
        f"Vectorize{single.__name__}": Case(
            wrapped(f"Vectorize{single.__name__}", single, **options)
        )
        for single, options in (
            (
                SingleTransformObservation,
                {"func": half, "observation_space": Walk.observation_space},
            ),
            (SingleTransformAction, {"func": half, "action_space": Walk.action_space}),
            (SingleTransformReward, {"func": more}),
        )
    },
    "DictInfoToList": Case(wrapped("DictInfoToList")),
    "TransformObservation": Case(lambda env: wrappers.TransformObservation(env, Drifting())),
    "FilterObservation": Case(wrapped("FilterObservation", ["b"]), Parts),
    "FlattenObservation": Case(wrapped("FlattenObservation"), Parts),
    "GrayscaleObservation": Case(wrapped("GrayscaleObservation"), Picture),
    "ResizeObservation": Case(wrapped("ResizeObservation", (4, 4)), Picture, needs=("cv2",)),
    "ReshapeObservation": Case(wrapped("ReshapeObservation", (3, 1))),
    "RescaleObservation": Case(wrapped("RescaleObservation", np.float32(-1), np.float32(1))),
    "DtypeObservation": Case(wrapped("DtypeObservation", np.float64)),
    "NormalizeObservation": Case(
        wrapped("NormalizeObservation"), state=lambda env: running(env.obs_rms)
    ),
    "TransformAction": Case(lambda env: wrappers.TransformAction(env, Drifting())),
    "ClipAction": Case(wrapped("ClipAction")),
    "RescaleAction": Case(wrapped("RescaleAction", np.float32(-2), np.float32(2))),
    "TransformReward": Case(lambda env: wrappers.TransformReward(env, Drifting())),
    "ClipReward": Case(wrapped("ClipReward", 0.2, 0.8)),
    "NormalizeReward": Case(
        wrapped("NormalizeReward"),
        state=lambda env: [*running(env.return_rms), env.accumulated_reward],
    ),
    "RecordEpisodeStatistics": Case(wrapped("RecordEpisodeStatistics"), state=of_episodes),
    "DictInfoToList of RecordEpisodeStatistics": Case(
        lambda env: wrappers.DictInfoToList(wrappers.RecordEpisodeStatistics(env)),
        state=lambda env: of_episodes(env.env),
    ),
    "RecordVideo": Case(
        wrapped("RecordVideo", "videos", episode_trigger=lambda _: False),
        state=lambda env: [env.episode_id, env.step_id],
        needs=("moviepy",),
    ),
    "HumanRendering": Case(wrapped("HumanRendering"), Picture, needs=("pygame", "cv2")),
    "ArrayConversion": Case(
        lambda env: wrappers.ArrayConversion(env, env_xp=np, target_xp=torch), needs=_ARRAYS
    ),
    "NumpyToTorch": Case(wrapped("NumpyToTorch"), needs=_ARRAYS),
    "JaxToNumpy": Case(around_torch("JaxToNumpy"), needs=("jax", *_ARRAYS)),
    "JaxToTorch": Case(around_torch("JaxToTorch"), needs=("jax", *_ARRAYS)),
}
if Version(gymnasium.__version__) < Version("1.2.2"):
    # There the outer one fails at the inner one's statistics.
    del CASES["DictInfoToList of RecordEpisodeStatistics"]


def missing(case):
    return [name for name in case.needs if find_spec(name) is None]


class Undeclared(VectorEnv):
    """A vector environment that resets in some mode, and doesn't state it.

    Args:
        env: what it steps.
        final: the name in the info of an episode's last observation; None to leave that out.
        masks: whether it resets some when it is told to, or all.
    """

    def __init__(self, env, final="final_obs", masks=True):
        self.env, self.final, self.masks = env, final, masks
        for name in ("num_envs", "single_observation_space", "single_action_space"):
            setattr(self, name, getattr(env, name))
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=seed, options=options if self.masks else None)

    def step(self, actions):
        *step, info = self.env.step(actions)
        for key in ("final_obs", "_final_obs", "final_info", "_final_info"):
            value = info.pop(key, None)
            if value is not None and self.final is not None and "obs" in key:
                info[key.replace("final_obs", self.final)] = value
        return *step, info


def made(seed, count, mode, kind=Walk):
    functions = [lambda i=i: kind([seed, i]) for i in range(count)]
    return SyncVectorEnv(functions, autoreset_mode=mode)


def leaves_of(obs):
    return [np.asarray(obs[key]) for key in sorted(obs)] if isinstance(obs, dict) else [obs]


def choose(*leaves):
    """An action for each row, from that row alone."""
    rows = [torch.as_tensor(leaf).flatten(1).double().mean(1) for leaf in leaves]
    return torch.tanh(sum(rows))[:, None].float()


def policy_of(env):
    """The same as a policy."""
    space = env.single_observation_space
    keys = sorted(space.spaces) if isinstance(space, spaces.Dict) else ["observation"]
    return TensorDictModule(choose, in_keys=keys, out_keys=["action"])


def frame(obs, action, reward, following, terminated, truncated, row):
    return [
        *[np.asarray(leaf)[row].tolist() for leaf in leaves_of(obs)],
        np.asarray(action)[row].tolist(),
        float(np.float32(np.asarray(reward)[row])),
        *[np.asarray(leaf).tolist() for leaf in leaves_of(following)],
        bool(terminated[row]),
        bool(truncated[row]),
    ]


def last_of(info, row):
    return info[row]["final_obs"] if isinstance(info, list) else info["final_obs"][row]


def by_hand(env, mode, steps):
    """The frames of each sub-environment, as a loop in Gymnasium's documentation gets them."""
    frames = defaultdict(list)
    obs, _ = env.reset()
    resetting = np.zeros(env.num_envs, dtype=bool)
    for _ in range(steps):
        action = choose(*leaves_of(obs)).numpy()
        # Copies: some wrappers write into the actions that they are given.
        after, reward, terminated, truncated, info = env.step(action.copy())
        ended = np.asarray(terminated) | np.asarray(truncated)
        for row in np.flatnonzero(~resetting):
            if ended[row] and mode is AutoresetMode.SAME_STEP:
                following = last_of(info, row)
            elif isinstance(after, dict):
                following = {key: value[row] for key, value in after.items()}
            else:
                following = after[row]
            step = (obs, action, reward, following, terminated, truncated, row)
            frames[int(row)].append(frame(*step))
        if mode is AutoresetMode.NEXT_STEP:
            resetting = ended
        elif mode is AutoresetMode.DISABLED and ended.any():
            after, _ = env.reset(options={"reset_mask": ended.copy()})
        obs = after
    return frames


def collected(batches):
    """The same of batches."""
    frames = defaultdict(list)
    for batch in batches:
        known = ("action", "collector", "done", "terminated", "truncated", "next")
        keys = sorted(key for key in batch.keys() if key not in known)  # noqa: SIM118
        columns = [
            *[batch[key] for key in keys],
            batch["action"],
            batch["next", "reward"].squeeze(-1),
            *[batch["next", key] for key in keys],
            *[batch["next", key].squeeze(-1) for key in ("terminated", "truncated")],
        ]
        mask = batch.get(("collector", "mask"), None)
        for row, t in np.ndindex(*batch.shape):
            if mask is None or mask[row, t]:
                frames[row].append([column[row, t].tolist() for column in columns])
    return frames


def check_same(found, expected, exactly):
    """Compares frames; beyond those of the loop by hand there may be more, unless exactly."""
    assert found.keys() == expected.keys()
    for row, frames in expected.items():
        assert len(found[row]) == len(frames) if exactly else len(found[row]) >= len(frames)
        for index, pair in enumerate(zip(found[row], frames)):  # noqa: B905 - may be longer
            assert pair[0] == pair[1], f"frame {index} of sub-environment {row}"
