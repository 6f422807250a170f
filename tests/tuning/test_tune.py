"""``trawl.tune``, with real collectors."""

from __future__ import annotations

import itertools
import signal
import subprocess
from functools import partial
from types import SimpleNamespace

import gymnasium
import psutil
import pytest
import torch
from forked import Forked
from rich.console import Console
from tuning_parts import SMALL, Linear, candidate

import trawl
from trawl import Collector
from trawl.extras.tuning import Trial, TuneResult, tuner
from trawl.extras.tuning.halving import Halving
from trawl.extras.tuning.trial import Probe
from trawl.extras.tuning.tuner import TuneProgress
from trawl.testing import FaultyEnv, NumberedEnv

PATIENCE = 300


def test_a_short_search_of_cartpole():
    result = trawl.tune("CartPole-v1", budget=3, max_workers=2, max_envs=8, progress=False)
    assert isinstance(result, TuneResult)
    assert result.best in result.trials
    assert result.best.measured
    assert result.frames_per_second > 0
    rates = [trial.frames_per_second for trial in result.trials]
    assert rates == sorted(rates, reverse=True)
    assert {trial.candidate.total_envs for trial in result.trials} <= {1, 2, 4, 8}
    assert all(trial.error is None for trial in result.trials)
    assert result.why
    assert "chosen" in str(result)
    assert result.code in str(result)
    names: dict = {}
    exec(result.code, names)
    with names["collector"], Collector(**result.options) as collector:
        assert type(collector) is type(names["collector"])
        assert collector.next().shape == names["batch"].shape


def test_options_reach_the_collectors_and_the_result_and_leave_no_trace(capsys):
    options = {"create_env_kwargs": {"g": 3.0}, "max_frames_per_traj": 9, "progress": True}
    policy = Linear(3, draws=True)
    torch.manual_seed(5)
    expected, threads = torch.rand(2), torch.get_num_threads()
    torch.manual_seed(5)
    result = trawl.tune("Pendulum-v1", policy, frames_per_batch=30, **{**SMALL, **options})
    assert torch.equal(torch.rand(2), expected)
    assert torch.get_num_threads() == threads
    assert policy.calls == 0  # a copy acts
    assert [trial.candidate for trial in result.trials] == [candidate(29)]
    assert result.code.splitlines()[1] == (
        "collector = Collector('Pendulum-v1', policy, frames_per_batch=30, "
        "create_env_kwargs={'g': 3.0}, max_frames_per_traj=9)"
    )
    with Collector(policy=policy, **result.options) as collector:
        assert collector.getattr_env("env.unwrapped.g") == 3.0
        assert collector.config.max_frames_per_traj == 9
    # Without a terminal, each layout is a line.
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert "one process, 1 env: " in line
    assert line.endswith("frames/s in batches of 30")


@pytest.fixture
def brief(monkeypatch):
    """Measurements are as brief as can be, and each layout is measured on every machine."""
    ticks = itertools.count(0.0, 1e-3)
    monkeypatch.setattr(tuner, "Halving", partial(Halving, clock=lambda: next(ticks)))
    real = tuner.measure
    monkeypatch.setattr(tuner, "measure", lambda make, seconds, *more: real(make, 0.0, *more))


@pytest.mark.usefixtures("brief")
def test_a_policy_factory_makes_the_policies():
    factory = partial(Linear, 3)
    result = trawl.tune("Pendulum-v1", policy_factory=factory, frames_per_batch=30, **SMALL)
    assert result.options["policy_factory"] is factory
    assert "policy_factory=make_policy" in result.code


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("sync", [None, True, False])
def test_a_learner_gets_the_batches_and_one_worker_of_the_kinds_asked_for_is_tried(sync):
    sizes = set()
    options = {"frames_per_batch": 20, "learner": lambda batch: sizes.add(batch.numel())}
    result = trawl.tune(NumberedEnv, sync=sync, **{**SMALL, "budget": 2}, **options)
    assert sizes == {20}
    expected = {"one process, 1 env"}
    if sync is not False:
        expected |= {"1 worker x 1 env, sync", "1 worker x 1 env, sync, prefetch=1"}
    if sync is not True:
        expected |= {"1 worker x 1 env, async"}
    assert {trial.candidate.label for trial in result.trials} == expected


@pytest.mark.usefixtures("brief")
def test_layouts_that_fail_are_noted(monkeypatch):
    """The environment can be made once in each process, but not twice."""
    made = []

    def once():
        made.append(1)
        if len(made) % 2 == 0:
            raise OSError("only one environment\nin a process")
        return NumberedEnv()

    def measured(*arguments):
        made.clear()
        return real(*arguments)

    real = tuner.measure
    monkeypatch.setattr(tuner, "measure", measured)
    result = trawl.tune(once, frames_per_batch=40, **{**SMALL, "max_envs": 4})
    assert result.best.candidate == candidate(39)
    errors = {trial.candidate.envs: trial.error for trial in result.trials}
    assert errors == {1: None, 4: "OSError: only one environment"}
    assert "OSError: only one environment" in str(result)


