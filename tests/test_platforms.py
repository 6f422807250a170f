"""Other systems than Linux: what works there, and what is said where something doesn't.

Such a system is simulated: Python has another ``sys.platform``, and lacks what only Linux has.
"""

import nursery
import pytest

OTHER_SYSTEM = """
import builtins, mmap, os, select, selectors, signal, socket, sys, warnings
import gymnasium, numpy, rich, torch, cloudpickle, multiprocessing

sys.platform = "{platform}"
for module, prefixes in {{
    os: ("eventfd", "EFD_", "memfd", "MFD_", "pidfd", "sched_"),
    mmap: ("MADV_",),
    select: ("epoll", "EPOLL"),
    selectors: ("EpollSelector",),
    signal: ("pidfd",),
}}.items():
    for name in dir(module):
        if name.startswith(prefixes):
            delattr(module, name)
before = builtins.open


def open(file, *args, **kwargs):
    if str(file).startswith("/proc"):
        raise FileNotFoundError(file)
    return before(file, *args, **kwargs)


builtins.open = open
"""
WORKS = """
import tensordict.nn

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import trawl
assert [one for one in caught if "made for Linux: on darwin" in str(one.message)], caught
from trawl import Collector, Evaluator, MultiAsyncCollector, MultiSyncCollector, ParallelEnv
from trawl.collectors import AsyncBatchedCollector
from torch import nn

linear = nn.Linear(3, 1)
policy = tensordict.nn.TensorDictModule(linear, in_keys=["observation"], out_keys=["action"])
with Collector("Pendulum-v1", policy, frames_per_batch=10, total_frames=30) as collector:
    collector.next()
    state = collector.state_dict()
    collector.load_state_dict(state)
    collector.checkpoint("checkpoints")
    assert len(list(collector)) == 2
with Collector(["Pendulum-v1"] * 2, policy, frames_per_batch=10) as collector:
    assert collector.next().shape == (2, 5)
with MultiSyncCollector(
    ["Pendulum-v1"] * 2, policy, frames_per_batch=10, start_method="inline"
) as collector:
    collector.next()
    collector.update_policy_weights_()
    collector.next()
with Collector(ParallelEnv(2, "Pendulum-v1"), policy, frames_per_batch=10) as collector:
    assert collector.next().shape == (2, 5)
with AsyncBatchedCollector(
    ["Pendulum-v1"] * 2, policy=policy, frames_per_batch=10, env_backend="multiprocessing"
) as collector:
    assert collector.next().numel() == 10
for kind in (MultiSyncCollector, MultiAsyncCollector):
    with kind(["Pendulum-v1"] * 2, policy, frames_per_batch=10, total_frames=20) as collector:
        assert sum(batch.numel() for batch in collector) == 20
for backend in ("thread", "process"):
    with Evaluator("Pendulum-v1", policy, max_steps=5, backend=backend) as evaluator:
        evaluator.evaluate()
print("works")
"""
WORKS_NOT = """
warnings.simplefilter("ignore")
import trawl
from trawl.collectors.distributed import DistributedCollector, RPCCollector


def policy(td):
    return td.set("action", torch.zeros(*td.batch_size, 1))


two = ["Pendulum-v1"] * 2
for make in (
    lambda: DistributedCollector(two, policy, frames_per_batch=10, launcher="mp"),
    lambda: RPCCollector(two, policy, frames_per_batch=10, launcher="mp"),
):
    try:
        make()
    except RuntimeError as error:
        assert "can't be used on darwin" in str(error), error
    else:
        raise AssertionError("nothing is said")
print("works")
"""


def run(platform, script, folder):
    program = OTHER_SYSTEM.format(platform=platform) + script
    return nursery.run(program, within=nursery.bare(), cwd=folder)


@pytest.mark.parametrize("script", [WORKS, WORKS_NOT], ids=["works", "works not"])
def test_macos(script, tmp_path):
    done = run("darwin", script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["works"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["trawl", "trawl.collectors", "trawl.extras.cli"])
def test_windows(name, tmp_path):
    done = run("win32", f"import {name}", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: trawl needs Linux, and does not")
