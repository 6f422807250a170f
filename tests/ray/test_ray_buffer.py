"""A replay buffer in an actor."""

import multiprocessing
import os
import pickle
import signal
from functools import partial

import pytest
import torch
from multi_parts import envs
from tensordict import TensorDict

from trawl.collectors.distributed import RayCollector
from trawl.data import RayReplayBuffer

torchrl_data = pytest.importorskip("torchrl.data")
DoubleToFloat = pytest.importorskip("torchrl.envs.transforms").DoubleToFloat
pytestmark = pytest.mark.usefixtures("cluster")
FREE = {"num_cpus": 0, "memory": 0}


@pytest.fixture(scope="module")
def buffer(cluster):
    one = RayReplayBuffer(
        storage=partial(torchrl_data.LazyTensorStorage, 1000),
        sampler=torchrl_data.RandomSampler,
        batch_size=16,
        remote_config=FREE,
    )
    yield one
    one.close()


def data(count, start=0):
    x = torch.arange(start, start + count)[:, None].expand(count, 300)
    return TensorDict({"x": x}, [count])


def test_what_is_written_is_read(buffer):
    buffer.empty()
    assert (buffer.service_backend, len(buffer)) == ("ray", 0)
    buffer.extend(data(50))
    buffer.add(data(1, 50)[0])
    assert (len(buffer), buffer.write_count) == (51, 51)
    assert torch.equal(buffer[:]["x"][:, 0], torch.arange(51))
    sample = buffer.sample()
    assert sample.shape == (16,)
    sample["x"].zero_()
    assert buffer.sample(5).shape == (5,)
    assert next(iter(buffer)).shape == (16,)
    assert buffer.stats()["size"] == 51


class Scored(torchrl_data.ReplayBuffer):
    """A buffer that keeps the priorities it is given."""

    def update_priority(self, index, priority):
        self.scores = dict(zip(index.tolist(), priority.tolist(), strict=True))

    def stats(self):
        return {"scores": self.scores}


def test_priorities(cluster):
    buffer = RayReplayBuffer(
        storage=partial(torchrl_data.ListStorage, 10), replay_buffer_cls=Scored,
        remote_config=FREE, delayed_init=True,
    )  # fmt: skip
    buffer.update_priority(torch.arange(2), torch.tensor([1.0, 0.5]))
    assert buffer.stats() == {"size": 0, "write_count": 0, "scores": {0: 1.0, 1: 0.5}}
    buffer.close()
    buffer.close()


class Locked(torchrl_data.ReplayBuffer):
    """A buffer that tells whether its lock has a name that would outlive it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.lock = multiprocessing.RLock()

    def stats(self):
        # Without a name it was removed from there when it was made.
        return {"named": self.lock._semlock.name is not None}


def test_an_actor_that_is_killed_leaves_no_semaphore(cluster):
    buffer = RayReplayBuffer(
        storage=partial(torchrl_data.ListStorage, 10), replay_buffer_cls=Locked,
        remote_config=FREE,
    )  # fmt: skip
    assert buffer.stats()["named"] is False
    buffer.close()


def test_its_state_is_loaded(buffer):
    buffer.empty()
    buffer.extend(data(20))
    state = buffer.state_dict()
    buffer.empty()
    buffer.load_state_dict(state)
    assert len(buffer) == 20


def test_clients_are_sent(buffer):
    buffer.empty()
    for client in buffer.clients(2):
        pickle.loads(pickle.dumps(client)).extend(data(7))
    pickle.loads(pickle.dumps(buffer)).extend(data(7))
    assert len(buffer) == 21
    assert len(pickle.loads(pickle.dumps(buffer))) == 21


def test_errors_are_those_of_the_buffer(buffer, cluster):
    with pytest.raises(TypeError, match=r"replay buffer's actor.*no_such"):
        RayReplayBuffer(no_such=1, remote_config=FREE)
    with pytest.raises(ValueError, match="transport must be one of 'auto', 'ray'"):
        RayReplayBuffer(transport="pigeon")
    gone = RayReplayBuffer(storage=partial(torchrl_data.ListStorage, 10), remote_config=FREE)
    cluster.kill(gone._actor)

    def use():
        # The actor may carry out calls until it gets to know that it was killed.
        while True:
            len(gone)

    with pytest.raises(ConnectionError, match="actor is gone"):
        use()


def test_workers_write_each_batch_once(cluster):
    """Also one that dies when its batch is in the buffer, before it says so."""
    buffer = RayReplayBuffer(
        storage=partial(torchrl_data.LazyTensorStorage, 1000), remote_config=FREE
    )
    collector = RayCollector(
        envs(2), frames_per_batch=12, total_frames=240, replay_buffer=buffer, remote_configs=FREE
    )
    with collector, pytest.warns(RuntimeWarning, match="worker 1 died"):  # noqa: PT031
        for number, nothing in enumerate(collector):
            assert nothing is None
            if number == 2:
                os.kill(collector._pool.slots[1].worker.pid, signal.SIGKILL)
    assert len(buffer) == buffer.write_count == collector.stats()["frames"] == 240


def test_a_pass_without_replacement_ends(cluster):
    one = RayReplayBuffer(
        storage=partial(torchrl_data.LazyTensorStorage, 100),
        sampler=torchrl_data.SamplerWithoutReplacement,
        batch_size=4,
        remote_config=FREE,
    )
    try:
        one.extend(data(12))
        for _ in range(2):
            found = torch.cat([batch["x"][:, 0] for batch in one])
            assert found.sort().values.tolist() == list(range(12))
        assert one.next().shape == (4,)
    finally:
        one.close()


def test_it_has_the_public_names_of_a_buffer(buffer, tmp_path):
    buffer.empty()
    buffer.extend(data(8))
    missing = [
        name
        for name in dir(torchrl_data.ReplayBuffer)
        if not name.startswith("_") and not hasattr(buffer, name)
    ]
    assert missing == []
    assert not hasattr(buffer, "no_such_name")
    with pytest.raises(AttributeError, match=r"actor has no attribute 'storage\.no_such'"):
        _ = buffer.storage.no_such
    assert buffer.can_sample() is True
    assert (buffer.storage.ndim, buffer.sampler.ran_out) == (1, False)
    assert buffer.append_transform(DoubleToFloat()) is buffer
    buffer[0:2] = data(2, 70)
    assert buffer[:2]["x"][:, 0].tolist() == [70, 71]
    buffer.dumps(tmp_path / "saved")
    buffer.empty()
    buffer.loads(tmp_path / "saved")
    assert buffer[:]["x"][:, 0].tolist() == [70, 71, 2, 3, 4, 5, 6, 7]
    buffer.set_sampler(torchrl_data.SamplerWithoutReplacement())
    assert sum(len(batch) for batch in buffer) == 8
    buffer.set_sampler(torchrl_data.RandomSampler())
    assert buffer.is_alive
