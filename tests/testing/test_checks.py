"""One deliberately broken environment or policy per finding, and healthy ones without any."""

import json
import os
import random
import re
import sys
import threading
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from pettingzoo import ParallelEnv as Parallel
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.envs import GymEnv, JaxEnv, ParallelEnv
from trawl.testing import CheckFailed, NumberedEnv, check_env, check_policy

NEXT, SAME, DISABLED = "NextStep", "SameStep", "Disabled"
BOX = spaces.Box(-1, 1, (2,), np.float32)


class Healthy(gymnasium.Env):
    """Draws observations, and ends after seven steps."""

    observation_space = BOX
    action_space = spaces.Discrete(2)
    time = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        return self.observe(), *self.outcome()

    def observe(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def outcome(self):
        return 1.0, self.time >= 7, False, {}


def broken(base=Healthy, **members):
    """Returns a class of environments that differ in some members from those of another class."""
    return type("Broken", (base,), members)


def outcome(*values):
    return broken(outcome=lambda env: values)


def observing(change, **members):
    return broken(observe=lambda env: change(env, Healthy.observe(env)), **members)


def fail(*_, **__):
    raise OSError("no robot")


def reset_alone(env):
    return Healthy.reset(env)


def reset_seeded(env, *, seed=None):
    return Healthy.reset(env, seed=seed)


def reset_once(env, **given):
    if env.time:
        raise RuntimeError("only once")
    return Healthy.reset(env, **given)


def step_by_itself(env, action):
    obs, reward, terminated, truncated, info = Healthy.step(env, action)
    if terminated:
        info["final_observation"], (obs, _) = obs, Healthy.reset(env)
    return obs, reward, terminated, truncated, info


def reuse(env, obs):
    env.buffer = getattr(env, "buffer", np.zeros(2, np.float32))
    env.buffer[:] = obs
    return env.buffer


def late(env, obs):
    # Once a step was taken after the end of an episode, all is shifted.
    env.shift = getattr(env, "shift", 0) or float(env.time > 7)
    return np.clip(obs + env.shift, -1, 1)


def break_late(env, **given):
    if env.time > 7:
        raise RuntimeError("broken for ever")
    return Healthy.reset(env, **given)


class Private(Healthy):
    def __init__(self):
        self.generator = np.random.default_rng()

    def observe(self):
        return self.generator.uniform(-1, 1, 2).astype(np.float32)


class Carried(Private):
    def __init__(self):
        self.generator = np.random.default_rng(0)


class Numbered(Healthy):
    made = 0

    def __init__(self):
        Numbered.made += 1
        self.number = Numbered.made

    def observe(self):
        return super().observe() / self.number


class Forgetful(Healthy):
    def get_state(self):
        return {"time": self.time}

    def set_state(self, state):
        self.time = state["time"]


class Locked(Healthy):
    def __init__(self):
        self.lock = threading.Lock()


class Spawning(Locked):
    """Neither its attributes nor its generator can be captured."""

    def reset(self, **given):
        found = super().reset(**given)
        self.np_random.spawn(1)
        return found


class Closed(Locked):
    """Neither its state nor its generator can be read."""

    def reset(self, **given):
        self.streams = (np.random.default_rng(seed) for seed in range(100))
        return super().reset(**given)

    def observe(self):
        return next(self.streams).uniform(-1, 1, 2).astype(np.float32)


class Vector(VectorEnv):
    """Two environments, whose true mode may differ from the declared one."""

    single_observation_space, single_action_space = BOX, spaces.Discrete(2)
    num_envs = 2

    def __init__(self, true, declared, final=None):
        self.metadata = {"autoreset_mode": declared}
        self.true, self.final = true, final
        self.observation_space = gymnasium.vector.utils.batch_space(BOX, 2)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, 2)

    def draw(self, rows):
        self.shown[rows] = self.np_random.uniform(-1, 1, (np.sum(rows), 2))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        rows = (options or {}).get("reset_mask", np.ones(2, bool))
        if rows.all():
            self.shown, self.time = np.zeros((2, 2), np.float32), np.zeros(2, int)
        self.draw(rows)
        self.time[rows], self.ended = 0, np.zeros(2, bool)
        return self.shown.copy(), {}

    def step(self, actions):
        begins = self.ended & (self.true == NEXT)
        self.time = np.where(begins, 0, self.time + 1)
        self.draw(np.ones(2, bool))
        self.ended, info = self.time >= [3, 5], {}
        if self.true == SAME and self.ended.any():
            # With "shared", the last observations are overwritten by the first ones.
            last = self.shown if self.final == "shared" else self.shown.copy()
            info = {"final_obs": last, "_final_obs": self.ended} if self.final else {}
            self.draw(self.ended)
            self.time[self.ended] = 0
        return self.shown.copy(), np.where(begins, 0.0, 1.0), self.ended, np.zeros(2, bool), info


