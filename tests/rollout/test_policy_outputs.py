"""What policies give is recorded as it was when they gave it."""

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import Collector
from trawl.envs import GymEnv
from trawl.testing import ImageEnv, NumberedEnv, RaggedEnv

TOTAL = 3  # the place of the steps in all among the numbers
KINDS = pytest.mark.parametrize("kind", [NumberedEnv, RaggedEnv])


def two(kind=NumberedEnv):
    return [kind(number, lengths=[4 + number]) for number in range(2)]


def one_hot(index, dtype=torch.int64):
    return nn.functional.one_hot(index.long(), 4).to(dtype)


def by_step(observation):
    """The action tells the step."""
    return one_hot(observation[..., TOTAL] % 4)


def first_batch(source, policy, frames_per_batch=8, **options):
    with Collector(source, policy, frames_per_batch=frames_per_batch, **options) as collector:
        return collector.next()


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_further_outputs_keep_their_dtype(kind, dtype):
    def policy(observation):
        return by_step(observation), observation[..., TOTAL].to(dtype)

    batch = first_batch(two(kind), policy)
    assert batch["output1"].dtype == dtype
    assert batch["output1"].tolist() == [[0, 1, 2, 3]] * 2


@KINDS
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64])
def test_a_one_hot_action_may_have_any_dtype(kind, dtype):
    envs = two(kind)
    batch = first_batch(envs, lambda observation: by_step(observation).to(dtype))
    assert batch["action"].dtype == dtype
    assert [env.actions for env in envs] == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_continuous_action_is_recorded_as_given_and_taken_as_the_space_says(dtype):
    env = GymEnv("Pendulum-v1")
    taken = []
    step = env.env.step
    env.env.step = lambda action: taken.append(action) or step(action)
    batch = first_batch(env, lambda observation: observation[:1].to(dtype))
    assert batch["action"].dtype == dtype
    assert {action.dtype for action in taken} == {np.dtype(np.float32)}
    assert torch.equal(batch["action"].float(), torch.from_numpy(np.stack(taken)))


@KINDS
def test_random_actions_are_of_the_policys_dtype(kind):
    envs = two(kind)
    batch = first_batch(
        envs, lambda observation: by_step(observation).bfloat16(), init_random_frames=8
    )
    assert batch["action"].dtype == torch.bfloat16
    assert [env.actions for env in envs] == kind.action_numbers(batch).tolist()


@KINDS
def test_a_policy_may_return_the_same_buffer_each_time(kind):
    buffer = torch.zeros(4, dtype=torch.int64)

    def policy(observation):
        buffer.copy_(by_step(observation))
        return buffer

    batch = first_batch(kind(lengths=[3]), policy)
    assert kind.action_numbers(batch).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


@KINDS
def test_a_function_of_a_tensordict_may_return_the_same_buffer_each_time(kind):
    buffer = torch.zeros(4, dtype=torch.int64)

    def policy(tensordict):
        return tensordict.set("action", buffer.copy_(by_step(tensordict["observation"])))

    batch = first_batch(kind(lengths=[3]), policy)
    assert kind.action_numbers(batch).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


@KINDS
def test_a_function_may_return_a_new_tensordict_with_the_action_alone(kind):
    def policy(tensordict):
        return tensordict.empty().set("action", by_step(tensordict["observation"]))

    batch = first_batch(two(kind), policy)
    assert kind.action_numbers(batch).tolist() == [[0, 1, 2, 3]] * 2
    assert kind.numbers(batch)[..., TOTAL].tolist() == [[0, 1, 2, 3]] * 2


@KINDS
def test_a_view_of_the_observation_may_be_an_output(kind):
    def policy(observation):
        return by_step(observation), observation[..., TOTAL:]

    batch = first_batch(kind(lengths=[3]), policy)
    assert batch["output1"][:, 0].tolist() == list(range(8))


class Parameters(nn.Module):
    """Gives a parameter itself at some steps, and something else at others."""

    def __init__(self, odd):
        super().__init__()
        self.odd = odd
        self.action = nn.Parameter(torch.tensor([0.0, 0.0, 1.0, 0.0]))

    def forward(self, observation):
        if int(observation[TOTAL]) % 2 == self.odd:
            return self.action
        return torch.tensor([1.0, 0.0, 0.0, 0.0])


@KINDS
@pytest.mark.parametrize("odd", [0, 1])
def test_a_parameter_may_be_the_action(kind, odd):
    policy = Parameters(odd)
    batch = first_batch(kind(lengths=[3]), policy)
    assert kind.action_numbers(batch).tolist() == [2 * (odd == step % 2) for step in range(8)]
    with torch.no_grad():
        policy.action.zero_()
    assert batch["action"].any(-1).all()
    assert not batch["action"].requires_grad


def test_an_output_may_begin_with_the_memory_of_the_policy_and_go_on_elsewhere():
    """What is read one step later is not changed while the outputs are being written."""

    def policy(observation, memory):
        if memory is None:
            memory = torch.zeros(1)
        return memory + 1, by_step(observation), memory

    module = TensorDictModule(policy, ["observation", "memory"], ["memory", "action", "before"])
    batch = first_batch(NumberedEnv(lengths=[100]), module)
    assert batch["before"][:, 0].tolist() == list(range(8))
    assert batch["memory"][:, 0].tolist() == list(range(1, 9))


