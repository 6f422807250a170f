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
from collector_parts import by_step

import trawl
from tests.oracle.cases import Case, collector_of, policy_of
from tests.oracle.comparing import compare
from tests.oracle.test_cuts import TOLD_APART
from trawl import Collector, MultiAsyncCollector, MultiSyncCollector, interrupts
from trawl.collectors import AsyncBatchedCollector
from trawl.envs import GymEnv
from trawl.rollout.policy.random_policy import RandomPolicy
from trawl.testing import Ledger, NumberedEnv
from trawl.testing.faces import FACES
from trawl.testing.oracle import Options

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


OPTIONS = {"frames_per_batch": FRAMES, "total_frames": FRAMES * BATCHES}
SPEC = GymEnv(NumberedEnv()).full_action_spec


def made(presses=(), times=1, **options):
    return Collector(partial(numbered, 0, presses, times), by_step(), **OPTIONS, **options)


class Overriding(Collector):
    def rollout(self):
        return torch.cat([super().rollout(), super().rollout()], -1)


PLACES = {
    "a list": lambda: Collector(
        [partial(numbered, 0, {3, 27}), partial(numbered, 1, {10, 41})],
        RandomPolicy(SPEC.expand(2)),
        **OPTIONS,
    ),
    "random actions": lambda: made({3, 25}, init_random_frames=60),
    "overridden": lambda: Overriding(partial(numbered, 0, {3, 55}), by_step(), **OPTIONS),
}


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
def test_nothing_is_drawn_twice(place, monkeypatch):
    found = []
    for _ in range(2):
        with PLACES[place]() as collector:
            collector.set_seed(3)
            found.append(rest(collector))
        monkeypatch.setitem(globals(), "press", lambda: None)
    (batches, pressed), (expected, none) = found
    assert pressed >= 1
    assert none == 0
    assert same(batches, expected)


class Presses:
    """Does something, and presses Ctrl-C in the third call."""

    def __init__(self, act=lambda *args: args[0] if args else None):
        self.act, self.calls = act, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == 3:
            press()
        return self.act(*args)


class PressingPolicy(Presses):
    def __call__(self, tensordict):
        return super().__call__(tensordict)


WHERE = ("policy", "pre_collect_hook", "post_collect_hook", "postproc")


@pytest.mark.parametrize("index", range(len(TOLD_APART) + 1))
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_lost_or_repeated(index):
    """Ctrl-C comes in the policy or in a hook, and another collector goes on from the state."""
    face, place = [*((face, "one") for face in TOLD_APART), ("list", "ready")][index]
    if FACES[face].needs:
        pytest.importorskip(FACES[face].needs)
    options = Options(frame_stack=3, normalize_rewards=place == "one")
    for number in range(2):
        where = WHERE[(index + number) % 4]
        delivery = ("rows", "cat", "in_turn")[(index + number) % 3]
        case = Case(face, options, place, delivery, policy="tensordict")

        def pressed(case=case, where=where):
            if where == "policy":
                return collector_of(case, PressingPolicy(policy_of(case)), **case.in_step)
            return collector_of(case, **{where: Presses()}, **case.in_step)

        collector, found, count = pressed(), [], 0
        while len(found) < 4:
            try:
                found.append(collector.next().clone())
            except KeyboardInterrupt:
                count += 1
                state = collector.state_dict()
                collector.shutdown()
                collector = pressed()
                collector.load_state_dict(state)
        compare(case, found, collector.normalization)
        collector.shutdown()
        assert count


def test_the_loop_can_begin_anew():
    ledger = Ledger([NumberedEnv(number=0, lengths=LENGTHS)])
    with made({3, 25, 50}) as collector:
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                deque(map(ledger.add, collector))
        deque(map(ledger.add, collector))
    assert ledger.frames == FRAMES * BATCHES


def test_the_loop_can_begin_anew_for_the_last_batch():
    def pressed(batch):
        if collector.stats()["frames"] == FRAMES * BATCHES:
            press()

    with made(post_collect_hook=pressed) as collector:
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
    with made({3}, times) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        assert collector.closed
        with pytest.raises(RuntimeError, match="after KeyboardInterrupt"):
            collector.next()


def test_a_state_replaces_the_batch_under_way():
    with made({25}) as collector:
        collector.set_seed(3)
        state = collector.state_dict()
        expected, _ = rest(collector, 1)
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        collector.load_state_dict(state)
        batches, _ = rest(collector, 1)
        assert same(batches, expected)


def test_a_reset_keeps_the_batch_under_way():
    with made({3}) as collector:
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
    with made({3, 25}) as collector:
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
    with made() as collector:
        if callable(own):
            with pytest.raises(KeyboardInterrupt):
                collector.next()
        assert collector.next() is not None
        assert not presses
        assert signal.getsignal(signal.SIGINT) is own


def test_other_threads_are_not_interrupted():
    found = []
    with made() as collector:
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
            "policy": RandomPolicy(SPEC.expand(2)),
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
