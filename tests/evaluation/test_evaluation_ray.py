"""Evaluations in actors of a Ray cluster."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_early import early
from evaluation_parts import DiesOnce, Fails, Walk, linear, stochastic
from tensordict import TensorDict

from trawl import ExplorationType
from trawl.collectors import Evaluator
from trawl.collectors.distributed import RayEvalWorker

pytestmark = pytest.mark.usefixtures("cluster")
PATIENCE = 300.0


def test_results_are_those_of_a_thread(tmp_path: Path) -> None:
    for kind in (ExplorationType.DETERMINISTIC, ExplorationType.RANDOM):
        results = []
        dies = tmp_path / "dies"
        for backend in ("thread", "ray"):
            # The actor dies at its fifth step, and a new worker takes its place.
            env: Any = partial(DiesOnce, str(dies)) if backend == "ray" else Walk
            dies.touch()
            with Evaluator(
                env,
                stochastic(),
                num_trajectories=4,
                num_envs=2,
                exploration_type=kind,
                backend=backend,
            ) as evaluator:
                death = pytest.warns(RuntimeWarning, match="a new worker takes its place")
                with death if backend == "ray" else nullcontext():
                    assert evaluator.trigger_eval()
                    result = evaluator.wait()
                assert result is not None
                assert backend == "thread" or not dies.exists()
                results.append(result.episodes.returns.tolist())
                results.append(evaluator.evaluate(stochastic(0)).episodes.returns.tolist())
        assert all(result == results[0] for result in results)


def test_an_error_of_an_actor_has_its_traceback() -> None:
    with (
        Evaluator(Fails, linear(), num_trajectories=1, backend="ray") as evaluator,
        pytest.raises(KeyError, match="the pole broke") as raised,
    ):
        evaluator.evaluate()
    shown = str(raised.value) + "".join(getattr(raised.value, "__notes__", []))
    assert "evaluation_parts.py" in shown


class Early(Walk):
    """Its reward says whether torch was imported before ``early`` was called."""

    def step(self, action: Any) -> Any:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(os.environ["IMPORTED_BEFORE"] == "True"), terminated, truncated, info


class Kills(Walk):
    """Kills its process."""

    def step(self, action: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_ray_eval_worker() -> None:
    policy = linear()
    weights = TensorDict.from_module(policy).data
    worker = RayEvalWorker(
        early,
        partial(Early, render_mode="rgb_array", most=10),
        lambda env: linear(1),
        name="evaluates",
        num_cpus=1,
        # A fresh interpreter, as users have it: other workers of the tests are forked.
        runtime_env={"env_vars": {"FRESH": "1"}},
    )
    assert worker.poll() is None
    worker.submit(weights, 40)
    result = worker.poll(timeout=PATIENCE)
    assert result is not None
    assert worker.poll() is None
    assert result["reward"] == 0.0, "torch was imported before init_fn was called"
    frames = result["frames"]
    assert frames.dtype == torch.uint8
    # They count down the steps that are left, to the last.
    assert frames[:, 0, 0, 0].tolist() == list(range(len(frames), 0, -1))
    assert frames.shape[1:] == (4, 6, 3)
    other = RayEvalWorker.from_name("evaluates")
    other.submit(policy, 25, break_when_any_done=False)
    result = other.poll(timeout=PATIENCE)
    assert result is not None
    assert len(result["frames"]) == 25
    # What is submitted before the result was asked for is given up.
    worker.submit(weights, 30)
    worker.submit(weights, 1)
    result = worker.poll(timeout=PATIENCE)
    assert result is not None
    assert len(result["frames"]) == 1
    worker.submit({"module.weight": torch.zeros(3)}, 5)
    with pytest.raises((KeyError, ValueError)):
        worker.poll(timeout=PATIENCE)
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        worker.submit(weights, 5)


def test_ray_eval_worker_uses_the_weights() -> None:
    worker = RayEvalWorker(None, Walk, lambda env: linear(1), num_gpus=0)
    zero = {name: torch.zeros_like(value) for name, value in linear().state_dict().items()}
    big = {**zero, "module.bias": torch.full((1,), 100.0)}
    rewards = []
    for weights in (zero, big):
        worker.submit(weights, 20, break_when_any_done=False, deterministic=False)
        result = worker.poll(timeout=PATIENCE)
        assert result is not None
        assert result["frames"] is None
        rewards.append(result["reward"])
    worker.shutdown()
    assert rewards[1] > rewards[0] + 90


def test_a_dead_actor_is_an_error(cluster: Any) -> None:
    worker = RayEvalWorker(None, Kills, lambda env: linear(), num_gpus=0)
    worker.submit(None, 5)
    with pytest.raises(cluster.exceptions.RayActorError):
        worker.poll(timeout=PATIENCE)
    worker.shutdown()


def test_ray_eval_worker_refuses_what_is_no_function() -> None:
    with pytest.raises(TypeError, match="env_maker must be a function, but it is 'Pendulum-v1'"):
        RayEvalWorker(None, "Pendulum-v1", lambda env: linear())  # type: ignore[arg-type]
