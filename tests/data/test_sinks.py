"""What sinks of all formats do."""

import json
import os

import nursery
import pytest
import torch
from sink_parts import SINKS, files_no_larger_than, frames, write
from tensordict import NonTensorData, stack

from trawl import Collector, MultiCollector
from trawl.data import MemmapSink, info, load
from trawl.testing import NumberedEnv


@pytest.fixture(params=SINKS)
def kind(request):
    return SINKS[request.param]


def test_a_dataset_is_resumed_with_ids_of_its_own(kind, tmp_path):
    write(kind, tmp_path / "d", [frames(0, 21)], env="X-v0", note="first")
    with kind(tmp_path / "d", info={"note": "second"}, resume=True) as sink:
        assert sink.frames == 21
        sink.write(frames(0, 14))
    loaded = load(tmp_path / "d")
    assert loaded["number"].tolist() == [*range(21), *range(14)]
    assert loaded["collector", "traj_ids"].tolist() == [i // 7 for i in range(35)]
    facts = info(tmp_path / "d")
    assert (facts["frames"], facts["env"], facts["note"]) == (35, "X-v0", "second")


def test_to_resume_what_is_not_there_begins_it(kind, tmp_path):
    with kind(tmp_path / "d", resume=True) as sink:
        assert sink.frames == 0
        sink.write(frames(0, 7))
    assert len(load(tmp_path / "d")) == 7


@pytest.mark.parametrize("left", [[], [".reserve"], ["._dataset.json", ".reserve"]], ids=len)
def test_to_resume_what_a_kill_left_of_the_beginning_begins_it(left, kind, tmp_path):
    (tmp_path / "d").mkdir()
    for name in left:
        (tmp_path / "d" / name).write_text("{")
    with kind(tmp_path / "d", resume=True) as sink:
        sink.write(frames(0, 7))
    assert len(load(tmp_path / "d")) == 7


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_is_no_dataset_is_not_resumed(what, kind, tmp_path):
    if what == "file":
        (tmp_path / "d").touch()
    else:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "mine").touch()
    with pytest.raises(FileExistsError, match="is not a dataset that can be continued"):
        kind(tmp_path / "d", resume=True)


def test_another_format_is_not_resumed(kind, tmp_path):
    other = next(each for each in SINKS.values() if each is not kind)
    write(other, tmp_path / "d", [frames(0, 7)])
    with pytest.raises(ValueError, match=f"format {other.format}, and can't .* as {kind.format}"):
        kind(tmp_path / "d", resume=True)
    assert len(load(tmp_path / "d")) == 7


def test_other_entries_are_not_written_after_these(kind, tmp_path):
    write(kind, tmp_path / "d", [frames(0, 7)])
    with kind(tmp_path / "d", resume=True) as sink:
        with pytest.raises(ValueError, match="adds \\['more'\\]"):
            sink.write(frames(0, 7, more=torch.ones(7)))
        with pytest.raises(ValueError, match=r"was torch\.int64 .* but in this batch"):
            sink.write(frames(0, 7, number=torch.ones(7)))
    assert len(load(tmp_path / "d")) == 7


def test_only_one_writes_at_a_time(kind, tmp_path):
    with kind(tmp_path / "d") as sink:
        sink.write(frames(0, 7))
        with pytest.raises(BlockingIOError, match="another sink or process is writing"):
            kind(tmp_path / "d", resume=True)
        sink.write(frames(7, 7))
    assert len(load(tmp_path / "d")) == 14
    kind(tmp_path / "d", resume=True).close()


def test_a_closed_sink_takes_nothing(kind, tmp_path):
    sink = kind(tmp_path / "d")
    sink.write(frames(0, 7))
    sink.close()
    sink.close()
    with pytest.raises(RuntimeError, match="is closed"):
        sink.write(frames(7, 7))
    assert sink.closed
    assert len(load(tmp_path / "d")) == 7


def test_an_error_marks_the_dataset(kind, tmp_path):
    def failing():
        with kind(tmp_path / "d") as sink:
            sink.write(frames(0, 7))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert info(tmp_path / "d")["complete"] is False
    assert len(load(tmp_path / "d")) == 7


def test_without_frames_nothing_is_left(kind, tmp_path):
    with kind(tmp_path / "d") as sink:
        sink.write(frames(0, 1)[:0])
    assert os.listdir(tmp_path) == []


def test_a_batch_may_be_changed_after_it_was_written(kind, tmp_path):
    batch = frames(0, 10)
    with kind(tmp_path / "d") as sink:
        sink.write(batch[:5])
        sink.write(batch[5:])
        batch.zero_()
    assert load(tmp_path / "d")["number"].tolist() == list(range(10))


