"""The command prints the findings, and its exit code says if there are errors."""

import pytest
from cli_parts import trawl

MODULE = """
import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictModule

class Healthy(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Box(-1, 1, (2,))
    value = 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.full(2, self.value, np.float32), 0.0, True, False, {}

class Wrong(Healthy):
    value = np.nan

class Wide(Healthy):
    value = 7.0

def made(value=0.0):
    env = Healthy()
    env.value = value
    return env

def act():
    return TensorDictModule(torch.tanh, ["observation"], ["action"])

def misread():
    return TensorDictModule(torch.tanh, ["obs"], ["action"])
"""

CASES = {
    "healthy": (["Healthy"], 0, "mine.py:Healthy: nothing found"),
    "error": (["Wrong"], 1, "error observations: observation 'observation' of step 1 has NaN"),
    "warning": (["Wide"], 0, "1 warning\n  warning observations: observation"),
    "arguments": (["made", "--env-kwargs", '{"value": 7}'], 0, "is 7.0 at [0]"),
    "steps": (["Healthy", "--steps", "3", "--seed", "4"], 0, "microseconds per step"),
    "policy": (["Healthy", "--policy", "mine.py:act"], 0, "policy mine.py:act: nothing found"),
    "policy with an error": (["Healthy", "--policy", "mine.py:misread"], 1, "reads ['obs']"),
    "policy that is left out": (["Wrong", "--policy", "mine.py:act"], 1, "not checked: the policy"),
    "no environment": (["missing"], 2, "no attribute 'missing'"),
    "no policy": (["Healthy", "--policy", "mine.py:missing"], 2, "no attribute 'missing'"),
    "no steps": (["Healthy", "--steps", "0"], 2, "--steps must be at least 1"),
}


@pytest.mark.parametrize("case", CASES)
def test_findings_are_printed_and_errors_set_the_exit_code(tmp_path, case):
    (name, *options), expected, text = CASES[case]
    (tmp_path / "mine.py").write_text(MODULE)
    if case != "healthy" and "--steps" not in options:
        options += ["--steps", "10"]
    code, out, err = trawl("check", f"mine.py:{name}", *options)
    assert code == expected, out + err
    assert text in out + err