DICT = spaces.Dict(a=spaces.Discrete(3), b=BOX)
ONE = Healthy()


class Tensors:
    """Three environments of torch tensors, which end after three to five steps."""

    single_observation_space, single_action_space = BOX, spaces.Discrete(2)
    num_envs, device = 3, "cpu"

    mode, partial = DISABLED, True

    def __init__(self):
        self.metadata = {"autoreset_mode": self.mode}

    def change(self, shown):
        return shown

    def reset(self, *, seed=None, options=None):
        if seed is not None or not hasattr(self, "generator"):
            self.generator = torch.Generator().manual_seed(seed or 0)
        rows = (options or {}).get("reset_mask") if self.partial else None
        if rows is None:
            self.shown, rows = torch.zeros(3, 2), torch.ones(3, dtype=torch.bool)
            self.time = torch.zeros(3)
        self.time = torch.where(rows, 0, self.time)
        self.shown = torch.where(rows[:, None], self.draw(), self.shown)
        return self.change(self.shown), {}

    def draw(self):
        return torch.rand(3, 2, generator=self.generator)

    def step(self, actions):
        self.time, self.shown = self.time + 1, self.draw()
        ended = self.time >= torch.tensor([3, 4, 5])
        return self.change(self.shown), torch.ones(3), ended, torch.zeros_like(ended), {}

    def close(self):
        pass


class Agents(Parallel):
    """Two agents, for seven steps."""

    possible_agents = ("a_0", "a_1")
    results = ()

    def observation_space(self, agent):
        return BOX

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.time = list(self.possible_agents), 0
        if seed is not None or not hasattr(self, "generator"):
            self.generator = np.random.default_rng(seed)
        return self.observe(), {agent: {} for agent in self.agents}

    def observe(self):
        return {a: self.generator.uniform(-1, 1, 2).astype(np.float32) for a in self.agents}

    def step(self, actions):
        self.time += 1
        present, over = list(self.agents), self.time == 7
        values = [1.0, over, False, {}]
        found = [self.observe(), *(dict.fromkeys(present, one) for one in values)]
        self.agents = [] if over else present
        for place, change in self.results:
            found[place] = change(found[place])
        return tuple(found)


def first_only(values):
    return {"a_0": values["a_0"]}


def in_buffer(env, shown):
    env.buffer = getattr(env, "buffer", torch.zeros(3, 2))
    return env.buffer.copy_(shown)


