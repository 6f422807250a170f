"""``trawl collect --workers``: the same datasets, made in several processes."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import time

import pytest
import torch
from cli_parts import PATIENCE
from cli_parts import start as start_command
from cli_policies import Net

from trawl import MultiSyncCollector
from trawl.cli.summary import show_workers
from trawl.data import info, load
from trawl.observe import EpisodeStats


def test_they_are_the_frames_that_the_collector_gives(trawl):
    code, out, err = trawl("collect", "CartPole-v1", "--frames", 200, "--frames-per-batch", 100,
                           "--seed", 7, "--envs", 5, "--workers", 2, "--out", "d",
                           "--max-frames-per-traj", 9)  # fmt: skip
    assert code == 0
    with MultiSyncCollector(
        [["CartPole-v1"] * 5] * 2, frames_per_batch=100, total_frames=200, max_frames_per_traj=9
    ) as collector:
        collector.set_seed(7)
        expected = torch.cat([batch.reshape(-1).clone() for batch in collector])
    assert (load("d") == expected).all()
    assert "200/200 frames" in err
    assert "workers  2, synchronous; 100 frames each" in out
    assert "workers  2, synchronous; 100 frames each" in trawl("show", "d")[1]


def test_environments_in_processes_give_the_same_frames(trawl):
    for name, more in (("a", []), ("b", ["--env-processes", 2])):
        code, _, err = trawl("collect", "CartPole-v1", "--frames", 400, "--seed", 3, "--envs", 4,
                             "--out", name, *more)  # fmt: skip
        assert code == 0, err
    assert (load("a") == load("b")).all()


def test_the_same_seed_gives_the_same_frames(trawl):
    for name in ("a", "b"):
        trawl("collect", "Pendulum-v1", "--frames", 300, "--seed", 3, "--workers", 3, "--sync",
              "--out", name)  # fmt: skip
    assert (load("a") == load("b")).all()
    starts = load("a")["observation"].reshape(3, 100, 3)[:, 0]
    assert len(starts.unique(dim=0)) == 3


def test_without_order_each_trajectory_is_whole(trawl):
    code, out, _ = trawl("collect", "Pendulum-v1", "--frames", 1000, "--frames-per-batch", 50,
                         "--envs", 2, "--workers", 2, "--async", "--out", "d")  # fmt: skip
    assert code == 0
    frames = load("d")
    assert len(frames) == 1000
    for number in frames["collector", "traj_ids"].unique():
        own = frames[frames["collector", "traj_ids"] == number]
        assert torch.equal(own["next", "observation"][:-1], own["observation"][1:])
        assert not own["next", "done"][:-1].any()
    facts = info("d")["workers"]
    assert (facts["count"], facts["sync"], facts["restarts"]) == (2, False, 0)
    assert sum(facts["frames"]) == 1000
    stats = EpisodeStats()
    stats.update(frames)
    assert stats.count == info("d")["episodes"]["count"]
    assert "2, asynchronous; " in out


@pytest.mark.parametrize(
    ("frames", "more"),
    [(3000, ["--envs", 4]), (40, []), (1, []), (3000, ["--async"]), (100, ["--async"])],
)
def test_batches_that_are_not_asked_for_suit_the_workers(frames, more, trawl):
    code, _, err = trawl("collect", "Pendulum-v1", "--frames", frames, *more, "--workers", 3,
                         "--out", "d")  # fmt: skip
    assert code == 0
    assert "workers" not in err
    assert len(load("d")) == frames
    assert min(info("d")["workers"]["frames"]) >= frames // 100


def save_exported(file):
    program = torch.export.export(Net(), (torch.zeros(3),))
    torch.export.save(program, file)


def save_script(file):
    torch.jit.script(Net()).save(file)


@pytest.mark.parametrize("save", [save_exported, save_script])
def test_a_policy_in_a_file_is_loaded_by_each_worker(save, trawl):
    save("policy")
    code, _, _ = trawl("collect", "Pendulum-v1", "--policy", "policy", "--frames", 40,
                       "--workers", 2, "--out", "d")  # fmt: skip
    assert code == 0
    assert len(load("d")["action"].unique()) == 40


def test_all_workers_begin_with_the_same_weights(trawl):
    trawl("collect", "Pendulum-v1", "--policy", "cli_policies:Net", "--frames", 40, "--seed", 3,
          "--workers", 2, "--out", "d")  # fmt: skip
    torch.manual_seed(3)
    net = Net()
    with torch.no_grad():
        assert torch.allclose(net(load("d")["observation"]), load("d")["action"], atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "-1"], "--workers must be at least 0, but it is -1"),
        (["--async"], "--async needs worker processes: pass --workers"),
        (["--workers", "2", "--policy", "none.pt2"], "--policy none.pt2: there is no such file"),
        (["--workers", "2", "--policy", "cli_policies:breaks"], "--policy cli_policies:breaks"),
        (["--workers", "2", "--policy", "cli_policies:wrong"],
         "--policy cli_policies:wrong: ValueError: policy wrote 'action' with shape (7,)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_is_wrong_is_one_line(arguments, words, trawl):
    code, out, err = trawl("collect", "Pendulum-v1", *arguments, "--out", "d")
    assert (code, out) == (2, "")
    assert err.startswith(f"trawl: {words}")
    assert err.count("\n") == 1
    assert os.listdir() == []


def test_two_orders_are_too_many(trawl):
    code, _, err = trawl("collect", "Pendulum-v1", "--workers", 2, "--sync", "--async")
    assert code == 2
    assert "not allowed together" in err


@pytest.mark.parametrize("order", ["--sync", "--async"])
def test_a_failing_policy_is_told_with_its_worker(order, trawl):
    code, _, err = trawl("collect", "Pendulum-v1", "--policy", "cli_policies:fails", order,
                         "--frames", 2000, "--frames-per-batch", 100, "--workers", 2,
                         "--out", "d")  # fmt: skip
    assert code == 2
    last = err.splitlines()[-1]
    assert "collection failed: ValueError: no more (while collecting from " in last
    assert re.search(r"; in worker [01]\); kept the \d+ frames", last)
    assert "Traceback" not in err
    kept = len(load("d"))
    assert f"kept the {kept} frames" in last
    assert kept % 100 == 0
    # Each worker's policy acts 250 times. The call before collection, to see what it gives, counts
    # no step.
    assert kept == 500 if order == "--sync" else 200 <= kept <= 500
    assert not info("d")["complete"]


def test_a_worker_that_leaves_is_an_error(trawl):
    code, _, err = trawl("collect", "Pendulum-v1", "--policy", "cli_policies:leaves",
                         "--frames", 1000, "--frames-per-batch", 100, "--workers", 2,
                         "--out", "d")  # fmt: skip
    assert code == 2
    assert "collection failed: SystemExit: enough (in worker " in err.splitlines()[-1]
    assert len(load("d")) == 200


def test_a_traceback_is_that_of_the_worker(trawl):
    _, _, err = trawl("collect", "Pendulum-v1", "--policy", "cli_policies:fails", "--traceback",
                      "--frames", 1000, "--workers", 2, "--out", "d")  # fmt: skip
    assert 'raise ValueError("no more' in err


@pytest.mark.parametrize("order", ["--sync", "--async"])
def test_a_worker_that_dies_is_replaced(order, trawl):
    code, out, err = trawl("collect", "Pendulum-v1", "--policy", "cli_policies:dies_once", order,
                           "--frames", 1000, "--frames-per-batch", 100, "--workers", 2,
                           "--out", "d")  # fmt: skip
    assert code == 0
    assert "was killed by SIGKILL; a new worker takes its place" in err
    assert "  1 restart  " in err.splitlines()[-1]
    assert "each; 1 restart" in out
    frames = load("d")
    assert len(frames) == 1000
    assert info("d")["complete"]
    facts = info("d")["workers"]
    assert (facts["restarts"], sum(facts["frames"])) == (1, 1000)


def test_a_worker_that_dies_again_and_again_is_an_error(trawl):
    code, _, err = trawl("collect", "Pendulum-v1", "--policy", "cli_policies:dies",
                         "--frames", 2000, "--frames-per-batch", 100, "--workers", 1,
                         "--out", "d")  # fmt: skip
    assert code == 2
    assert "collection failed: WorkerDied: worker 0 was killed by SIGKILL" in err.splitlines()[-1]
    # Each has collected a batch, and ten took the place of another.
    assert len(load("d")) == 1100


def test_warnings_are_told_once(trawl):
    code, out, err = trawl("collect", "CartPole-v0", "--frames", 100, "--workers", 2, "--out", "d")
    assert code == 0
    assert "\x1b" not in out + err
    assert err.count("is out of date") == 1


def test_warnings_of_workers_are_told_once(trawl):
    code, _, err = trawl("collect", "Pendulum-v1", "--policy", "cli_policies:warns",
                         "--frames", 100, "--workers", 2, "--out", "d")  # fmt: skip
    assert code == 0
    notes = [line for line in err.splitlines() if "note" in line]
    assert len(notes) == 1
    assert re.fullmatch(r"trawl: note: in worker [01]: how odd", notes[0])


# --- in a process of its own


@pytest.fixture
def started(tmp_path):
    """Starts a collection with one of the policies; ended in any case."""
    processes = []

    def start(policy, *arguments, **options):
        process = start_command(
            "collect", "Pendulum-v1", "--policy", f"cli_policies:{policy}", "--out", "d",
            "--frames", 4000, "--frames-per-batch", 200, "--workers", 2, *arguments,
            cwd=tmp_path,
            env={"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"},
            session=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def read_until(stream, words):
    for line in stream:
        if words in line:
            return
    raise AssertionError(f"{words!r} did not come")


def read_all(terminal):
    """What is shown there until nobody has it open any more."""
    found = b""
    with contextlib.suppress(OSError):  # how its end is told
        while part := os.read(terminal, 1 << 16):
            found += part
    return found.decode()


def members(session):
    """The processes of a session that still live."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                state, _, _, own = file.read().rpartition(") ")[2].split()[:4]
        except OSError:
            continue
        if int(own) == session and state != "Z":
            found.add(int(name))
    return found


