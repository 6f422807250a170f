"""The collector whose policy acts for the environments that are ready."""

import math
import os
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from collector_parts import Chooses
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import OneHotCategorical

from trawl.collectors import AsyncBatchedCollector, PolicyVersion, RandomPolicy
from trawl.collectors.async_batched import InferenceProcessCollector
from trawl.collectors.serving_options import AsyncBatchedArguments
from trawl.envs import GymEnv
from trawl.errors import WorkerDied
from trawl.testing import Ledger, NumberedEnv

LENGTHS = (3, 1, 7)
#: Where the policy acts.
PLACES = pytest.mark.parametrize("place", ["threading", "multiprocessing"])
BACKENDS = pytest.mark.parametrize("backend", ["threading", "multiprocessing"])


def makers(count):
    return [partial(NumberedEnv, number, lengths=LENGTHS) for number in range(count)]


def ledger_of(count):
    return Ledger([make() for make in makers(count)])


class Sized(Chooses):
    """The same policy, which notes for how many environments it acts at a time."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, observation):
        self.sizes.append(len(observation))
        return super().forward(observation)


def numbered(count=4, frames=50, together=False, **options):
    """Makes a collector; ``together``: the policy waits for all environments."""
    options.setdefault("policy", Chooses())
    options.setdefault("env_backend", "threading")
    if together:
        options.update(min_batch_size=count, server_timeout=math.inf)
    return AsyncBatchedCollector(makers(count), frames_per_batch=frames, **options)


# --- frames


# Here, in threads, what is delivered is compared with what the oracle says.
@pytest.mark.parametrize(("each", "place"), [(3, "threading"), (2, "multiprocessing")])
def test_each_step_of_processes_is_delivered_once_and_in_order(each, place):
    ledger, sizes = ledger_of(5), []
    options = {"env_backend": None, "envs_per_worker": each, "policy_backend": place}
    with numbered(5, total_frames=333, **options) as collector:
        assert isinstance(collector, InferenceProcessCollector) == (place == "multiprocessing")
        for batch in collector:
            ledger.add(batch)
            sizes.append(len(batch))
            assert (NumberedEnv.numbers(batch)[:, 0] == batch["env_index"]).all()
    assert sizes == [50] * 6 + [33]
    assert ledger.frames == collector.stats()["frames"] == 333


def test_a_slow_environment_holds_nobody_up():
    sources = [Gated, *makers(4)[1:]]
    options = {"frames_per_batch": 60, "env_backend": "threading"}
    with AsyncBatchedCollector(sources, policy=Chooses(), **options) as collector:
        assert 0 not in collector.next()["env_index"]
        Gated.gate.set()


class Gated(NumberedEnv):
    """Environment whose steps wait until a gate is opened."""

    gate = threading.Event()

    def step(self, action):
        self.gate.wait()
        return super().step(action)


# --- the policy


class Constant(nn.Module):
    """Policy that also writes its only weight."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

    def forward(self, observation):
        one = torch.ones(len(observation), 1)
        return nn.functional.one_hot(one[:, 0].long(), 4), self.value * one


def test_frames_have_the_version_that_chose_their_action():
    policy, count = (
        TensorDictModule(Constant(), ["observation"], ["action", "sent"]),
        PolicyVersion(),
    )
    count.version = 7
    options = {"policy": policy, "trust_policy": True, "track_policy_version": count}
    with numbered(frames=40, return_same_td=True, **options) as collector:
        for version in range(7, 12):
            batch = collector.next()
            assert (batch["sent"] == batch["policy_version"].unsqueeze(-1) - 7).all()
            assert batch["policy_version"].max() == version
            with torch.no_grad():
                policy.module.value += 1
            collector.update_policy_weights_()
        assert collector.server_stats()["policy_version"] == 12
        assert collector.policy_version == count.version == 12
        assert collector.next() is batch
        collector.update_policy_weights_({"module.value": torch.full((1,), 5.0)})
        collector.next()
        assert (collector.next()["sent"] == 5).all()