# A broken environment; the level and the topic of its only finding, and a part of the sentence.
ENVS = {
    "other precision": (
        observing(lambda _, obs: obs.astype(float)),
        "warning observations",
        "is float64, but its space says float32",
    ),
    "list": (observing(lambda _, obs: obs.tolist()), "warning observations", "float64"),
    "other kind": (
        broken(observation_space=spaces.Box(0, 5, (2,), np.int64)),
        "error observations",
        "float32, but its space says int64",
    ),
    "shape": (
        observing(lambda _, obs: obs[:1]),
        "error observations",
        r"the first reset has the shape \(1,\), but its space says \(2,\)",
    ),
    "shape of a later step": (
        observing(lambda env, obs: obs[: 2 - (env.time == 3)]),
        "error observations",
        r"step 3 has the shape \(1,\)",
    ),
    "bounds": (
        observing(lambda env, obs: obs + 4 * (env.time == 2)),
        "warning observations",
        r"of step 2 is [345]\.\d+ at \[0\], above the bound 1.0",
    ),
    "NaN": (
        observing(lambda env, obs: obs * (np.nan if env.time == 3 else 1)),
        "error observations",
        r"step 3 has NaN at \[0\]",
    ),
    "nothing": (observing(lambda _, obs: None), "error observations", "NoneType"),
    "objects": (observing(lambda _, obs: {"a": obs}), "error observations", "is dict"),
    "missing entry": (
        observing(
            lambda env, obs: {"a": 0, "b": obs} if env.time < 3 else {"a": 0},
            observation_space=DICT,
        ),
        "error observations",
        r"step 3 lacks \['b'\]",
    ),
    "no mapping": (
        broken(observation_space=DICT),
        "error observations",
        "is ndarray, but its space is a Dict",
    ),
    "choice": (
        observing(lambda env, _: env.time, observation_space=spaces.Discrete(3)),
        "error observations",
        r"step 3 is 3, but its space is Discrete\(3\)",
    ),
    "text": (
        observing(lambda env, _: "x" * env.time, observation_space=spaces.Text(5)),
        "warning observations",
        "not in its space",
    ),
    "reused buffer": (observing(reuse), "note buffers", "before step 1 was overwritten"),
    "reused vector buffer": (
        lambda: SyncVectorEnv([Healthy] * 2, copy=False),
        "note buffers",
        "overwritten",
    ),
    "reward NaN": (outcome(np.nan, False, False, {}), "error rewards", "is nan"),
    "reward beyond float32": (outcome(1e300, False, False, {}), "error rewards", r"1e\+300"),
    "reward text": (outcome("5", False, False, {}), "error failures", "reward='5'"),
    "reward None": (outcome(None, False, False, {}), "error failures", "reward=None"),
    "several rewards": (
        outcome(np.ones(3), False, False, {}),
        "error failures",
        "state reward_space",
    ),
    "flag text": (outcome(1.0, "False", False, {}), "error failures", "terminated='False'"),
    "flag None": (outcome(1.0, False, None, {}), "error failures", "truncated=None"),
    "four results": (outcome(1.0, False, {}), "error failures", "returned 4 values"),
    "reset alone": (
        broken(reset=lambda env, **given: Healthy.reset(env, **given)[0]),
        "error failures",
        "returned ndarray",
    ),
    "no seed": (broken(reset=reset_alone), "error reset", "arguments seed and options"),
    "no options": (broken(reset=reset_seeded), "warning reset", "argument options"),
    "no info": (outcome(1.0, False, False, None), "warning infos", "is NoneType"),
    "infos come and go": (
        broken(outcome=lambda env: (1.0, env.time > 6, False, {"x": 1} if env.time % 2 else {})),
        "note infos",
        "x only in some steps",
    ),
    "infos change": (
        broken(outcome=lambda env: (1.0, env.time > 6, False, {"x": np.zeros(env.time)})),
        "note infos",
        r"shapes \[\(1,\), \(2,\)",
    ),
    "failing step": (
        broken(step=fail),
        "error failures",
        "step 1 failed: OSError: no robot: .*on_env_error",
    ),
    "failing reset": (broken(reset=fail), "error failures", "the first reset failed: OSError"),
    "failing second reset": (
        broken(reset=reset_once),
        "error failures",
        "the reset after step 7 failed",
    ),
    "failing constructor": (broken(__init__=fail), "error construction", "OSError"),
    "exit": (broken(step=lambda *_: sys.exit(3)), "error failures", "SystemExit: 3"),
    "failing close": (broken(close=fail), "warning closing", "OSError"),
    "broken by a late step": (broken(reset=break_late), "warning late steps", "broken for ever"),
    "changed by a late step": (observing(late), "warning late steps", "changed what followed"),
    "begins by itself": (
        broken(step=step_by_itself),
        "warning autoreset",
        r"info\['final_observation'\] of step 7",
    ),
    "np.random": (
        observing(lambda *_: np.random.uniform(-1, 1, 2).astype(np.float32)),
        "warning seeds",
        r"generator of NumPy \(np.random\),",
    ),
    "random": (
        observing(lambda *_: np.full(2, random.random(), np.float32)),
        "warning seeds",
        r"generator of Python \(random\),",
    ),
    "torch": (observing(lambda *_: torch.rand(2).numpy()), "warning seeds", "generator of torch,"),
    "seed ignored": (Private, "warning seeds", r"by super\(\).reset\(seed=seed\)"),
    "carried over": (Carried, "warning seeds", "depends on earlier episodes"),
    "differing twins": (Numbered, "warning seeds", "made in the same way differ"),
    "incomplete state": (
        Forgetful,
        "error states",
        "restored .by get_state. continues with other data",
    ),
    "state that can't be loaded": (
        broken(Forgetful, set_state=fail),
        "error states",
        "OSError: no robot",
    ),
    "no state": (Spawning, "note states", "can't be captured"),
    "the same object": (lambda: ONE, "error batches", "are the same object"),
    "undeclared mode": (
        lambda: Vector(SAME, None),
        "error construction",
        "doesn't state when it resets",
    ),
    "next step, declared as same step": (
        lambda: Vector(NEXT, SAME),
        "error failures",
        "no info..final_obs",
    ),
    "disabled, declared as next step": (
        lambda: Vector(DISABLED, NEXT),
        "error failures",
        "so it was not a reset",
    ),
    "same step, declared as next step": (
        lambda: Vector(SAME, NEXT, "copied"),
        "error failures",
        "resets in that step",
    ),
    "same step without last observations, declared as next step": (
        lambda: Vector(SAME, NEXT),
        "warning autoreset",
        "a reward of 1.0",
    ),
    "same step, declared as disabled": (
        lambda: Vector(SAME, DISABLED, "copied"),
        "error failures",
        "resets in that step",
    ),
    "same step without last observations": (
        lambda: Vector(SAME, SAME),
        "error failures",
        "no info..final_obs",
    ),
    "same step with overwritten last observations": (
        lambda: Vector(SAME, SAME, "shared"),
        "warning autoreset",
        "always equals the first observation",
    ),
    "tensors of other precision": (
        broken(Tensors, change=lambda _, shown: shown.double()),
        "warning observations",
        "is float64",
    ),
    "shape of tensors": (
        broken(Tensors, change=lambda _, shown: shown[:2]),
        "error observations",
        r"shape \(2, 2\)",
    ),
    "reused tensors": (
        broken(Tensors, change=in_buffer),
        "note buffers",
        "overwritten",
    ),
    "tensors, declared as next step": (
        broken(Tensors, mode=NEXT),
        "error autoreset",
        "so it was not a reset",
    ),
    "tensors that all begin anew": (
        broken(Tensors, partial=False),
        "error autoreset",
        "also changed sub-environment",
    ),
    "agent without observation": (
        broken(Agents, results=[(0, first_only)]),
        "error agents",
        r"no observation of \['a_1'\]",
    ),
    "agent without reward": (
        broken(Agents, results=[(1, first_only)]),
        "error agents",
        "step 1 returned no reward",
    ),
    "flag of an agent": (
        broken(Agents, results=[(2, lambda flags: dict.fromkeys(flags))]),
        "error agents",
        "termination of agent 'a_0'=None",
    ),
    "shape of an agent's observation": (
        broken(Agents, observe=lambda env: {a: np.zeros(3) for a in env.agents}),
        "error observations",
        r"shape \(3,\)",
    ),
    "precision of an agent's observation": (
        broken(Agents, observe=lambda env: {a: np.zeros(2) for a in env.agents}),
        "warning observations",
        "of agent 'a_0' is float64",
    ),
    "bounds of an agent's observation": (
        broken(Agents, observe=lambda env: {a: np.full(2, 9, np.float32) for a in env.agents}),
        "warning observations",
        "above the bound 1.0",
    ),
    "unknown id": ("NoSuchEnv-v0", "error construction", "NameNotFound"),
    "no environment": (5, "error construction", "expected an id"),
    "makes no environment": (lambda: 5, "error construction", "not an environment"),
    "no spaces": (broken(gymnasium.Env), "error construction", "must be a gymnasium.Space"),
}


