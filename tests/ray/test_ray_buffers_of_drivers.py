"""TorchRL's buffers of all kinds, here or in an actor, are filled by Ray actors."""

from functools import partial

import pytest
from buffer_parts import BUFFERS, SIZE, check_background, check_iteration, data
from collector_parts import by_step

from trawl.collectors.distributed import RayCollector
from trawl.data import RayReplayBuffer

pytestmark = pytest.mark.usefixtures("cluster")
FREE = {"num_cpus": 0, "memory": 0}


def of(sync):
    def make(source, **options):
        options = {"frames_per_batch": 20, "sync": sync, "remote_configs": FREE, **options}
        return RayCollector(source, by_step(), **options)

    return make


@pytest.mark.parametrize(
    ("kind", "sync"), [("memory", False), ("disk", True), ("shared", True), ("prioritized", False)]
)
def test_iteration_fills_it_exactly(kind, sync):
    check_iteration(of(sync), kind)


@pytest.mark.parametrize("held", ["driver", "actor"])
def test_it_is_filled_in_the_background(held):
    if held == "driver":
        check_background(of(False), BUFFERS["memory"]())
        return
    storage = partial(data.LazyTensorStorage, SIZE)
    buffer = RayReplayBuffer(storage=storage, batch_size=64, remote_config=FREE)
    try:
        check_background(of(False), buffer)
    finally:
        buffer.close()