@pytest.mark.parametrize("batch", [None, {"a": 1}, torch.ones(3)], ids=["none", "dict", "tensor"])
def test_what_is_no_batch_is_refused(batch, kind, tmp_path):
    with (
        pytest.raises(TypeError, match="batch must be a TensorDict, but it is"),
        kind(tmp_path / "d") as sink,
    ):
        sink.write(batch)
    assert os.listdir(tmp_path) == []


def test_what_is_no_tensor_is_refused(kind, tmp_path):
    objects = stack([NonTensorData(each) for each in ("text", 3, None)])
    with (
        pytest.raises(TypeError, match="entry 'what' is NonTensorStack"),
        kind(tmp_path / "d") as sink,
    ):
        sink.write(frames(0, 3).set("what", objects))
    assert os.listdir(tmp_path) == []


def test_a_batch_that_does_not_fit_is_as_if_not_written(kind, tmp_path):
    options = {"commit_seconds": 0} if kind.format == "parquet" else {}
    long = frames(70, 7000)
    long["collector", "traj_ids"].fill_(10)  # a single episode
    sink = kind(tmp_path / "d", **options)
    sink.write(frames(0, 70))
    with files_no_larger_than(9000):
        with pytest.raises(OSError, match="File too large"):
            sink.write(long)
        assert info(tmp_path / "d")["frames"] == sink.frames == 70
        assert len(load(tmp_path / "d")) == 70
    sink.write(frames(70, 7))
    sink.close()
    assert load(tmp_path / "d")["number"].tolist() == list(range(77))


def test_no_room_at_the_start_leaves_nothing(kind, tmp_path):
    with files_no_larger_than(1000), pytest.raises(OSError, match="File too large"):
        kind(tmp_path / "d")
    assert os.listdir(tmp_path) == []
    kind(tmp_path / "d").close()


def test_info_must_be_json(kind, tmp_path):
    with pytest.raises(TypeError, match="not JSON"):
        kind(tmp_path / "d", info={"env": object()})
    assert os.listdir(tmp_path) == []


def test_the_record_is_replaced_as_a_whole(tmp_path):
    with MemmapSink(tmp_path / "d") as sink:
        sink.write(frames(0, 7))
        with open(tmp_path / "d" / "_dataset.json") as before:
            sink.write(frames(7, 7))
            assert json.load(before)["frames"] == 7
    assert info(tmp_path / "d")["frames"] == 14


# --- as an option of collectors


def make():
    return NumberedEnv(lengths=[5, 3])


COLLECTORS = {
    "one": (Collector, make, {}),
    "several": (Collector, [make, make], {}),
    "sync": (MultiCollector, [make, make], {"sync": True, "start_method": "inline"}),
    "async": (MultiCollector, [make, make], {"sync": False, "start_method": "inline"}),
    "processes": (MultiCollector, [make, make], {"sync": True}),
    "padded": (Collector, [make, make], {"split_trajs": True}),
}


@pytest.mark.filterwarnings("ignore:split_trajs=True pads")
@pytest.mark.parametrize("how", COLLECTORS)
def test_a_collector_writes_what_it_delivers(how, kind, tmp_path):
    cls, env, options = COLLECTORS[how]
    sink, seen = kind(tmp_path / "d"), []
    with cls(env, frames_per_batch=20, total_frames=60, sink=sink, **options) as collector:
        seen.extend(batch.clone() for batch in collector)
    assert sink.closed
    loaded, facts = load(tmp_path / "d"), info(tmp_path / "d")
    assert (len(loaded), facts["frames"], facts["complete"]) == (60, 60, True)
    expected = [
        tuple(row)
        for batch in seen
        for row in zip(
            batch["collector", "traj_ids"].flatten().tolist(),
            batch["observation"].reshape(batch.numel(), -1)[:, 0].tolist(),
            batch.get(("collector", "mask"), torch.ones(batch.shape)).flatten().tolist(),
            strict=True,
        )
    ]
    found = zip(
        loaded["collector", "traj_ids"].tolist(), loaded["observation"][:, 0].tolist(), strict=True
    )
    assert sorted(found) == sorted(row[:2] for row in expected if row[2])


@pytest.mark.parametrize("extend", [True, False], ids=["batches", "steps"])
def test_a_collector_with_a_buffer_writes_what_it_puts_there(extend, tmp_path):
    class Buffer:
        def __init__(self):
            self.frames = 0

        def extend(self, batch):
            self.frames += batch.numel()

        def add(self, frame):
            self.frames += 1

    buffer = Buffer()
    collector = Collector(make, frames_per_batch=20, total_frames=60, replay_buffer=buffer,
                          extend_buffer=extend, sink=MemmapSink(tmp_path / "d"))  # fmt: skip
    with collector:
        for _ in collector:
            pass
    assert buffer.frames == len(load(tmp_path / "d")) == 60


