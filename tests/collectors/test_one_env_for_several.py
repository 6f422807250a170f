"""One environment given for several workers, or several times in a batch: each has a copy."""

import threading
from functools import partial

import gymnasium
import numpy as np
import pytest
from multi_parts import CLASSES, make

from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from trawl.envs import GymEnv, SerialEnv
from trawl.testing import Ledger, NumberedEnv


def pendulum():
    """An environment that has drawn random numbers already: a copy would draw the same."""
    env = gymnasium.make("Pendulum-v1")
    env.reset(seed=1)
    return env


SOURCES = {
    "a list": lambda env: {"create_env_fn": [env] * 2},
    "a number": lambda env: {"create_env_fn": env, "num_workers": 2},
    "batches": lambda env: {"create_env_fn": [[env, env]] * 2},
    "TorchRL's": lambda env: {
        "create_env_fn": [pytest.importorskip("torchrl.envs").GymEnv("Pendulum-v1")] * 2
    },
    "a batched environment": lambda env: {
        "create_env_fn": [SerialEnv(2, partial(GymEnv, "Pendulum-v1"))] * 2
    },
}


@pytest.mark.parametrize(
    ("how", "method"), [*((how, "inline") for how in SOURCES), ("batches", "forkserver")]
)
def test_each_worker_has_its_own(how, method):
    options = SOURCES[how](pendulum())
    with make(frames_per_batch=12, policy=None, start_method=method, **options) as collector:
        seen = collector.next()["observation"].reshape(-1, 3)
    # No state is met twice, neither at the start nor later.
    assert len(np.unique(seen.numpy(), axis=0)) == len(seen)


def test_a_batch_of_this_process_has_copies():
    with Collector([pendulum()] * 3, frames_per_batch=30) as collector:
        batch = collector.next()
    assert len(batch["observation"][:, 0].unique(dim=0)) == 3
    # The environments are not stepped by one another.
    speed = batch["observation"][..., 2]
    assert (batch["next", "observation"][..., 2][:, :-1] == speed[:, 1:]).all()


@pytest.mark.parametrize("cls", CLASSES)
def test_copies_are_whole_environments(cls):
    env = NumberedEnv(lengths=[3, 5, 1])
    with make(cls, create_env_fn=[env] * 2, frames_per_batch=20) as collector:
        batches = [collector.next().reshape(-1, 10) for _ in range(4)]
    rows = [row for batch in batches for row in batch]
    firsts = [row for row in rows if int(row["collector", "traj_ids"].min()) % 2 == 0]
    others = [row for row in rows if int(row["collector", "traj_ids"].min()) % 2]
    for own in (firsts, others):
        ledger = Ledger([NumberedEnv(lengths=[3, 5, 1])])
        for row in own:
            ledger.add(row)


def test_an_environment_that_can_not_be_copied_is_named():
    env = GymEnv(NumberedEnv())
    env.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"contains .* several times, but .*can't be copied"):
        make(create_env_fn=[env] * 2)


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_one_environment_without_a_number_of_workers_is_told(cls):
    with pytest.warns(UserWarning, match=rf"^{cls.__name__} has one worker, because create_env_fn"):
        cls(NumberedEnv, frames_per_batch=4, start_method="inline").shutdown()
    cls(NumberedEnv, frames_per_batch=4, num_workers=1, start_method="inline").shutdown()
