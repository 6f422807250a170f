"""Collection in a thread, while others control the collector or end."""

import gc
import threading
import weakref
from contextlib import nullcontext, suppress

import nursery
import pytest
from collector_parts import PATIENCE, Buffer, by_step
from multi_parts import Chooser

from trawl.collectors import Collector
from trawl.testing import FaultyEnv, Ledger, NumberedEnv


def steps(buffer):
    """The numbers of the steps in the buffer."""
    return buffer.content()["next", "reward"][:, 0].int().tolist()


def made(buffer=None, policy=None, env=None, **options):
    """A collector of batches of five frames for a buffer, which is to be started."""
    buffer = Buffer() if buffer is None else buffer
    options = {"frames_per_batch": 5, "replay_buffer": buffer, **options}
    return Collector(NumberedEnv() if env is None else env, policy, **options)


def waited(event):
    assert event.wait(PATIENCE)


class Gate(Buffer):
    """A buffer that takes batches only when it is let, one for each call of ``let``."""

    def __init__(self):
        super().__init__()
        self.arrived = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)

    def extend(self, batch):
        self.arrived.release()
        assert self.allowed.acquire(timeout=PATIENCE)
        super().extend(batch)

    def wait_for_batch(self):
        assert self.arrived.acquire(timeout=PATIENCE)

    def let(self, batches=1):
        self.allowed.release(batches)


def collecting():
    """The threads that collect in the background."""
    return [thread for thread in threading.enumerate() if thread.name == "Collector.start"]