def test_workers_batches_for_a_buffer_are_written(tmp_path):
    class Buffer:
        frames = 0

        def extend(self, batch):
            self.frames += batch.numel()

    buffer = Buffer()
    options = {"frames_per_batch": 20, "total_frames": 60, "sync": True, "start_method": "inline"}
    sink = MemmapSink(tmp_path / "d")
    with MultiCollector([make, make], replay_buffer=buffer, sink=sink, **options) as collector:
        for _ in collector:
            pass
    assert buffer.frames == len(load(tmp_path / "d")) == 60


def test_a_collector_that_ends_early_says_so(tmp_path):
    sink = MemmapSink(tmp_path / "d")
    with Collector(make, frames_per_batch=20, total_frames=60, sink=sink) as collector:
        collector.next()
    facts = info(tmp_path / "d")
    assert (facts["frames"], facts["complete"]) == (20, False)


@pytest.mark.parametrize("fails", [False, True])
def test_an_endless_collection_is_complete_if_nothing_failed(fails, tmp_path):
    def collect():
        with Collector(make, frames_per_batch=20, sink=MemmapSink(tmp_path / "d")) as collector:
            collector.next()
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            collect()
    else:
        collect()
    assert info(tmp_path / "d")["complete"] is not fails


def test_a_sink_that_fails_ends_the_collection(tmp_path):
    sink = MemmapSink(tmp_path / "d")
    collector = Collector(make, frames_per_batch=200, total_frames=400, sink=sink)
    with collector:
        collector.next()
        with files_no_larger_than(3000), pytest.raises(OSError, match="File too large"):
            collector.next()
        assert collector.closed
    facts = info(tmp_path / "d")
    assert (facts["frames"], facts["complete"]) == (200, False)


@pytest.mark.parametrize(("sink", "lacks"), [("runs/d", "write"), ([], "write")])
def test_what_is_no_sink_is_refused(sink, lacks):
    with pytest.raises(TypeError, match=rf"sink must have a method {lacks}\(\)"):
        Collector(make, frames_per_batch=20, sink=sink)


@pytest.mark.parametrize("layout", ["cat", "padded"])
@pytest.mark.parametrize("how", ["one", "sync"])
def test_whole_trajectories_are_written_as_they_are_delivered(how, layout, kind, tmp_path):
    cls, env, options = COLLECTORS[how]
    sink = kind(tmp_path / "d")
    with cls(env, frames_per_batch=20, total_frames=80, sink=sink, trajs_per_batch=3,
             traj_format=layout, **options) as collector:  # fmt: skip
        ids = [batch["collector", "traj_ids"].flatten().unique().numel() for batch in collector]
    loaded = load(tmp_path / "d")
    found = loaded["collector", "traj_ids"]
    assert len(found.unique()) == 3 * len(ids) > 3
    last = torch.cat([found[1:] != found[:-1], torch.tensor([True])])
    assert torch.equal(last, loaded["next", "done"].flatten())


def test_whole_trajectories_for_a_buffer_are_written(tmp_path):
    class Buffer:
        frames = 0

        def extend(self, batch):
            self.frames += batch.numel()

    buffer, sink = Buffer(), MemmapSink(tmp_path / "d")
    with Collector(make, frames_per_batch=20, total_frames=60, replay_buffer=buffer, sink=sink,
                   trajs_per_batch=1) as collector:  # fmt: skip
        for _ in collector:
            pass
    assert buffer.frames == len(load(tmp_path / "d")) > 50


SCRIPT = """
import sys
from trawl import Collector
from trawl.data import {kind}
if __name__ == "__main__":
    collector = Collector("CartPole-v1", frames_per_batch=50, total_frames=100, sink={kind}("d-v0"))
    for batch in collector:
        {what}
"""


@pytest.mark.parametrize("kind", ["MemmapSink", "ParquetSink", "MinariSink"])
@pytest.mark.parametrize(("what", "status", "frames"), [("pass", 0, 100), ("raise OSError", 1, 50)])
def test_a_program_that_leaves_its_collector_open_ends_as_it_would(
    kind, what, status, frames, tmp_path
):
    text = SCRIPT.format(kind=kind, what=what)
    made = nursery.run(text, cwd=tmp_path, warn=["ignore"])
    assert made.returncode == status, made.stderr
    assert info(tmp_path / "d-v0")["frames"] == frames
    assert info(tmp_path / "d-v0")["complete"] == (status == 0)
