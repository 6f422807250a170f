from functools import partial

import pytest
import torch
from collector_parts import Buffer, Scorer, by_step

from trawl.collectors import Collector, MultiSyncCollector
from trawl.envs import GymEnv
from trawl.testing import NumberedEnv, RaggedEnv

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("given", "policy", "env", "storing"),
    [
        ({}, None, None, None),
        ({"policy_device": "cpu"}, CPU, None, None),
        ({"env_device": "cpu"}, None, CPU, None),
        ({"storing_device": "cpu"}, None, None, CPU),
        ({"policy_device": "cpu", "env_device": "cpu"}, CPU, CPU, CPU),
        # There is one CPU.
        *(
            ({"device": cpu}, CPU, CPU, CPU)
            for cpu in ("cpu", "cpu:0", CPU, torch.device("cpu", 0))
        ),
    ],
    ids=str,
)
def test_devices_are_resolved(given, policy, env, storing):
    module = Scorer()
    with Collector(NumberedEnv(), module, frames_per_batch=4, **given) as collector:
        found = (collector.policy_device, collector.env_device, collector.storing_device)
        assert found == (policy, env, storing)
        assert collector.policy is module
        assert collector.next().device == storing


def test_the_environments_device_is_not_the_batches():
    env = GymEnv(NumberedEnv(), device="cpu")
    with Collector(env, frames_per_batch=4) as collector:
        assert collector.env_device == CPU
        assert next(iter(collector)).device is None


SOURCES = {"array": NumberedEnv, "tensordict": RaggedEnv, "torchrl": None}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("given", "device"),
    [
        ({}, None),
        ({"device": "cpu"}, CPU),
        ({"policy_device": "cpu"}, CPU),
        ({"storing_device": "cpu"}, None),
        ({"env_device": "cpu"}, None),
        ({"env_device": "cpu", "policy_device": "cpu"}, CPU),
    ],
    ids=str,
)
def test_the_policys_tensordict_has_the_policys_device(source, given, device):
    seen = []

    def policy(td):
        seen.append(td.device)
        return td.set("action", torch.eye(count, dtype=torch.int64)[0])

    count = 4
    env = SOURCES[source]
    if env is None:
        count, env = 2, pytest.importorskip("torchrl.envs").GymEnv("CartPole-v1", device="cpu")
    with Collector(env, policy, frames_per_batch=4, trust_policy=True, **given) as collector:
        collector.next()
    assert set(seen) == {device}


@pytest.mark.parametrize(("storage", "device"), [("LazyTensorStorage", CPU), ("ListStorage", None)])
@pytest.mark.parametrize("place", [Collector, partial(MultiSyncCollector, start_method="inline")])
def test_frames_without_a_device_get_that_of_the_storage(place, storage, device):
    data = pytest.importorskip("torchrl.data")

    class Buffer(data.ReplayBuffer):
        def extend(self, frames, **options):
            seen.append(frames.device)
            return super().extend(frames, **options)

    seen = []
    source = NumberedEnv if place is Collector else [NumberedEnv]
    with place(
        source,
        frames_per_batch=4,
        total_frames=8,
        replay_buffer=Buffer(storage=getattr(data, storage)(100)),
        postproc=lambda batch: batch.clear_device_(),
    ) as collector:
        list(collector)
    assert seen == [device] * 2


def test_a_policy_that_is_in_place_is_used_itself():
    policy = Scorer(0)
    with Collector(NumberedEnv(), policy, frames_per_batch=4, policy_device="cpu") as collector:
        iterator = iter(collector)
        assert NumberedEnv.action_numbers(next(iterator)).tolist() == [0] * 4
        with torch.no_grad():
            policy.scores.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0]))
        assert NumberedEnv.action_numbers(next(iterator)).tolist() == [3] * 4


@pytest.mark.parametrize("policy", [by_step(), by_step().module])
def test_a_policy_without_parameters_cannot_be_moved(policy):
    with pytest.warns(UserWarning, match=r"policy has no parameters to move to policy_device cpu"):
        Collector(NumberedEnv(), policy, frames_per_batch=4, policy_device="cpu").shutdown()


@pytest.mark.parametrize("options", [{"policy": None}, {"policy": by_step(), "trust_policy": True}])
def test_random_and_trusted_policies_need_no_parameters(options):
    Collector(NumberedEnv(), frames_per_batch=4, policy_device="cpu", **options).shutdown()


def test_frames_in_a_buffer_are_on_the_storing_device():
    buffer = Buffer()
    options = {"total_frames": 4, "extend_buffer": False, "storing_device": "cpu"}
    with Collector(NumberedEnv(), frames_per_batch=4, replay_buffer=buffer, **options) as collector:
        list(collector)
    assert [frame.device for frame in buffer.frames] == [CPU] * 4


@pytest.mark.parametrize("name", ["device", "storing_device", "env_device", "policy_device"])
def test_a_wrong_device_is_named(name):
    with pytest.raises(ValueError, match=rf"{name} 'gpu' is not a device"):
        Collector(NumberedEnv(), frames_per_batch=4, **{name: "gpu"})


def test_a_cuda_graph_needs_a_cuda_device():
    with pytest.raises(
        ValueError, match=r"cudagraph_policy needs a policy_device of type cuda.*cpu"
    ):
        Collector(NumberedEnv(), Scorer(), frames_per_batch=4, cudagraph_policy=True, device="cpu")
