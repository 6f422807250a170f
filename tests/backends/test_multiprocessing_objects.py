"""Objects of ``multiprocessing`` in workers, where these don't come from a fork of the driver."""

import nursery

# With a second thread, the process that workers are forked from is no fork of the driver.
PROGRAM = """
import multiprocessing, threading
import gymnasium, torch
from trawl import MultiSyncCollector


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


def check(source, count, **options):
    options |= {"frames_per_batch": 10, "post_collect_hook": hook}
    with MultiSyncCollector(source, policy, **options) as one:
        one.next()
    for _ in range(count):
        assert queue.get(timeout=300).dtype == torch.float32
    while not queue.empty():
        queue.get()


check([make] * 2, 4)
check([make], 2, start_method="spawn")
print("told")
"""


def test_tensors_pass_through_a_manager():
    done = nursery.run(f"import sys; sys.executable = {nursery.python()!r}\n{PROGRAM}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["told"]
