import gc
import threading
import time
import weakref
from functools import partial

import nursery
import pytest
from monitor_parts import PATIENCE, Recorder, ended, make, watch

from trawl import Collector, MultiAsyncCollector
from trawl.observe import Monitor
from trawl.testing import FaultyEnv, NumberedEnv

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_it_polls_at_once_and_again_and_again():
    sink = Recorder()
    with make(0) as collector, Monitor(collector, [sink], every=float("inf")):
        sink.wait_for(lambda: sink.steps == [0])
    sink = Recorder()
    with make(0) as collector, Monitor(collector, [sink], every=0.001):
        next(iter(collector))
        sink.wait_for(lambda: sink.steps[-4:] == [20] * 4)


def test_a_function_gets_a_dict_of_its_own():
    def spoils(stats):
        found.append(dict(stats))
        stats.clear()

    found, sink = [], Recorder()
    with make(0) as collector, Monitor(collector, [spoils, sink]):
        list(collector)
    assert found[-1] == sink.stats[-1]
    assert found[-1]["frames"] == 60


# --- its end


@pytest.mark.parametrize("step", ["before", "after"])
def test_an_interrupted_start_closes_the_sinks(step, monkeypatch):
    """Ctrl-C comes just before, or just after, the thread begins."""
    begin = threading.Thread.start

    def start(thread):
        if thread.name == "Monitor" and step == "before":
            raise KeyboardInterrupt
        begin(thread)
        if thread.name == "Monitor":
            raise KeyboardInterrupt

    sink = Recorder()
    with make(0) as collector:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(KeyboardInterrupt):
                Monitor(collector, [sink])
        for thread in threading.enumerate():
            if thread.name == "Monitor":
                thread.join(PATIENCE)
        assert sink.calls[-1] == "close"
        with Monitor(collector, [sink]):
            pass


def fails(at):
    return FaultyEnv(at, OSError("a fault"))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["monitor", "collector", "dropped", "in a cycle", "failed", "done"])
def test_it_ends_with_the_collector(how, workers):
    """The last poll has all frames, and then the sinks are closed, once."""
    sink = Recorder()
    # A fault is in the second batch of 20 frames: of one, or of each of two workers.
    env = partial(fails, 15 if workers else 25) if how == "failed" else "CartPole-v1"
    collector = make(workers, env, total_frames=200 if how == "failed" else 60)
    if how == "done":
        with collector:
            list(collector)
    monitor = Monitor(collector, [sink], every=float("inf"))
    sink.wait_for(lambda: sink.steps)
    if how == "monitor":
        list(collector)
        last = collector.stats(*["both"] * bool(workers))
        monitor.close()
        assert monitor.closed
        assert sink.stats[-1] == last
        assert ("worker_1/frames" in last) == (workers > 0)
        collector.shutdown()
    elif how == "collector":
        list(collector)
        assert not monitor.closed
        collector.shutdown()
    elif how == "failed":
        with pytest.raises(OSError, match="a fault"):
            list(collector)
    elif how in ("dropped", "in a cycle"):
        next(iter(collector))
        gone = weakref.ref(collector)
        if how == "in a cycle":
            collector.itself = collector
        del collector
        assert how == "dropped" or not monitor.closed
        gc.collect()
        assert gone() is None
    assert ended(monitor)
    assert sink.steps[-1] == (60 if how in ("monitor", "collector", "done") else 20)
    monitor.close()
    assert sink.calls == ["open", *["write"] * len(sink.stats), "close"]


def test_slow_sinks_do_not_keep_the_collector_alive():
    began, goes_on = threading.Event(), threading.Event()

    def slow(stats):
        if stats["frames"] == 20:
            began.set()
            assert goes_on.wait(PATIENCE)

    collector = make(0)
    gone = weakref.ref(collector)
    monitor = Monitor(collector, [slow], every=0.001)
    next(iter(collector))
    assert began.wait(PATIENCE)
    del collector
    assert gone() is None
    goes_on.set()
    assert ended(monitor)


def test_a_monitor_need_not_be_kept_and_keeps_nothing_once_closed():
    sink = Recorder()
    with make(0) as collector:
        monitor = weakref.ref(Monitor(collector, [sink], every=0.001))
        gc.collect()
        assert monitor() is None
        list(collector)
        sink.wait_for(lambda: sink.steps[-1] == 60)
        thread = next(one for one in threading.enumerate() if one.name == "Monitor")
    thread.join(PATIENCE)
    assert sink.calls[-1] == "close"
    other = Recorder()
    gone = weakref.ref(other)
    with make(0) as collector:
        monitor = Monitor(collector, [other])
        monitor.close()
        del other, monitor
        gc.collect()
        assert gone() is None
        next(iter(collector))


