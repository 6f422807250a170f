"""Policies that the tests name on the command line."""

import os
import signal
import sys
import time
import warnings

import torch
from torch import nn


def slow(env):
    def policy(observation):
        time.sleep(0.001)
        return torch.zeros(*env.batch_size, 1)

    return policy


def stuck():
    count = 0

    def policy(observation):
        nonlocal count
        count += 1
        while count > 150:
            # Short, as a signal that comes just before the sleep does not end it.
            time.sleep(0.05)
        return torch.zeros(1)

    return policy


def interrupts(*signals):
    """Raises the signals in this process, at step 150 of the policy."""
    count = 0

    def policy(observation):
        nonlocal count
        count += 1
        if count == 150:
            for number in signals:
                os.kill(os.getpid(), number)
        return torch.zeros(1)

    return policy


def ctrl_c():
    return interrupts(signal.SIGINT)


def ctrl_c_twice():
    return interrupts(signal.SIGINT, signal.SIGINT)


def terminate():
    return interrupts(signal.SIGTERM)


def fails():
    count = 0

    def policy(observation):
        nonlocal count
        count += 1
        if count > 250:
            raise ValueError("no more\nof this")
        return torch.zeros(1)

    return policy


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


def leaves():
    count = 0

    def policy(observation):
        nonlocal count
        count += 1
        if count == 150:
            sys.exit("enough")
        return torch.zeros(1)

    return policy


def dies(once=False):
    """Kills its process at step 150; only the first of this folder, if ``once``."""
    count = 0

    def policy(observation):
        nonlocal count
        count += 1
        if count == 150 and (not once or first("died")):
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1)

    return policy


def first(name):
    try:
        os.mkdir(name)
    except FileExistsError:
        return False
    return True


def dies_once():
    return dies(once=True)


def ctrl_c_then_dies():
    """Stops the first run in this folder, and kills the second."""
    return ctrl_c() if first("stopped") else dies()


def warns():
    """Warns at step 10."""
    count = 0

    def policy(observation):
        nonlocal count
        count += 1
        if count == 10:
            warnings.warn("how odd", RuntimeWarning, stacklevel=1)
        return torch.zeros(1)

    return policy


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
