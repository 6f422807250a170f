import hashlib
import os
import resource
import signal
from importlib.metadata import version

import pytest
import torch
from tensordict import TensorDict

from trawl import Collector
from trawl.data import info, load


def test_the_frames_asked_for_are_on_disk(trawl):
    code, out, err = trawl("collect", "Pendulum-v1", "--frames", 500, "--out", "d")
    assert code == 0
    assert TensorDict.load_memmap("d/frames").shape == (500,)
    assert info("d")["frames"] == 500
    assert info("d")["complete"]
    assert "500 in " in out
    assert "500/500 frames" in err


def test_they_are_the_frames_that_the_collector_gives(trawl):
    trawl("collect", "CartPole-v1", "--frames", 200, "--frames-per-batch", 100, "--seed", 7,
          "--out", "d", "--max-frames-per-traj", 9)  # fmt: skip
    with Collector(
        "CartPole-v1", frames_per_batch=100, total_frames=200, max_frames_per_traj=9
    ) as collector:
        collector.set_seed(7)
        expected = torch.cat([batch.clone() for batch in collector])
    assert (load("d") == expected).all()


def test_environments_lie_one_after_the_other(trawl):
    trawl("collect", "Pendulum-v1", "--frames", 60, "--frames-per-batch", 30, "--envs", 3,
          "--out", "d")  # fmt: skip
    frames = load("d")
    ids = frames["collector", "traj_ids"].reshape(2, 3, 10)
    assert (ids == ids[:1, :, :1]).all()
    assert len(ids.unique()) == 3
    pieces = frames.reshape(2, 3, 10)
    assert torch.equal(
        pieces["next", "observation"][..., :-1, :], pieces["observation"][..., 1:, :]
    )
    assert torch.equal(pieces["next", "observation"][0, :, -1], pieces["observation"][1, :, 0])


def test_the_same_seed_gives_the_same_frames(trawl):
    for name in ("a", "b"):
        trawl("collect", "Pendulum-v1", "--frames", 300, "--seed", 3, "--out", name)
    assert (load("a") == load("b")).all()


def test_a_seed_that_was_drawn_gives_the_same_frames_again(trawl):
    trawl("collect", "Pendulum-v1", "--frames", 100, "--out", "a")
    trawl("collect", "Pendulum-v1", "--frames", 100, "--out", "b")
    assert (load("a")["action"] != load("b")["action"]).any()
    trawl("collect", "Pendulum-v1", "--frames", 100, "--seed", info("a")["seed"], "--out", "c")
    assert (load("a") == load("c")).all()


def test_the_first_weights_of_a_policy_come_from_the_seed(trawl):
    for name in ("a", "b"):
        trawl("collect", "Pendulum-v1", "--policy", "cli_policies:Net", "--frames", 50, "--seed", 3,
              "--out", name)  # fmt: skip
    assert (load("a") == load("b")).all()


def test_it_is_said_how_the_dataset_was_made(trawl):
    trawl("collect", "Pendulum-v1", "--frames", 1000, "--frames-per-batch", 250, "--seed", 5,
          "--out", "d")  # fmt: skip
    facts = info("d")
    assert facts["env"] == "Pendulum-v1"
    assert facts["policy"] == "random"
    assert facts["seed"] == facts["arguments"]["seed"] == 5
    assert facts["frames_per_batch"] == 250
    assert facts["arguments"]["out"] == "d"
    assert facts["versions"]["torch"] == version("torch")
    assert facts["date"].startswith("20")
    assert facts["stopped_by"] is None
    assert facts["seconds"] > 0
    assert facts["episodes"]["count"] == 5
    assert facts["episodes"]["length"] == {"mean": 200, "std": 0, "min": 200, "max": 200}
    returns = load("d")["next", "reward"].double().reshape(5, 200).sum(1)
    assert facts["episodes"]["return"]["mean"] == pytest.approx(returns.mean().item())
    assert facts["episodes"]["return"]["min"] == pytest.approx(returns.min().item())


def test_it_is_said_which_policy_file_it_was(trawl):
    program = torch.export.export(torch.nn.Linear(3, 1), (torch.zeros(3),))
    torch.export.save(program, "p.pt2")
    trawl("collect", "Pendulum-v1", "--policy", "p.pt2", "--frames", 10, "--out", "d")
    with open("p.pt2", "rb") as file:
        assert info("d")["policy_sha256"] == hashlib.sha256(file.read()).hexdigest()


def test_a_name_is_made_from_environment_and_time(trawl):
    assert trawl("collect", "Pendulum-v1", "--frames", 10)[0] == 0
    (name,) = os.listdir("runs")
    assert name.startswith("Pendulum-v1-20")
    assert len(load(f"runs/{name}")) == 10


def test_exactly_the_frames_that_are_asked_for_are_collected(trawl):
    code, _, err = trawl("collect", "Pendulum-v1", "--frames", 250, "--frames-per-batch", 100,
                         "--out", "d")  # fmt: skip
    assert code == 0
    assert len(load("d")) == 250
    assert "note" not in err
    assert "250/250 frames" in err