class Buffer(list):
    def extend(self, batch):
        self.append(batch)


def test_an_error_in_the_background_is_left_for_the_learner(capsys):
    sink = Recorder()
    env = FaultyEnv(25, OSError("a fault"))
    collector = Collector(env, frames_per_batch=10, replay_buffer=Buffer())
    monitor = Monitor(collector, [sink], every=0.001)
    collector.start()
    assert ended(monitor)
    assert sink.steps[-1] == 20
    for thread in threading.enumerate():
        if thread.name == "Collector.start":
            thread.join(PATIENCE)
    Monitor(collector, [sink]).close()
    assert "a fault" in capsys.readouterr().err
    with pytest.raises(OSError, match="a fault"):
        collector.stats()


def test_objects_with_other_statistics_are_counted_by_polls():
    class Counter:
        def stats(self):
            return {"a": 1}

    sink, counter = Recorder(), Counter()
    monitor = Monitor(counter, [sink], every=0.001)
    sink.wait_for(lambda: sink.steps[:3] == [1, 2, 3])
    assert sink.stats[0] == {"a": 1}
    del counter
    assert ended(monitor)


def test_a_sink_may_close_its_monitor(capsys):
    def close(stats):
        if stats["frames"] == 60:
            monitor.close()

    with make(0) as collector:
        monitor = Monitor(collector, [close], every=0.001)
        list(collector)
        assert ended(monitor)
    assert capsys.readouterr().err == ""


# --- sinks that fail, or are slow


def test_sinks_that_fail_are_reported_once_and_tried_again():
    def leave(stats):
        raise SystemExit

    bad, ends, good = Recorder(fails=["write", "close"]), Recorder(fails=["close"]), Recorder()
    with make(0) as collector, pytest.warns(RuntimeWarning) as warned:  # noqa: PT031
        monitor = Monitor(collector, [bad, leave, ends, good], every=0.001)
        for sink in (bad, good):
            sink.wait_for(lambda sink=sink: len(sink.steps) >= 3)
        assert sum(batch.numel() for batch in collector) == 60
        monitor.close()
    told = [str(warning.message).partition(": ")[2] for warning in warned]
    assert told == ["ConnectionError('no write')", "SystemExit()", "ConnectionError('no close')"]
    first = "a sink of a monitor failed, Recorder: "
    assert str(warned[0].message).startswith(first)
    assert bad.steps == good.steps
    assert bad.steps[-1] == 60
    assert bad.calls[-1] == good.calls[-1] == "close"


def test_a_sink_that_can_not_be_opened_is_an_error_at_once():
    first, bad, last = Recorder(), Recorder(fails=["open"]), Recorder()
    with make(0) as collector:
        with pytest.raises(ConnectionError, match="no open"):
            Monitor(collector, [first, bad, last])
        assert first.calls == ["open", "close"]
        assert bad.calls == ["open"]
        assert last.calls == []
        bad.fails = ()
        # A sink belongs to one monitor at a time.
        sinks = [first, bad, last]
        with (
            Monitor(collector, sinks),
            pytest.raises(ValueError, match="by a monitor already"),
        ):
            Monitor(collector, sinks[:1])
        with Monitor(collector, sinks):
            list(collector)
    assert first.steps[-1] == bad.steps[-1] == last.steps[-1] == 60
    assert first.calls.count("open") == first.calls.count("close") == 3


def test_statistics_that_can_not_be_read_are_reported_once():
    class Odd:
        calls = 0

        def stats(self):
            self.calls += 1
            if self.calls < 4:
                raise KeyError("odd")
            return {"frames": 5}

    sink, odd = Recorder(), Odd()
    with (
        pytest.warns(RuntimeWarning, match="can't be read: KeyError") as warned,
        Monitor(odd, [sink], every=0.001),
    ):
        sink.wait_for(lambda: sink.steps)
    assert len(warned) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_waits_for_slow_sinks_longer_than_it_is_told(workers):
    began, goes_on = threading.Event(), threading.Event()
    found = []

    def slow(stats):
        began.set()
        assert goes_on.wait(PATIENCE)
        found.append(stats["frames"])

    with make(workers) as collector:
        monitor = Monitor(collector, [slow], every=0.001)
        assert began.wait(PATIENCE)
        assert sum(batch.numel() for batch in collector) == 60
    assert not monitor.closed
    said = r"longer than 0 s to close: .* has not returned from write\(\)"
    with pytest.warns(RuntimeWarning, match=said):
        monitor.close(timeout=0)
    goes_on.set()
    monitor.close(timeout=None)
    assert monitor.closed
    assert (found[0], found[-1]) == (0, 60)


