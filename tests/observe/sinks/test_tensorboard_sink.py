import pytest
from monitor_parts import watch

from trawl.observe import TensorBoardSink

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


def test_tensorboard_reads_the_numbers(tmp_path):
    last = watch(TensorBoardSink(tmp_path / "runs" / "a"), 2)
    found = scalars(tmp_path / "runs" / "a")
    numbers = {name: value for name, value in last.items() if not isinstance(value, str)}
    assert {name: points[-1] for name, points in found.items()} == {
        f"collector/{name}": (60, pytest.approx(float(value))) for name, value in numbers.items()
    }
    assert found["collector/frames"][0] == (0, 0.0)


def test_each_poll_is_on_disk_at_once_without_values_that_are_no_finite_numbers(tmp_path):
    odd = {"a": float("nan"), "b": float("inf"), "c": "text", "e": None}
    sink = TensorBoardSink(tmp_path, prefix="")
    sink.open()
    for frames in range(3):
        sink.write({"frames": frames, "d": True, **odd}, frames)
        steps = range(frames + 1)
        assert scalars(tmp_path) == {
            "frames": [(step, float(step)) for step in steps],
            "d": [(step, 1.0) for step in steps],
        }
    sink.close()