@pytest.mark.parametrize(("frames", "envs"), [(3000, 1), (40, 3), (1, 2)])
def test_batches_that_are_not_asked_for_suit_the_environments(frames, envs, trawl):
    trawl("collect", "Pendulum-v1", "--frames", frames, "--envs", envs, "--out", "d")
    assert info("d")["frames_per_batch"] % envs == 0
    assert len(load("d")) == frames


def test_the_summary_tells_the_episodes(trawl):
    _, out, _ = trawl("collect", "Pendulum-v1", "--frames", 400, "--out", "d")
    assert "2 episodes" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["length", "200.0", "0", "200.0", "200.0"] in lines


def test_the_summary_says_if_no_episode_ended(trawl):
    _, out, _ = trawl("collect", "Pendulum-v1", "--frames", 100, "--out", "d")
    assert "no episode has ended" in out


def test_brackets_in_names_are_names(trawl):
    _, out, _ = trawl("collect", "Pendulum-v1", "--frames", 10, "--out", "[red]d[/red]")
    assert "[red]d[/red]" in out
    assert len(load("[red]d[/red]")) == 10


def test_a_failing_policy_keeps_what_was_collected(trawl):
    code, out, err = trawl("collect", "Pendulum-v1", "--policy", "cli_policies:fails",
                           "--frames", 1000, "--frames-per-batch", 100, "--out", "d")  # fmt: skip
    assert code == 2
    last = err.splitlines()[-1]
    assert "collection failed: ValueError: no more (" in last
    assert "kept the 200 frames" in last
    assert "Traceback" not in err
    assert len(load("d")) == 200
    assert not info("d")["complete"]
    assert "no more" in info("d")["stopped_by"]
    assert "200 in " in out


def test_a_policy_that_fails_in_the_first_batch_leaves_nothing(trawl):
    code, _, err = trawl("collect", "Pendulum-v1", "--policy", "cli_policies:fails",
                         "--frames", 1000, "--out", "d")  # fmt: skip
    assert code == 2
    assert "nothing was written" in err.splitlines()[-1]
    assert not [name for name in os.listdir() if name.startswith("d")]


def test_a_traceback_comes_if_asked_for(trawl):
    _, _, err = trawl("collect", "Pendulum-v1", "--policy", "cli_policies:fails", "--frames", 1000,
                      "--out", "d", "--traceback")  # fmt: skip
    assert "Traceback" in err
    assert 'raise ValueError("no more' in err
    assert err.splitlines()[-1].startswith("trawl: collection failed")


@pytest.mark.parametrize(
    ("policy", "code", "frames", "name"),
    [
        ("ctrl_c", 130, 200, "SIGINT"),
        ("terminate", 143, 200, "SIGTERM"),
        ("ctrl_c_twice", 130, 100, "SIGINT"),
    ],
)
def test_a_signal_keeps_what_was_collected(policy, code, frames, name, trawl):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    found, out, err = trawl("collect", "Pendulum-v1", "--policy", f"cli_policies:{policy}",
                            "--frames", 1000, "--frames-per-batch", 100, "--out", "d")  # fmt: skip
    assert found == code
    assert err.splitlines()[-1] == (
        f"trawl: interrupted; kept the {frames} frames collected so far, in d"
    )
    assert len(load("d")) == frames
    assert (info("d")["complete"], info("d")["stopped_by"]) == (False, name)
    assert f"{frames} in " in out
    assert [each for each in os.listdir() if each.startswith("d")] == ["d"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_in_the_last_batch_leaves_a_whole_dataset(trawl):
    code, _, _ = trawl("collect", "Pendulum-v1", "--policy", "cli_policies:ctrl_c",
                       "--frames", 200, "--frames-per-batch", 100, "--out", "d")  # fmt: skip
    assert code == 130
    assert info("d")["complete"]


def test_warnings_are_lines_without_escape_codes(trawl):
    # This environment warns in colours.
    code, out, err = trawl("collect", "CartPole-v0", "--frames", 100, "--out", "d")
    assert code == 0
    assert "\x1b" not in out + err
    notes = [line for line in err.splitlines() if not line.startswith("100/100 frames")]
    assert notes
    assert all(line.startswith("trawl: note: ") for line in notes)


def test_a_limit_on_file_sizes_keeps_what_fits(trawl):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The largest entries, of 12 bytes a frame, have room for 16 batches.
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        code, _, err = trawl("collect", "Pendulum-v1", "--frames", 20_000, "--out", "d")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    assert err.splitlines()[-1] == (
        "trawl: d can't be written: File too large; kept the 16,000 frames collected so far, in d"
    )
    assert len(load("d")) == 16_000


def test_a_policy_that_leaves_the_program_is_an_error(trawl):
    code, _, err = trawl("collect", "Pendulum-v1", "--policy", "cli_policies:leaves",
                         "--frames", 1000, "--frames-per-batch", 100, "--out", "d")  # fmt: skip
    assert code == 2
    assert "collection failed: SystemExit: enough" in err.splitlines()[-1]
    assert len(load("d")) == 100


def test_ctrl_c_that_is_ignored_stays_ignored(trawl):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code, _, _ = trawl("collect", "Pendulum-v1", "--policy", "cli_policies:ctrl_c",
                           "--frames", 300, "--frames-per-batch", 100, "--out", "d")  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 0
    assert len(load("d")) == 300
