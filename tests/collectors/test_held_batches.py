"""Batches of workers that the user keeps."""

import os
import resource
import sys

import pytest
import torch

from trawl import MultiCollector
from trawl.testing import NumberedEnv


@pytest.fixture
def few_descriptors():
    """Allows this process so few more descriptors that each held batch can't have its own."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Other tests in this process may have left files open.
    most = max(map(int, os.listdir("/proc/self/fd"))) + 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.usefixtures("few_descriptors")
def test_there_may_be_more_of_them_than_descriptors(sync):
    options = {"num_workers": 2, "frames_per_batch": 4, "total_frames": 1_200}
    with MultiCollector(NumberedEnv, sync=sync, **options) as collector:
        kept = list(collector)
        copies = [batch["next", "observation"].clone() for batch in kept]
        assert len(kept) == 300
        assert collector.next() is None
    assert all(
        torch.equal(batch["next", "observation"], copy)
        for batch, copy in zip(kept, copies, strict=True)
    )
    assert len({batch["next", "observation"].data_ptr() for batch in kept}) == 300


@pytest.mark.parametrize("sync", [True, False])
def test_no_python_runs_when_one_is_released(sync):
    """A KeyboardInterrupt would be lost in it: Python only prints errors of finalisers."""
    calls = []
    with MultiCollector(NumberedEnv, sync=sync, num_workers=2, frames_per_batch=4) as collector:
        for _ in range(4):
            batch = collector.next()
        sys.setprofile(lambda frame, event, _: calls.append((event, frame.f_code.co_name)))
        try:
            del batch
        finally:
            sys.setprofile(None)
    assert [name for event, name in calls if event == "call"] == []
