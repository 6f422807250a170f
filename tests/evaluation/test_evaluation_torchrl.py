"""Evaluations of TorchRL's environments and policies."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from evaluation_parts import Walk, linear
from tensordict.nn import TensorDictSequential

torchrl = pytest.importorskip("torchrl")

from torchrl.collectors import Evaluator as TheirEvaluator  # noqa: E402
from torchrl.envs import (  # noqa: E402
    GymWrapper,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNormV2,
)
from torchrl.modules import AdditiveGaussianModule  # noqa: E402
from torchrl.record import CSVLogger, VideoRecorder  # noqa: E402

from trawl import ExplorationType  # noqa: E402
from trawl.collectors import Evaluator  # noqa: E402


def plain() -> Any:
    return GymWrapper(Walk())


def serial() -> Any:
    return SerialEnv(2, plain)


@pytest.mark.parametrize("make", [plain, serial])
def test_torchrl_environments_repeat_their_episodes(make: Any) -> None:
    results = []
    for backend in ("thread", "process"):
        with Evaluator(make, linear(), num_trajectories=5, max_steps=40, backend=backend) as it:
            results += [it.evaluate().episodes for _ in range(2)]
    assert len(results[0].returns) == 5
    for result in results:
        assert result.returns.tolist() == results[0].returns.tolist()
        assert result.lengths.tolist() == results[0].lengths.tolist()


# TorchRL announces another default of its collectors.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_metric_replaces_that_of_its_name_as_in_torchrl() -> None:
    options: dict[str, Any] = {"num_trajectories": 1, "metrics_fn": lambda _: {"reward": 7.0}}
    for kind in (Evaluator, TheirEvaluator):
        evaluator = kind(plain, linear(), max_steps=5, **options)
        assert evaluator.evaluate()["eval/reward"] == 7.0
        evaluator.shutdown()


def test_sums_of_rewards_are_used_if_there_are_some() -> None:
    def make() -> Any:
        env = TransformedEnv(plain(), StepCounter())
        env.append_transform(RewardSum())
        return env

    results = []
    for env in (plain, make):
        with Evaluator(env, linear(), num_trajectories=5) as evaluator:
            results.append(evaluator.evaluate().episodes)
    assert results[0].lengths.tolist() == results[1].lengths.tolist()
    assert results[0].returns == pytest.approx(results[1].returns, rel=1e-5)


@pytest.mark.parametrize("seen", [3, 0])
def test_vecnorm_is_frozen(seen: int) -> None:
    """Also one that has seen nothing."""
    env = TransformedEnv(plain(), VecNormV2(in_keys=["observation"]))
    for _ in range(seen):
        env.rollout(20, break_when_any_done=False)
    with Evaluator(env, linear(), num_trajectories=4) as evaluator:
        first = evaluator.evaluate().episodes.returns.tolist()
        # The collector's first reset was before; after that nothing has moved.
        mean = env.transform.loc["observation"].clone() if seen else None
        assert evaluator.evaluate().episodes.returns.tolist() == first
        assert mean is None or torch.equal(env.transform.loc["observation"], mean)


def recorded(folder: str) -> Any:
    logger = CSVLogger("run", log_dir=folder)
    env = GymWrapper(Walk(render_mode="rgb_array"), from_pixels=True, pixels_only=False)
    return TransformedEnv(env, VideoRecorder(logger, tag="eval"))


@pytest.mark.parametrize("backend", ["thread", "process", "no video"])
def test_a_video_recorder_writes_a_file_for_each_evaluation(tmp_path: Path, backend: str) -> None:
    options: Any = {"backend": backend} if backend != "no video" else {"dump_video": False}
    env = partial(recorded, str(tmp_path))
    with Evaluator(env, linear(), num_trajectories=1, **options) as evaluator:
        result = evaluator.evaluate(step=3)
        evaluator.evaluate(step=8)
    found = sorted(tmp_path.rglob("*.pt"), key=lambda path: path.name)
    assert len(found) == (0 if backend == "no video" else 2)
    for file, step in zip(found, "38", strict=False):
        assert step in file.name
    if found:
        assert torch.load(found[0]).shape[1] >= result["eval/episode_length"]


def test_exploration_modules_of_torchrl_follow_the_evaluations_type() -> None:
    def noisy() -> Any:
        spec = plain().action_spec
        return TensorDictSequential(linear(), AdditiveGaussianModule(spec, sigma_init=1.0))

    returns = {}
    for name, policy, kind in (
        ("plain", linear(), ExplorationType.DETERMINISTIC),
        ("quiet", noisy(), ExplorationType.DETERMINISTIC),
        ("noisy", noisy(), ExplorationType.RANDOM),
    ):
        with Evaluator(Walk, policy, num_trajectories=3, exploration_type=kind) as evaluator:
            returns[name] = evaluator.evaluate().episodes.returns.tolist()
    assert returns["quiet"] == pytest.approx(returns["plain"])
    assert returns["noisy"] != pytest.approx(returns["plain"])


class CountsSteps(Walk):
    """Walk whose observation has an entry of the name that limits use, too."""

    def __init__(self) -> None:
        super().__init__()
        count = gymnasium.spaces.Box(0, 1e6, (1,), np.int64)
        self.observation_space = gymnasium.spaces.Dict(
            observation=self.observation_space, step_count=count
        )
        self.steps = 0

    def counted(self, observation: Any) -> Any:
        return {"observation": observation, "step_count": np.array([self.steps])}

    def reset(self, **kwargs: Any) -> Any:
        self.steps = 0
        observation, info = super().reset(**kwargs)
        return self.counted(observation), info

    def step(self, action: Any) -> Any:
        self.steps += 1
        observation, *rest = super().step(action)
        return (self.counted(observation), *rest)


def counting() -> Any:
    return TransformedEnv(plain(), StepCounter())


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("kind", ["Gymnasium", "TorchRL", "serial"])
def test_max_steps_limits_environments_that_count_their_steps(kind: str, num_envs: int) -> None:
    made = {"Gymnasium": CountsSteps, "TorchRL": counting, "serial": lambda: SerialEnv(2, counting)}
    options = {"num_trajectories": 3, "max_steps": 3, "num_envs": num_envs}
    with Evaluator(made[kind], linear(), **options) as evaluator:
        assert evaluator.evaluate()["eval/episode_length"] == 3
