"""Statistics for normalisation that all workers share."""

import numpy as np
import pytest
import torch
from collector_parts import Buffer
from multi_parts import TRAJ_IDS
from tensordict.nn import TensorDictModule
from torch import nn

from tests.oracle.cases import Case, collector_of
from trawl.backends import InlineBackend
from trawl.collectors import Collector, MultiSyncCollector, NormalizeObservation, NormalizeReward
from trawl.testing.oracle import Options

OPTIONS = {"normalize_observations": True, "normalize_rewards": NormalizeReward(keep_raw=True)}


def policy():
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])


def make(cls=MultiSyncCollector, workers=2, method="inline", **options):
    """A collector; with the method ``"messages"``, workers share no memory with their driver."""
    if method == "messages":
        method = "inline"
        cls = type(cls.__name__, (cls,), {"_new_backend": lambda self: InlineBackend(False)})
    options = {"frames_per_batch": 80, "max_frames_per_traj": 30, **OPTIONS, **options}
    return cls(["Pendulum-v1"] * workers, policy(), start_method=method, **options)


def batches(collector, count):
    return [collector.next().clone() for _ in range(count)]


def equal(one, other):
    return all(bool((a == b).all()) for a, b in zip(one, other, strict=True))


def test_one_seed_gives_equal_batches_in_processes():
    found = []
    for how in ("inline", "forkserver"):
        with make(method=how, prefetch=1, total_frames=320) as collector:
            collector.set_seed(3)
            found.append(list(collector))
    assert len(found[0]) == 4
    assert equal(*found)


def test_first_observations_after_a_seed_have_the_statistics_of_all_workers():
    with make(frames_per_batch=64) as collector:
        collector.set_seed(0)
        batches(collector, 2)
        shared = collector.normalization.observations["observation"]
        collector.set_seed(1)
        first = collector.next()["observation"][:, 0, :2].double().numpy()
    squares = np.square(first * np.sqrt(shared.var[:2] + 1e-8) + shared.mean[:2]).sum(-1)
    np.testing.assert_allclose(squares, 1, atol=1e-4)


def test_a_state_of_other_statistics_is_refused():
    with make(normalize_rewards=False) as one, make() as other:
        with pytest.raises(ValueError, match="has statistics of"):
            other.load_state_dict(one.state_dict())
        assert other.next() is not None


@pytest.mark.parametrize(
    ("face", "place", "total"),
    [
        ("sync_same_step", "sync", 31),
        ("tensors_same_step", "sync", 2),
        ("tensors_same_step", "async", 31),
        ("sync_next_step", "sync", 70),
        ("tensors_next_step", "sync", 73),
        ("sync_next_step", "async", 79),
        ("tensors_next_step", "async", 64),
        ("list", "one", 31),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_statistics_have_exactly_the_frames_that_were_delivered(face, place, total):
    normalize = {"normalize_observations": True, "normalize_rewards": True}
    options = Options(12, total_frames=total, exact_frames=True, **normalize)
    buffer = Buffer() if place == "one" else None
    with collector_of(Case(face, options, place), replay_buffer=buffer) as collector:
        delivered = [batch[TRAJ_IDS].clone() for batch in collector if batch is not None]
        found = collector.normalization
        count = len(buffer) if buffer else sum(int((ids >= 0).sum()) for ids in delivered)
        assert found.observations["observation"].count == count == total
        assert found.rewards["reward"].count == total


def test_an_error_of_a_worker_names_the_mistake():
    with pytest.raises(KeyError, match="the key 'x', but the observations are"):
        make(normalize_observations=NormalizeObservation(keys=["x"]))


def test_a_collector_that_overrides_rollout_shares_its_statistics():
    with make(collector_class=Twice, frames_per_batch=80) as collector:
        batch = collector.next()
        # The frames that it drops were seen, too.
        assert collector.normalization.observations["observation"].count == 2 * batch.numel()


class Twice(Collector):
    """Drops every second batch."""

    def rollout(self):
        super().rollout()
        return super().rollout()
