"""Global variables of a script: in a worker, all that the worker got uses the same ones."""

import subprocess

import nursery
import pytest

SCRIPT = '''
import os, pickle, sys, threading
import gymnasium, numpy as np, torch
from trawl import MultiSyncCollector, MultiAsyncCollector
from trawl.collectors.distributed import DistributedCollector

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
    rows = batch["next", "observation"].reshape(-1, 8, 5)
    check(rows[-1], {envs})
    {then}
assert STEPS == 0 and SEEN == {{}}, (STEPS, SEEN)
print("one")
"""
SYNC = "MultiSyncCollector([make] * 2, policy, **options())"
COLLECTORS = [
    (SYNC, 1),
    # The same objects in both workers.
    ("MultiSyncCollector([Env(SEEN), Env(SEEN)], policy, **options())", 1),
    ("MultiSyncCollector([Env(None)] * 2, policy, **options())", 1),
    ("MultiSyncCollector([make], policy, **options(start_method='spawn'))", 1),
    ("MultiAsyncCollector([[make, lambda: make(1)]] * 2, policy, **options())", 2),
    ("DistributedCollector([make] * 2, policy, sync=True, launcher='mp', **options())", 1),
    ("MultiSyncCollector([make] * 2, policy_factory=lambda: policy, **options())", 1),
]
# The replacement begins with what the worker began with, though the program has gone on.
REPLACED = """SEEN["policy"] = 7
    del SEEN["policy"]
    os.kill(collector._pool.slots[1].worker.pid, 9)
    for _ in range(3):
        batch = collector.next()
    check(batch["next", "observation"].reshape(-1, 8, 5)[-1], 1)"""
ONE = RUN.format(collector=SYNC, envs=1, then="")


def test_a_worker_has_one_of_each(tmp_path):
    path = tmp_path / "script.py"
    runs = [RUN.format(collector=collector, envs=envs, then="") for collector, envs in COLLECTORS]
    runs.append(RUN.format(collector=SYNC, envs=1, then=REPLACED))
    path.write_text("".join([SCRIPT, *runs]))
    command = [nursery.python(), path]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "one\n" * len(runs)


# A notebook's `__main__` has no file, and its functions come from several cells.
NOTEBOOK = f"""
import sys, types
module = sys.modules['__main__'] = types.ModuleType('__main__')
for cell in ({SCRIPT!r}, 'from trawl import MultiSyncCollector', {ONE!r}):
    exec(compile(cell, '<cell>', 'exec'), vars(module))
"""
# With a second thread, the server that forks workers is executed, and imports no script.
THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"


@pytest.mark.parametrize(
    "code", [SCRIPT + ONE, NOTEBOOK, SCRIPT + THREAD + ONE], ids=["no file", "notebook", "thread"]
)
def test_programs_without_a_file(code):
    done = nursery.run(code)
    assert (done.returncode, done.stdout) == (0, "one\n"), done.stderr
