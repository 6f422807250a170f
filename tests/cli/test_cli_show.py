"""What ``trawl show`` tells of datasets that are not finished, of another form, or large."""

import os
import shutil
import signal

import pytest
import torch
from cli_parts import lines_of, run, trawl
from report_parts import frames, write
from tensordict import TensorDict

from trawl.data import MemmapSink, info

UNFINISHED = "not finished: the collection is still running, or it was killed\n"


def shown(*arguments):
    code, out, err = trawl("show", *arguments)
    assert (code, err) == (0, "")
    return out


@pytest.mark.parametrize("complete", [True, False])
def test_a_collection_that_still_runs_is_not_called_stopped(complete):
    with MemmapSink("d") as sink:
        sink.write(TensorDict({"x": torch.zeros(3, 2)}, [3]))
        sink.commit()
        assert f"frames  3, {UNFINISHED}" in shown("d", "--html", "report.html")
        sink.close(complete=complete)
    out = shown("d")
    assert ("frames  3\n" in out) == complete
    # Without a known cause, none is told.
    assert ("frames  3, not complete: stopped before the end\n" in out) != complete
    # The report has told the same.
    with open("report.html") as file:
        page = file.read()
    assert "3 frames, not complete" in page
    assert "still running, or it was killed" in page
    # Frames without rewards have no episodes.
    assert "episode" not in out
    assert ["'x'", "(3,", "2)", "float32", "24", "B"] in lines_of(out)


def test_a_collection_that_was_killed_is_not_called_stopped_by_an_error():
    command = ["collect", "Pendulum-v1", "--policy", "cli_policies:ctrl_c_then_dies",
               "--frames", 1000, "--frames-per-batch", 100, "--out", "d"]  # fmt: skip
    assert trawl(*command)[0] == 130
    assert info("d")["stopped_by"] == "SIGINT"
    assert run(*command, "--resume").returncode == -signal.SIGKILL
    assert UNFINISHED in shown("d")
    # The cause of the first stop is none of the second run's.
    assert info("d")["stopped_by"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_episodes_of_agents_are_shown(dtype):
    batch = frames(4, 2).exclude(("next", "reward"))
    batch["next", "agents", "reward"] = torch.tensor([1, 3]).to(dtype).expand(4, 2).unsqueeze(-1)
    write(batch)
    out = shown("d")
    assert "2 episodes" in out
    assert ["return", "4", "0", "4", "4"] in lines_of(out)


def test_a_large_dataset_is_read_in_parts_wherever_it_lies():
    # An episode lies across the end of the first part.
    write(frames(300_003, 7).exclude("observation"))
    shutil.move("d", "moved")
    out = shown("moved", "--html", "report.html", "--plot", "a.png")
    assert "42,857 episodes" in out
    for name in ("return", "length"):
        assert [name, "7", "0", "7", "7"] in lines_of(out)
    with open("report.html") as file:
        page = file.read()
    assert "Histogram of 300,003 values" in page
    assert os.path.getsize("report.html") < 2_500_000
    with open("a.png", "rb") as file:
        assert file.read(4) == b"\x89PNG"
