"""A collector whose workers are Ray actors: what all collectors with workers promise."""

import os
import signal

import pytest
import torch
from multi_parts import LENGTHS, TRAJ_IDS, Chooser, actions, envs, same
from ray_parts import kill
from torch import nn

from trawl.collectors import MultiSyncCollector
from trawl.collectors.distributed import RayCollector
from trawl.testing import Ledger, NumberedEnv

pytestmark = pytest.mark.usefixtures("cluster")
FREE = {"num_cpus": 0, "memory": 0}


class Noisy(nn.Module):
    """A stochastic policy for Pendulum."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, observation):
        mean = self.net(observation)
        return (mean + torch.randn_like(mean)).clamp(-2, 2)


def collector(source=None, policy=None, sync=True, workers=2, **options):
    options.setdefault("remote_configs", FREE)
    options.setdefault("frames_per_batch", 12)
    return RayCollector(source or envs(workers), policy, sync=sync, **options)


def test_same_seed_same_batches_as_inline():
    torch.manual_seed(0)
    policy = Noisy()
    options = {"frames_per_batch": 40, "total_frames": 800}
    source = ["Pendulum-v1"] * 2
    with MultiSyncCollector(source, policy, start_method="inline", **options) as inline:
        inline.set_seed(7)
        expected = [batch.clone() for batch in inline]
    with collector(source, policy, **options) as there:
        there.set_seed(7)
        found = list(there)
    assert len(found) == 20
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))


def test_one_batch_ahead_is_one_update_behind():
    policy = Chooser()
    with collector(policy=policy, prefetch=1, total_frames=60, track_policy_version=True) as there:
        found = []
        for count, batch in enumerate(there):
            found.append((actions(batch), set(batch["policy_version"].flatten().tolist())))
            policy.become((count + 1) % 4)
            there.update_policy_weights_()
    assert found == [({0}, {0}), *[({k}, {k}) for k in range(4)]]


def test_a_worker_that_is_added_takes_part_in_the_batch_ahead():
    policy = Chooser()
    with collector(policy=policy, workers=1, prefetch=1) as there:
        there.next()
        policy.become(2)
        there.update_policy_weights_()
        there.add_collectors(envs(2)[1:])
        assert [actions(row) for row in there.next()] == [{0}, {2}]
        assert [actions(row) for row in there.next()] == [{2}, {2}]


def test_batches_can_be_kept_and_written_to():
    with collector("Pendulum-v1", sync=False, workers=1, frames_per_batch=5000) as there:
        kept = [there.next() for _ in range(3)]
        copies = [batch.clone() for batch in kept]
        kept[1].zero_()
        assert not kept[1]["observation"].any()
    assert (kept[0] == copies[0]).all()
    assert (kept[2] == copies[2]).all()


class Books:
    """Checks the frames of workers that may be replaced, by others that begin anew."""

    def __init__(self, workers):
        self.books = [self._new(number) for number in range(workers)]
        self.ids = [set() for _ in range(workers)]
        self.frames = 0

    def _new(self, number):
        return Ledger([NumberedEnv(number, lengths=LENGTHS)])

    def add(self, batch):
        for row in batch if batch.ndim == 2 else [batch]:
            number, _, _, total, *_ = NumberedEnv.numbers(row)[0].tolist()
            if total == 0:
                self.books[number] = self._new(number)
            before = set(row[TRAJ_IDS].tolist()) & self.ids[number]
            assert total or not before
            self.books[number].add(row)
            self.ids[number] |= set(row[TRAJ_IDS].tolist())
            self.frames += row.numel()
        for index, ids in enumerate(self.ids):
            assert not any(ids & other for other in self.ids[:index])


@pytest.mark.parametrize(("sync", "how"), [(True, "ray.kill"), (False, "SIGKILL")])
def test_who_dies_is_replaced(sync, how, cluster):
    books = Books(2)
    with collector(sync=sync, total_frames=240, policy=Chooser(1)) as there:
        there.update_policy_weights_()
        with pytest.warns(RuntimeWarning, match="worker 0 died"):  # noqa: PT031
            for number, batch in enumerate(there):
                books.add(batch)
                assert actions(batch) == {1}
                if number == 3:
                    worker = there._pool.slots[0].worker
                    if how == "SIGKILL":
                        os.kill(worker.pid, signal.SIGKILL)
                    else:
                        kill(worker.actor)
        stats = there.stats()
    assert books.frames == stats["frames"] == 12 * (number + 1) == 240
    assert stats["restarts"] == 1
