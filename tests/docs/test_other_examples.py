"""Short runs of the examples of DQN and offline learning."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


# Of 20 untrained networks, 17 balanced the pole for less than 30 steps, and one for 500. The test
# therefore takes the median of five. With the same 20 seeds, a clone reached 442 or more.
def test_a_clone_acts_as_the_controller_does(
    example: Callable[[str], Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    offline = example("offline")
    data = tmp_path / "cartpole-expert-v0"
    result = offline.main(
        offline.Config(frames=2_000, epochs=8, eval_episodes=10, data=data, target_return=501.0)
    )
    assert result.frames == 2_000
    assert result.data_return == 500
    assert result.mean_return > 100
    assert "epoch   8" in capfd.readouterr().out
    # The dataset exists, so it is not collected again.
    untrained = [
        offline.main(
            offline.Config(
                seed=seed, epochs=1, learning_rate=0.0, frames=10, eval_episodes=10, data=data
            )
        )
        for seed in range(5)
    ]
    assert {again.frames for again in untrained} == {2_000}
    assert statistics.median(again.mean_return for again in untrained) < 100


def test_dqn_draws_by_the_errors_of_its_frames(example: Callable[[str], Any]) -> None:
    dqn = example("dqn")
    made: list[Any] = []

    def make_collector(*given: Any) -> Any:
        made.extend(given)
        return dqn.make_collector(*given)

    config = dqn.Config(
        total_frames=1_024, random_frames=256, eval_every=512, eval_episodes=2, epsilon_frames=800
    )
    result = dqn.main(config, make_collector)
    assert result.frames == 1_024
    assert [frames for frames, _ in result.curve] == [512, 1_024]
    _, _, policy, replay = made
    priority = replay.sampler.priority[:1_024]
    assert (priority > 0).all()
    assert len(priority.unique()) > 100
    assert policy.epsilon == config.epsilon


def test_frames_are_drawn_by_their_errors(example: Callable[[str], Any]) -> None:
    sampler = example("dqn").Prioritized(100, alpha=1.0, beta=1.0)
    sampler.extend(torch.arange(4))
    sampler.update_priority(torch.arange(4), torch.tensor([0.0, 1.0, 2.0, 5.0]))
    index, info = sampler.sample(range(4), 8_000)
    shares = torch.bincount(index, minlength=4) / 8_000
    assert torch.allclose(shares, torch.tensor([0.0, 0.125, 0.25, 0.625]), atol=0.03)
    # Frames that are drawn rarely get larger weights. With beta=1, the weights make up for this.
    weight = info["weight"]
    assert torch.allclose(weight[index == 1], torch.tensor(1.0))
    assert torch.allclose(weight[index == 3], torch.tensor(0.2), atol=1e-4)
    state = sampler.state_dict()
    other = example("dqn").Prioritized(100, alpha=1.0, beta=1.0)
    other.load_state_dict(state)
    assert torch.equal(other.priority, sampler.priority)
