"""The collector whose policy acts for the environments that are ready."""

import math
import os
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from collector_parts import Chooses
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import AsyncBatchedCollector, RandomPolicy
from trawl.collectors.async_batched import InferenceProcessCollector
from trawl.collectors.serving_options import AsyncBatchedArguments
from trawl.envs import GymEnv
from trawl.errors import WorkerDied
from trawl.testing import FaultyEnv, Ledger, NumberedEnv

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


@pytest.mark.parametrize(
    ("backend", "each", "place"),
    [
        ("threading", 2, "threading"),
        ("multiprocessing", 1, "threading"),
        ("multiprocessing", 3, "threading"),
        ("multiprocessing", 2, "multiprocessing"),
    ],
)
def test_each_step_is_delivered_once_and_in_order(backend, each, place):
    ledger, sizes = ledger_of(5), []
    options = {"env_backend": backend, "envs_per_worker": each, "policy_backend": place}
    with numbered(5, total_frames=333, **options) as collector:
        assert isinstance(collector, InferenceProcessCollector) == (place == "multiprocessing")
        for batch in collector:
            ledger.add(batch)
            sizes.append(len(batch))
            assert (NumberedEnv.numbers(batch)[:, 0] == batch["env_index"]).all()
    assert sizes == [50] * 6 + [33]
    assert ledger.frames == collector.stats()["frames"] == 333


def test_a_slow_environment_holds_nobody_up():
    def slow():
        return Gated(number=0)

    with AsyncBatchedCollector(
        [slow, *makers(4)[1:]], policy=Chooses(), frames_per_batch=60, env_backend="threading"
    ) as collector:
        batch = collector.next()
        assert 0 not in batch["env_index"]
        Gated.gate.set()


class Gated(NumberedEnv):
    """Environment whose steps wait until a gate is opened."""

    gate = threading.Event()

    def step(self, action):
        self.gate.wait()
        return super().step(action)


# --- the policy


def test_frames_have_the_version_that_chose_their_action():
    policy = TensorDictModule(Constant(), ["observation"], ["action", "sent"])
    with numbered(frames=40, policy=policy, policy_version=7) as collector:
        for version in range(7, 12):
            batch = collector.next()
            assert (batch["sent"] == batch["policy_version"].unsqueeze(-1) - 7).all()
            assert batch["policy_version"].max() == version
            with torch.no_grad():
                policy.module.value += 1
            collector.update_policy_weights_()
        assert collector.policy_version == collector.server_stats()["policy_version"] == 12


