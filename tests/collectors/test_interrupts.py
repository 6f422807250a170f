"""Ctrl-C while a batch is collected: the next call delivers it, and each frame comes once."""

import importlib
import multiprocessing
import os
import pkgutil
import signal
import threading
from collections import deque
from functools import partial

import gymnasium
import pytest
import torch

import trawl
from trawl import Collector, MultiAsyncCollector, MultiSyncCollector, interrupts
from trawl.collectors import AsyncBatchedCollector
from trawl.envs import GymEnv
from trawl.rollout.policy.random_policy import RandomPolicy
from trawl.testing import Ledger, NumberedEnv

LENGTHS = [3, 1, 4]
FRAMES, BATCHES = 20, 6


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handler():
    """The handler of a Python program that sets none; a test runner may have set another."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Pressing(gymnasium.Wrapper):
    """Environment in which Ctrl-C is pressed in the middle of some steps."""

    def __init__(self, env, presses=(), times=1):
        super().__init__(env)
        self.steps, self.presses, self.times = 0, presses, times

    def step(self, action):
        self.steps += 1
        if self.steps in self.presses:
            for _ in range(self.times):
                press()
        return super().step(action)


def numbered(number, presses=(), times=1):
    return Pressing(NumberedEnv(number=number, lengths=LENGTHS), presses, times)


def drawn(policy_presses=()):
    """A policy that draws random numbers, and in some of whose calls Ctrl-C is pressed."""
    calls = 0
    spec = GymEnv(NumberedEnv()).full_action_spec

    def policy(td):
        nonlocal calls
        calls += 1
        if calls in policy_presses:
            press()
        td["noise"] = torch.rand(*td.batch_size, 1)
        return td.update(spec.expand(*td.batch_size).rand())

    return policy


def pressing(batch=None, *, counts, presses):
    counts.append(1)
    if len(counts) in presses:
        press()
    return batch


OPTIONS = {"frames_per_batch": FRAMES, "total_frames": FRAMES * BATCHES}
PLACES = {
    "a step": lambda **more: Collector(partial(numbered, 0, {3, 25, 40, 41, 90}), drawn(), **more),
    "a list": lambda **more: Collector(
        [partial(numbered, 0, {3, 27}), partial(numbered, 1, {10, 41})],
        RandomPolicy(GymEnv(NumberedEnv()).full_action_spec.expand(2)),
        **more,
    ),
    "the policy": lambda **more: Collector(partial(numbered, 0), drawn({3, 25, 90}), **more),
    "random actions": lambda **more: Collector(
        partial(numbered, 0, {3, 25}), drawn(), init_random_frames=60, **more
    ),
    "the hook before": lambda **more: Collector(
        partial(numbered, 0),
        drawn(),
        pre_collect_hook=partial(pressing, counts=[], presses={2, 4}),
        **more,
    ),
    "the hook after": lambda **more: Collector(
        partial(numbered, 0),
        drawn(),
        post_collect_hook=partial(pressing, counts=[], presses={1, 6}),
        **more,
    ),
    "postproc": lambda **more: Collector(
        partial(numbered, 0), drawn(), postproc=partial(pressing, counts=[], presses={2}), **more
    ),
    "whole trajectories": lambda **more: Collector(
        partial(numbered, 0, {3, 25}), drawn(), trajs_per_batch=4, traj_format="cat", **more
    ),
    "overridden": lambda **more: Overriding(partial(numbered, 0, {3, 55}), drawn(), **more),
    "ready": lambda **more: AsyncBatchedCollector(
        [partial(NumberedEnv, number=i, lengths=LENGTHS) for i in range(2)],
        policy=drawn({3, 25, 31}),
        **more,
    ),
}


class Overriding(Collector):
    def rollout(self):
        return torch.cat([super().rollout(), super().rollout()], -1)


def rest(collector, most=None):
    """The batches that are left, and the number of times that Ctrl-C ended a call."""
    found, pressed = [], 0
    while most is None or len(found) < most:
        try:
            batch = collector.next()
        except KeyboardInterrupt:
            pressed += 1
            continue
        if batch is None:
            break
        found.append(batch.clone())
    return found, pressed


def same(batches, others):
    assert len(batches) == len(others)
    return all((one == other).all() for one, other in zip(batches, others, strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_lost_or_repeated(place, monkeypatch):
    with PLACES[place](**OPTIONS) as collector:
        collector.set_seed(3)
        batches, pressed = rest(collector)
    assert pressed >= 1
    monkeypatch.setitem(globals(), "press", lambda: None)
    with PLACES[place](**OPTIONS) as collector:
        collector.set_seed(3)
        expected, none = rest(collector)
    assert none == 0
    if place != "ready":
        assert same(batches, expected)
    elif batches:
        assert sum(map(len, batches)) == FRAMES * BATCHES


def test_the_loop_can_begin_anew():
    ledger = Ledger([NumberedEnv(number=0, lengths=LENGTHS)])
    with Collector(partial(numbered, 0, {3, 25, 50}), drawn(), **OPTIONS) as collector:
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                deque(map(ledger.add, collector))
        deque(map(ledger.add, collector))
    assert ledger.frames == FRAMES * BATCHES


def test_the_loop_can_begin_anew_for_the_last_batch():
    def pressed(batch):
        if collector.stats()["frames"] == FRAMES * BATCHES:
            press()

    with Collector(
        partial(numbered, 0), drawn(), post_collect_hook=pressed, **OPTIONS
    ) as collector:
        found = []
        with pytest.raises(KeyboardInterrupt):
            found.extend(collector)
        found = [*collector]
        assert [len(batch) for batch in found] == [FRAMES]


@pytest.mark.parametrize("nested", [False, True])
def test_a_second_one_ends_the_collector(nested):
    """Also if it comes while the program's handler is at work on the first."""

    def note(signum, frame):
        seen.append(signum)
        if len(seen) == 2:
            raise KeyboardInterrupt
        press()

    seen = []
    if nested:
        signal.signal(signal.SIGINT, note)
    times = 1 if nested else 2
    with Collector(partial(numbered, 0, {3}, times), drawn(), **OPTIONS) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        assert collector.closed
        with pytest.raises(RuntimeError, match="after KeyboardInterrupt"):
            collector.next()