@pytest.mark.parametrize("step", ["open", "write", "close"])
def test_the_sink_that_a_call_waits_for_is_named(step, monkeypatch):
    monkeypatch.setattr("trawl.extras.monitors.monitor._SILENCE", 0.01)
    told, said = threading.Event(), list[str]()

    def note(text):
        said.append(text)
        if f"{step}()" in text:
            told.set()

    monkeypatch.setattr("trawl.extras.monitors.monitor._warn", note)

    class Hangs(Recorder):
        def _call(self, name):
            super()._call(name)
            if name == step:
                assert told.wait(PATIENCE)

    with make(0) as collector, Monitor(collector, [Hangs()]):
        pass
    what = "a new monitor waits" if step == "open" else "closing a monitor waits"
    # On a busy machine, other calls take longer than a moment, too.
    assert f"{what}: Hangs has not returned from {step}()" in said


# --- arguments


class Slotted:
    __slots__ = ()

    def stats(self):
        return {}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be a number of seconds above 0, but it is 0"),
        ({"every": float("nan")}, ValueError, "every must be"),
        ({"every": "1"}, TypeError, "every must be a number of seconds"),
        ({"sinks": Recorder()}, TypeError, "sinks must be a list of sinks"),
        ({"sinks": "csv:file"}, TypeError, "sinks must be a list of sinks"),
        ({"sinks": print}, TypeError, "sinks must be a list of sinks"),
        ({"sinks": ["csv:file"]}, TypeError, "but one is 'csv:file'"),
        ({"sinks": [Recorder]}, TypeError, "but one is <class"),
        ({"collector": 3}, TypeError, "collector must be a collector, .* but it is int: 3"),
        ({"collector": Slotted()}, TypeError, "weak reference"),
    ],
)
def test_wrong_arguments_open_no_sink(changes, error, message):
    sink = Recorder()
    with make(0) as collector, pytest.raises(error, match=message):
        Monitor(**{"collector": collector, "sinks": [sink], **changes})
    assert sink.calls == []


# --- the exit of the interpreter

_OPEN_AT_EXIT = """
    import sys
    from trawl import Collector, MultiSyncCollector
    from trawl.observe import Monitor

    workers = int(sys.argv[1])
    options = {"frames_per_batch": 20, "total_frames": 60}
    if workers:
        collector = MultiSyncCollector(["CartPole-v1"] * workers, **options)
    else:
        collector = Collector("CartPole-v1", **options)
    prints = lambda stats: print(stats["frames"], collector.closed, flush=True)
    Monitor(collector, [lambda stats: 1 / 0, prints])
    list(collector)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_the_exit_of_the_interpreter_ends_it(workers):
    """Warnings that are errors end nothing."""
    done = nursery.run(_OPEN_AT_EXIT, workers, finalize=True, warn=["error"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "60 False"
    assert done.stderr.count("RuntimeWarning: a sink of a monitor failed") == 1


def test_loggers_of_torchrl_are_sinks(tmp_path):
    record = pytest.importorskip("torchrl.record.loggers.csv")
    last = watch(record.CSVLogger("run", log_dir=str(tmp_path)), 2)
    folder = tmp_path / "run" / "scalars"
    rows = (folder / "collector" / "frames.csv").read_text().splitlines()
    assert rows[-1] == "60,60.0"
    assert (folder / "collector" / "worker_1" / "frames.csv").exists()
    assert "env_path" in {name.rpartition("/")[2] for name in last}
    assert not list(folder.rglob("env_path*"))


def test_frames_that_workers_write_themselves_are_all_counted():
    data = pytest.importorskip("torchrl.data")
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(1000), shared=True)
    sink = Recorder()
    options = {"frames_per_batch": 20, "total_frames": 200, "replay_buffer": buffer}
    collector = MultiAsyncCollector([NumberedEnv] * 2, **options)
    monitor = Monitor(collector, [sink], every=float("inf"))
    collector.next()
    # More batches than that one are counted only when the collector is closed.
    while buffer.write_count < 60:
        time.sleep(0.001)
    collector.shutdown()
    assert ended(monitor)
    assert sink.steps[-1] == collector.stats()["frames"] > 20