@pytest.mark.usefixtures("brief")
def test_workers_that_cannot_get_the_environment_are_noted():
    class Unpicklable:
        def __call__(self):
            return NumberedEnv()

        def __reduce__(self):
            raise TypeError("stays here")

    result = trawl.tune(
        Unpicklable(), budget=3, frames_per_batch=16, max_workers=2, max_envs=2, progress=False
    )
    assert result.best.candidate == candidate(15)
    failed = [trial for trial in result.trials if trial.error is not None]
    assert failed
    assert all("stays here" in trial.error for trial in failed)


def test_if_no_layout_works_the_first_error_is_the_cause():
    made = []

    def once():
        made.append(1)
        if len(made) > 1:
            raise OSError("only once")
        return NumberedEnv()

    with pytest.raises(RuntimeError, match="no layout could be measured") as raised:
        trawl.tune(once, frames_per_batch=10, **SMALL)
    assert str(raised.value.__cause__) == "only once"


# --- wrong arguments


@pytest.mark.parametrize(
    ("arguments", "change", "error", "message"),
    [
        *(
            ((NumberedEnv,), *row)
            for row in (
                ({"budget": 0.5}, ValueError, "budget must be at least 1 seconds, but it is 0.5"),
                ({"budget": float("nan")}, ValueError, "budget must be at least 1 seconds"),
                ({"budget": "60"}, TypeError, "budget must be a number of seconds"),
                ({"frames_per_batch": 0}, ValueError, "frames_per_batch must be at least 1"),
                # A billion frames: no machine collects them in time.
                ({"frames_per_batch": 10**9}, ValueError,
                 r"budget must be at least \d+ seconds, but it is 4: one "),
                ({"max_workers": 0}, ValueError, "max_workers must be at least 1"),
                ({"max_envs": 1.5}, TypeError, "max_envs must be an integer"),
                ({"sync": "yes"}, TypeError, "sync must be True, False or None"),
                ({"learner": 3}, TypeError, "learner must be callable"),
                ({"max_frame_per_traj": 3}, TypeError, "did you mean max_frames_per_traj"),
                ({"total_frames": 3}, TypeError, "unknown arguments: total_frames"),
                ({"device": "no"}, ValueError, "device"),
            )
        ),
        ((["CartPole-v1"] * 2,), {}, TypeError, "tune needs the source of one environment"),
        ((gymnasium.make("CartPole-v1"),), {}, TypeError, "is an existing environment"),
        ((Linear(),), {}, TypeError, "the environment comes first"),
        (("NoSuchEnv-v1",), {}, gymnasium.error.NameNotFound, "NoSuchEnv"),
        ((partial(FaultyEnv, 0, ZeroDivisionError("no")),), {}, ZeroDivisionError, "no"),
        (("Pendulum-v1", Linear(7)), {}, RuntimeError, "mat1 and mat2"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_reported_at_the_call(arguments, change, error, message):
    with pytest.raises(error, match=message):
        trawl.tune(*arguments, **{**SMALL, **change})


def test_an_environment_that_takes_long_to_make_costs_budget_only(monkeypatch):
    """The clock stands still but for an hour that the first environment takes."""
    made = []
    clock = SimpleNamespace(perf_counter=lambda: 3600.0 * len(made))
    monkeypatch.setattr(tuner, "time", clock)

    def look(*arguments):
        made.append(1)
        return Probe(1e-4, 0, False)

    monkeypatch.setattr(tuner, "probe", look)
    result = trawl.tune(NumberedEnv, frames_per_batch=10, **{**SMALL, "max_envs": 4})
    assert [trial.measured for trial in result.trials] == [True, False]
    assert "1 layout of 2 could not be measured in time" in result.why


# --- traces and progress


def test_ctrl_c_leaves_no_process(tmp_path):
    code = "import trawl; trawl.tune('CartPole-v1', budget=600, max_envs=2, max_workers=2)"
    with Forked(code, stderr=subprocess.PIPE, cwd=tmp_path, finalize=True) as process:
        try:
            # By now, there have been workers.
            assert any("2 workers" in line for line in process.stderr)
            below = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert told.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT
    _, alive = psutil.wait_procs(below, PATIENCE)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_a_terminal_shows_a_bar(capsys):
    console = Console(force_terminal=True, width=120, color_system=None)
    with TuneProgress(10, console) as progress:
        progress.update(candidate(3))
        progress.update(Trial(candidate(3), error="ValueError: no"))
        progress.update(candidate(0))
        progress.update(Trial(candidate(0), 50.0, 1.0))
        progress.update(candidate(1))
        progress.update(Trial(candidate(1), error="ValueError: no"))
        progress.update(candidate(2))
    shown = capsys.readouterr().out
    assert "looking at the environment" in shown
    assert "best: one process, 1 env, 50.0 frames/s in batches of 1" in shown
    assert "ValueError" not in shown