@pytest.mark.parametrize("case", ENVS)
def test_a_broken_environment_has_one_finding(case):
    source, found, sentence = ENVS[case]
    report = check_env(source, steps=20, worker=False)
    assert [f"{one.level} {one.topic}" for one in report.findings] == [found], report
    [finding] = report.findings
    assert re.search(sentence, finding.message), report
    assert report.ok == (not found.startswith("error"))


class Placed(Healthy):
    def __init__(self, process):
        self.process = process

    def observe(self):
        return super().observe() * (1 if os.getpid() == self.process else -1)


# Made in the test, whose process may be a copy of the one that has imported it.
WORKERS = {
    "process": (
        lambda: partial(Placed, os.getpid()),
        "warning workers",
        "other data in a worker process",
    ),
    "lock": (Locked, "warning workers", "cannot pickle '_thread.lock'"),
    "lock in a function": (
        lambda: partial(lambda _: Healthy(), threading.Lock()),
        "error workers",
        "'_thread.lock'",
    ),
}


@pytest.mark.parametrize("case", WORKERS)
def test_what_fails_in_a_worker_process_is_found(case):
    make, found, sentence = WORKERS[case]
    report = check_env(make(), steps=10)
    finding = report.findings[0]
    assert f"{finding.level} {finding.topic}" == found, report
    assert re.search(sentence, finding.message), report