@pytest.mark.parametrize("each", [1, 3])
def test_the_policy_waits_for_the_least_number_of_environments(each):
    options = {"envs_per_worker": each, "max_batch_size": 4, "total_frames": 208}
    with numbered(frames=52, together=True, **options) as collector:
        for batch in collector:
            assert (batch["env_index"] == torch.arange(52) % 4).all()
        assert collector.server_stats()["avg_batch_size"] == 4


def test_the_policy_acts_for_at_most_the_largest_number_of_environments():
    policy = Sized()
    with numbered(6, policy=policy, max_batch_size=2) as collector:
        del policy.sizes[:]
        for _ in range(3):
            collector.next()
            # A reset of one environment changes nothing about it.
            collector.reset(0)
    assert max(policy.sizes) == 2


def test_batches_of_static_size_are_filled_up():
    policy, ledger = Sized(), ledger_of(3)
    config = {"max_batch_size": 4, "static_batch_size": 8}
    with numbered(3, policy=policy, server_config=config) as collector:
        del policy.sizes[:]
        ledger.add(collector.next())
    assert set(policy.sizes) == {8}
    # A graph needs batches of one size.
    options = {"create_env_fn": [NumberedEnv] * 3, "policy": policy, "frames_per_batch": 6}
    for most, size in ((None, 3), (2, 2)):
        options |= {"cudagraph_policy": True, "max_batch_size": most}
        assert AsyncBatchedArguments(**options).batching.size == size


class ThroughTensorDict(nn.Module):
    """Chooses actions in a TensorDict."""

    def forward(self, tensordict):
        tensordict["action"] = Chooses()(tensordict["observation"])
        return tensordict


def test_a_compiled_policy_may_read_a_tensordict_of_any_size():
    ledger, compiled = ledger_of(5), {"backend": "eager"}
    options = {"policy": ThroughTensorDict(), "compile_policy": compiled}
    with numbered(5, total_frames=120, **options) as collector:
        for batch in collector:
            ledger.add(batch)
    assert ledger.frames == 120


def test_samples_of_a_distribution():
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(5, 4), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=OneHotCategorical, return_log_prob=True
        ),
    )
    with numbered(policy=policy) as collector:
        batch = collector.next()
        assert collector.stats()["distribution_path"] == "objects"
    expected = OneHotCategorical(logits=batch["logits"]).log_prob(batch["action"])
    torch.testing.assert_close(batch["action_log_prob"], expected)


def test_random_actions_come_first():
    def second(observation):
        return nn.functional.one_hot(torch.ones(len(observation), dtype=torch.int64), 4)

    with numbered(3, 20, policy=second, init_random_frames=20, total_frames=60) as collector:
        first, _, last = (batch["action"].argmax(-1) for batch in collector)
    assert len(first.unique()) > 1
    # A step that was under way when the policy's turn came has a random action: one for each
    # environment, in a batch as late as the environment is slow.
    assert (last != 1).sum() <= 3


# --- seeds, resets and states


@pytest.mark.parametrize("random", [True, False])
def test_equal_seeds_give_equal_data_if_the_policy_waits_for_all(random):
    found = []
    for place in ("threading", "threading", "multiprocessing"):
        policy = RandomPolicy(GymEnv(NumberedEnv()).full_action_spec.expand(4))
        options = {"policy": policy if random else Chooses(), "policy_backend": place}
        with numbered(together=True, total_frames=120, **options) as collector:
            collector.set_seed(3)
            found.append(torch.cat(list(collector)))
    assert all((found[0] == other).all() for other in found[1:])


@pytest.mark.parametrize("index", [None, 2])
def test_a_reset_drops_the_steps_under_way(index):
    """One of one environment leaves the others."""
    with numbered(frames=41, together=True) as collector:
        before = collector.next()
        collector.reset(index)
        after = collector.next()
    for env in range(4):
        last = before[before["env_index"] == env][-1]["next"]
        first = after["observation"][after["env_index"] == env][0]
        if index in (None, env):
            assert first[2] == 0
        elif not last["done"]:
            assert (first == last["observation"]).all()


