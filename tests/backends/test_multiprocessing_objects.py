"""Objects of ``multiprocessing`` in workers, where these don't come from a fork of the driver."""

import subprocess
import sys

import pytest

# With a second thread, the process that workers are forked from is a fresh interpreter.
PROGRAM = """
import multiprocessing, threading
import gymnasium, torch
from trawl import Collector, Evaluator, MultiSyncCollector, ParallelEnv


class Telling(gymnasium.Wrapper):
    def __init__(self, queue):
        super().__init__(gymnasium.make("Pendulum-v1"))
        self.queue = queue

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        self.queue.put(torch.from_numpy(observation.copy()))
        return observation, info


def policy(td):
    return td.set("action", torch.zeros(*td.batch_size, 1))


threading.Thread(target=threading.Event().wait, daemon=True).start()
queue = multiprocessing.get_context("spawn").Manager().Queue()


def make():
    return Telling(queue)


def hook(batch):
    queue.put(batch["next", "reward"].clone())


{run}
for _ in range({count}):
    assert queue.get(timeout=60).dtype == torch.float32
print("told")
"""
RUNS = {
    "forkserver": """
with MultiSyncCollector([make] * 2, policy, frames_per_batch=10, post_collect_hook=hook) as one:
    one.next()""",
    "spawn": """
with MultiSyncCollector(
    [make] * 2, policy, frames_per_batch=10, post_collect_hook=hook, start_method="spawn"
) as one:
    one.next()""",
    "environments": """
with Collector(ParallelEnv(2, make), policy, frames_per_batch=10, post_collect_hook=hook) as one:
    one.next()""",
    "evaluator": """
with Evaluator(make, policy, max_steps=5, num_trajectories=3, backend="process") as one:
    one.evaluate()""",
}


@pytest.mark.parametrize("run", RUNS)
def test_tensors_pass_through_a_manager(run):
    program = PROGRAM.format(run=RUNS[run], count=3)
    done = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["told"]
