"""Policies that the tests name on the command line."""

import os
import signal
import sys
import time
import warnings

import torch
from torch import nn


def at(step, act):
    """A policy that does something at a step."""
    count = 0

    def policy(observation):
        nonlocal count
        count += 1
        if count == step:
            act()
        return torch.zeros(1)

    return policy


def slow(env):
    def policy(observation):
        time.sleep(0.001)
        return torch.zeros(*env.batch_size, 1)

    return policy


def stuck():
    """Leaves a file in the folder when it gets stuck."""

    def wait():
        open(f"stuck-{os.getpid()}", "w").close()
        while True:
            # Short, as a signal that comes just before the sleep does not end it.
            time.sleep(0.05)

    return at(151, wait)


def held():
    """Waits in its step 201 for the file ``go``."""

    def wait():
        while not os.path.exists("go"):
            time.sleep(0.01)

    return at(201, wait)


def send(*signals):
    for number in signals:
        os.kill(os.getpid(), number)


def ctrl_c():
    return at(150, lambda: send(signal.SIGINT))


def ctrl_c_twice():
    return at(150, lambda: send(signal.SIGINT, signal.SIGINT))


def terminate():
    return at(150, lambda: send(signal.SIGTERM))


def fails():
    def fail():
        raise ValueError("no more\nof this")

    return at(251, fail)


def leaves():
    return at(150, lambda: sys.exit("enough"))


def warns():
    return at(10, lambda: warnings.warn("how odd", RuntimeWarning, stacklevel=1))


def dies():
    return at(150, lambda: send(signal.SIGKILL))


def dies_once():
    """Only the first policy of this folder kills its process."""
    return at(150, lambda: first("died") and send(signal.SIGKILL))


def ctrl_c_then_dies():
    """Stops the first run in this folder, and kills the second."""
    return ctrl_c() if first("stopped") else dies()


def first(name):
    try:
        os.mkdir(name)
    except FileExistsError:
        return False
    return True


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, observation):
        return self.layer(observation)


net = Net()


def with_hidden(hidden=64):
    assert hidden == 64
    return Net()


def two(one, other):
    return Net()


def wrong():
    return lambda observation: torch.zeros(7)


def nothing():
    """Makes a policy and forgets to return it."""


def breaks():
    raise RuntimeError("no luck")


def text():
    return "not a policy"


number = 3


def reads_stacks(env):
    """Acts from the oldest and the newest frame of each stack."""
    size = (*env.batch_size, 3, 3)
    assert env.observation_spec["observation"].shape == size
    assert env.full_observation_spec["observation"].zero().shape == size
    assert env.action_keys == ["action"]

    def policy(observation):
        assert observation.shape[-2:] == size[-2:]
        return observation[..., -1, :1] - observation[..., 0, :1]

    return policy