@pytest.mark.parametrize("presses", [{25}, {40}], ids=["under way", "complete"])
def test_the_state_has_the_batch_under_way(presses):
    with Collector(partial(numbered, 0, presses), drawn(), **OPTIONS) as collector:
        collector.set_seed(3)
        collector.next()
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        state = collector.state_dict()
        expected, _ = rest(collector)
    with Collector(partial(numbered, 0), drawn(), **OPTIONS) as collector:
        collector.load_state_dict(state)
        batches, _ = rest(collector)
    assert len(expected) == BATCHES - 1
    assert same(batches, expected)


def test_a_state_replaces_the_batch_under_way():
    with Collector(partial(numbered, 0, {25}), drawn(), **OPTIONS) as collector:
        collector.set_seed(3)
        state = collector.state_dict()
        expected, _ = rest(collector, 1)
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        collector.load_state_dict(state)
        batches, _ = rest(collector, 1)
        assert same(batches, expected)


def test_a_reset_keeps_the_batch_under_way():
    with Collector(partial(numbered, 0, {3}), drawn(), **OPTIONS) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        collector.reset()
        batch, following = rest(collector, 2)[0]
    assert (batch["collector", "traj_ids"][-1] < following["collector", "traj_ids"][0]).all()
    ledger = Ledger([NumberedEnv(number=0, lengths=LENGTHS)])
    ledger.add(batch)
    assert ledger.frames == FRAMES


def test_handlers_of_the_program_run_at_once():
    seen = []

    def note(signum, frame):
        seen.append(signum)
        if len(seen) == 2:
            raise TimeoutError("the program's own")

    signal.signal(signal.SIGINT, note)
    with Collector(partial(numbered, 0, {3, 25}), drawn(), **OPTIONS) as collector:
        assert collector.next() is not None
        assert seen == [signal.SIGINT]
        with pytest.raises(TimeoutError):
            collector.next()
        assert collector.next() is not None
        assert signal.getsignal(signal.SIGINT) is note


