"""The ledger notices each way in which frames can be wrong."""

import pytest
import torch

from trawl.collectors import Collector
from trawl.testing import Ledger, NumberedEnv


def batches(count=2, frames_per_batch=10, **options):
    """Right batches of two environments, in memory of their own."""
    with Collector(envs(), frames_per_batch=frames_per_batch, **options) as collector:
        return [collector.next().clone() for _ in range(count)]


def envs():
    ends = ["terminated", "truncated"]
    return [NumberedEnv(0, [3], ends), NumberedEnv(1, [2, 4], ends)]


def test_right_batches_pass():
    ledger = Ledger(envs())
    for batch in batches():
        ledger.add(batch)
    assert ledger.frames == 20
    assert ledger.steps == {0: 10, 1: 10}
    assert ledger.episodes == 6


def test_frames_that_were_not_filled_are_left_out():
    batch = batches(count=1)[0]
    batch["collector", "traj_ids"][:, 2:] = -1
    ledger = Ledger(envs())
    ledger.add(batch)
    assert ledger.frames == 4


def test_frames_of_several_environments_may_be_mixed():
    ledger = Ledger(envs())
    ledger.add(batches(count=1)[0].transpose(0, 1))
    assert ledger.frames == 10


def lose_a_frame(batch):
    return batch[:, 1:]


def double_a_frame(batch):
    return torch.cat([batch[:, :1], batch], 1)


def swap_frames(batch):
    return batch[:, [1, 0, 2, 3, 4]]


def swap_environments(batch):
    batch["next"] = batch["next"].flip(0)
    return batch


def show_the_reset_observation(batch):
    """The observation after an episode's last step is the next episode's first one."""
    batch["next", "observation"][0, 2] = batch["observation"][0, 3]
    return batch


def act_on_the_last_observation(batch):
    """The first observation of an episode is the last one of the episode before."""
    batch["observation"][0, 3] = batch["next", "observation"][0, 2]
    return batch


def change(key, where=(0, 1)):
    def changed(batch):
        value = batch[key]
        value[where] = ~value[where] if value.dtype is torch.bool else value[where] + 1
        return batch

    changed.__name__ = f"change {key}"
    return changed


def change_the_action(batch):
    batch["action"] = batch["action"].roll(1, -1)
    return batch


def reuse_a_trajectory(batch):
    batch["collector", "traj_ids"][0, 3:] = 0
    return batch


def break_a_trajectory(batch):
    batch["collector", "traj_ids"][0, 1:] = 99
    return batch


def strange_environment(batch):
    batch["observation"][0, 0, 0] = 2
    return batch


FAULTS = [
    lose_a_frame,
    double_a_frame,
    swap_frames,
    swap_environments,
    show_the_reset_observation,
    act_on_the_last_observation,
    change("done"),
    change("terminated"),
    change("truncated"),
    change("step_count"),
    change("is_init"),
    change(("next", "done")),
    change(("next", "terminated")),
    change(("next", "truncated"), (0, 2)),
    change(("next", "step_count")),
    change(("next", "reward")),
    change_the_action,
    reuse_a_trajectory,
    break_a_trajectory,
    strange_environment,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_batch_is_refused(fault):
    options = {"max_frames_per_traj": 9, "auto_register_policy_transforms": True}
    batch = batches(count=1, **options)[0]
    Ledger(envs(), limit=9).add(batch)
    with pytest.raises(AssertionError, match="frame"):
        Ledger(envs(), limit=9).add(fault(batch))


def test_a_batch_that_was_skipped_is_noticed():
    first, _, third = batches(count=3)
    ledger = Ledger(envs())
    ledger.add(first)
    with pytest.raises(AssertionError):
        ledger.add(third)


def test_a_limit_that_was_not_kept_is_noticed():
    with pytest.raises(AssertionError, match="truncated"):
        Ledger(envs(), limit=2).add(batches(count=1)[0])
