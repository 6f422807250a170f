"""Policies of all kinds, and the devices of policies and batches."""

from functools import partial

import pytest
import torch
from collector_parts import Buffer, by_step, choose_by_step, first_batch, keys
from multi_parts import Chooser
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import nn

from trawl import ExplorationType
from trawl.collectors import Collector, MultiSyncCollector, RandomPolicy
from trawl.envs import GymEnv
from trawl.testing import NestedEnv, NumberedEnv, RaggedEnv

BY_STEP = [0, 1, 2, 3, 0, 0, 1, 2]


def actions(policy, **options):
    """The first eight actions of a policy, in episodes of five steps."""
    batch = first_batch(NumberedEnv(), policy, frames_per_batch=8, **options)
    return NumberedEnv.action_numbers(batch).tolist()


def of_annotated(data: TensorDictBase):
    return data.set("action", choose_by_step(data["observation"]))


class Module(nn.Module):
    def forward(self, observation):
        return choose_by_step(observation)


class Reader(nn.Module):
    def forward(self, tensordict):
        return of_annotated(tensordict)


class Callable:
    def __call__(self, observation):
        return choose_by_step(observation)


WAYS = {
    "TensorDictModule": by_step(),
    "TensorDictSequential": TensorDictSequential(by_step()),
    "compiled": torch.compile(by_step(), backend="eager"),
    "module": Module(),
    "module of a TensorDict": Reader(),
    "object": Callable(),
    "function": choose_by_step,
    "partial": partial(choose_by_step),
    "lambda": lambda observation: Module()(observation),
    "td": lambda td: of_annotated(td),
    "tensordict": lambda tensordict: of_annotated(tensordict),
    "annotated": of_annotated,
    "another TensorDict": lambda td: TensorDict(action=choose_by_step(td["observation"])),
    "keyword only": lambda *, observation: choose_by_step(observation),
    "option before": lambda scale=1, *, observation: choose_by_step(observation * scale),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_policy_may_come_in_many_ways(way):
    assert actions(WAYS[way]) == BY_STEP


def test_a_factory_makes_the_policy_and_one_that_draws_nothing_explores_nothing():
    assert actions(None, policy_factory=by_step) == BY_STEP
    for kind in ExplorationType:
        assert actions(by_step(), exploration_type=kind) == BY_STEP


# --- wrapping


def test_a_function_of_several_observations_gets_them_by_name():
    seen = {}

    def policy(last, env, unused=None):
        seen["last"], seen["env"] = last.shape, env.shape
        return torch.tensor([1, 0]), torch.ones(2, dtype=torch.int8), torch.zeros(1)

    batch = first_batch(NestedEnv(), policy, frames_per_batch=4)
    assert seen == {"last": (1, 2), "env": (8,)}
    assert NestedEnv.action_numbers(batch).tolist() == [3] * 4


# --- random policies


def test_a_random_policy_takes_the_environments_spec():
    policy = RandomPolicy()
    batch = first_batch(NumberedEnv(), policy, frames_per_batch=50)
    assert set(NumberedEnv.action_numbers(batch).tolist()) == {0, 1, 2, 3}
    assert policy.action_spec == GymEnv(NumberedEnv()).full_action_spec
    with (
        Collector("Pendulum-v1", policy_factory=RandomPolicy, frames_per_batch=200) as one,
        Collector(["Pendulum-v1"] * 2, policy, frames_per_batch=4) as two,
        Collector("Pendulum-v1", policy, frames_per_batch=4) as three,
    ):
        first, *others = (each.next()["action"] for each in (one, two, three, two))
    assert [each.shape for each in others] == [(2, 2, 1), (4, 1), (2, 2, 1)]
    # Actions fill their space.
    assert first.abs().max() <= 2
    assert first.min() < -1
    assert first.max() > 1


def test_a_random_policy_keeps_its_own_spec():
    env = GymEnv(NumberedEnv())

    class OnlyTwo(type(env.action_spec)):
        def _draw(self, shape):
            return nn.functional.one_hot(torch.full(shape[:-1], 2), 4)

    first = first_batch(env, RandomPolicy(OnlyTwo(4)), frames_per_batch=20)
    assert set(NumberedEnv.action_numbers(first).tolist()) == {2}


def test_a_random_policy_can_be_called_by_hand():
    env, nested = GymEnv(NumberedEnv()), GymEnv(NestedEnv())
    root = RandomPolicy(env.action_spec, action_key="choice")(env.reset())
    assert root["choice"].sum() == 1
    written = RandomPolicy(nested.full_action_spec)(nested.reset())
    assert {("pick", "0"), ("pick", "1"), "push"} <= keys(written)
    with pytest.raises(RuntimeError, match=r"RandomPolicy has no action spec.*env.action_spec"):
        RandomPolicy()(TensorDict())


# --- autograd, modes, changes


def test_policies_run_without_autograd_in_the_mode_that_they_have():
    class Noisy(nn.Module):
        def forward(self, observation):
            assert not torch.is_grad_enabled()
            return nn.functional.one_hot(torch.tensor(3 if self.training else 1), 4)

    policy = Noisy()
    with Collector(NumberedEnv(), policy, frames_per_batch=4) as collector:
        assert NumberedEnv.action_numbers(collector.next()).tolist() == [3] * 4
        policy.eval()
        assert NumberedEnv.action_numbers(collector.next()).tolist() == [1] * 4


def test_an_optimiser_step_shows_in_the_next_batch():
    policy = Chooser(0)
    # It is in place, so it is used itself.
    with Collector(NumberedEnv(), policy, frames_per_batch=4, policy_device="cpu") as collector:
        collector.next()
        optimiser = torch.optim.SGD(policy.parameters(), lr=2.0)
        (-policy.choice).backward()
        optimiser.step()
        assert NumberedEnv.action_numbers(collector.next()).tolist() == [2] * 4


# --- devices

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
    module, buffer = Chooser(), Buffer()
    with Collector(NumberedEnv(), module, frames_per_batch=4, **given) as collector:
        found = (collector.policy_device, collector.env_device, collector.storing_device)
        assert found == (policy, env, storing)
        assert collector.policy is module
        assert collector.next().device == storing
    options = {"total_frames": 4, "extend_buffer": False, "replay_buffer": buffer, **given}
    with Collector(NumberedEnv(), module, frames_per_batch=4, **options) as collector:
        list(collector)
    assert [frame.device for frame in buffer.frames] == [storing] * 4


def test_the_environments_device_is_not_the_batches():
    env = GymEnv(NumberedEnv(), device="cpu")
    with Collector(env, frames_per_batch=4) as collector:
        assert collector.env_device == CPU
        assert next(iter(collector)).device is None


SOURCES = {"array": NumberedEnv, "tensordict": RaggedEnv, "torchrl": None}


@pytest.mark.parametrize("source", SOURCES)
def test_the_policys_tensordict_has_the_policys_device(source):
    def policy(td):
        seen.append(td.device)
        return td.set("action", torch.eye(count, dtype=torch.int64)[0])

    count, seen = 4, []
    env = SOURCES[source]
    if env is None:
        count, env = 2, pytest.importorskip("torchrl.envs").GymEnv("CartPole-v1", device="cpu")
    for given, device in [
        ({}, None),
        ({"device": "cpu"}, CPU),
        ({"policy_device": "cpu"}, CPU),
        ({"storing_device": "cpu"}, None),
        ({"env_device": "cpu"}, None),
        ({"env_device": "cpu", "policy_device": "cpu"}, CPU),
    ]:
        seen.clear()
        with Collector(env, policy, frames_per_batch=4, trust_policy=True, **given) as collector:
            collector.next()
            assert set(seen) == {device}, given
            collector.shutdown(close_env=False)


@pytest.mark.parametrize(("storage", "device"), [("LazyTensorStorage", CPU), ("ListStorage", None)])
@pytest.mark.parametrize("place", [Collector, partial(MultiSyncCollector, start_method="inline")])
def test_frames_without_a_device_get_that_of_the_storage(place, storage, device):
    data = pytest.importorskip("torchrl.data")

    class Kept(data.ReplayBuffer):
        def extend(self, frames, **options):
            seen.append(frames.device)
            return super().extend(frames, **options)

    seen = []
    with place(
        NumberedEnv if place is Collector else [NumberedEnv],
        frames_per_batch=4,
        total_frames=8,
        replay_buffer=Kept(storage=getattr(data, storage)(100)),
        postproc=lambda batch: batch.clear_device_(),
    ) as collector:
        list(collector)
    assert seen == [device] * 2


@pytest.mark.parametrize("policy", [by_step(), by_step().module, None])
def test_a_policy_without_parameters_cannot_be_moved(policy):
    options = {"frames_per_batch": 4, "policy_device": "cpu"}
    if policy is not None:
        with pytest.warns(UserWarning, match=r"has no parameters to move to policy_device cpu"):
            Collector(NumberedEnv(), policy, **options).shutdown()
    # Random and trusted policies need none.
    trusted = {} if policy is None else {"trust_policy": True}
    Collector(NumberedEnv(), policy and by_step(), **options, **trusted).shutdown()
    with pytest.raises(ValueError, match=r"cudagraph_policy needs a policy_device of type cuda"):
        Collector(NumberedEnv(), Chooser(), cudagraph_policy=True, **options)
