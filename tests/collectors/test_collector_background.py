import threading
from contextlib import nullcontext

import pytest
from collector_parts import PATIENCE, Buffer, Scorer, by_step

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


def test_frames_reach_the_buffer_in_the_background():
    buffer = Buffer()
    ledger = Ledger([NumberedEnv()])
    collector = made(buffer)
    before = threading.active_count()
    collector.start()
    collector.start()
    # Starting twice starts once.
    assert threading.active_count() == before + 1
    buffer.wait_for(50)
    collector.async_shutdown()
    assert collector.closed
    assert not collector.is_running()
    assert "Collector.start" not in {thread.name for thread in threading.enumerate()}
    ledger.add(buffer.content())
    assert ledger.frames == len(buffer) == collector.stats()["frames"]
    collector.async_shutdown()
    collector.shutdown()


def test_single_frames_end_exactly_at_the_total():
    buffer = Buffer()
    with made(buffer, total_frames=17, extend_buffer=False) as collector:
        collector.start()
        buffer.wait_for(17)
        with collector.pause():
            assert steps(buffer) == list(range(1, 18))


def test_the_thread_is_named_and_dies_with_the_program():
    gate = Gate()
    with made(gate) as collector:
        assert not collector.is_running()
        collector.start()
        gate.wait_for_batch()
        assert collector.is_running()
        (thread,) = [t for t in threading.enumerate() if t.name == "Collector.start"]
        assert thread.daemon
        gate.let(1000)


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


def test_it_can_be_started_again_after_more_frames_are_allowed_by_a_checkpoint():
    buffer = Buffer()
    with made(buffer, total_frames=10) as collector:
        begin = collector.state_dict()
        collector.start()
        buffer.wait_for(10)
        with collector.pause():
            collector.load_state_dict(begin)
        collector.start()
        buffer.wait_for(20)
        with collector.pause():
            assert len(buffer) == 20


# --- pause


def test_no_frame_arrives_during_a_pause():
    buffer = Buffer()
    with made(buffer, by_step()) as collector:
        collector.start()
        for _ in range(5):
            with collector.pause():
                count = len(buffer)
                assert count == collector.stats()["frames"]
                # Were it not held, the thread would go on while this one waits.
                with buffer.changed:
                    assert not buffer.changed.wait_for(lambda n=count: len(buffer) > n, 0.02)
            buffer.wait_for(count + 5)


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


def test_pauses_may_be_nested():
    buffer = Buffer()
    with made(buffer) as collector:
        collector.start()
        buffer.wait_for(5)
        with collector.pause():
            count = len(buffer)
            with collector.pause():
                pass
            with buffer.changed:
                assert not buffer.changed.wait_for(lambda: len(buffer) > count, 0.02)
        # An error within one ends it.
        with pytest.raises(LookupError), collector.pause():
            raise LookupError
        buffer.wait_for(len(buffer) + 5)


def test_shutting_down_within_a_pause_works():
    buffer = Buffer()
    collector = made(buffer)
    collector.start()
    with collector.pause():
        count = len(buffer)
        collector.shutdown()
    assert len(buffer) == count
    assert collector.closed


def load_own_state(collector):
    with collector.pause():
        collector.load_state_dict(collector.state_dict())


CALLS = [
    lambda collector: collector.state_dict(),
    lambda collector: load_own_state(collector),
    lambda collector: collector.update_policy_weights_(Scorer(2)),
    lambda collector: collector.set_seed(3),
    lambda collector: collector.reset(),
    lambda collector: collector.stats(),
    lambda collector: collector.map_fn("env.full_action_spec.clone"),
    lambda collector: collector.cascade_execute("env.full_action_spec.clone"),
    lambda collector: collector.get_distant_attr("policy.scores"),
    lambda collector: collector.increment_version(),
]


