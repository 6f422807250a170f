"""A replay buffer in an actor."""

import multiprocessing
import os
import pickle
import signal
from functools import partial

import pytest
import torch
from buffer_parts import FRAMES, check_background, check_contents
from collector_parts import by_step
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


def test_what_is_written_by_any_client_is_read(buffer):
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
    state = buffer.state_dict()
    for client in (*buffer.clients(2), buffer):
        pickle.loads(pickle.dumps(client)).extend(data(7))
    assert len(buffer) == len(pickle.loads(pickle.dumps(buffer))) == 72
    buffer.load_state_dict(state)
    assert len(buffer) == 51


class Own(torchrl_data.ReplayBuffer):
    """A buffer that keeps the priorities it is given, and has a lock."""

    def __init__(self, **options):
        super().__init__(**options)
        self.lock = multiprocessing.RLock()

    def update_priority(self, index, priority):
        self.scores = dict(zip(index.tolist(), priority.tolist(), strict=True))

    def stats(self):
        return {"scores": self.scores, "named": self.lock._semlock.name is not None}


def test_a_class_of_ones_own_gets_priorities_and_leaves_no_semaphore():
    buffer = RayReplayBuffer(
        storage=partial(torchrl_data.ListStorage, 10), replay_buffer_cls=Own,
        remote_config=FREE, delayed_init=True,
    )  # fmt: skip
    buffer.update_priority(torch.arange(2), torch.tensor([1.0, 0.5]))
    # A name of a semaphore would outlive an actor that is killed.
    found = {"scores": {0: 1.0, 1: 0.5}, "named": False}
    assert buffer.stats() == {"size": 0, "write_count": 0, **found}
    buffer.close()
    buffer.close()


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


def torchrl_actor(**options):
    return torchrl_data.RayReplayBuffer(remote_config=FREE, **options)


def torchrl_service(**options):
    service = {"service_backend": "ray", "service_backend_options": {"remote_config": FREE}}
    return torchrl_data.TensorDictReplayBuffer(**options, **service)


def trawl_actor(**options):
    return RayReplayBuffer(remote_config=FREE, **options)


def filled(make):
    """A buffer in an actor, and what makes collectors whose workers are actors."""
    buffer = make(storage=partial(torchrl_data.LazyTensorStorage, 1000), batch_size=64)

    def of(source, **options):
        return RayCollector(source, by_step(), remote_configs=FREE, **options)

    return buffer, of


@pytest.mark.parametrize("make", [torchrl_actor, torchrl_service])
def test_workers_write_into_an_actor_of_torchrl(make):
    buffer, of = filled(make)
    source = envs(2, lengths=[1000])
    options = {"frames_per_batch": 20, "total_frames": FRAMES, "sync": True}
    with of(source, replay_buffer=buffer, **options) as collector:
        assert [batch for batch in collector if batch is not None] == []
        assert collector.stats()["frames"] == buffer.write_count == FRAMES
    check_contents(buffer[:])
    assert buffer.sample().shape == (64,)
    buffer.close()


def test_workers_write_each_batch_once(cluster):
    """Also one that dies when its batch is in the buffer, before it says so."""
    buffer, of = filled(trawl_actor)
    options = {"frames_per_batch": 12, "total_frames": 240, "replay_buffer": buffer}
    with of(envs(2), **options) as collector, pytest.warns(RuntimeWarning, match="worker 1 died"):  # noqa: PT031
        for number, nothing in enumerate(collector):
            assert nothing is None
            if number == 2:
                os.kill(collector._pool.slots[1].worker.pid, signal.SIGKILL)
    assert len(buffer) == buffer.write_count == collector.stats()["frames"] == 240
    buffer.close()
    buffer, of = filled(trawl_actor)
    check_background(of, buffer, frames_per_batch=20)
    buffer.close()


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
    for _ in range(2):
        assert sum(len(batch) for batch in buffer) == 8
    assert buffer.next().shape == (8,)
    buffer.set_sampler(torchrl_data.RandomSampler())
    assert buffer.is_alive
