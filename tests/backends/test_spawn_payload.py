"""Things of a user's program, packed for other processes; code is tested with the backends."""

import gc
import multiprocessing
import os
import threading
from multiprocessing import context

import numpy as np
import pytest
import torch
from backend_parts import held_files
from tensordict import TensorDict
from torch import nn

from trawl.backends.processes.payload import Shared, SpawnPayload, unpack


def through(content):
    payload = SpawnPayload(content)
    return unpack(payload.data, [os.dup(fd) for fd in payload.fds])


def test_tensors_are_copied_and_stay_where_they_are():
    base = torch.arange(6.0)
    tensors = {
        "plain": base,
        "view": base[1:3],
        "leaf": torch.ones(2, requires_grad=True),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor(True),
        "array": np.ones(3),
    }
    result = through(tensors)
    base[:] = -1
    assert result["plain"].tolist() == [0, 1, 2, 3, 4, 5]
    assert result["view"].tolist() == [1, 2]
    assert result["leaf"].requires_grad
    assert result["empty"].shape == (0, 3)
    assert result["array"].tolist() == [1, 1, 1]
    assert not any(t.is_shared() for name, t in tensors.items() if name != "array")
    assert SpawnPayload(tensors).fds == []


def test_sparse_tensors():
    sparse = torch.eye(3).to_sparse()
    assert through(sparse).to_dense().equal(torch.eye(3))
    assert not sparse._values().is_shared()


def test_modules_are_copied():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.append(module[0])
    result = through(module)
    assert not any(p.is_shared() for p in [*module.parameters(), *module.buffers()])
    with torch.no_grad():
        module[0].weight.zero_()
    assert result[0].weight.abs().sum() > 0
    assert result[2] is result[0]
    assert result[0].weight.requires_grad


def test_shared_tensors_stay_shared():
    tensor = torch.zeros(3).share_memory_()
    module = nn.Linear(2, 2)
    module.share_memory()
    payload = SpawnPayload({"tensor": tensor, "view": tensor[1:], "module": module})
    assert payload.fds
    result = unpack(payload.data, [os.dup(fd) for fd in payload.fds])
    tensor[1] = 5
    assert result["tensor"].tolist() == [0, 5, 0]
    assert result["view"].tolist() == [5, 0]
    result["module"].weight.data.fill_(2)
    assert (module.weight == 2).all()


def test_tensordicts_are_copied_unless_they_are_shared():
    plain, shared = TensorDict({"x": torch.zeros(2)}), TensorDict({"x": torch.zeros(2)})
    shared.share_memory_()
    result = through({"plain": plain, "shared": shared})
    assert not plain["x"].is_shared()
    plain["x"].fill_(1)
    shared["x"].fill_(1)
    assert result["plain"]["x"].tolist() == [0, 0]
    assert result["shared"]["x"].tolist() == [1, 1]


def test_what_is_said_to_be_shared_becomes_so():
    tensor = torch.zeros(2)
    result = through({"mine": Shared(tensor), "copy": torch.zeros(2)})
    assert tensor.is_shared()
    tensor[0] = 1
    assert result["mine"].tolist() == [1, 0]


def test_things_of_multiprocessing():
    spawn = multiprocessing.get_context("spawn")
    value, lock, plain = spawn.Value("i", 3), spawn.Lock(), spawn.Array("d", 2, lock=False)
    read, write = spawn.Pipe(duplex=False)
    result = through((value, lock, plain, write))
    result[0].value = 4
    result[2][1] = 2.5
    result[3].send("through the pipe")
    assert value.value == 4
    assert list(plain) == [0, 2.5]
    assert read.recv() == "through the pipe"
    with lock:
        assert not result[1].acquire(block=False)
    for end in (read, write, result[3]):
        end.close()


def test_what_can_not_be_packed():
    before = held_files()
    popen = context.get_spawning_popen()
    with pytest.raises(TypeError, match="pickle"):
        SpawnPayload([torch.zeros(3).share_memory_(), threading.Lock()])
    gc.collect()
    assert held_files() <= before
    assert context.get_spawning_popen() is popen


def test_descriptors_are_let_go_of():
    before = held_files()
    tensors = [torch.zeros(3).share_memory_() for _ in range(10)]
    for _ in range(3):
        through(tensors)
    payload = SpawnPayload(tensors)
    assert len(payload.fds) == 10
    del payload, tensors
    gc.collect()
    assert held_files() <= before


class Unreadable:
    def __init__(self, tensor):
        self.tensor = tensor

    def __reduce__(self):
        return _refuse, (self.tensor,)


def _refuse(tensor):
    raise LookupError("no")


def test_what_can_not_be_unpacked():
    before = held_files()
    with pytest.raises(LookupError):
        through(Unreadable(torch.zeros(3).share_memory_()))
    gc.collect()
    assert held_files() <= before


def test_a_shared_module_of_many_parts():
    module = nn.ModuleList(nn.Linear(1, 1) for _ in range(300))
    module.share_memory()
    payload = SpawnPayload(module)
    assert len(payload.fds) == 600