def make_torchrl():
    from torchrl.envs import GymEnv

    return GymEnv("Pendulum-v1")


def make_agents(name):
    module = pytest.importorskip(name)
    return (getattr(module, "parallel_env", None) or module.env)()


def make_gymnax():
    gymnax = pytest.importorskip("gymnax")
    return JaxEnv(gymnax.make("CartPole-v1"), num_envs=2)


HEALTHY = {
    "id": "CartPole-v1",
    "function": Healthy,
    "object": gymnasium.make("Pendulum-v1"),
    "list": ["CartPole-v1", "CartPole-v1"],
    **{
        f"vector, {mode.value}": lambda mode=mode: SyncVectorEnv([Healthy] * 2, autoreset_mode=mode)
        for mode in AutoresetMode
    },
    "own vector": lambda: Vector(SAME, SAME, "copied"),
    "threads": lambda: ParallelEnv(2, Healthy, backend="thread"),
    "EnvPool": "envpool:CartPole-v1",
    "dm_control": "dm_control:cartpole/swingup",
    "agents": lambda: make_agents("mpe2.simple_spread_v3"),
    "agents in turns": lambda: make_agents("pettingzoo.classic.tictactoe_v3"),
    "torch": Tensors,
    "own agents": Agents,
    "JAX": make_gymnax,
    "TorchRL": make_torchrl,
    "choices": "Blackjack-v1",
    "masks": "Taxi-v4",
    "MuJoCo": "HalfCheetah-v5",
    "Box2D": "LunarLander-v3",
}
PACKAGES = {"EnvPool": "envpool", "dm_control": "dm_control", "TorchRL": "torchrl"}
PACKAGES |= {"MuJoCo": "mujoco", "Box2D": "Box2D"}


@pytest.mark.parametrize("kind", HEALTHY)
def test_nothing_is_found_in_a_healthy_environment(kind):
    if kind in PACKAGES:
        pytest.importorskip(PACKAGES[kind])
    report = check_env(HEALTHY[kind], steps=20, worker=kind == "function")
    assert not report.findings, report
    assert report.ok
    assert report.raise_for_errors() is report
    assert report.figures["microseconds per step"] > 0


def test_a_slow_environment_takes_fewer_steps():
    report = check_env(Healthy, patience=0.0, worker=False)
    assert not report.findings
    assert report.not_checked[0] == "more than 2 steps, which took 0 s: pass patience"


def test_a_pool_is_checked_in_a_collector():
    envpool = pytest.importorskip("envpool")
    report = check_env(
        lambda: envpool.make_gymnasium("CartPole-v1", num_envs=4, batch_size=2, seed=1)
    )
    assert [f"{one.level} {one.topic}" for one in report.findings] == ["note states"]
    assert "stepped only by a collector" in report.not_checked[0]