def test_frames_reach_the_buffer_in_one_thread_however_often_it_is_started():
    buffer, ledger, barrier = Buffer(), Ledger([NumberedEnv()]), threading.Barrier(4)
    collector = made(buffer)
    assert not collector.is_running()

    def start():
        barrier.wait()
        collector.start()

    starters = [threading.Thread(target=start) for _ in range(4)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    (thread,) = collecting()
    assert thread.daemon
    assert collector.is_running()
    buffer.wait_for(50)
    collector.async_shutdown()
    assert collector.closed
    assert not collector.is_running()
    assert not collecting()
    ledger.add(buffer.content())
    assert ledger.frames == len(buffer) == collector.stats()["frames"]
    collector.async_shutdown()
    collector.shutdown()


def test_single_frames_end_exactly_at_the_total_and_it_goes_on_from_a_checkpoint():
    buffer = Buffer()
    with made(buffer, total_frames=17, extend_buffer=False) as collector:
        begin = collector.state_dict()
        for times in (1, 2):
            collector.start()
            buffer.wait_for(17 * times)
            with collector.pause():
                assert steps(buffer) == [*range(1, 18)] * times
                collector.load_state_dict(begin)


def test_starting_and_pausing_need_a_buffer_and_an_open_collector():
    collector = Collector(NumberedEnv(), frames_per_batch=5)
    with pytest.raises(RuntimeError, match=r"start\(\) needs a replay buffer.* replay_buffer="):
        collector.start()
    # Ending it without a start closes it.
    collector.async_shutdown()
    assert collector.closed
    collector = made()
    with pytest.raises(
        RuntimeError, match=r"pause\(\) pauses the collection that start\(\) begins"
    ):
        collector.pause()
    collector.shutdown()
    with pytest.raises(RuntimeError, match=r"start\(\) failed because the collector was shut down"):
        collector.start()


# --- pause


def test_no_frame_arrives_during_a_pause():
    """Pauses may be nested, and an error within one ends it."""
    buffer = Buffer()
    with made(buffer, by_step()) as collector:
        collector.start()
        for _ in range(5):
            with suppress(LookupError), collector.pause():
                with collector.pause():
                    count = len(buffer)
                assert count == collector.stats()["frames"]
                # Were it not held, the thread would go on while this one waits.
                with buffer.changed:
                    assert not buffer.changed.wait_for(lambda n=count: len(buffer) > n, 0.02)
                raise LookupError
            buffer.wait_for(count + 5)
        with collector.pause():
            count = len(buffer)
            collector.shutdown()
    assert len(buffer) == count
    assert collector.closed


def test_pausing_waits_for_the_batch_that_is_collected():
    gate = Gate()
    entered = threading.Event()
    with made(gate) as collector:
        collector.start()
        gate.wait_for_batch()

        def pause():
            with collector.pause():
                assert len(gate) == 5
                entered.set()

        thread = threading.Thread(target=pause)
        thread.start()
        assert not entered.is_set()
        gate.let()
        waited(entered)
        gate.let(1000)
        thread.join()


def load_own_state(collector):
    with collector.pause():
        collector.load_state_dict(collector.state_dict())


CALLS = [
    lambda collector: collector.state_dict(),
    load_own_state,
    lambda collector: collector.update_policy_weights_(Chooser(2)),
    lambda collector: [collector.set_seed(seed) for seed in range(10)],
    lambda collector: collector.reset(),
    lambda collector: collector.stats(),
    lambda collector: collector.map_fn("env.full_action_spec.clone"),
    lambda collector: collector.cascade_execute("env.full_action_spec.clone"),
    lambda collector: collector.get_distant_attr("policy.choice"),
    lambda collector: collector.increment_version(),
]


def test_control_calls_work_at_any_time_and_lose_no_frame():
    buffer = Buffer()
    options = {"frames_per_batch": 50, "track_policy_version": True}
    with made(buffer, Chooser(1), **options) as collector:
        collector.start()
        for call in CALLS:
            for context in (nullcontext, collector.pause):
                buffer.wait_for(len(buffer) + 50)
                with context():
                    call(collector)
        buffer.wait_for(len(buffer) + 50)
        collector.async_shutdown()
    found, frames = steps(buffer), buffer.content()
    assert found == list(range(1, len(found) + 1))
    # In the middle of a batch, a seed or a reset would break what goes from row to row.
    following, root = frames["next", "observation"], frames["observation"]
    same = (following[:-1] == root[1:]).all(-1)
    new = frames["collector", "traj_ids"][1:] != frames["collector", "traj_ids"][:-1]
    assert (same | new).all()


def test_hooks_may_control_a_collector_that_others_iterate_meanwhile():
    versions, buffer = [], Buffer()

    def hook(batch):
        collector.update_policy_weights_(Chooser(3))
        versions.append(collector.state_dict()["policy_version"])

    options = {"total_frames": 100, "track_policy_version": True, "post_collect_hook": hook}
    collector = made(buffer, Chooser(0), **options)
    with collector:
        collector.start()
        assert all(batch is None for batch in collector)
        buffer.wait_for(100)
        with collector.pause():
            assert versions == list(range(1, 21))
    assert steps(buffer) == list(range(1, 101))


# --- errors


class Announcing(NumberedEnv):
    """Says when it has been closed."""

    def __init__(self):
        super().__init__()
        self.closed = threading.Event()

    def close(self):
        self.closed.set()


def failed():
    """A collector whose environment has failed in the background, with its error printed."""
    buffer = Buffer()
    env = FaultyEnv(at=12, fault=OSError("disk"))
    collector = made(buffer, env=env)
    collector.start()
    for thread in collecting():
        thread.join(PATIENCE)
    return collector, buffer


LATER = [
    lambda collector: collector.stats(),
    lambda collector: collector.start(),
    lambda collector: collector.async_shutdown(),
    lambda collector: collector.pause().__enter__(),
    lambda collector: collector.state_dict(),
    lambda collector: collector.next(),
    lambda collector: list(collector),
]


def test_an_error_in_the_background_is_printed_at_once_and_raised_once(capfd):
    for call in LATER:
        collector, buffer = failed()
        with pytest.raises(OSError, match=r"disk") as caught:
            call(collector)
        assert "at its step 12" in caught.value.__notes__[0]
        assert collector.closed
        shown = capfd.readouterr().err
        assert "Traceback" in shown
        assert "OSError: disk" in shown
        assert collector.stats()["frames"] == 10
        # What was collected before is in the buffer.
        assert steps(buffer) == list(range(1, 11))
        why = r"start\(\) failed because the collector was shut down"
        with pytest.raises(RuntimeError, match=why):
            collector.start()
        collector.async_shutdown()
    collector, _ = failed()
    collector.shutdown()
    collector.shutdown()


def test_weights_sent_while_an_error_closes_the_collector_are_refused_with_its_cause(monkeypatch):
    env = FaultyEnv(at=12, fault=OSError("disk"))
    collector = Collector(env, frames_per_batch=5, total_frames=100)

    def closing(*args):
        with pytest.raises(OSError, match=r"disk"):
            list(collector)
        raise KeyError(0)

    monkeypatch.setattr(collector.parts.weights, "prepare", closing)
    with pytest.raises(RuntimeError, match=r"shut down after OSError: disk"):
        collector.update_policy_weights_({})


# --- the end


@pytest.mark.parametrize("method", ["shutdown", "async_shutdown"])
def test_ending_does_not_wait_longer_than_asked(method):
    gate = Gate()
    env = Announcing()
    collector = made(gate, env=env)
    collector.start()
    gate.wait_for_batch()
    with pytest.raises(TimeoutError, match=r"did not stop within 0\.01 s"):
        getattr(collector, method)(timeout=0.01)
    # Nothing was closed under the thread, and the end can be waited for again.
    assert not env.closed.is_set()
    gate.let()
    getattr(collector, method)(close_env=method == "shutdown")
    assert collector.closed
    assert env.closed.is_set() == (method == "shutdown")
    assert len(gate) == 5


def test_ending_within_a_hook_works():
    buffer = Buffer()
    env = Announcing()
    collector = made(buffer, env=env, post_collect_hook=lambda batch: collector.shutdown())
    collector.start()
    waited(env.closed)
    collector.async_shutdown()
    assert len(buffer) == 5


def test_an_update_of_the_policy_that_acts_waits_for_nothing():
    begun, go = threading.Event(), threading.Event()

    class Waiting(NumberedEnv):
        def step(self, action):
            begun.set()
            assert go.wait(PATIENCE)
            return super().step(action)

    options = {"replay_buffer": Buffer(), "track_policy_version": True}
    with Collector(Waiting(), Chooser(1), frames_per_batch=4, **options) as collector:
        collector.start()
        assert begun.wait(PATIENCE)
        collector.update_policy_weights_()
        assert not go.is_set()
        assert collector.policy_version == 1
        go.set()


FORGETFUL = """
import threading
import torch
from tensordict.nn import TensorDictModule
from trawl import Collector

class Buffer:
    def extend(self, batch): filled.set()

filled = threading.Event()
policy = TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["action"])
collector = Collector("Pendulum-v1", policy, frames_per_batch=200, replay_buffer=Buffer())
collector.start()
filled.wait()
print("the end")
"""


def test_a_program_that_forgets_to_shut_down_ends_well():
    done = nursery.run(FORGETFUL, finalize=True)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


def test_a_collector_nobody_holds_stops_collecting():
    buffer = Buffer()
    collector = made(buffer)
    collector.start()
    buffer.wait_for(10)
    ((thread,), gone) = collecting(), weakref.ref(collector)
    del collector
    thread.join(PATIENCE)
    gc.collect()
    assert not thread.is_alive()
    assert gone() is None


def test_a_batch_has_the_version_that_it_began_with():
    began, changed = threading.Event(), threading.Event()

    def stop():
        began.set()
        return changed.is_set()

    options = {"frames_per_batch": 100_000, "interruptor": stop, "track_policy_version": True}
    with Collector(NumberedEnv(), by_step(), **options) as collector:
        waiter = threading.Thread(
            target=lambda: (began.wait(), changed.set(), collector.increment_version())
        )
        waiter.start()
        batch = collector.next()
        waiter.join()
        assert batch["policy_version"].unique().tolist() == [0]
        assert collector.policy_version == 1
