import shutil
import signal
import sys
from importlib import metadata

import pytest
import torch
from cli_parts import run
from tensordict import TensorDict

from trawl.cli import show as show_module
from trawl.data import MemmapSink, info


@pytest.fixture
def dataset(trawl):
    trawl("collect", "Pendulum-v1", "--frames", 1000, "--envs", 2, "--seed", 4, "--out", "d")
    return "d"


def rows(out):
    return [line.split() for line in out.splitlines()]


def test_it_shows_every_entry(dataset, trawl):
    code, out, err = trawl("show", dataset)
    assert (code, err) == (0, "")
    assert ["'observation'", "(1,000,", "3)", "float32", "12.0", "kB"] in rows(out)
    assert ["('next',", "'reward')", "(1,000,", "1)", "float32", "4.0", "kB"] in rows(out)
    assert ["('collector',", "'traj_ids')", "(1,000)", "int64", "8.0", "kB"] in rows(out)


def test_it_shows_how_it_was_made(dataset, trawl):
    _, out, _ = trawl("show", dataset)
    for line in ("environment  Pendulum-v1", "policy  random", "seed  4", "frames  1,000"):
        assert line in out
    assert f"torch {metadata.version('torch')}" in out


def test_it_tells_the_episodes_as_collect_did(dataset, trawl):
    _, collected, _ = trawl(
        "collect", "Pendulum-v1", "--frames", 1000, "--envs", 2, "--seed", 4, "--out", "again"
    )
    _, shown, _ = trawl("show", dataset)
    table = collected[collected.index("4 episodes") :]
    assert table in shown


def test_episodes_are_read_across_chunks(dataset, trawl, monkeypatch):
    _, whole, _ = trawl("show", dataset)
    monkeypatch.setattr(show_module, "_CHUNK", 77)
    assert trawl("show", dataset)[1] == whole


def test_a_plot_is_drawn(dataset, trawl):
    code, out, _ = trawl("show", dataset, "--plot", "a.png")
    assert code == 0
    assert "a.png" in out
    with open("a.png", "rb") as file:
        assert file.read(4) == b"\x89PNG"


def test_a_dataset_that_is_not_complete_is_said_to_be(trawl):
    trawl("collect", "Pendulum-v1", "--policy", "cli_policies:fails", "--frames", 1000,
          "--frames-per-batch", 100, "--out", "d")  # fmt: skip
    _, out, _ = trawl("show", "d")
    words = "not complete: stopped by an error: collection failed: ValueError: no more"
    assert f"frames  200, {words}" in out


def test_a_signal_that_stopped_the_collection_is_named(trawl):
    trawl("collect", "Pendulum-v1", "--policy", "cli_policies:ctrl_c", "--frames", 1000,
          "--frames-per-batch", 100, "--out", "d")  # fmt: skip
    assert "frames  200, not complete: stopped by SIGINT\n" in trawl("show", "d")[1]


UNFINISHED = "not finished: the collection is still running, or it was killed\n"


def test_a_collection_that_still_runs_is_not_called_stopped(trawl):
    with MemmapSink("d") as sink:
        sink.write(TensorDict({"x": torch.zeros(3, 2)}, [3]))
        sink.commit()
        assert f"frames  3, {UNFINISHED}" in trawl("show", "d")[1]
    assert "frames  3\n" in trawl("show", "d")[1]


def test_a_collection_that_was_killed_is_not_called_stopped_by_an_error(trawl):
    command = ["collect", "Pendulum-v1", "--policy", "cli_policies:ctrl_c_then_dies",
               "--frames", 1000, "--frames-per-batch", 100, "--out", "d"]  # fmt: skip
    assert run(*command, cwd=".").returncode == 130
    assert info("d")["stopped_by"] == "SIGINT"
    assert run(*command, "--resume", cwd=".").returncode == -signal.SIGKILL
    assert UNFINISHED in trawl("show", "d")[1]
    # The cause of the first stop is none of the second run's.
    assert info("d")["stopped_by"] is None


def test_without_a_known_cause_none_is_told(trawl):
    with MemmapSink("d") as sink:
        sink.write(TensorDict({"x": torch.zeros(3, 2)}, [3]))
        sink.close(complete=False)
    assert "frames  3, not complete: stopped before the end\n" in trawl("show", "d")[1]


def test_a_dataset_of_other_frames_is_shown_without_episodes(trawl):
    with MemmapSink("d") as sink:
        sink.write(TensorDict({"x": torch.zeros(3, 2)}, [3]))
    code, out, _ = trawl("show", "d")
    assert code == 0
    assert "episode" not in out
    assert ["'x'", "(3,", "2)", "float32", "24", "B"] in rows(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_episodes_of_agents_are_shown(trawl, dtype):
    frames = TensorDict(batch_size=[4])
    frames["collector", "traj_ids"] = torch.tensor([0, 0, 1, 1])
    frames["next", "agents", "reward"] = torch.tensor([1, 3]).to(dtype).expand(4, 2).unsqueeze(-1)
    frames["next", "done"] = torch.tensor([False, True, False, True]).unsqueeze(-1)
    with MemmapSink("d") as sink:
        sink.write(frames)
    code, out, _ = trawl("show", "d")
    assert code == 0
    assert "2 episodes" in out
    assert ["return", "4", "0", "4", "4"] in rows(out)


def test_a_dataset_may_be_moved(dataset, trawl):
    shutil.move(dataset, "moved")
    assert "1,000" in trawl("show", "moved")[1]


def test_without_matplotlib_the_extra_is_named(dataset, trawl, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    # Python's own way of saying that there is no such module.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = trawl("show", dataset, "--plot", "a.png")
    assert (code, out) == (2, "")
    assert err == "trawl: --plot a.png: plots need matplotlib: pip install 'trawl-rl[plot]'\n"
