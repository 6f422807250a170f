"""Names, arguments and attributes by which programs written for TorchRL use a collector."""

import threading
from pathlib import Path

import pytest
import torch
from collector_parts import Buffer
from multi_parts import CLASSES, make
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector, ProfileConfig
from trawl.testing import NumberedEnv
from trawl.weight_update import (
    MultiProcessedWeightUpdater,
    SharedMemWeightSyncScheme,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)


def module():
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])


def filled(value):
    """Weights for that policy."""
    return {"module.weight": torch.full((1, 3), value), "module.bias": torch.full((1,), value)}


def pendulum(cls=Collector, policy=None, **options):
    if cls is not Collector:
        options = {"num_workers": 2, "start_method": "inline", **options}
    return cls("Pendulum-v1", policy or module(), frames_per_batch=10, **options)


def test_attributes_of_a_collector():
    policy = module()
    with pendulum(policy=policy, track_policy_version=True, total_frames=20) as collector:
        assert collector.n_env == 1
        assert not collector.verbose
        assert not collector.compiled_policy
        assert collector.policy_version_tracker.version == 0
        assert torch.equal(collector.policy_weights["module", "weight"], policy.module.weight)
        assert torch.equal(collector.get_weights_fn()["module", "bias"], policy.module.bias)
        assert [collector._iter for _ in collector] == [1, 2]
    envs = [NumberedEnv(number) for number in range(3)]
    with Collector(envs, frames_per_batch=6) as collector:
        assert collector.n_env == 3
        assert collector.policy_weights.is_empty()
        assert collector.get_weights_fn is None
        assert collector.policy_version_tracker is None
    with pendulum(compile_policy=True) as collector:
        assert collector.compiled_policy
    scheme = SharedMemWeightSyncScheme()
    with pendulum(MultiSyncCollector, weight_sync_schemes={"policy": scheme}) as collector:
        assert dict(collector.weight_sync_schemes) == {"policy": scheme}
        assert collector._weight_sync_schemes["policy"] is scheme
        assert collector._receiver_schemes == {}


@pytest.mark.parametrize(
    ("cls", "method"), [(MultiSyncCollector, "inline"), (MultiAsyncCollector, "messages")]
)
def test_weights_that_workers_were_sent(cls, method):
    policy = module()
    with make(cls, create_env_fn=["Pendulum-v1"] * 2, policy=policy, start_method=method) as one:
        before = policy.module.weight.detach().clone()
        with torch.no_grad():
            policy.module.weight.add_(1)
        # What the learner has is not what workers have, as yet.
        assert torch.equal(one.get_cached_weights("policy")["module", "weight"], before)
        one.update_policy_weights_()
        assert torch.equal(one.get_cached_weights("policy")["module", "weight"], before + 1)
        assert one.get_cached_weights("critic") is None
    # There are none of what is no module.
    with pendulum(MultiSyncCollector, lambda observation: observation[..., :1]) as collector:
        assert collector.get_cached_weights("policy") is None


@pytest.mark.parametrize("cls", CLASSES)
def test_workers_are_named_by_the_device_of_their_policy(cls):
    policy = module()
    with pendulum(cls, policy, track_policy_version=True) as collector:
        new = filled(1.0)
        collector.update_policy_weights_(new, worker_ids=torch.device("cpu"))
        for weight in collector.get_distant_attr("policy.module.weight"):
            assert torch.equal(weight, torch.ones(1, 3))
        with pytest.raises(ValueError, match="worker_ids names the device cuda:3, but no"):
            collector.update_policy_weights_(new, worker_ids=[torch.device("cuda:3")])
        assert collector.policy_version == 1


# --- updaters


def test_an_updater_that_is_assigned_serves_the_collector():
    with pendulum(MultiSyncCollector) as collector:
        collector.weight_updater = updater = MultiProcessedWeightUpdater()
        assert updater.collector is collector
        updater.push_weights(filled(1.0))
        for weight in collector.get_distant_attr("policy.module.weight"):
            assert torch.equal(weight, torch.ones(1, 3))
        collector.weight_updater = None
        collector.update_policy_weights_(filled(0.0))
        for weight in collector.get_distant_attr("policy.module.weight"):
            assert torch.equal(weight, torch.zeros(1, 3))


def test_the_class_of_an_updater_makes_one_for_the_policy():
    policy = module()
    with pendulum(policy=policy, weight_updater=VanillaWeightUpdater) as collector:
        collector.update_policy_weights_(filled(1.0))
        assert isinstance(collector.weight_updater, VanillaWeightUpdater)
        assert torch.equal(policy.module.weight, torch.ones(1, 3))
    # It may have no use for it.
    seen = []
    with pytest.warns(DeprecationWarning, match="weight updaters are deprecated"):

        class Own(WeightUpdaterBase):
            @classmethod
            def from_policy(cls, policy):
                seen.append(policy)

    with pendulum(MultiSyncCollector, policy, weight_updater=Own) as collector:
        assert type(collector.weight_updater) is Own
        assert seen == [policy]


# --- profiles


def test_options_of_a_profile():
    config = ProfileConfig(workers=[1], save_path="trace_{worker_idx}.json", activities=["cpu"])
    assert config.should_profile_worker(1)
    assert not config.should_profile_worker(0)
    assert config.get_save_path(1) == Path("trace_1.json")
    assert ProfileConfig().get_save_path(2) == Path("collector_profile_2.json")
    assert config.get_activities() == [torch.profiler.ProfilerActivity.CPU]
    assert torch.profiler.ProfilerActivity.CPU in ProfileConfig().get_activities()


# --- pauses


class Gate(NumberedEnv):
    """Waits in each step until it is opened."""

    def __init__(self):
        super().__init__(0)
        self.waits, self.open = threading.Event(), threading.Event()
        self.open.set()

    def step(self, action):
        if not self.open.is_set():
            self.waits.set()
            assert self.open.wait(60)
        return super().step(action)


def test_a_pause_waits_no_longer_than_it_may():
    gate = Gate()
    buffer = Buffer()
    with Collector(gate, frames_per_batch=10, replay_buffer=buffer) as collector:
        gate.open.clear()
        collector.start()
        assert gate.waits.wait(60)
        with (
            pytest.raises(TimeoutError, match="not finished within the time limit"),
            collector.pause(0.01),
        ):
            pytest.fail("the batch is not finished")
        gate.open.set()
        with collector.pause(timeout=300):
            assert len(buffer) % 10 == 0


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_a_pause_may_be_for_good(cls):
    buffer = Buffer()
    options = {} if cls is Collector else {"num_workers": 2, "start_method": "inline"}
    with cls("Pendulum-v1", None, frames_per_batch=10, replay_buffer=buffer, **options) as one:
        one.start()
        with one.pause(resume=False):
            before = one.stats()["frames"]
        assert not one.is_running()
        assert one.stats()["frames"] == before
        one.start()
        assert one.is_running()
        with one.pause():
            pass
        one.async_shutdown()
    assert one.stats()["frames"] > before
