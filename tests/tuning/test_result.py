"""The table, the code and the reasons of a result."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from tuning_parts import Linear

from trawl import Collector
from trawl.collectors import NormalizeObservation, NormalizeReward
from trawl.envs import FrameStack
from trawl.extras.tuning import Candidate, Trial, TuneResult
from trawl.extras.tuning.result import ordered
from trawl.extras.tuning.tuner import busy, code_of, reason

CANDIDATES = [
    Candidate(frames_per_batch=8),
    Candidate(envs=4, frames_per_batch=8),
    Candidate(workers=2, frames_per_batch=8),
    Candidate(workers=2, envs=2, frames_per_batch=8, prefetch=1),
    Candidate(workers=2, envs=2, frames_per_batch=8, sync=False),
    Candidate(envs=4, env_processes=2, frames_per_batch=8),
    Candidate(envs=2, env_processes=2, frames_per_batch=8),
]


def run(code, **names):
    """Runs the code; returns what it made, closed, and the batch."""
    exec(code, names)
    names["collector"].shutdown()
    return names["collector"], names["batch"]


@pytest.mark.parametrize("one", CANDIDATES, ids=lambda one: one.label)
def test_the_code_and_the_options_make_the_layout(one):
    options = {"create_env_kwargs": {"g": 3.5}, "max_frames_per_traj": 7}
    code = code_of(one, "Pendulum-v1", Linear(), options)
    assert len(code.splitlines()) == 3
    collector, batch = run(code, policy=Linear())
    assert batch.numel() == one.frames_per_batch
    assert getattr(collector, "num_workers", 0) == one.workers
    per_worker = 1 if not one.workers or not one.sync else one.workers
    assert batch.shape[:-1].numel() == per_worker * one.envs
    assert collector.config.max_frames_per_traj == 7
    assert getattr(collector.config, "prefetch", 0) == one.prefetch
    with Collector(**one.options("Pendulum-v1", {"g": 3.5})) as same:
        assert type(same) is type(collector)
        assert same.next().shape == batch.shape


def test_names_stand_for_what_has_no_text():
    one = Candidate(frames_per_batch=8)
    options = {"policy_factory": Linear, "device": "cpu", "exploration_type": object()}
    code = code_of(one, CartPoleEnv, None, options)
    expected = (
        "collector = Collector(make_env, frames_per_batch=8, policy_factory=make_policy, "
        "device='cpu', exploration_type=exploration_type)"
    )
    assert code.splitlines()[1] == expected


def test_stacks_and_normalisation_are_shown():
    options = {
        "normalize_observations": NormalizeObservation(clip=math.inf),
        "normalize_rewards": NormalizeReward(keep_raw=True, gamma=0.9),
    }
    collector, batch = run(code_of(Candidate(frames_per_batch=8), "Pendulum-v1", None, options))
    assert {name: getattr(collector.config, name) for name in options} == options
    assert ("next", "raw_reward") in batch.keys(True)
    stack = {"frame_stack": FrameStack(3, keys=["observation"])}
    collector, batch = run(code_of(Candidate(frames_per_batch=8), "Pendulum-v1", None, stack))
    assert collector.config.frame_stack == stack["frame_stack"]


def trials(**rates):
    """Results of the layouts of a small search."""
    found = {
        "base": Trial(Candidate(frames_per_batch=8), 100.0, 1.0, {"env_share": 0.85}),
        "batch": Trial(Candidate(envs=4, frames_per_batch=8), 90.0, 1.0, {"env_share": 0.9}),
        "workers": Trial(Candidate(workers=2, frames_per_batch=8), 80.0, 1.0),
        "many": Trial(Candidate(workers=2, envs=4, frames_per_batch=8), 70.0, 1.0),
        "parallel": Trial(Candidate(envs=8, env_processes=2, frames_per_batch=8), 60.0, 1.0),
    }
    for name, rate in rates.items():
        found[name] = replace(found[name], frames_per_second=rate)
    return found


def why(best, **rates):
    found = trials(**rates)
    return reason(ordered(list(found.values())), found[best])


@pytest.mark.parametrize(
    ("best", "rate", "text"),
    [
        (
            "workers",
            190.0,
            "2 synchronous workers with 1 environment each collect 1.9 times as many frames per "
            "second as one process with 1 environment. In one process, the environment takes 85% "
            "of the time, and the policy and the collector take the rest. 2 workers divide all of "
            "this.",
        ),
        (
            "many",
            180.0,
            "2 synchronous workers with 4 environments each collect 1.8 times as many frames per "
            "second as one process with 1 environment. In one process, the environment takes 90% "
            "of the time, and the policy and the collector take the rest. 2 workers divide all of "
            "this, and collect 2.0 times as many frames as one process with 4 environments.",
        ),
        (
            "batch",
            110.0,
            "One process with 4 environments collects 1.10 times as many frames per second as one "
            "process with 1 environment. With one environment, 15% of the time goes to the policy "
            "and the collector, which now work once for 4 environments.",
        ),
        (
            "parallel",
            200.0,
            "A ParallelEnv of 8 environments in 2 processes collects 2.0 times as many frames per "
            "second as one process with 1 environment. In one process, the environment takes 90% "
            "of the time; 2 processes divide this share, while the policy acts once for all "
            "environments, and collect 2.2 times as many frames as one process with 4 "
            "environments.",
        ),
        (
            "base",
            100.0,
            "One process with 1 environment collects 100 frames per second; the best of the other "
            "layouts (one process with 4 environments) is at 90% of its speed.",
        ),
    ],
)
def test_the_reason_is_what_the_layout_divides(best, rate, text):
    assert why(best, **{best: rate}) == text


def test_the_simplest_layout_may_be_a_little_slower_or_the_only_one():
    assert "is no more than 3% faster." in why("base", workers=101.0)
    assert "each collect about as many frames per second" in why("workers", workers=101.0)
    # Batches of another size are no other layout.
    found = [
        Trial(Candidate(frames_per_batch=1000), 100.0, 1.0, {}),
        Trial(Candidate(frames_per_batch=4000), 99.0, 1.0, {}),
    ]
    assert reason(found, found[0]) == (
        "One process with 1 environment is the only layout that was measured."
    )


def test_what_makes_figures_doubtful_is_mentioned():
    assert busy(1.0, 2) == ""
    assert busy(5.04, 2).startswith("Other programs were busy when the search began (load 5.0 on 2")
    found = [*trials().values(), Trial(Candidate(workers=9, frames_per_batch=9))]
    assert reason(found, found[0]).endswith(
        "1 layout of 6 could not be measured in time: a larger budget compares more."
    )
    best = Trial(Candidate(workers=2, frames_per_batch=8), 9.0, 1.0, {"idle_share": 0.25})
    assert reason([best], best).endswith("Its workers wait for 25% of the time.")


def test_the_table():
    found = list(trials(workers=190.0).values())
    found[3] = found[3].fail(ValueError("no such thing"))
    found.append(Trial(Candidate(workers=9, frames_per_batch=9)))
    rows = ordered(found)
    result = TuneResult(rows, rows[0], {}, "code", "reason", 1.0)
    head, _, *lines = (re.split("  +", line.strip()) for line in str(result).splitlines())
    assert head == ["layout", "batch", "frames/s", "of best", "env time"]
    assert lines == [
        ["2 workers x 1 env, sync", "8", "190.0", "100%", "chosen"],
        ["one process, 1 env", "8", "100.0", "53%", "85%"],
        ["one process, 4 envs", "8", "90.0", "47%", "90%"],
        ["ParallelEnv, 2 x 4 envs", "8", "60.0", "32%"],
        ["2 workers x 4 envs, sync", "8", "ValueError: no such thing"],
        ["9 workers x 1 env, sync", "9", "no time left to measure it"],
        [""],
        ["reason"],
        [""],
        ["code"],
    ]
    assert result.frames_per_second == 190.0
