"""Files of timelines, and what is read back from them."""

import errno
import gzip
import json
import multiprocessing
import os
import signal
import zlib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trawl.observe import TraceOptions, read_trace
from trawl.observe.timeline_file import TraceWriter, moved, nanoseconds_of, rewrite
from trawl.rollout.times import StepRecorder


def fail(error):
    """For writers that must not fail."""
    raise error


def written(path, count=3, info=None):
    """A file with a lane and spans of a second each."""
    writer = TraceWriter(path, fail)
    writer.begin(100.0)
    writer.name(1, 0, "worker 0", "worker 0")
    for number in range(count):
        writer.span(1, 0, "batch", 100.0 + number, 101.0 + number, {"request": number})
    writer.instant(1, 0, "died", 100.5)
    writer.counter("memory", 101.0, 7)
    if info is not None:
        assert writer.close(info)
    return writer


NAMES = pytest.mark.parametrize("name", ["run.json.gz", "run.json"])


@NAMES
def test_what_was_written_is_one_json_object_that_is_read_and_moved(tmp_path, name):
    path = tmp_path / name
    written(path, count=2000, info={"detail": "batch"})
    timeline = read_trace(path)
    assert repr(timeline).startswith("Timeline(2000 spans in ")
    assert timeline.complete
    assert timeline.info == {"detail": "batch"}
    assert timeline.lanes == ["worker 0"]
    starts = [span.start for span in timeline.lane("worker 0")]
    assert starts == pytest.approx(list(range(2000)))
    assert timeline.seconds("worker 0", "batch") == pytest.approx(2000)
    assert [(one.name, one.at) for one in timeline.instants] == [("died", pytest.approx(0.5))]
    assert timeline.counters == {"memory": [(pytest.approx(1.0), 7.0)]}
    assert timeline.spans[2].args == {"request": 2}
    data = path.read_bytes()
    content = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    assert set(content) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert {event["ph"] for event in content["traceEvents"]} == {"M", "X", "i", "C"}

    def move(event):
        if event["ph"] == "X":
            event["ts"] += 5e6

    rewrite(path, move, {"moved": True})
    timeline = read_trace(path)
    assert timeline.info == {"moved": True}
    assert [span.start for span in timeline.spans] == pytest.approx([5 + at for at in starts])
    assert timeline.instants[0].at == pytest.approx(0.5)

    def fail(event):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        rewrite(path, fail, {"moved": False})
    assert len(read_trace(path).spans) == 2000
    assert os.listdir(tmp_path) == [name]


@given(st.data())
def test_a_file_that_was_cut_off_has_what_was_before(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / data.draw(st.sampled_from(["a.json.gz", "a.json"]))
    written(path, count=1500, info={})
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(100, len(whole) - 60))])
    timeline = read_trace(path)
    assert not timeline.complete
    numbers = [span.args["request"] for span in timeline.spans]
    assert numbers == list(range(len(numbers)))


def in_a_fork(act):
    """Runs a function in a forked process, which ends without the rest of the interpreter."""
    process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(act()))
    process.start()
    process.join()
    return process.exitcode


def test_a_killed_program_leaves_a_file_that_can_be_read(tmp_path):
    path = tmp_path / "run.json.gz"
    # It writes more than is kept in memory, and has no time for the rest.
    assert in_a_fork(lambda: int(written(path, count=2000) is None)) == 0
    timeline = read_trace(path)
    assert not timeline.complete
    assert len(timeline.spans) > 1000
    with pytest.raises(EOFError):
        gzip.decompress(path.read_bytes())


def test_a_forked_process_writes_nothing(tmp_path):
    path = tmp_path / "run.json.gz"
    writer = written(path)

    def close_there():
        writer.span(1, 0, "batch", 0.0, 1.0)
        return int(writer.close({"there": True}))

    assert in_a_fork(close_there) == 0
    assert writer.close({"here": True})
    assert read_trace(path).info == {"here": True}
    assert len(read_trace(path).spans) == 3