def wait_for(reached, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("order", ["--sync", "--async"])
def test_ctrl_c_ends_it_after_the_batch(order, started, tmp_path):
    process = started("slow", order)
    read_until(process.stderr, "400/4,000 frames")
    # A terminal sends it to all of them.
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    frames = load(tmp_path / "d")
    assert 400 <= len(frames) < 4000
    assert len(frames) % 200 == 0
    lines = err.splitlines()
    assert lines[0] == "finishing this batch; press Ctrl-C again to stop at once"
    assert lines[-1] == (
        f"trawl: interrupted; kept the {len(frames):,} frames collected so far, in d"
    )
    assert f"{len(frames):,} in " in out
    wait_for(lambda: not members(process.pid))


def test_a_second_ctrl_c_ends_it_at_once(started, tmp_path):
    # The policies get stuck in the second batch.
    process = started("stuck", "--frames", "2000")
    read_until(process.stderr, "200/2,000 frames")
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    read_until(process.stderr, "finishing this batch")
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "trawl: interrupted; kept the 200 frames collected so far, in d"
    wait_for(lambda: not members(process.pid))


def test_a_kill_leaves_no_process(started):
    process = started("slow")
    read_until(process.stderr, "400/4,000 frames")
    assert len(members(process.pid)) >= 3
    process.kill()
    process.wait()
    wait_for(lambda: not members(process.pid))


def test_on_a_terminal_there_is_a_line_for_each_worker(started):
    ours, theirs = pty.openpty()
    try:
        process = started("dies_once", stderr=theirs)
        os.close(theirs)
        shown = read_all(ours)
        out, _ = process.communicate(timeout=PATIENCE)
    finally:
        os.close(ours)
    assert process.returncode == 0
    assert "each; 1 restart" in out
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown[shown.rindex("4,000/4,000") :])
    (heading,) = [line for line in last.splitlines() if "restarts" in line]
    workers = [line for line in last.splitlines() if line.startswith("worker ")]
    assert [line[:8] for line in workers] == ["worker 0", "worker 1"]
    assert all("%" in line and "dead" not in line for line in workers)
    place = slice(heading.index("restarts"), heading.index("restarts") + len("restarts"))
    assert sorted(line[place].strip() for line in workers) == ["", "1"]


def test_workers_are_one_line():
    facts = {"count": 1, "sync": True, "restarts": 0, "frames": [1]}
    assert show_workers(facts) == "1, synchronous; 1 frame each"
