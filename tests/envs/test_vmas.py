"""Environments of VMAS, compared with TorchRL's wrapper."""

import warnings
from typing import Any

import pytest
import torch

from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from trawl.envs import VmasEnv

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Gym, which VMAS imports, warns about itself.
    vmas = pytest.importorskip("vmas")


def make(scenario: str = "balance", **options: Any) -> Any:
    return vmas.make_env(scenario, **{"num_envs": 4, "max_steps": 5, "seed": 0, **options})


def rows(td: Any) -> dict[Any, Any]:
    return {
        key: (tuple(value.shape), value.dtype)
        for key, value in td.items(True, True)
        if "truncated" not in key and key[-1] != "truncated"
    }


@pytest.mark.parametrize(
    "scenario", ["balance", "simple_tag", "simple_adversary", "football", "wheel"]
)
def test_keys_are_those_of_torchrl(scenario: str) -> None:
    from torchrl.envs import VmasEnv as Theirs

    own, theirs = VmasEnv(make(scenario)), Theirs(scenario, num_envs=4, max_steps=5, seed=0)
    assert own.name == f"vmas {scenario}"
    assert own.group_map == theirs.group_map
    found, expected = own.rollout(3), theirs.rollout(3)
    assert rows(found) == rows(expected)
    for key in own.action_keys:
        assert own.full_action_spec[key].shape == theirs.full_action_spec[key].shape


def test_frames_are_those_of_the_simulator() -> None:
    env = make()
    with Collector(env, frames_per_batch=4 * 12) as collector:
        assert isinstance(collector.env, VmasEnv)
        batch = next(iter(collector))
        assert collector.stats()["env_path"] == "tensor"
    assert batch["agents"].batch_size == (4, 12, 3)
    done = batch["next", "done"].squeeze(-1)
    assert done[0].tolist() == [t % 5 == 4 for t in range(12)]
    obs, after = batch["agents", "observation"], batch["next", "agents", "observation"]
    goes_on = ~done[:, :-1]
    assert torch.equal(obs[:, 1:][goes_on], after[:, :-1][goes_on])
    assert not torch.equal(obs[:, 5], after[:, 4])
    # The same actions from the same seed give the same frames.
    again = make()
    shown = again.reset()
    for t in range(4):
        assert torch.equal(torch.stack(shown, 1), obs[:, t])
        shown, rewards, _, _ = again.step(list(batch["agents", "action"][:, t].unbind(1)))
        expected = torch.stack(rewards, 1).unsqueeze(-1)
        assert torch.equal(expected, batch["next", "agents", "reward"][:, t])


@pytest.mark.parametrize(
    ("cls", "how", "size", "options"),
    [
        (MultiSyncCollector, "stack", (2, 4, 6), {}),
        (MultiSyncCollector, 0, (8, 6), {"frame_stack": 2}),
        (MultiSyncCollector, -1, (4, 12), {}),
        (MultiAsyncCollector, None, (4, 6), {"frame_stack": 2}),
    ],
)
def test_groups_in_batches_of_workers_have_a_dimension_of_agents(
    cls: Any, how: Any, size: tuple[int, ...], options: Any
) -> None:
    frames = 4 * 6 * (2 if cls is MultiSyncCollector else 1)
    options = {"start_method": "inline", "frames_per_batch": frames, **options}
    # The last batch is cut.
    options |= {"total_frames": frames + 11, "exact_frames": True, "cat_results": how}
    with cls([make, make], **options) as collector:
        first, *_, last = collector
        assert first.batch_size == size
        for batch in (first, last):
            for root in (batch, batch["next"]):
                assert root["agents"].batch_size == (*batch.batch_size, 3)


def test_discrete_actions_and_flags() -> None:
    env = make(continuous_actions=False, terminated_truncated=True)
    with Collector(env, frames_per_batch=4 * 6) as collector:
        batch = next(iter(collector))
    assert batch["agents", "action"].shape == (4, 6, 3)
    assert batch["next", "truncated"][:, 4].all()
    assert not batch["next", "terminated"].any()
