"""Checks of devices that users name."""

import pytest
import torch

from trawl import Collector, GymEnv, MultiSyncCollector, ParallelEnv, SerialEnv
from trawl.collectors import AsyncBatchedCollector
from trawl.devices import check_device
from trawl.testing import NumberedEnv


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("cpu", "cpu"), ("cpu:0", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("meta", "meta")],
)
def test_devices_of_this_machine(two_gpus, given, expected):
    assert check_device("device", given) == torch.device(expected)
    assert check_device("device", torch.device(given)) == torch.device(expected)


def test_a_number_that_no_gpu_has(two_gpus):
    expected = (
        "policy_device is 'cuda:7', but torch finds only 2 CUDA devices: pass 'cuda:0' to 'cuda:1'"
    )
    with pytest.raises(ValueError, match=f"^{expected}$"):
        check_device("policy_device", "cuda:7")


def test_a_device_of_another_machine(no_gpu):
    assert check_device("device", "cuda", here=False) == torch.device("cuda:0")
    assert check_device("device", "cuda:7", here=False) == torch.device("cuda:7")


@pytest.mark.parametrize("given", [[0], True, 1.5, {}])
def test_what_is_not_a_device(given):
    with pytest.raises(TypeError, match="device must be a device, such as 'cpu' or 'cuda:0', but"):
        check_device("device", given)


def test_a_device_that_torch_was_not_compiled_for():
    missing = [kind for kind in ("mps", "xpu", "hpu") if not _works(kind)]
    for kind in missing:
        with pytest.raises(ValueError, match=f"^device is '{kind}', but torch can't use it here: "):
            check_device("device", kind)


def _works(kind):
    try:
        torch.empty(0, device=kind)
    except Exception:
        return False
    return True


@pytest.mark.parametrize(
    "make",
    [
        lambda device: ParallelEnv(2, NumberedEnv, device=device),
        lambda device: SerialEnv(2, NumberedEnv, device=device),
        lambda device: GymEnv(NumberedEnv(), device=device),
        lambda device: GymEnv(NumberedEnv()).to(device),
        lambda device: Collector(NumberedEnv, device=device, frames_per_batch=4),
        lambda device: MultiSyncCollector([NumberedEnv], device=device, frames_per_batch=4),
        lambda device: AsyncBatchedCollector(
            [NumberedEnv], policy=torch.sum, device=device, frames_per_batch=4
        ),
    ],
)
def test_a_missing_gpu_is_found_at_once(no_gpu, make):
    with pytest.raises(ValueError, match=r"^device is 'cuda', but torch finds no CUDA device"):
        make("cuda")


@pytest.mark.parametrize("name", ["policy_device", "env_device", "storing_device"])
def test_the_argument_is_named(two_gpus, name):
    for kind, source in ((Collector, NumberedEnv), (MultiSyncCollector, [NumberedEnv])):
        with pytest.raises(ValueError, match=f"^{name} is 'cuda:2', but torch finds only 2 CUDA"):
            kind(source, frames_per_batch=4, **{name: "cuda:2"})
