"""The PPO example works, and learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

FRAMES = 20_480  # 20 batches


@pytest.fixture
def ppo(example: Callable[[str], Any]) -> Any:
    return example("ppo")


# A policy that doesn't learn balances the pole for some 20 steps. After so many frames PPO was
# between 138 and 150, with the seeds from 0 to 5.
def test_ppo_learns(ppo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = ppo.main(ppo.Config(total_frames=FRAMES))
    assert result.frames == FRAMES
    assert result.episodes > 100
    assert result.mean_return > 90
    assert not result.solved
    assert "frames  20,480" in capsys.readouterr().out.splitlines()[-1]


def test_ppo_learns_with_workers(ppo: Any) -> None:
    result = ppo.main(ppo.Config(total_frames=FRAMES, workers=2))
    assert result.frames == FRAMES
    assert result.episodes > 100
    assert result.mean_return > 90


def test_ppo_shares_its_environments_out_evenly(ppo: Any) -> None:
    with pytest.raises(ValueError, match="16 environments can't be shared by 3"):
        ppo.main(ppo.Config(workers=3))


def test_ppo_needs_its_optimiser(ppo: Any) -> None:
    result = ppo.main(ppo.Config(total_frames=FRAMES // 4, learning_rate=0.0, num_epochs=1))
    assert result.mean_return < 45


def test_ppo_stops_at_its_target(ppo: Any) -> None:
    result = ppo.main(ppo.Config(total_frames=FRAMES, target_return=15.0))
    assert result.solved
    assert result.frames < FRAMES


# Blind to velocities; after so many frames the mean was 91 with seed 0.
def test_recurrent_ppo_learns(ppo: Any) -> None:
    result = ppo.main(ppo.Config(total_frames=2 * FRAMES, recurrent=True))
    assert result.frames == 2 * FRAMES
    assert result.mean_return > 60


@pytest.mark.parametrize("workers", [0, 2])
def test_the_learner_sees_the_memory_that_the_policy_had(ppo: Any, workers: int) -> None:
    config = ppo.Config(recurrent=True, num_envs=2, num_steps=16, total_frames=96, workers=workers)
    agent = ppo.RecurrentAgent(2, 2, 8)
    collector = ppo.make_collector(config, ppo.make_policy(agent))
    collector.set_seed(0)
    batches = [collector.next() for _ in range(3)]
    collector.shutdown()
    begins_anew = []
    for batch in batches:
        batch["advantage"] = batch["target"] = torch.zeros(batch.shape)
        begins_anew.append(not batch["memory"][:, 0].any())
        part, logits, value = agent(agent.rows(batch))
        assert part.shape == value.shape == (32,)
        log_prob = logits.log_softmax(-1).gather(-1, part["action"].unsqueeze(-1)).squeeze(-1)
        assert torch.allclose(log_prob, part["action_log_prob"], atol=1e-5)
        values, next_values = agent.worths(batch)
        goes_on = ~batch["next", "done"][:, :-1].squeeze(-1)
        expected = values[:, 1:][goes_on]
        assert torch.allclose(next_values[:, :-1][goes_on], expected, atol=1e-5)
    # Episodes go on from batch to batch, and the memory with them.
    assert begins_anew[0]
    assert not all(begins_anew)
