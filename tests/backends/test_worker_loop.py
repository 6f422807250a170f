"""Loop of a worker: how a thread is broken off."""

import sys
import threading

import nursery

from trawl.backends.processes.loop import Breaker, Stopped, ThreadBreaker

# Breaks a thread off while it cannot be broken off, or once it can, and profiles a call after that.
AFTERWARDS = """
import sys, threading
from trawl.backends.processes.loop import Stopped, ThreadBreaker

def run(shielded):
    breaker = ThreadBreaker()
    def stop():
        if shielded:
            with breaker.shielded():
                breaker.stop()
        else:
            breaker.stop()
    try:
        breaker.call(lambda: None)
        breaker.call(stop)
    except Stopped:
        print("stopped")
    breaker.seal()

for shielded in (True, False):
    thread = threading.Thread(target=run, args=(shielded,))
    thread.start()
    thread.join()
    sys.setprofile(lambda *event: None)
    (lambda: None)()
    sys.setprofile(None)
    print("profiled")
"""


def test_calls_can_be_profiled_after_a_thread_was_broken_off() -> None:
    done = nursery.run(AFTERWARDS)
    assert done.stdout.split() == ["stopped", "profiled"] * 2, done.stderr


def test_what_may_not_be_broken_off_ends_whenever_the_stop_comes() -> None:
    for _ in range(20):
        stop_between()


def stop_between() -> None:
    finished = []

    def run() -> None:
        breaker = ThreadBreaker()
        breakers.append(breaker)
        made.set()
        try:
            while True:
                breaker.call(lambda: None)
                begun = len(finished)
                finished.append("begun")
                assert len(finished) == begun + 1
                finished.pop()
        except Stopped:
            breaker.seal()

    made, breakers = threading.Event(), []
    thread = threading.Thread(target=run)
    thread.start()
    made.wait()
    breakers[0].stop()
    thread.join(60)
    assert not thread.is_alive()
    assert not finished


# Stops work where the interpreter ignores exceptions: in a finalizer, and in a callback of the
# garbage collector.
IGNORING = """
import gc, sys, threading
from trawl.backends.processes.loop import Breaker, Stopped, ThreadBreaker

hook = sys.unraisablehook

def stop_once(*event):
    if not breaker.stopping:
        breaker.stop()
        while True:
            pass

class Finalized:
    __del__ = stop_once

def collect():
    gc.callbacks.append(stop_once)
    gc.collect()

def work(place):
    place()
    while True:
        pass

def run(kind, place):
    global breaker
    breaker = kind()
    with breaker.installed():
        try:
            breaker.call(work, place)
        except Stopped:
            print("stopped")
        breaker.seal()
    gc.callbacks[:] = [call for call in gc.callbacks if call is not stop_once]

for place in (Finalized, collect):
    run(Breaker, place)
    thread = threading.Thread(target=run, args=(ThreadBreaker, place))
    thread.start()
    thread.join()
print(sys.unraisablehook is hook)
"""


def test_work_is_stopped_where_exceptions_are_ignored() -> None:
    done = nursery.run(IGNORING)
    assert done.stderr == ""
    assert done.stdout.split() == [*["stopped"] * 4, "True"]


def test_a_breaker_that_cannot_be_installed_leaves_nothing() -> None:
    hook, errors = sys.unraisablehook, []

    def run() -> None:
        try:
            with Breaker().installed():
                pass
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert sys.unraisablehook is hook


FOLLOWED = """
import sys
from trawl.envs import ParallelEnv

for follow in (sys.settrace, sys.setprofile):
    env = ParallelEnv(2, "CartPole-v1", backend="thread")
    env.reset()
    follow(lambda *event: None)
    env.close()
    follow(None)
    print("closed")
"""


def test_a_program_that_a_debugger_or_profiler_follows_closes_its_threads() -> None:
    done = nursery.run(FOLLOWED)
    assert (done.stdout.split(), done.stderr) == (["closed", "closed"], "")