@pytest.mark.parametrize("own", [signal.default_int_handler, signal.SIG_IGN])
def test_one_that_comes_while_the_handler_is_replaced(own, monkeypatch):
    def replace(number, new, real=interrupts.set_signal_handler):
        before = real(number, new)
        if presses and new is not own:
            press()
            presses.pop()
        return before

    signal.signal(signal.SIGINT, own)
    presses = [True]
    monkeypatch.setattr(interrupts, "set_signal_handler", replace)
    with Collector(partial(numbered, 0), drawn(), **OPTIONS) as collector:
        if callable(own):
            with pytest.raises(KeyboardInterrupt):
                collector.next()
        assert collector.next() is not None
        assert not presses
        assert signal.getsignal(signal.SIGINT) is own


def test_other_threads_are_not_interrupted():
    found = []
    with Collector(partial(numbered, 0), drawn(), **OPTIONS) as collector:
        thread = threading.Thread(target=lambda: found.append(collector.next()))
        thread.start()
        thread.join()
    assert len(found) == 1


class Waiting(gymnasium.Wrapper):
    """Environment of a worker: some steps wait until Ctrl-C has ended the driver's call."""

    def __init__(self, env, reached, go_on):
        super().__init__(env)
        self.reached, self.go_on, self.steps = reached, go_on, 0

    def step(self, action):
        self.steps += 1
        if self.steps in (3, 17, 31):
            self.reached.release()
            self.go_on.acquire()
        return super().step(action)


WORKERS = {
    "sync": (MultiSyncCollector, {}),
    "prefetch": (MultiSyncCollector, {"prefetch": 1}),
    "async": (MultiAsyncCollector, {}),
    "inference process": (
        AsyncBatchedCollector,
        {
            "policy": RandomPolicy(GymEnv(NumberedEnv()).full_action_spec.expand(2)),
            "policy_backend": "multiprocessing",
        },
    ),
}


@pytest.mark.parametrize("kind", WORKERS)
def test_workers(kind):
    spawn = multiprocessing.get_context("spawn")
    reached, go_on = spawn.Semaphore(0), spawn.Semaphore(0)

    def make():
        return Waiting(NumberedEnv(number=0, lengths=LENGTHS), reached, go_on)

    def interrupt():
        for _ in range(3):
            reached.acquire()
            os.kill(os.getpid(), signal.SIGINT)

    cls, options = WORKERS[kind]
    other = partial(NumberedEnv, number=1, lengths=LENGTHS)
    ledger = Ledger([NumberedEnv(number=i, lengths=LENGTHS) for i in range(2)])
    waits, presses = [False], []

    def handle(signum, frame):
        # Workers that collect ahead may come to such a step while nobody waits for them.
        presses.append(waits[0])
        if waits[0]:
            raise KeyboardInterrupt
        go_on.release()

    signal.signal(signal.SIGINT, handle)
    delivered = more = 0
    with cls([make, other], frames_per_batch=FRAMES, total_frames=-1, **options) as collector:
        thread = threading.Thread(target=interrupt)
        thread.start()
        # How many frames come before the third wait depends on the speed of the other environment.
        while more < 2:
            more += not thread.is_alive()
            batch = "none yet"
            try:
                waits[0] = True
                batch = collector.next()
                waits[0] = False
            except KeyboardInterrupt:
                waits[0] = False
                go_on.release()
                if isinstance(batch, str):
                    continue
            ledger.add(batch)
            delivered += 1
        thread.join()
    assert len(presses) == 3
    assert ledger.frames == FRAMES * delivered


# --- constructors


def test_what_ctrl_c_left_half_made_is_deleted_without_a_word():
    """Ctrl-C may end a constructor before its first line."""
    found = []
    for module in pkgutil.walk_packages(trawl.__path__, "trawl."):
        if module.name.endswith("__main__"):
            continue
        for cls in vars(importlib.import_module(module.name)).values():
            if isinstance(cls, type) and cls.__module__ == module.name and "__del__" in vars(cls):
                # Also that of an abstract class.
                made = type(cls)(cls.__name__, (cls,), {})
                made.__abstractmethods__ = frozenset()
                object.__new__(made).__del__()
                found.append(cls.__name__)
    assert {"Evaluator", "BaseCollector", "ProcessBackend", "IpcConnection"} <= set(found)
