import gc
import threading
import weakref
from functools import partial

import nursery
import pytest
from monitor_parts import PATIENCE, Recorder, ended, make, watch

from trawl import Collector, MultiAsyncCollector
from trawl.observe import Monitor
from trawl.testing import FaultyEnv, NumberedEnv

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_last_poll_has_all_frames(workers):
    sink = Recorder()
    last = watch(sink, workers)
    assert sink.calls == ["open", *["write"] * len(sink.stats), "close"]
    assert sink.steps[-1] == 60
    assert sink.stats[-1] == last
    assert ("worker_1/frames" in last) == (workers > 0)


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


@pytest.mark.parametrize("workers", [0, 2])
def test_it_ends_with_the_collector(workers):
    sink = Recorder()
    with make(workers, **({"start_method": "forkserver"} if workers else {})) as collector:
        monitor = Monitor(collector, [sink])
        list(collector)
        assert not monitor.closed
    assert ended(monitor)
    assert sink.steps[-1] == 60
    assert sink.calls[-1] == "close"
    monitor.close()
    assert sink.calls.count("close") == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collector_that_is_dropped_ends_both(workers):
    sink = Recorder()
    collector = make(workers)
    monitor = Monitor(collector, [sink])
    sink.wait_for(lambda: sink.steps)
    next(iter(collector))
    gone = weakref.ref(collector)
    del collector
    assert ended(monitor)
    gc.collect()
    assert gone() is None
    assert sink.steps[-1] == 20
    assert sink.calls[-1] == "close"


def test_a_collector_in_a_cycle_that_is_dropped_ends_both():
    sink = Recorder()
    collector = make(0)
    collector.itself = collector
    monitor = Monitor(collector, [sink])
    sink.wait_for(lambda: sink.steps)
    next(iter(collector))
    del collector
    assert not monitor.closed
    gc.collect()
    assert ended(monitor)
    assert sink.steps[-1] == 20


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


def test_a_monitor_need_not_be_kept():
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


