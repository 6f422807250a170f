"""Evaluations of environments with several rewards, and of dm_env."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from trawl import Collector, Evaluator
from trawl.envs.build import build_one
from trawl.extras.clusters.ray.eval_worker import StepEvaluation


class _Team:
    """Parallel environment whose agents of two groups have rewards of their own."""

    metadata: dict[str, Any] = {"name": "team_v0"}  # noqa: RUF012
    render_mode = None
    possible_agents = ["fast_0", "fast_1", "slow_0"]  # noqa: RUF012
    rewards = {"fast_0": 1.0, "fast_1": 3.0, "slow_0": 11.0}  # noqa: RUF012

    def observation_space(self, agent: str) -> spaces.Box:
        return spaces.Box(0, 9, (2 if agent.startswith("fast") else 1,), np.float32)

    def action_space(self, agent: str) -> spaces.Discrete:
        return spaces.Discrete(2)

    def _all(self, value: Any) -> dict[str, Any]:
        return dict.fromkeys(self.possible_agents, value)

    def _shown(self) -> dict[str, Any]:
        size = {agent: self.observation_space(agent).shape for agent in self.possible_agents}
        return {agent: np.full(shape, self.t, np.float32) for agent, shape in size.items()}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.agents = 0, list(self.possible_agents)
        # An entry of info that is called like the reward.
        return self._shown(), {agent: {"reward": 5.0} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self.t += 1
        over = self.t == 4
        infos = {agent: {"reward": 5.0} for agent in self.possible_agents}
        found = self._shown(), dict(self.rewards), self._all(over), self._all(False), infos
        self.agents = [] if over else self.agents
        return found

    def close(self) -> None:
        pass


def team() -> Any:
    from pettingzoo import ParallelEnv

    return type("Team", (_Team, ParallelEnv), {})()


def evaluated(env: Any, **options: Any) -> Any:
    options = {"num_trajectories": 3, "policy_factory": lambda: None, **options}
    with Evaluator(env, **options) as evaluator:
        return evaluator.evaluate()


@pytest.mark.parametrize("options", [{}, {"num_envs": 2}, {"backend": "process"}])
def test_the_rewards_of_all_groups_are_found(options: dict[str, Any]) -> None:
    pytest.importorskip("pettingzoo")
    result = evaluated(team, **options)
    # The mean of all agents, not of the groups.
    assert result["eval/reward"] == 4 * (1 + 3 + 11) / 3
    assert result["eval/fast/reward"] == 4 * 2
    assert result["eval/slow/reward"] == 4 * 11
    groups = result.episodes.groups
    assert {name: values.tolist() for name, values in groups.items()} == {
        "fast": [8.0] * 3,
        "slow": [44.0] * 3,
    }
    assert result["eval/episode_length"] == 4


def test_some_rewards_may_be_chosen() -> None:
    pytest.importorskip("pettingzoo")
    slow, fast = (("next", name, "reward") for name in ("slow", "fast"))
    for keys, reward, groups in (
        (slow, 44, ["slow"]),
        ((slow, fast), 20, ["slow", "fast"]),
        ([slow, fast], 20, ["slow", "fast"]),
    ):
        result = evaluated(team, reward_keys=keys)
        assert result["eval/reward"] == reward
        assert list(result.episodes.groups) == groups
    result = evaluated("CartPole-v1")
    assert result.episodes.groups == {}
    assert not any(name.endswith("/reward") and name != "eval/reward" for name in result)


def test_groups_add_up_as_in_batches() -> None:
    pytest.importorskip("mpe2")
    groups = ("adversary", "agent")

    def summed(found: Any) -> dict[str, float]:
        return {
            name: float(found["next", name, "reward"].double().mean(-2).sum() / 2)
            for name in groups
        }

    options = {"num_trajectories": 2, "max_steps": 5}
    result = evaluated("pettingzoo:mpe2/simple_tag_v3", metrics_fn=summed, **options)
    for name in groups:
        assert result[f"eval/{name}/reward"] == pytest.approx(result[f"eval/{name}"])


@pytest.mark.parametrize(
    ("env_id", "group"),
    [("pettingzoo:mpe2/simple_spread_v3", "agent"), ("vmas:balance", "agents")],
)
def test_ids_need_no_keys(env_id: str, group: str) -> None:
    pytest.importorskip("mpe2" if env_id.startswith("p") else "vmas")
    result = evaluated(env_id, num_trajectories=2, max_steps=4)
    assert result["eval/reward"] == result[f"eval/{group}/reward"]
    key = ("next", group, "reward")
    again = evaluated(env_id, num_trajectories=2, max_steps=4, reward_keys=key)
    assert again.episodes.returns.tolist() == result.episodes.returns.tolist()


def test_dm_control_is_evaluated_without_rendering() -> None:
    """Episodes have seeds of their own."""
    pytest.importorskip("dm_control")

    def zeros(tensordict: Any) -> Any:
        return tensordict.set("action", torch.zeros((*tensordict.batch_size, 1)))

    env = "dm_control:cartpole/balance"
    options = {"num_trajectories": 4, "max_steps": 3, "policy_factory": None, "policy": zeros}
    one = evaluated(env, **options)
    two = evaluated(env, num_envs=2, **options)
    assert one.episodes.returns.tolist() == two.episodes.returns.tolist()
    assert len(set(one.episodes.returns.tolist())) == 4
    assert (one.episodes.lengths == 3).all()
    assert "eval/video" not in one
    with Collector(env, zeros, frames_per_batch=3, max_frames_per_traj=3) as collector:
        rewards = collector.next()["next", "reward"]
    assert abs(one["eval/reward"] - float(rewards.sum())) < 0.1
    evaluation = StepEvaluation(partial(build_one, env), lambda env: None)
    found = evaluation.run(None, 3, deterministic=False, break_when_any_done=False)
    evaluation.close()
    assert found["frames"] is None
    assert 0 < found["reward"] <= 3
