"""TorchRL's environments in workers, and TorchRL's collectors next to Trawl's."""

import pickle
import sys
import warnings
from pathlib import Path

import nursery
import pytest
import torch
from collector_parts import layout
from multi_parts import BOTH
from tensordict.nn import TensorDictModule
from torch import nn

import trawl.collectors
from trawl.collectors import MultiSyncCollector

torchrl_collectors = pytest.importorskip("torchrl.collectors")

from torchrl.data import LazyTensorStorage, ReplayBuffer  # noqa: E402
from torchrl.envs import (  # noqa: E402
    GymEnv,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)


def plain():
    return GymEnv("Pendulum-v1")


def transformed():
    env = TransformedEnv(plain(), StepCounter(max_steps=7))
    env.append_transform(RewardSum())
    env.append_transform(InitTracker())
    return env


def serial():
    return SerialEnv(3, plain)


def actor():
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


def test_one_seed_gives_the_same_bits_wherever_workers_live():
    found = []
    for method in ("inline", "forkserver"):
        with MultiSyncCollector(
            [transformed] * 2, frames_per_batch=40, total_frames=80, start_method=method
        ) as collector:
            collector.set_seed(1)
            found.append(list(collector))
    for one, other in zip(*found, strict=True):
        assert (one == other).all()


@BOTH
def test_batches_go_into_torchrls_buffers(cls):
    buffer = ReplayBuffer(storage=LazyTensorStorage(500), batch_size=16)
    with cls(
        [plain] * 2,
        actor(),
        frames_per_batch=40,
        total_frames=200,
        replay_buffer=buffer,
        start_method="inline",
    ) as collector:
        assert list(collector) == [None] * 5
    sample = buffer.sample()
    assert sample["observation"].shape[-1] == 3
    assert buffer.write_count in (200, 10)  # rows of batches, or frames of them


# --- next to TorchRL's own


CASES = {
    "MultiSyncCollector": ([plain] * 2, {"cat_results": "stack", "max_frames_per_traj": 9}),
    "MultiAsyncCollector": ([serial], {}),
}
# Ends its workers by itself: TorchRL's shutdown may wait for ever for what they left in queues.
SCRIPT = """
import multiprocessing, os, pickle, sys, warnings
warnings.simplefilter("ignore")
# Otherwise each of TorchRL's workers imports all of it.
multiprocessing.set_start_method("fork")
sys.path[:0] = sys.argv[2:]
import torch
torch.set_num_threads(1)  # a process with threads can't be forked
from test_multi_torchrl import CASES, facts, torchrl_collectors

found = {}
for name in CASES:
    collector, found[name] = facts(torchrl_collectors, name)
    for process in collector.procs:
        process.kill()
with open(sys.argv[1], "wb") as file:
    pickle.dump(found, file)
os._exit(0)
"""


def facts(module, name, **more):
    """A collector, and the look of its batches."""
    sources, options = CASES[name]
    collector = getattr(module, name)(
        sources, actor(), frames_per_batch=60, total_frames=120, **options, **more
    )
    return collector, [(batch.shape, batch.names, layout(batch)) for batch in collector]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The look of TorchRL's batches, by the name of the collector."""
    folder = tmp_path_factory.mktemp("torchrl")
    path = [str(Path(__file__).parent), *sys.path]
    # Processes that are killed leave their temporary files.
    done = nursery.run(SCRIPT, folder / "found", *path, env={"TMPDIR": str(folder)})
    assert done.returncode == 0, done.stderr
    return pickle.loads((folder / "found").read_bytes())


@pytest.mark.parametrize("name", CASES)
def test_batches_look_as_torchrls(name, theirs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector, ours = facts(trawl.collectors, name, start_method="inline")
    collector.shutdown()
    assert len(theirs[name]) == len(ours) == 2
    for their, our in zip(theirs[name], ours, strict=True):
        assert our == their
