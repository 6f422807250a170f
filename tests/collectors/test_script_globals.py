"""Global variables of a script: in a worker, all that the worker got uses the same ones."""

import os
import subprocess
import sys

import pytest

SCRIPT = '''
import os, pickle, sys, threading
import gymnasium, numpy as np, torch
from trawl import MultiSyncCollector, MultiAsyncCollector
from trawl.collectors.distributed import DistributedCollector, RayCollector

SEEN = {}
STEPS = 0
LOCK = threading.local()  # can't be pickled, and isn't used by what is sent


class Helper:
    def __init__(self, value):
        self.value = value


def helper(value):
    return Helper(value)


class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-10, 1e9, (5,), np.float64)
    action_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)

    def __init__(self, shared, number=0):
        self.shared, self.number = shared, number

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.seen(), {}

    def seen(self):
        import __main__

        same = __main__.SEEN is SEEN and __main__.Helper is Helper and self.shared in (None, SEEN)
        pickled = pickle.loads(pickle.dumps((Helper, helper, helper(3))))
        ok = pickled[0] is Helper and pickled[1] is helper and pickled[2].value == 3
        got = SEEN.get("policy", 0), SEEN.get("hook", 0), SEEN.get("other", 0)
        return np.array([same and ok, *got, STEPS], dtype=np.float64)

    def step(self, action):
        global STEPS
        STEPS += 1
        SEEN["env"] = SEEN.get("env", 0) + 1
        SEEN["other" if self.number else "first"] = self.number
        return self.seen(), 0.0, False, False, {}


def policy(td):
    SEEN["policy"] = SEEN.get("env", 0)
    return td.set("action", torch.zeros(*td.batch_size, 1))


def hook(batch=None):
    SEEN["hook"] = SEEN.get("env", 0)


def make(number=0):
    return Env(SEEN, number)


def check(rows, envs):
    """rows: observations of one environment in one worker."""
    assert rows[:, 0].all(), rows
    # The policy, called before the last step, has seen all steps before; the hook, the batch.
    assert rows[-1, 1] == rows[-1, 4] - 1 or envs > 1, rows
    assert rows[-1, 2] >= 4 or rows[0, 4] < 4, rows
    if envs > 1:
        assert rows[-1, 3] == 1, rows


def options(**more):
    return dict(frames_per_batch=16, total_frames=-1, post_collect_hook=hook, **more)
'''

RUN = """
with {collector} as collector:
    for _ in range(3):
        batch = collector.next()
    rows = batch["next", "observation"].reshape(-1, {time}, 5)
    check(rows[-1], {envs})
    {then}
assert STEPS == 0 and SEEN == {{}}, (STEPS, SEEN)
print("one")
"""
SYNC = "MultiSyncCollector([make] * 2, policy, **options())"
CASES = {
    "sync": (SYNC, 8, 1),
    "objects": ("MultiSyncCollector([Env(SEEN), Env(SEEN)], policy, **options())", 8, 1),
    "repeated": ("MultiSyncCollector([Env(None)] * 2, policy, **options())", 8, 1),
    "spawn": (SYNC.replace("options(", "options(start_method='spawn'"), 8, 1),
    "async": ("MultiAsyncCollector([[make, lambda: make(1)]] * 2, policy, **options())", 8, 2),
    "distributed": (
        "DistributedCollector([make] * 2, policy, sync=True, launcher='mp', **options())",
        8,
        1,
    ),
    "factory": (
        "MultiSyncCollector([make] * 2, policy_factory=lambda: policy, **options())",
        8,
        1,
    ),
}


def run(*arguments):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], text=True, capture_output=True, timeout=300, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1:] == ["one"], done.stdout


def program(case, then=""):
    collector, time, envs = CASES[case]
    return SCRIPT + RUN.format(collector=collector, time=time, envs=envs, then=then)


@pytest.mark.parametrize("case", CASES)
def test_a_worker_has_one_of_each(case, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(program(case))
    run(path)


def test_without_a_file():
    run("-c", program("sync"))


def test_of_a_notebook(tmp_path):
    """A notebook's ``__main__`` has no file, and its functions come from several cells."""
    first, second = SCRIPT, RUN.format(collector=CASES["sync"][0], time=8, envs=1, then="")
    path = tmp_path / "kernel.py"
    path.write_text(
        "import sys, types\n"
        "module = sys.modules['__main__'] = types.ModuleType('__main__')\n"
        f"for cell in ({first!r}, 'from trawl import MultiSyncCollector', {second!r}):\n"
        "    exec(compile(cell, '<cell>', 'exec'), vars(module))\n"
    )
    run(path)


def test_a_process_that_can_not_be_forked(tmp_path):
    """With a second thread, the server that forks workers is executed, and imports no script."""
    path = tmp_path / "script.py"
    waiting = "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    path.write_text(
        SCRIPT + waiting + RUN.format(collector=CASES["sync"][0], time=8, envs=1, then="")
    )
    run(path)


def test_a_replacement(tmp_path):
    """It begins with what the worker began with, though the program has gone on."""
    then = """SEEN["policy"] = 7
    del SEEN["policy"]
    os.kill(collector._pool.slots[1].worker.pid, 9)
    for _ in range(3):
        batch = collector.next()
    check(batch["next", "observation"].reshape(-1, 8, 5)[-1], 1)"""
    path = tmp_path / "script.py"
    path.write_text(program("sync", then))
    run(path)