class Constant(nn.Module):
    """Policy that also writes its only weight."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

    def forward(self, observation):
        one = torch.ones(len(observation), 1)
        return nn.functional.one_hot(one[:, 0].long(), 4), self.value * one


def test_weights_can_be_passed():
    policy = TensorDictModule(Constant(), ["observation"], ["action", "sent"])
    options = {"policy": None, "policy_factory": lambda: policy, "together": True}
    with numbered(frames=20, **options) as collector:
        collector.next()
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


def test_a_graph_gets_batches_of_one_size():
    options = {"policy": Chooses(), "frames_per_batch": 6, "cudagraph_policy": True}
    given = AsyncBatchedArguments(create_env_fn=[NumberedEnv] * 3, **options)
    assert given.batching.size == 3
    given = AsyncBatchedArguments(create_env_fn=[NumberedEnv] * 3, max_batch_size=2, **options)
    assert given.batching.size == 2


class ThroughTensorDict(nn.Module):
    """Chooses actions in a TensorDict."""

    def forward(self, tensordict):
        tensordict["action"] = Chooses()(tensordict["observation"])
        return tensordict


@pytest.mark.parametrize("config", [None, {"static_batch_size": 8, "max_batch_size": 4}])
def test_a_compiled_policy_may_read_a_tensordict_of_any_size(config):
    ledger, compiled = ledger_of(5), {"backend": "eager"}
    options = {"policy": ThroughTensorDict(), "compile_policy": compiled, "server_config": config}
    with numbered(5, total_frames=120, **options) as collector:
        for batch in collector:
            ledger.add(batch)
    assert ledger.frames == 120


def test_samples_of_a_distribution():
    from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
    from torch.distributions import OneHotCategorical

    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(5, 4), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"],
            ["action"],
            distribution_class=OneHotCategorical,
            return_log_prob=True,
            default_interaction_type="random",
        ),
    )
    ledger = ledger_of(4)
    with numbered(policy=policy) as collector:
        batch = collector.next()
        ledger.add(batch)
        assert collector.stats()["distribution_path"] == "objects"
    expected = OneHotCategorical(logits=batch["logits"]).log_prob(batch["action"])
    torch.testing.assert_close(batch["action_log_prob"], expected)


# --- seeds and resets


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
        last = before["next", "observation"][before["env_index"] == env][-1]
        ended = before["next", "done"][before["env_index"] == env][-1]
        first = after["observation"][after["env_index"] == env][0]
        if index in (None, env):
            assert first[2] == 0
        elif not ended:
            assert (first == last).all()


@pytest.mark.parametrize(
    ("together", "each", "frames"), [(True, 1, 42), (False, 1, 42), (False, 2, 40)]
)
def test_such_resets_drop_no_step(together, each, frames):
    """The fourth number of an observation counts all steps of an environment."""
    taken = [0] * 4
    options = {"reset_at_each_iter": True, "envs_per_worker": each, "together": together}
    with numbered(frames=frames, total_frames=3 * frames, **options) as collector:
        for batch in collector:
            for env in range(4):
                numbers = batch["observation"][batch["env_index"] == env][:, 3].tolist()
                assert numbers == list(range(taken[env], taken[env] + len(numbers)))
                taken[env] += len(numbers)
    assert sum(taken) == 3 * frames


@PLACES
def test_a_state_continues_the_counts(place):
    with numbered(policy_backend=place, total_frames=100) as collector:
        collector.next()
        collector.update_policy_weights_()
        state = collector.state_dict()
    with numbered(policy_backend=place, total_frames=100) as collector:
        collector.load_state_dict(state)
        assert collector.policy_version == 1
        assert sum(len(batch) for batch in collector) == 50


# --- delivery


@PLACES
def test_whole_trajectories(place):
    ledger = ledger_of(3)
    with numbered(
        3, policy_backend=place, yield_completed_trajectories=True, total_frames=200
    ) as collector:
        for trajectory in collector:
            assert trajectory["next", "done"][:, 0].tolist() == [
                *[False] * (len(trajectory) - 1),
                True,
            ]
            assert len(trajectory["env_index"].unique()) == 1
            ledger.add(trajectory)
        assert collector.stats()["trajectories"] > 4
    assert ledger.frames > 150


@PLACES
def test_collection_in_the_background(place):
    data = pytest.importorskip("torchrl.data")
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(500))
    with numbered(policy_backend=place, replay_buffer=buffer, total_frames=200) as collector:
        collector.start()
        while collector.is_running():
            time.sleep(0.001)
        ledger = ledger_of(4)
        ledger.add(buffer[:])
    assert ledger.frames == 200


@PLACES
def test_postproc_and_hook_get_each_batch(place):
    seen = []
    with numbered(
        policy_backend=place,
        total_frames=70,
        postproc=lambda b: b.select("action"),
        post_collect_hook=lambda batch: seen.append((list(batch.keys()), len(batch))),
    ) as collector:
        assert [list(batch.keys()) for batch in collector] == [["action"]] * 2
    assert seen == [(["action"], 50), (["action"], 20)]


@PLACES
def test_the_version_has_the_key_that_the_user_gives(place):
    with numbered(
        policy_backend=place, policy_version_key=("a", "b"), policy_version=2
    ) as collector:
        assert (collector.next()["a", "b"] == 2).all()
    with numbered(policy_backend=place, policy_version_key=None) as collector:
        assert collector.next().get("policy_version", None) is None


@PLACES
def test_figures_about_the_policys_calls(place):
    with numbered(total_frames=100, policy_backend=place) as collector:
        list(collector)
        figures = collector.server_stats(reset=True)
        assert figures["requests"] >= 100
        assert figures["avg_batch_size"] == figures["requests"] / figures["batches"]
        assert 0 < figures["forward_share"] + figures["wait_share"] <= 1
        assert collector.server_stats()["requests"] == 0


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


def test_an_error_does_no_harm_to_a_reset():
    makes = [NumberedEnv, partial(BreaksOnce, 1)]
    with AsyncBatchedCollector(makes, policy=Chooses(), frames_per_batch=10) as collector:
        with pytest.raises(ValueError, match="broken"):
            collect_forever(collector)
        collector.reset()
        found = set()
        while len(found) < 2:
            found |= set(collector.rollout()["env_index"].tolist())


@BACKENDS
def test_an_error_that_arrives_late_is_raised(backend):
    """The answer of a failed step is seen before the message that has the error is read."""
    makes = [NumberedEnv, partial(BreaksOnce, 1)]
    with AsyncBatchedCollector(
        makes, policy=Chooses(), frames_per_batch=10, env_backend=backend
    ) as collector:
        processes = collector.env.processes
        wait, buffers = processes.wait_for_answers, collector.env.buffers

        def late(timeout=None):
            wait(timeout)
            while (np.abs(buffers.answers) != np.asarray(buffers.numbers)).any():
                time.sleep(0.001)

        processes.wait_for_answers = late
        with pytest.raises(ValueError, match="broken"):
            collect_forever(collector)
        collector.reset()
        processes.wait_for_answers = wait
        collector.rollout()


@pytest.mark.parametrize(
    "options", [{}, {"env_backend": "threading"}, {"policy_backend": "multiprocessing"}]
)
def test_an_error_in_an_environment_is_raised(options):
    makes = [NumberedEnv, partial(FaultyEnv, at=5, fault=ValueError("broken"))]
    options = {"policy": Chooses(), "frames_per_batch": 100, **options}
    with (
        AsyncBatchedCollector(makes, **options) as collector,
        pytest.raises(ValueError, match="in environment 1: ValueError: broken"),
    ):
        list(collector)


class Dies(NumberedEnv):
    """Environment whose process ends in its fifth step."""

    def step(self, action):
        if len(self.actions) == 4:
            os._exit(3)
        return super().step(action)


def test_a_dead_process_is_an_error():
    with (
        AsyncBatchedCollector(
            [NumberedEnv, Dies], policy=Chooses(), frames_per_batch=100
        ) as collector,
        pytest.raises(WorkerDied, match="environment 1: its process exited with status 3"),
    ):
        list(collector)


WRONG = [
    ({"min_batch_size": 5}, ValueError, "min_batch_size=5 is larger than the 4 environments"),
    (
        {"min_batch_size": 3, "max_batch_size": 2},
        ValueError,
        "min_batch_size=3 is larger than max_batch_size=2",
    ),
    (
        {"min_batch_size": 2, "server_timeout": 0},
        ValueError,
        "min_batch_size=2 has no effect if server_timeout is 0",
    ),
    (
        {"server_config": {"min_batch_size": 2, "timeout": 0}},
        ValueError,
        "min_batch_size=2 has no effect if the timeout in server_config is 0",
    ),
    ({"server_timeout": -1}, ValueError, "seconds from 0 on"),
    ({"server_timeout": math.nan}, ValueError, "seconds from 0 on"),
    ({"server_config": {"max_batchsize": 3}}, ValueError, "unknown entries: max_batchsize"),
    ({"server_config": 3}, TypeError, "server_config must be a mapping"),
    ({"device_config": "cpu"}, TypeError, "device_config must be a mapping"),
    ({"device_config": {"policy": "cpu"}}, ValueError, "unknown entries: policy"),
    ({"policy_version_key": "observation"}, ValueError, "has it already"),
    ({"policy_version_key": 3}, TypeError, "policy_version_key must be a key"),
    ({"yield_completed_trajectories": "yes"}, TypeError, "yield_completed_trajectories"),
    ({"nothing": 1}, TypeError, "unknown arguments: nothing"),
    ({"server_timeout": "1"}, TypeError, "number of seconds"),
    ({"max_batch_size": 0}, ValueError, "max_batch_size"),
    ({"envs_per_worker": 3, "max_batch_size": 2}, ValueError, "envs_per_worker=3 is larger"),
    ({"env_backend": "ray"}, ValueError, "env_backend must be 'threading' or"),
    ({"policy_backend": "ray"}, ValueError, "policy_backend must be 'threading' or"),
    ({"server_config": {"service_backend": "ray"}}, ValueError, "service_backend='thread' or"),
    (
        {"server_config": {}, "max_batch_size": 3},
        ValueError,
        "server_config and max_batch_size can't both be given",
    ),
    (
        {"server_config": {"static_batch_size": 8, "max_batch_size": 9}},
        ValueError,
        "smaller than max_batch_size",
    ),
    ({"device": "cpu", "device_config": {}}, ValueError, "can't both be given"),
    ({"device": "cuda:77"}, ValueError, "^device is 'cuda:77'"),
    ({"device_config": {"env_device": "cuda:77"}}, ValueError, "^env_device is 'cuda:77'"),
    ({"transport": object()}, TypeError, "transport can't be object"),
    ({"transport": "slots"}, ValueError, "transport must be 'auto'"),
    ({"env_exchange": "queue"}, ValueError, "env_exchange must be"),
    ({"transition_chunk_size": 64}, ValueError, "transition_chunk_size must be"),
    ({"policy": None}, TypeError, r"a policy is missing: pass policy .*policy=RandomPolicy\(\)"),
    ({"policy": RandomPolicy}, TypeError, r"it is the class RandomPolicy: .* RandomPolicy\(\)$"),
    ({"num_envs": 2}, TypeError, r": num_envs\. create_env_fn is a list .*\['CartPole-v1'\] \* 4"),
    ({"n_workers": 2}, TypeError, r": n_workers\. create_env_fn is a list"),
    ({"policy_factory": Chooses}, TypeError, "policy and policy_factory can't both be given"),
    (
        {"create_env_kwargs": [{}]},
        ValueError,
        "create_env_kwargs has 1 entries, but the number of environments is 4",
    ),
    ({"create_env_kwargs": 3}, TypeError, "create_env_kwargs must be a mapping"),
    ({"driver_affinity": [9999]}, ValueError, "driver_affinity"),
    ({"worker_affinity": [[0]]}, ValueError, "worker_affinity has 1 entries"),
    ({"worker_affinity": 3}, TypeError, "worker_affinity must be a sequence"),
]


def test_wrong_options_are_refused():
    for options, error, text in WRONG:
        with pytest.raises(error, match=text):
            numbered(**options)


def test_the_policy_is_given_by_name():
    with pytest.raises(TypeError, match=r"takes 1 positional .*got 2: .*policy=RandomPolicy\(\)"):
        AsyncBatchedCollector([NumberedEnv], RandomPolicy(), frames_per_batch=10)


def test_one_environment_is_not_a_list():
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