def test_an_object_takes_no_steps_if_it_can_be_copied():
    env = NumberedEnv()
    assert check_env(env, worker=False).ok
    assert env.actions == []
    assert env.reset()[0][1] == 0


def test_the_state_of_an_object_that_cannot_be_copied_is_restored():
    env = Locked()
    env.get_state = lambda: {"time": env.time, "draws": env.np_random.bit_generator.state}
    env.reset(seed=3)
    env.step(0)
    expected = env.np_random.bit_generator.state

    def set_state(state):
        env.time, env.np_random.bit_generator.state = state["time"], state["draws"]

    env.set_state = set_state
    report = check_env(env, worker=False)
    [finding] = report.findings
    assert finding.message.endswith("its state was restored")
    assert (env.time, env.np_random.bit_generator.state) == (1, expected)


def test_an_object_whose_state_is_lost_must_be_reset():
    env = Closed()
    [finding] = check_env(env, worker=False, steps=10).findings
    assert finding.topic == "copies"
    assert "its state can't be captured: reset it" in finding.message


def test_the_global_generators_are_left_alone():
    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    check_env(observing(lambda *_: torch.rand(2).numpy()), worker=False, steps=5)
    assert draw() == expected


def test_the_report_is_text_and_plain_data():
    report = check_env(broken(step=fail), worker=False)
    with pytest.raises(CheckFailed, match="1 error\n  error: failures: step 1 failed") as caught:
        report.raise_for_errors()
    assert caught.value.report is report
    [found] = json.loads(json.dumps(report.as_dict()))["findings"]
    assert found["level"] == "error"
    assert 'raise OSError("no robot")' in found["place"]


class Nameless(Exception):
    def __str__(self):
        raise ValueError("no text")


def raise_nameless(*_, **__):
    raise Nameless


@pytest.mark.parametrize(
    "source",
    [
        broken(step=raise_nameless),
        broken(__repr__=fail, outcome=lambda env: (1, 2)),
        broken(__getattr__=fail),
        broken(__reduce__=fail)(),
        broken(action_space=spaces.Text(3), step=fail),
        broken(action_space=None),
        broken(metadata=None),
        broken(observation_space=spaces.Box(-1, 1, (0,), np.float32)),
        broken(observe=lambda env: np.ma.masked_all(2)),
        broken(outcome=lambda env: (1.0, True, True, {1: 2, None: 3})),
        broken(step=lambda *_: None),
        broken(step=lambda *_: (fail(),)),
        broken(spec=5),
        broken(np_random=None),
        lambda one: one,
        [],
        [Healthy, 5],
        {},
        nn.Linear(1, 1),
        type,
    ],
)
def test_the_check_itself_never_fails(source):
    assert str(check_env(source, steps=5, worker=False))


# --- policies


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.calls, self.process = 0, os.getpid()
        self.generator = np.random.default_rng()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, observation):
        return self.act(self.layer, observation)

    def act(self, layer, observation):
        return torch.tanh(layer(observation))


def policy(act=Layer.act, reads="observation", writes="action", **members):
    made = type("Made", (Layer,), {"act": act, **members})()
    return TensorDictModule(made, [reads], [writes])


def count(module, layer, observation):
    module.calls += 1
    return torch.full((*observation.shape[:-1], 1), module.calls / 1000)


def draw(module, layer, observation):
    drawn = module.generator.uniform(-1, 1, (*observation.shape[:-1], 1))
    return torch.as_tensor(drawn, dtype=torch.float32)


def learn(module, layer, observation):
    with torch.no_grad():
        layer.weight += 0.01
    return torch.tanh(layer(observation))


def follow(module, layer, observation):
    module.mean += 0.1
    return torch.tanh(layer(observation))


def record(module, layer, observation):
    with torch.enable_grad():
        return torch.tanh(layer(observation))


def centre(module, layer, observation):
    others = observation.mean(0, keepdim=True) if observation.ndim > 1 else 0
    return torch.tanh(layer(observation - others))


def halve(module, layer, observation):
    return torch.tanh(layer(observation.mul_(0.5)))