# That of environments by themselves is compared with what the oracle says.
def test_resets_before_each_batch_drop_no_step_of_a_process():
    """The fourth number of an observation counts all steps of an environment."""
    taken = [0] * 4
    options = {"reset_at_each_iter": True, "envs_per_worker": 2, "total_frames": 120}
    with numbered(frames=40, **options) as collector:
        for batch in collector:
            for env in range(4):
                numbers = batch["observation"][batch["env_index"] == env][:, 3].tolist()
                assert numbers == list(range(taken[env], taken[env] + len(numbers)))
                taken[env] += len(numbers)
    assert sum(taken) == 120


# --- delivery


@PLACES
def test_what_is_done_around_a_batch(place):
    called, seen, later, sink = [], [], [], Kept()
    with numbered(
        policy_backend=place,
        total_frames=70,
        policy_version=2,
        policy_version_key=("a", "b"),
        postproc=lambda batch: batch.select("action", ("a", "b")),
        pre_collect_hook=lambda: called.append(1),
        post_collect_hook=lambda batch: seen.append(batch.clone()),
        sink=sink,
        use_buffers=False,
        storing_device="cpu",
    ) as collector:
        found = []
        for batch in collector:
            found.append(batch.clone())
            collector.set_post_collect_hook(lambda batch: later.append(batch.clone()))
        figures = collector.server_stats(reset=True)
        assert collector.server_stats()["requests"] == 0
    assert [len(batch) for batch in found] == [50, 20]
    assert all(set(batch.keys()) == {"action", "a"} for batch in found)
    assert all((batch["a", "b"] == 2).all() for batch in found)
    assert all(batch.device == torch.device("cpu") for batch in found)
    assert len(later) == 1
    for kept in (seen + later, sink.batches):
        assert all((one == other).all() for one, other in zip(found, kept, strict=True))
    # The inference process has a copy of the hook.
    assert len(called) == (2 if place == "threading" else 0)
    assert figures["requests"] >= 70
    assert figures["avg_batch_size"] == figures["requests"] / figures["batches"]
    assert 0 < figures["forward_share"] + figures["wait_share"] <= 1


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self):
        self.batches = []

    def write(self, batch):
        self.batches.append(batch.clone())

    def close(self, **options):
        """Closes nothing."""


def test_frames_have_no_version_without_a_key_and_a_batch_may_end_early():
    with numbered(policy_version_key=None, interruptor=lambda: True) as collector:
        batch = collector.next()
    assert batch.get("policy_version", None) is None
    assert 0 < len(batch) < 50


@PLACES
def test_whole_trajectories_and_a_state_that_continues_the_counts(place):
    ledger, options = ledger_of(3), {"policy_backend": place, "total_frames": 200}
    with numbered(3, yield_completed_trajectories=True, **options) as collector:
        for trajectory in collector:
            ended = [*[False] * (len(trajectory) - 1), True]
            assert trajectory["next", "done"][:, 0].tolist() == ended
            assert len(trajectory["env_index"].unique()) == 1
            ledger.add(trajectory)
        assert collector.stats()["trajectories"] > 4
        collector.update_policy_weights_()
        state = collector.state_dict()
    assert ledger.frames > 150
    with numbered(3, yield_completed_trajectories=True, **options) as collector:
        collector.load_state_dict(state | {"frames": 100})
        assert collector.policy_version == 1
        assert collector.stats()["frames"] == 100


@PLACES
def test_collection_in_the_background(place):
    data = pytest.importorskip("torchrl.data")
    buffer, ledger = data.ReplayBuffer(storage=data.LazyTensorStorage(500)), ledger_of(4)
    with numbered(policy_backend=place, replay_buffer=buffer, total_frames=200) as collector:
        collector.start()
        while collector.is_running():
            time.sleep(0.001)
        ledger.add(buffer[:])
    assert ledger.frames == 200


# --- failures


def collect_forever(collector):
    while True:
        collector.rollout()


class FailsOnce:
    """Policy that raises an error in the call before which ``left`` other calls are left."""

    def __init__(self, error):
        self.error, self.left = error, -1

    def __call__(self, observation):
        self.left -= 1
        if self.left == -1:
            raise self.error
        return Chooses()(observation)