def test_memories_that_a_policy_keeps_are_never_overwritten():
    kept = []

    def policy(observation, memory):
        memory = torch.zeros(1) if memory is None else memory
        kept.append(memory)
        return by_step(observation), memory + 1

    module = TensorDictModule(policy, ["observation", "memory"], ["action", "memory"])
    first_batch(NumberedEnv(lengths=[100]), module)
    assert [int(memory) for memory in kept] == list(range(8))


def test_an_output_whose_shape_changes_is_refused():
    def policy(observation):
        return by_step(observation), observation[: 2 + int(observation[TOTAL]) // 3]

    with pytest.raises(
        ValueError, match=r"'output1' with shape \(3,\), but at first with shape \(2,\)"
    ):
        first_batch(NumberedEnv(), policy)


def test_an_output_that_vanishes_is_named():
    def policy(tensordict):
        tensordict.set("action", by_step(tensordict["observation"]))
        if int(tensordict["observation"][TOTAL]) < 3:
            tensordict.set("more", torch.ones(1))
        else:
            tensordict.pop("more", None)
        return tensordict

    with pytest.raises((TypeError, KeyError), match="'more'"):
        first_batch(NumberedEnv(), policy)


def test_an_output_that_is_no_tensor_takes_the_batch_off_the_fast_path():
    def policy(tensordict):
        step = int(tensordict["observation"][TOTAL])
        tensordict.set("action", by_step(tensordict["observation"]))
        return tensordict.set("why", NonTensorData(f"step {step}"))

    with Collector(NumberedEnv(), policy, frames_per_batch=4) as collector:
        batches = [collector.next() for _ in range(2)]
        stats = collector.stats()
    assert stats["env_path"] == "tensordict"
    assert "'why'" in stats["env_path_reason"]
    assert [list(batch["why"]) for batch in batches] == [
        ["step 0", "step 1", "step 2", "step 3"],
        ["step 4", "step 5", "step 6", "step 7"],
    ]
    assert NumberedEnv.numbers(batches[1])[:, TOTAL].tolist() == [4, 5, 6, 7]


def test_the_shape_of_an_output_must_begin_with_the_batch():
    def policy(tensordict):
        action = by_step(tensordict["observation"])
        return TensorDict({"action": action, "output1": torch.zeros(())})

    with pytest.raises(ValueError, match=r"'output1' with shape \(\).*batch size is \[2\]"):
        first_batch(two(), policy)


@KINDS
def test_a_policy_may_write_nested_entries(kind):
    module = TensorDictModule(
        lambda obs: (by_step(obs), obs[..., :2], obs[..., 2]),
        ["observation"],
        ["action", ("deep", "down", "a"), ("deep", "b")],
    )
    batch = first_batch(two(kind), module)
    assert torch.equal(batch["deep", "down", "a"], batch["observation"][..., :2])
    assert torch.equal(batch["deep", "b"], batch["observation"][..., 2])


@KINDS
def test_what_a_policy_writes_over_an_observation_is_recorded(kind):
    module = TensorDictModule(
        lambda obs: (by_step(obs), obs * 2), ["observation"], ["action", "observation"]
    )
    batch = first_batch(kind(lengths=[100]), module)
    assert torch.equal(batch["observation"][1:], 2 * batch["next", "observation"][:-1])


@KINDS
@pytest.mark.parametrize("limit", [1, 3, 100])
def test_a_policy_may_read_the_count_of_steps(kind, limit):
    module = TensorDictModule(
        lambda obs, count: (by_step(obs), count.clone()),
        ["observation", "step_count"],
        ["action", "seen"],
    )
    options = {"frames_per_batch": 14, "max_frames_per_traj": limit}
    with Collector(two(kind), module, **options) as collector:
        for _ in range(3):
            batch = collector.next()
            step = kind.numbers(batch)[..., 2:3]
            assert torch.equal(batch["step_count"], step)
            assert torch.equal(batch["seen"], step)


@KINDS
def test_a_policy_may_read_that_an_episode_begins(kind):
    module = TensorDictModule(
        lambda obs, start: (by_step(obs), start.clone()),
        ["observation", "is_init"],
        ["action", "seen"],
    )
    with Collector(two(kind), module, frames_per_batch=14) as collector:
        for _ in range(3):
            batch = collector.next()
            assert torch.equal(batch["seen"], kind.numbers(batch)[..., 2:3] == 0)


def test_an_observation_may_be_written_over_with_another_layout():
    module = TensorDictModule(
        lambda image: (torch.eye(4, dtype=torch.int64)[0], image[:5, 0, 0].double() / 2),
        ["observation"],
        ["action", "observation"],
    )
    with Collector(ImageEnv(lengths=[3]), module, frames_per_batch=4) as collector:
        for _ in range(2):
            batch = collector.next()
            assert batch["observation"].dtype == torch.float64
            assert batch["next", "observation"].shape == (4, 8, 8, 3)
    # One more than the steps in all, halved.
    assert batch["observation"][:, TOTAL].tolist() == [2.5, 3.0, 3.5, 4.0]
