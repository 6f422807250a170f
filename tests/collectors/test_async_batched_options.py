"""Options of all collectors, given to the one that acts for the environments that are ready."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import AsyncBatchedCollector, PolicyVersion
from trawl.testing import NumberedEnv

LENGTHS = (3, 1, 7)
PLACES = pytest.mark.parametrize("place", ["threading", "multiprocessing"])
IDS = ("collector", "traj_ids")


class Kept:
    """Object that keeps what it gets: a sink, a replay buffer, or a hook."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.calls = 0

    def write(self, batch: Any) -> None:
        self.batches.append(batch.clone())

    def extend(self, batch: Any) -> None:
        self.batches.append(batch.clone())

    def sample(self, *args: Any) -> Any:
        return self.batches[-1][: args[0]]

    def close(self, **options: Any) -> None:
        """Closes nothing."""

    def called(self) -> None:
        self.calls += 1


def second(observation: torch.Tensor) -> torch.Tensor:
    """Chooses the second action, whatever the observation is."""
    return nn.functional.one_hot(torch.ones(observation.shape[:-1], dtype=torch.int64), 4)


def made(place: str = "threading", **options: Any) -> Any:
    options = {"policy": second, "frames_per_batch": 20, **options}
    makers = [partial(NumberedEnv, number, lengths=LENGTHS) for number in range(3)]
    return AsyncBatchedCollector(
        makers, env_backend="threading", policy_backend=place, total_frames=60, **options
    )


def batches(place: str, **options: Any) -> list[Any]:
    with made(place, **options) as collector:
        return [batch.clone() for batch in collector]


def actions(batch: Any) -> Any:
    return batch["action"].argmax(-1)


@PLACES
def test_entries_that_are_chosen(place: str) -> None:
    found = batches(place, compact_obs=True, track_traj_ids=False)
    assert [len(batch) for batch in found] == [20, 20, 20]
    for batch in found:
        assert "observation" in batch
        assert "observation" not in batch["next"]
        assert IDS not in batch.keys(True)
    first = batches(place, auto_register_policy_transforms=True)
    starts = torch.cat([batch["is_init"][:, 0] for batch in first])
    ids = torch.cat([batch[IDS] for batch in first])
    for number in set(ids.tolist()):
        # The first frame of each trajectory is marked, and no other.
        assert starts[ids == number].tolist()[0]
        assert not starts[ids == number][1:].any()


@PLACES
def test_random_actions_first(place: str) -> None:
    found = batches(place, init_random_frames=20)
    assert len(set(actions(found[0]).tolist())) > 1
    # A step that was under way when the policy's turn came has a random action: one for each
    # environment, in a batch as late as the environment is slow.
    assert (actions(found[-1]) != 1).sum() <= 3


@PLACES
def test_what_is_done_around_a_batch(place: str, tmp_path: Any) -> None:
    hook, sink = Kept(), Kept()
    found = batches(
        place, pre_collect_hook=hook.called, sink=sink, use_buffers=False, storing_device="cpu"
    )
    # The inference process has a copy of the hook.
    assert hook.calls == (3 if place == "threading" else 0)
    assert all(batch.device == torch.device("cpu") for batch in found)
    assert all((one == other).all() for one, other in zip(found, sink.batches, strict=True))


def test_the_same_object_each_time() -> None:
    with made(return_same_td=True) as collector:
        first, second = islice(collector, 2)
        assert first is second


def test_an_interruptor_ends_a_batch_early() -> None:
    with made(interruptor=lambda: True) as collector:
        assert 0 < len(collector.next()) < 20


def test_a_sampled_ratio() -> None:
    buffer = Kept()
    with made(replay_buffer=buffer, samples_per_insert=1.0, inserts_ahead=20) as collector:
        while not buffer.batches:
            collector.next()
        assert len(collector.sample(8)) == 8


@PLACES
def test_policies_and_versions(place: str) -> None:
    version = PolicyVersion()
    version.version = 5
    policy = TensorDictModule(second, ["observation"], ["action"])
    with made(place, policy=policy, trust_policy=True, track_policy_version=version) as collector:
        assert (collector.next()["policy_version"] == 5).all()
        collector.update_policy_weights_()
        assert version.version == 6


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"policy_version": 3, "track_policy_version": PolicyVersion()},
            "policy_version=3 and track_policy_version can't both be given",
        ),
        (
            {"policy_device": "cpu", "device_config": {"policy_device": "cpu"}},
            "device_config and policy_device can't both be given",
        ),
        ({"policy_device": "cpu", "device": "cpu"}, "device and policy_device can't both be given"),
    ],
)
def test_what_is_said_twice_is_refused(options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        made(**options)