@pytest.mark.parametrize("error", [ValueError("not now"), KeyboardInterrupt()])
def test_an_error_of_the_policy_does_no_harm_to_later_rollouts(error):
    policy = FailsOnce(error)
    with numbered(policy=policy, together=True) as collector:
        for left in (0, 7):
            policy.left = left
            with pytest.raises(type(error)):
                collect_forever(collector)
        collector.reset()
        batch = collector.rollout()
        assert set(batch["env_index"].tolist()) == {0, 1, 2, 3}
        for env in range(4):
            own = batch[batch["env_index"] == env]
            assert own["observation"][0, 2] == 0
            assert (own["next", "reward"].diff(dim=0) == 1).all()


class BreaksOnce(NumberedEnv):
    """Environment that raises an error in one step."""

    broke = False

    def step(self, action):
        if len(self.actions) == 5 and not self.broke:
            self.broke = True
            raise ValueError("broken")
        return super().step(action)


@pytest.mark.parametrize(
    ("backend", "late"),
    [("threading", True), ("multiprocessing", False), ("multiprocessing", True)],
)
def test_an_error_of_an_environment_does_no_harm_to_a_reset(backend, late):
    """The answer of a failed step may be seen before the message that has the error is read."""
    options = {"policy": Chooses(), "frames_per_batch": 10, "env_backend": backend}
    makes = [NumberedEnv, partial(BreaksOnce, 1)]
    with AsyncBatchedCollector(makes, **options) as collector:
        processes = collector.env.processes
        wait, buffers = processes.wait_for_answers, collector.env.buffers

        def wait_for_all(timeout=None):
            wait(timeout)
            while (np.abs(buffers.answers) != np.asarray(buffers.numbers)).any():
                time.sleep(0.001)

        if late:
            processes.wait_for_answers = wait_for_all
        with pytest.raises(ValueError, match="in environment 1: ValueError: broken"):
            collect_forever(collector)
        collector.reset()
        processes.wait_for_answers = wait
        found = set()
        while len(found) < 2:
            found |= set(collector.rollout()["env_index"].tolist())


class Dies(NumberedEnv):
    """Environment whose process ends in its fifth step."""

    def step(self, action):
        if len(self.actions) == 4:
            os._exit(3)
        return super().step(action)


DIED = "environment 1: its process exited with status 3"


@pytest.mark.parametrize(
    ("env", "options", "error", "match"),
    [
        (BreaksOnce, {"policy_backend": "multiprocessing"}, ValueError, "ValueError: broken"),
        (Dies, {}, WorkerDied, DIED),
    ],
)
def test_an_error_ends_the_iteration(env, options, error, match):
    options |= {"policy": Chooses(), "frames_per_batch": 100}
    with (
        AsyncBatchedCollector([NumberedEnv, env], **options) as collector,
        pytest.raises(error, match=match),
    ):
        list(collector)


