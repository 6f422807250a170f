import pytest
from monitor_parts import make, watch

from trawl.observe import Monitor, TensorBoardSink

pytest.importorskip("tensorboard")

pytestmark = pytest.mark.usefixtures("nothing_left")


def scalars(folder):
    """The values by name, each with its step, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        name: [(one.step, one.value) for one in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_tensorboard_reads_the_numbers(workers, tmp_path):
    last = watch(TensorBoardSink(tmp_path / "runs" / "a"), workers)
    found = scalars(tmp_path / "runs" / "a")
    numbers = {name: value for name, value in last.items() if not isinstance(value, str)}
    assert {name: points[-1] for name, points in found.items()} == {
        f"collector/{name}": (60, pytest.approx(float(value))) for name, value in numbers.items()
    }
    assert ("collector/worker_1/frames" in found) == (workers > 0)
    assert found["collector/frames"][0] == (0, 0.0)


def test_values_that_are_no_numbers_are_left_out(tmp_path):
    sink = TensorBoardSink(tmp_path, prefix="")
    sink.open()
    sink.write({"a": float("nan"), "b": float("inf"), "c": "text", "d": True, "e": None}, 5)
    sink.close()
    assert scalars(tmp_path) == {"d": [(5, 1.0)]}


def test_each_poll_is_on_disk_at_once(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.open()
    for frames in range(3):
        sink.write({"frames": frames}, frames)
        expected = [(step, float(step)) for step in range(frames + 1)]
        assert scalars(tmp_path) == {"collector/frames": expected}
    sink.close()


def test_a_folder_that_can_not_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with make(0) as collector:
        with pytest.raises(FileExistsError, match="pass another folder"):
            Monitor(collector, [TensorBoardSink(tmp_path / "file")])
        with pytest.raises(NotADirectoryError, match="pass another folder"):
            Monitor(collector, [TensorBoardSink(tmp_path / "file" / "runs")])
