"""Workers through the standard library alone: where they are used, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.backends.portable import NamedMemory, PortableBackend
from trawl.collectors import MultiAsyncCollector, MultiSyncCollector

COLLECTS = """
import os, sys, torch
from trawl.collectors import MultiAsyncCollector

calls = 0

def policy(td):
    global calls
    calls += 1
    if calls > 20 and "9" in "NOW":
        sys.setswitchinterval(1000)  # no other thread runs any more
        while True:
            calls += 1
    td["pid"] = torch.full((1,), os.getpid())
    return td.set("action", torch.zeros(1))

with MultiAsyncCollector(
    ["Pendulum-v1"] * 2, policy, frames_per_batch=20, start_method="portable"
) as collector:
    first, second = collector.next(), collector.next()
    print(*first["pid"].unique().tolist(), *second["pid"].unique().tolist(), flush=True)
    NOW
"""


def collected(cls: Any, place: str) -> list[torch.Tensor]:
    """Some entries of batches between which weights are sent."""
    torch.manual_seed(0)
    policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    options = {"frames_per_batch": 24, "total_frames": 96, "start_method": place}
    found = []
    with cls(["Pendulum-v1"] * 2, policy, **options) as collector:
        collector.set_seed(1)
        for batch in collector:
            found.append(torch.stack([batch["next", "reward"].sum(), batch["action"].sum()]))
            nn.init.constant_(policy.module.bias, len(found))
            collector.update_policy_weights_()
    return found


@pytest.mark.parametrize("place", ["forkserver", "spawn"])
def test_it_is_used_where_the_user_asks_for_it(place: str, monkeypatch: Any) -> None:
    expected = collected(MultiSyncCollector, "inline")
    launched = []
    launch = PortableBackend.launch
    monkeypatch.setenv("TRAWL_PORTABLE", "1")
    monkeypatch.setattr(
        PortableBackend, "launch", lambda *args: launched.append(args) or launch(*args)
    )
    found = collected(MultiSyncCollector, place)
    assert len(launched) == 2
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert len(collected(MultiAsyncCollector, place)) == 4


def names() -> set[str]:
    """The names of shared memory on this machine."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("psm_")}


def test_names_go_with_the_memory() -> None:
    memory = NamedMemory.new(100)
    name, other = memory.name, NamedMemory(memory.name, 100)
    part = torch.from_numpy(other.buffer)[3:]
    raw = torch.frombuffer(memoryview(other.buffer), dtype=torch.uint8)
    memory.buffer[3] = 7
    assert part[0] == raw[3] == 7
    del memory
    assert name.lstrip("/") not in names()
    del other
    # What is in use stays, though other memory comes and goes.
    NamedMemory.new(100)
    assert part[0] == raw[3] == 7


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(0)", "raise SystemExit"])
def test_nothing_is_left_however_the_driver_ends(end: str, tmp_path: Path) -> None:
    script = Forked(COLLECTS.replace("NOW", end), stdout=subprocess.PIPE, cwd=tmp_path)
    with script:
        pids = {int(pid) for pid in script.stdout.readline().split()}
        assert script.wait(300) in (0, -signal.SIGKILL)
    for path in (Path(f"/proc/{pid}") for pid in pids):
        while path.exists():
            time.sleep(0.01)