#: For each error, options that are refused, and what it says.
WRONG = {
    ValueError: [
        ({"min_batch_size": 5}, "min_batch_size=5 is larger than the 4 environments"),
        (
            {"min_batch_size": 3, "max_batch_size": 2},
            "min_batch_size=3 is larger than max_batch_size=2",
        ),
        (
            {"min_batch_size": 2, "server_timeout": 0},
            "min_batch_size=2 has no effect if server_timeout is 0",
        ),
        (
            {"server_config": {"min_batch_size": 2, "timeout": 0}},
            "min_batch_size=2 has no effect if the timeout in server_config is 0",
        ),
        ({"server_timeout": -1}, "seconds from 0 on"),
        ({"server_timeout": math.nan}, "seconds from 0 on"),
        ({"server_config": {"max_batchsize": 3}}, "unknown entries: max_batchsize"),
        ({"device_config": {"policy": "cpu"}}, "unknown entries: policy"),
        ({"policy_version_key": "observation"}, "has it already"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"envs_per_worker": 3, "max_batch_size": 2}, "envs_per_worker=3 is larger"),
        ({"env_backend": "ray"}, "env_backend must be 'threading' or"),
        ({"policy_backend": "ray"}, "policy_backend must be 'threading' or"),
        ({"server_config": {"service_backend": "ray"}}, "service_backend='thread' or"),
        (
            {"server_config": {"static_batch_size": 8, "max_batch_size": 9}},
            "smaller than max_batch_size",
        ),
        ({"device": "cuda:77"}, "^device is 'cuda:77'"),
        ({"device_config": {"env_device": "cuda:77"}}, "^env_device is 'cuda:77'"),
        ({"transport": "slots"}, "transport must be 'auto'"),
        ({"env_exchange": "queue"}, "env_exchange must be"),
        ({"transition_chunk_size": 64}, "transition_chunk_size must be"),
        (
            {"create_env_kwargs": [{}]},
            "create_env_kwargs has 1 entries, but the number of environments is 4",
        ),
        ({"driver_affinity": [9999]}, "driver_affinity"),
        ({"worker_affinity": [[0]]}, "worker_affinity has 1 entries"),
    ],
    TypeError: [
        ({"server_config": 3}, "server_config must be a mapping"),
        ({"device_config": "cpu"}, "device_config must be a mapping"),
        ({"policy_version_key": 3}, "policy_version_key must be a key"),
        ({"yield_completed_trajectories": "yes"}, "yield_completed_trajectories"),
        ({"nothing": 1}, "unknown arguments: nothing"),
        ({"server_timeout": "1"}, "number of seconds"),
        ({"transport": object()}, "transport can't be object"),
        ({"policy": None}, r"a policy is missing: pass policy .*policy=RandomPolicy\(\)"),
        ({"policy": RandomPolicy}, r"it is the class RandomPolicy: .* RandomPolicy\(\)$"),
        ({"num_envs": 2}, r": num_envs\. create_env_fn is a list .*\['CartPole-v1'\] \* 4"),
        ({"n_workers": 2}, r": n_workers\. create_env_fn is a list"),
        ({"create_env_kwargs": 3}, "create_env_kwargs must be a mapping"),
        ({"worker_affinity": 3}, "worker_affinity must be a sequence"),
    ],
}


#: Options of which only one can be given.
TWICE: list[dict[str, Any]] = [
    {"server_config": {}, "max_batch_size": 3},
    {"device": "cpu", "device_config": {}},
    {"policy_version": 3, "track_policy_version": PolicyVersion()},
    {"device_config": {"policy_device": "cpu"}, "policy_device": "cpu"},
    {"device": "cpu", "policy_device": "cpu"},
    {"policy": Chooses(), "policy_factory": Chooses},
]


def test_wrong_options_are_refused():
    for options in TWICE:
        told = "(=3)? and ".join(options) + " can't both be given"
        with pytest.raises((TypeError, ValueError), match=told):
            numbered(**options)
    for error, rows in WRONG.items():
        for options, text in rows:
            with pytest.raises(error, match=text):
                numbered(**options)
    with pytest.raises(TypeError, match=r"takes 1 positional .*got 2: .*policy=RandomPolicy\(\)"):
        AsyncBatchedCollector([NumberedEnv], RandomPolicy(), frames_per_batch=10)
    with pytest.raises(TypeError, match="create_env_fn must be a list"):
        AsyncBatchedCollector(NumberedEnv, policy=Chooses(), frames_per_batch=10)


# --- cores


class Where(NumberedEnv):
    """Environment whose reward is the number of a core on which it may run."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float(min(os.sched_getaffinity(0))), *rest


@BACKENDS
def test_environments_run_on_the_cores_that_they_get(backend):
    before = os.sched_getaffinity(0)
    usable = sorted(before)
    cores = [[usable[0]], [usable[-1]]]
    with AsyncBatchedCollector(
        [Where, Where],
        policy=Chooses(),
        frames_per_batch=20,
        env_backend=backend,
        worker_affinity=cores,
        driver_affinity=[usable[0]],
    ) as collector:
        batch = collector.next()
    for env, (core,) in enumerate(cores):
        assert (batch["next", "reward"][batch["env_index"] == env] == core).all()
    assert os.sched_getaffinity(0) == before
