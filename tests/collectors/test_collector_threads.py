"""Collectors and other threads: the end of the program, versions, weights."""

from __future__ import annotations

import gc
import threading
import weakref

import nursery
import torch
from collector_parts import PATIENCE, Buffer, Scorer, by_step

from trawl.collectors import Collector
from trawl.testing import NumberedEnv

FORGETFUL = """
import torch
from tensordict.nn import TensorDictModule
from trawl import Collector

class Buffer:
    def extend(self, batch): filled.set()

import threading
filled = threading.Event()
policy = TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["action"])
collector = Collector("Pendulum-v1", policy, frames_per_batch=200, replay_buffer=Buffer())
collector.start()
filled.wait()
print("the end")
"""


def test_a_program_that_forgets_to_shut_down_ends_well() -> None:
    done = nursery.run(FORGETFUL, finalize=True)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


def test_a_collector_nobody_holds_stops_collecting() -> None:
    buffer = Buffer()
    collector = Collector(
        lambda: NumberedEnv(), by_step(), frames_per_batch=10, replay_buffer=buffer
    )
    collector.start()
    buffer.wait_for(10)
    thread, gone = collector.parts.background.thread._thread, weakref.ref(collector)
    del collector
    thread.join(PATIENCE)
    gc.collect()
    assert not thread.is_alive()
    assert gone() is None


def test_two_starts_at_once_start_one_thread() -> None:
    collector = Collector(
        lambda: NumberedEnv(), by_step(), frames_per_batch=10, replay_buffer=Buffer()
    )
    before, barrier = threading.active_count(), threading.Barrier(4)

    def start() -> None:
        barrier.wait()
        collector.start()

    starters = [threading.Thread(target=start) for _ in range(4)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert threading.active_count() == before + 1
    collector.async_shutdown()


def test_seeding_waits_for_the_batch_being_collected() -> None:
    buffer = Buffer()
    with Collector(
        lambda: NumberedEnv(), by_step(), frames_per_batch=50, replay_buffer=buffer
    ) as collector:
        collector.start()
        for seed in range(20):
            collector.set_seed(seed)
        buffer.wait_for(500)
        collector.async_shutdown()
    frames = buffer.content()
    # A seed in the middle of a batch would break what goes from row to row.
    following, root = frames["next", "observation"], frames["observation"]
    same = (following[:-1] == root[1:]).all(-1)
    new = frames["collector", "traj_ids"][1:] != frames["collector", "traj_ids"][:-1]
    assert (same | new).all()


def test_a_batch_has_the_version_that_it_began_with() -> None:
    began, changed = threading.Event(), threading.Event()

    def wait() -> bool:
        began.set()
        return changed.is_set()

    with Collector(
        lambda: NumberedEnv(),
        by_step(),
        frames_per_batch=100_000,
        track_policy_version=True,
        interruptor=wait,
    ) as collector:
        waiter = threading.Thread(
            target=lambda: (began.wait(), changed.set(), collector.increment_version())
        )
        waiter.start()
        batch = collector.next()
        waiter.join()
        assert batch["policy_version"].unique().tolist() == [0]
        assert collector.policy_version == 1


def test_tied_weights_are_updated_by_either_name() -> None:
    class Tied(Scorer):
        def __init__(self) -> None:
            super().__init__(choice=0)
            self.also = self.scores

    policy = Tied()
    with Collector(lambda: NumberedEnv(), policy, frames_per_batch=4) as collector:
        state = {name: torch.zeros_like(value) for name, value in policy.state_dict().items()}
        assert list(state) == ["scores", "also"]
        collector.update_policy_weights_(state)
    assert all((value == 0).all() for value in policy.state_dict().values())