@pytest.mark.parametrize("held", [False, True], ids=["running", "paused"])
def test_control_calls_work_at_any_time_and_lose_no_frame(held):
    buffer = Buffer()
    with made(buffer, Scorer(1), track_policy_version=True) as collector:
        collector.start()
        for call in CALLS:
            buffer.wait_for(len(buffer) + 10)
            with collector.pause() if held else nullcontext():
                call(collector)
        buffer.wait_for(len(buffer) + 10)
    found = steps(buffer)
    assert found == list(range(1, len(found) + 1))


def test_iterating_meanwhile_collects_each_frame_once():
    buffer = Buffer()
    with made(buffer, total_frames=100) as collector:
        collector.start()
        assert all(batch is None for batch in collector)
        buffer.wait_for(100)
    assert steps(buffer) == list(range(1, 101))


def test_hooks_may_control_the_collector():
    buffer = Buffer()
    versions = []

    def hook(batch):
        collector.update_policy_weights_(Scorer(3))
        versions.append(collector.state_dict()["policy_version"])

    options = {"total_frames": 15, "track_policy_version": True, "post_collect_hook": hook}
    collector = made(buffer, Scorer(0), **options)
    with collector:
        collector.start()
        buffer.wait_for(15)
        with collector.pause():
            assert versions == [1, 2, 3]


# --- errors


class Announcing(FaultyEnv):
    """Says when it has been closed."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.closed = threading.Event()

    def close(self):
        self.closed.set()


def failed():
    """A collector whose environment has failed in the background, with its error printed."""
    buffer = Buffer()
    env = FaultyEnv(at=12, fault=OSError("disk"))
    collector = made(buffer, env=env)
    collector.start()
    for thread in threading.enumerate():
        if thread.name == "Collector.start":
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


def test_an_error_in_the_background_surfaces():
    for call in LATER:
        collector, _ = failed()
        with pytest.raises(OSError, match=r"disk") as caught:
            call(collector)
        assert "at its step 12" in caught.value.__notes__[0]
        assert collector.closed


def test_an_error_in_the_background_is_printed_at_once_and_raised_once(capfd):
    collector, buffer = failed()
    with pytest.raises(OSError, match=r"disk"):
        collector.stats()
    shown = capfd.readouterr().err
    assert "OSError: disk" in shown
    assert "Traceback" in shown
    assert collector.stats()["frames"] == 10
    # What was collected before is in the buffer.
    assert steps(buffer) == list(range(1, 11))
    with pytest.raises(RuntimeError, match=r"start\(\) failed because the collector was shut down"):
        collector.start()
    collector.async_shutdown()


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


def test_shutdown_after_an_error_works_twice():
    collector, _ = failed()
    collector.shutdown()
    collector.shutdown()


# --- the end


def test_the_environment_may_stay_open():
    env = Announcing(at=-1, fault="nan")
    collector = made(env=env)
    collector.start()
    collector.async_shutdown(close_env=False)
    assert not env.closed.is_set()


@pytest.mark.parametrize("method", ["shutdown", "async_shutdown"])
def test_ending_does_not_wait_longer_than_asked(method):
    gate = Gate()
    env = Announcing(at=-1, fault="nan")
    collector = made(gate, env=env)
    collector.start()
    gate.wait_for_batch()
    with pytest.raises(TimeoutError, match=r"did not stop within 0\.01 s"):
        getattr(collector, method)(timeout=0.01)
    # Nothing was closed under the thread, and the end can be waited for again.
    assert not env.closed.is_set()
    gate.let()
    getattr(collector, method)()
    assert collector.closed
    assert env.closed.is_set()
    assert len(gate) == 5


def test_ending_within_a_hook_works():
    buffer = Buffer()
    env = Announcing(at=-1, fault="nan")
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
    with Collector(Waiting(), Scorer(1), frames_per_batch=4, **options) as collector:
        collector.start()
        assert begun.wait(PATIENCE)
        collector.update_policy_weights_()
        assert not go.is_set()
        assert collector.policy_version == 1
        go.set()
