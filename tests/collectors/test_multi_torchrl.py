"""TorchRL's environments in workers, and TorchRL's collectors next to Trawl's."""

import pickle
import sys
import warnings
from pathlib import Path

import nursery
import pytest
import torch
from collector_parts import layout
from tensordict.nn import TensorDictModule
from torch import nn

import trawl.collectors

torchrl_collectors = pytest.importorskip("torchrl.collectors")

from torchrl.envs import GymEnv, InitTracker, RewardSum, SerialEnv, StepCounter, TransformedEnv  # noqa: E402


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
