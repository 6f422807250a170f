"""TorchRL's buffers of all kinds, here or in an actor, are filled by Ray actors."""

from functools import partial

import pytest
from buffer_parts import (
    BUFFERS,
    FRAMES,
    SIZE,
    check_background,
    check_contents,
    check_iteration,
    data,
)
from collector_parts import by_step
from multi_parts import envs

from trawl.collectors.distributed import RayCollector
from trawl.data import RayReplayBuffer

pytestmark = pytest.mark.usefixtures("cluster")
FREE = {"num_cpus": 0, "memory": 0}
LONG = pytest.mark.long


def of(sync):
    def make(source, **options):
        options = {"frames_per_batch": 20, "sync": sync, "remote_configs": FREE, **options}
        return RayCollector(source, by_step(), **options)

    return make


@pytest.mark.parametrize(
    ("kind", "sync"),
    [
        pytest.param("memory", False, marks=LONG),
        pytest.param("disk", True, marks=LONG),
        ("shared", True),
        ("prioritized", False),
    ],
)
def test_iteration_fills_it_exactly(kind, sync):
    check_iteration(of(sync), kind)


def torchrl_actor(**options):
    from torchrl.data import RayReplayBuffer as TorchRLBuffer

    return TorchRLBuffer(remote_config=FREE, **options)


def torchrl_service(**options):
    service = {"service_backend": "ray", "service_backend_options": {"remote_config": FREE}}
    return data.TensorDictReplayBuffer(**options, **service)


def trawl_actor(**options):
    return RayReplayBuffer(remote_config=FREE, **options)


ACTORS = {"trawl": trawl_actor, "torchrl": torchrl_actor, "service": torchrl_service}


@pytest.mark.parametrize("held", ACTORS)
def test_workers_write_into_an_actor(held):
    source = envs(2, lengths=[1000])
    buffer = ACTORS[held](storage=partial(data.LazyTensorStorage, SIZE), batch_size=64)
    try:
        with of(True)(source, replay_buffer=buffer, total_frames=FRAMES) as collector:
            assert [batch for batch in collector if batch is not None] == []
            assert collector.stats()["frames"] == buffer.write_count == FRAMES
        check_contents(buffer[:])
        assert buffer.sample().shape == (64,)
    finally:
        buffer.close()


@pytest.mark.parametrize(
    "held",
    ["driver", pytest.param("trawl", marks=LONG), "torchrl", pytest.param("service", marks=LONG)],
)
def test_it_is_filled_in_the_background(held):
    if held == "driver":
        check_background(of(False), BUFFERS["memory"]())
        return
    buffer = ACTORS[held](storage=partial(data.LazyTensorStorage, SIZE), batch_size=64)
    try:
        check_background(of(False), buffer)
    finally:
        buffer.close()
