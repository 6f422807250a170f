"""Copies between arrays and a device."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trawl.rollout.layout import Leaf
from trawl.rollout.policy import device_transfer
from trawl.rollout.policy.device_transfer import DeviceTransfer

CUDA = pytest.param(
    "cuda:0",
    marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])
DTYPES = [torch.float32, torch.uint8, torch.int64, torch.bool, torch.float64, torch.int16]


def arrays_of(leaves, rows):
    rng = np.random.default_rng(0)
    return {
        key: torch.from_numpy(rng.integers(0, 2, (rows, *leaf.shape))).to(leaf.dtype).numpy()
        for key, leaf in leaves.items()
    }


@DEVICES
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 3), max_size=2)), min_size=1
    ),
    picks=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=9), min_size=1, max_size=4),
)
def test_rows_arrive_and_come_back(device, shapes, picks):
    leaves = {(str(i),): Leaf(tuple(shape), dtype) for i, (dtype, shape) in enumerate(shapes)}
    arrays = arrays_of(leaves, 7)
    transfer = DeviceTransfer(torch.device(device))
    for rows in picks:
        sent = transfer.send({**leaves, ("no",): Leaf((2,), torch.bool)}, arrays, np.array(rows))
        # An entry without an array is False.
        assert sent["no",].shape == (len(rows), 2)
        assert not sent["no",].any()
        array, *back = transfer.receive([arrays["0",], *(sent[key] for key in leaves)])
        # What is not on the device is left as it is.
        assert array is arrays["0",]
        for (key, leaf), value in zip(leaves.items(), back, strict=True):
            assert sent[key].device == torch.device(device)
            assert value.dtype == leaf.dtype
            assert value.device.type == "cpu"
            assert (value.numpy() == arrays[key][rows]).all()


@DEVICES
def test_the_policy_may_keep_what_it_reads(device):
    leaves = {("x",): Leaf((2,), torch.float32)}
    arrays = arrays_of(leaves, 4)
    transfer = DeviceTransfer(torch.device(device))
    first = transfer.send(leaves, arrays, np.array([0, 1]))[("x",)]
    transfer.receive([first])
    before = first.clone()
    arrays[("x",)] += 5
    transfer.send(leaves, arrays, np.array([0, 1]))
    assert (first == before).all()


# --- blocks that are filled again


class Copying:
    """Stands in for a CUDA event: the copy of a block goes on until somebody waits for it."""

    made = ()

    def __init__(self):
        self.recorded, self.calls = None, []
        Copying.made = (*Copying.made, self)

    def record(self, stream):
        self.calls.append("record")
        self.recorded = self.watched.clone()

    def synchronize(self):
        if self.recorded is not None:
            assert (self.recorded == self.watched).all(), "filled again before the copy was done"
        self.calls.append("wait")


@pytest.fixture
def copying(monkeypatch):
    """Makes the transfers of the CPU behave as if their copies took time."""
    Copying.made = ()
    monkeypatch.setattr(device_transfer, "new_event", lambda device: Copying())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)

    class Watched(device_transfer.HostBlock):
        def __init__(self, nbytes, device):
            super().__init__(nbytes, device)
            Copying.made[-1].watched = self.memory

    monkeypatch.setattr(device_transfer, "HostBlock", Watched)


def test_a_block_is_filled_again_only_when_its_copy_is_done(copying):
    leaves = {("x",): Leaf((2,), torch.float32)}
    arrays = arrays_of(leaves, 4)
    transfer = DeviceTransfer(torch.device("cpu"))
    for _ in range(3):
        transfer.send(leaves, arrays, np.array([0, 1]))
        arrays[("x",)] += 1
    sent = [event.calls for event in Copying.made if event.calls]
    assert sent == [["wait", "record"] * 3]


def test_blocks_of_different_sizes_do_not_wait_for_each_other(copying):
    leaves = {("x",): Leaf((2,), torch.float32)}
    arrays = arrays_of(leaves, 4)
    transfer = DeviceTransfer(torch.device("cpu"))
    for rows in ([0], [0, 1], [1]):
        transfer.send(leaves, arrays, np.array(rows))
    sent = sorted(event.calls for event in Copying.made if event.calls)
    assert sent == [["wait", "record"], ["wait", "record"] * 2]


def test_what_is_received_is_there_when_it_is_returned(copying):
    transfer = DeviceTransfer(torch.device("cpu"))
    (value,) = transfer.receive([torch.ones(2)])
    assert Copying.made[-1].calls == ["record", "wait"]
    assert value.tolist() == [1, 1]