def lock(module):
    Layer.__init__(module)
    module.lock = threading.Lock()


def here(module, layer, observation):
    return torch.full((*observation.shape[:-1], 1), float(os.getpid() == module.process))


def in_training(*layers):
    parts = nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 1), nn.Tanh())
    return TensorDictModule(parts, ["observation"], ["action"])


# A broken policy of Pendulum; the level and topic of a finding, and a part of the sentence.
POLICIES = {
    "missing key": (
        policy(reads="observed"),
        "error keys",
        r"\['observed'\].*did you mean observation",
    ),
    "no action": (policy(writes="act"), "error collection", "wrote no action"),
    "shape": (policy(lambda _, layer, x: x), "error collection", r"shape \(3,\)"),
    "NaN": (policy(lambda _, layer, x: layer(x) * np.nan), "error collection", "nan"),
    "no tensordict": (lambda tensordict: None, "error collection", "returned NoneType"),
    "fails": (policy(fail), "error collection", "OSError: no robot"),
    "no function": (5, "error collection", "must be callable"),
    "class": (nn.Linear, "error collection", "pass an instance"),
    "bounds": (
        policy(lambda _, layer, x: 9 + layer(x) * 0),
        "warning actions",
        "is 9 at .*from -2 to 2",
    ),
    "one environment only": (
        policy(lambda _, layer, x: torch.tanh(layer(x.reshape(3)))),
        "error several",
        "any number of environments",
    ),
    "counter": (policy(count), "warning calls", "same input and the same seed"),
    "own generator": (policy(draw), "warning calls", "same input and the same seed"),
    "learns": (policy(learn), "error weights", "parameter module.layer.weight"),
    "buffer": (policy(follow), "warning weights", "buffer module.mean"),
    "graph": (policy(record), "note gradients", r"\['action'\]"),
    "other rows": (policy(centre), "warning batches", "alone"),
    "in place": (policy(halve), "warning inputs", r"\['observation'\]"),
    "dropout": (in_training(nn.Dropout()), "warning training mode", "Dropout"),
    "unknown environment": (None, "error environment", "NameNotFound"),
}


@pytest.mark.parametrize("case", POLICIES)
def test_what_is_broken_in_a_policy_is_found(case):
    given, found, sentence = POLICIES[case]
    env = "NoSuchEnv-v0" if case == "unknown environment" else "Pendulum-v1"
    report = check_policy(given, env, worker=False, steps=5)
    finding = report.findings[0]
    assert f"{finding.level} {finding.topic}" == found, report
    assert re.search(sentence, finding.message), report


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (partial(policy, __init__=lock), "error workers"),
        (partial(policy, here), "warning workers"),
        (policy, None),
    ],
    ids=["lock", "process", "healthy"],
)
def test_a_policy_is_tried_in_a_worker_process(make, found):
    findings = check_policy(make(), "Pendulum-v1", steps=5).findings
    assert [f"{one.level} {one.topic}" for one in findings] == ([found] if found else [])


@pytest.mark.parametrize(
    ("given", "env"),
    [
        (None, "Pendulum-v1"),
        (policy(), ["Pendulum-v1"] * 2),
        (policy(), gymnasium.make("Pendulum-v1")),
        (policy(), lambda: SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * 2)),
        (lambda observation: observation[..., :1] / 9, GymEnv("Pendulum-v1")),
        (in_training().eval(), make_torchrl),
    ],
    ids=["random", "batch", "object", "vector", "function", "TorchRL"],
)
def test_nothing_is_found_in_a_healthy_policy(given, env):
    report = check_policy(given, env, worker=False, steps=5)
    assert not report.findings, report


def test_the_policy_is_as_it_was_before():
    given = policy(lambda *args: (learn(*args), follow(*args), count(*args))[-1])
    inner = given.module
    before = inner.layer.weight.clone(), inner.generator.bit_generator.state
    check_policy(given, "Pendulum-v1", worker=False, steps=5)
    assert (inner.layer.weight == before[0]).all()
    assert (inner.calls, inner.mean.sum().item()) == (0, 0)
    assert inner.generator.bit_generator.state == before[1]