def fails(at):
    return FaultyEnv(at, OSError("a fault"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failure_ends_it(workers):
    sink = Recorder()
    # The second batch of 20 frames fails: of one, or of each of two workers.
    collector = make(workers, partial(fails, 15 if workers else 25), total_frames=200)
    monitor = Monitor(collector, [sink])
    with pytest.raises(OSError, match="a fault"):
        list(collector)
    assert ended(monitor)
    assert sink.steps[-1] == 20


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


def test_a_closed_collector_is_polled_once():
    sink = Recorder()
    with make(0) as collector:
        list(collector)
    monitor = Monitor(collector, [sink], every=float("inf"))
    assert ended(monitor)
    assert set(sink.steps) == {60}
    assert sink.calls[-1] == "close"


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


def test_closing_forgets_the_collector_and_the_sinks():
    sink = Recorder()
    gone = weakref.ref(sink)
    with make(0) as collector:
        monitor = Monitor(collector, [sink])
        monitor.close()
        del sink, monitor
        gc.collect()
        assert gone() is None
        next(iter(collector))


def test_a_sink_may_close_its_monitor():
    def close(stats):
        if stats["frames"] == 60:
            monitor.close()

    with make(0) as collector:
        monitor = Monitor(collector, [close], every=0.001)
        list(collector)
        assert ended(monitor)


# --- sinks that fail, or are slow


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sink_that_fails_is_reported_once_and_tried_again(workers):
    bad, good = Recorder(fails=["write", "close"]), Recorder()
    frames = []
    with make(workers) as collector, pytest.warns(RuntimeWarning) as warned:  # noqa: PT031
        monitor = Monitor(collector, [bad, good], every=0.001)
        for sink in (bad, good):
            sink.wait_for(lambda sink=sink: len(sink.steps) >= 3)
        frames += [batch.numel() for batch in collector]
        monitor.close()
    (warning,) = warned
    message = "a sink of a monitor failed, Recorder: ConnectionError('no write')"
    assert message in str(warning.message)
    assert sum(frames) == 60
    assert bad.steps == good.steps
    assert bad.steps[-1] == 60
    assert bad.calls[-1] == good.calls[-1] == "close"


def test_a_sink_that_fails_at_its_end_and_one_that_exits_are_reported():
    def leave(stats):
        raise SystemExit

    bad, good = Recorder(fails=["close"]), Recorder()
    with (
        make(0) as collector,
        pytest.warns(RuntimeWarning, match="no close"),
        pytest.warns(RuntimeWarning, match=r"leave.*SystemExit"),
        Monitor(collector, [bad, leave, good]),
    ):
        list(collector)
    assert good.steps[-1] == 60
    assert good.calls[-1] == "close"


def test_a_sink_that_can_not_be_opened_is_an_error_at_once():
    first, bad, last = Recorder(), Recorder(fails=["open"]), Recorder()
    with make(0) as collector:
        with pytest.raises(ConnectionError, match="no open"):
            Monitor(collector, [first, bad, last])
        assert first.calls == ["open", "close"]
        assert bad.calls == ["open"]
        assert last.calls == []
        bad.fails = ()
        with Monitor(collector, [first, bad, last]):
            list(collector)
    assert first.steps[-1] == bad.steps[-1] == last.steps[-1] == 60


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
def test_collection_does_not_wait_for_sinks(workers):
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
    goes_on.set()
    assert ended(monitor)
    assert (found[0], found[-1]) == (0, 60)


def test_closing_waits_for_slow_sinks_as_long_as_it_is_told():
    goes_on = threading.Event()
    with make(0) as collector:
        monitor = Monitor(collector, [lambda stats: goes_on.wait(PATIENCE)])
        said = r"longer than 0 s to close: .* has not returned from write\(\)"
        with pytest.warns(RuntimeWarning, match=said):
            monitor.close(timeout=0)
        goes_on.set()
        monitor.close(timeout=None)
        assert monitor.closed


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


def test_a_sink_belongs_to_one_monitor_at_a_time():
    sink = Recorder()
    with make(0) as collector:
        with Monitor(collector, [sink]), pytest.raises(ValueError, match="by a monitor already"):
            Monitor(collector, [sink])
        with Monitor(collector, [sink]):
            pass
    assert sink.calls.count("open") == sink.calls.count("close") == 2


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be a number of seconds above 0, but it is 0"),
        ({"every": -1.0}, ValueError, "every must be"),
        ({"every": float("nan")}, ValueError, "every must be"),
        ({"every": "1"}, TypeError, "every must be a number of seconds"),
        ({"every": None}, TypeError, "every must be a number of seconds"),
        ({"sinks": Recorder()}, TypeError, "sinks must be a list of sinks"),
        ({"sinks": "csv:file"}, TypeError, "sinks must be a list of sinks"),
        ({"sinks": print}, TypeError, "sinks must be a list of sinks"),
        ({"sinks": ["csv:file"]}, TypeError, "but one is 'csv:file'"),
        ({"sinks": [Recorder]}, TypeError, "but one is <class"),
        ({"collector": 3}, TypeError, "collector must be a collector, .* but it is int: 3"),
    ],
)
def test_wrong_arguments(changes, error, message):
    with make(0) as collector, pytest.raises(error, match=message):
        Monitor(**{"collector": collector, "sinks": [], **changes})


def test_no_sink_is_opened_for_an_object_that_can_not_be_watched():
    class Slotted:
        __slots__ = ()

        def stats(self):
            return {}

    sink = Recorder()
    with pytest.raises(TypeError, match="weak reference"):
        Monitor(Slotted(), [sink])
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
    Monitor(collector, [lambda stats: print(stats["frames"], collector.closed, flush=True)])
    list(collector)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_the_exit_of_the_interpreter_ends_it(workers):
    done = nursery.run(_OPEN_AT_EXIT, workers, finalize=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "60 False"
    assert done.stderr == ""


_WARNINGS_AS_ERRORS = """
    from trawl import Collector, MultiAsyncCollector
    from trawl.observe import Monitor

    found = []
    with Collector("CartPole-v1", frames_per_batch=20, total_frames=60) as collector:
        with Monitor(collector, [lambda stats: 1 / 0, found.append]):
            list(collector)
    print(found[-1]["frames"])
"""


def test_warnings_that_are_errors_end_nothing():
    done = nursery.run(_WARNINGS_AS_ERRORS, warn=["error"])
    assert done.stdout == "60\n"
    assert done.stderr.count("RuntimeWarning: a sink of a monitor failed") == 1


# --- loggers of TorchRL


@pytest.mark.parametrize("workers", [0, 2])
def test_loggers_of_torchrl_are_sinks(workers, tmp_path):
    record = pytest.importorskip("torchrl.record.loggers.csv")
    logger = record.CSVLogger("run", log_dir=str(tmp_path))
    last = watch(logger, workers)
    folder = tmp_path / "run" / "scalars"
    rows = (folder / "collector" / "frames.csv").read_text().splitlines()
    assert rows[-1] == "60,60.0"
    assert (folder / "collector" / "worker_1" / "frames.csv").exists() == (workers > 0)
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
        pass
    collector.shutdown()
    assert ended(monitor)
    assert sink.steps[-1] == collector.stats()["frames"] > 20