def damaged():
    """A file that is all there, but for some of its bytes."""
    lines = [json.dumps({"ph": "X", "name": "a", "ts": at, "dur": 1}) for at in range(2000)]
    events = ",\n".join(lines)
    data = bytearray(gzip.compress(b'{"displayTimeUnit":"ms","traceEvents":[\n' + events.encode()))
    data[len(data) // 2 : len(data) // 2 + 200] = bytes(200)
    return bytes(data)


@pytest.mark.parametrize(
    "content",
    [
        damaged(),
        b"",
        b"no timeline",
        b'{"traceEvents":[]}',
        zlib.compress(b"no gzip"),
        gzip.compress(b'{"displayTimeUnit":"ms","traceEvents":[\n7\n],"otherData":{}}\n'),
        gzip.compress(b'{"displayTimeUnit":"ms","traceEvents":[\n{}\n],"otherData":{}}\n'),
        gzip.compress(b'{"displayTimeUnit":"ms","traceEvents":[\n\xff\n],"otherData":{}}\n'),
    ],
    ids=["damaged", "empty", "text", "JSON", "zlib", "a number", "an empty event", "bytes"],
)
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "run.json.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"run\.json\.gz"):
        read_trace(path)


@given(st.integers(0, 10**15), st.integers(-(10**15), 10**15))
@example(0, 1001)
def test_moved_times_are_whole_nanoseconds(start, shift):
    there = moved((start + 0.25) / 1000, shift)
    for read in (nanoseconds_of(there), int(there * 1000), round(there * 1000)):
        assert read == max(0, start + shift)


def test_a_write_that_fails_is_reported_once(tmp_path):
    errors = []
    path = tmp_path / "run.json"
    writer = TraceWriter(path, errors.append)
    # The write end of a pipe that nobody reads: each write fails.
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, writer._file._file.fileno())
    os.close(write)
    for number in range(2000):
        writer.span(1, 0, "batch", float(number), number + 1.0)
    assert not writer.open
    assert not writer.close({})
    assert [type(error) for error in errors] == [BrokenPipeError]


def test_a_write_that_is_interrupted_leaves_what_was_before(tmp_path, monkeypatch):
    path = tmp_path / "run.json.gz"
    writer = TraceWriter(path, fail)
    writer.begin(0.0)
    writer.name(1, 0, "worker 0", "worker 0")
    for number in range(600):
        writer.span(1, 0, "batch", float(number), number + 1.0)
    file = writer._file._file

    class HalfWritten:
        def write(self, view):
            file.write(view[: len(view) // 2])
            raise KeyboardInterrupt

        def close(self):
            file.close()

    monkeypatch.setattr(writer._file, "_file", HalfWritten())
    with pytest.raises(KeyboardInterrupt):
        writer.close({})
    assert not writer.close({})
    timeline = read_trace(path)
    assert not timeline.complete
    assert len(timeline.spans) >= 500


@pytest.fixture
def on_signal():
    """Sets the handler of a signal until the end of the test."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


@NAMES
def test_a_signal_handler_may_end_a_timeline_during_a_write(tmp_path, monkeypatch, on_signal, name):
    path, closed = tmp_path / name, []
    writer = TraceWriter(path, fail)
    writer.begin(0.0)
    writer.name(1, 0, "worker 0", "worker 0")
    file = writer._file._file

    def end(*_):
        writer.span(1, 0, "last", 600.0, 601.0)
        closed.append(writer.close({"seconds": 601.0}))

    class Interrupted:
        def write(self, view):
            if not closed:
                signal.raise_signal(signal.SIGUSR1)
            return file.write(view[:1000])

        def close(self):
            file.close()

    on_signal(end)
    monkeypatch.setattr(writer._file, "_file", Interrupted())
    for number in range(600):
        writer.span(1, 0, "batch", float(number), number + 1.0)
    # The write that was interrupted has completed the file.
    assert closed == [False]
    assert not writer.open
    timeline = read_trace(path)
    assert timeline.info == {"seconds": 601.0}
    assert timeline.complete
    assert timeline.spans[-1].name == "last"
    assert [span.start for span in timeline.spans[:-1]] == [
        float(number) for number in range(len(timeline.spans) - 1)
    ]


@pytest.mark.parametrize(
    ("path", "detail", "words"),
    [
        (None, "batch", "path must be a str"),
        (3, "batch", "path must be a str"),
        ("", "batch", "path must name a file"),
        ("a.json.gz", "frame", "detail must be 'batch' or 'step', but it is 'frame'"),
        ("a.json.gz", None, "detail must be 'batch' or 'step', but it is None"),
    ],
)
def test_options_are_checked(path, detail, words):
    with pytest.raises((TypeError, ValueError), match=words):
        TraceOptions(path, detail)


def test_a_path_does_not_depend_on_the_folder_of_later(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = TraceOptions("run.json.gz").file
    assert file == tmp_path / "run.json.gz"
    assert TraceOptions(Path("~x", "run.json.gz")).file == tmp_path / "~x" / "run.json.gz"


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(1, 10))
def test_a_ring_buffer_keeps_the_newest_and_counts_the_others(counts, size):
    recorder = StepRecorder(size)
    number = 0
    for count in counts:
        times = []
        for _ in range(count):
            times.append((number + 0.1, number + 0.2, number + 0.3))
            recorder.add(*times[-1])
            number += 1
        found = recorder.pop()
        assert found.times == times[-size:]
        assert found.dropped + len(found.times) == count
    assert recorder.pop() == ([], 0)
