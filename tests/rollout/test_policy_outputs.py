"""What policies give is recorded as it was when they gave it."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from tensordict import NonTensorData, TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from trawl.collectors import AsyncBatchedCollector, Collector
from trawl.envs import GymEnv, TorchVectorEnv
from trawl.testing import ImageEnv, NumberedEnv, NumberedTorchEnv, RaggedEnv

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


DTYPES = [torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.float16, torch.float64]


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_actions_and_further_outputs_may_have_any_dtype(kind, dtype):
    envs = two(kind)

    def policy(observation):
        return by_step(observation).to(dtype), observation[..., TOTAL].to(dtype)

    batch = first_batch(envs, policy)
    assert batch["action"].dtype == batch["output1"].dtype == dtype
    assert [env.actions for env in envs] == [[0, 1, 2, 3]] * 2
    assert torch.equal(batch["output1"], torch.arange(4).expand(2, 4).to(dtype))


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


def in_a_new_tensordict(tensordict):
    return tensordict.empty().set("action", by_step(tensordict["observation"]))


def with_a_view(observation):
    return by_step(observation), observation[..., TOTAL:]


@KINDS
@pytest.mark.parametrize("policy", [in_a_new_tensordict, with_a_view])
def test_what_a_policy_returns_is_recorded_as_it_was(kind, policy):
    batch = first_batch(kind(lengths=[3]), policy)
    assert kind.action_numbers(batch).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert kind.numbers(batch)[:, TOTAL].tolist() == list(range(8))
    if policy is with_a_view:
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


def test_memories_are_never_overwritten_and_an_output_may_begin_with_one():
    """What is read one step later is not changed while the outputs are being written."""
    kept = []

    def policy(observation, memory):
        memory = torch.zeros(1) if memory is None else memory
        kept.append(memory)
        return memory + 1, by_step(observation), memory

    module = TensorDictModule(policy, ["observation", "memory"], ["memory", "action", "before"])
    batch = first_batch(NumberedEnv(lengths=[100]), module)
    assert batch["before"][:, 0].tolist() == list(range(8))
    assert batch["memory"][:, 0].tolist() == list(range(1, 9))
    assert [int(memory) for memory in kept] == list(range(8))


def growing(observation):
    return by_step(observation), observation[: 2 + int(observation[TOTAL]) // 3]


def vanishing(tensordict):
    tensordict.set("action", by_step(tensordict["observation"]))
    if int(tensordict["observation"][TOTAL]) < 3:
        tensordict.set("more", torch.ones(1))
    else:
        tensordict.pop("more", None)
    return tensordict


def without_a_batch(tensordict):
    action = by_step(tensordict["observation"])
    return TensorDict({"action": action, "output1": torch.zeros(())})


@pytest.mark.parametrize(
    ("source", "policy", "error", "match"),
    [
        (
            NumberedEnv,
            growing,
            ValueError,
            r"'output1' with shape \(3,\), but at first with shape \(2,\)",
        ),
        (NumberedEnv, vanishing, (TypeError, KeyError), "'more'"),
        (two, without_a_batch, ValueError, r"'output1' with shape \(\).*batch size is \[2\]"),
    ],
)
def test_outputs_that_change_or_do_not_fit_are_refused(source, policy, error, match):
    with pytest.raises(error, match=match):
        first_batch(source(), policy)


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


@KINDS
def test_a_policy_may_write_nested_entries_and_over_an_observation(kind):
    module = TensorDictModule(
        lambda obs: (by_step(obs), obs[..., :2] + 0, obs[..., 2] + 0, obs * 2),
        ["observation"],
        ["action", ("deep", "down", "a"), ("deep", "b"), "observation"],
    )
    batch = first_batch(kind(lengths=[100]), module)
    assert torch.equal(batch["observation"][1:], 2 * batch["next", "observation"][:-1])
    assert torch.equal(2 * batch["deep", "down", "a"], batch["observation"][..., :2])
    assert torch.equal(2 * batch["deep", "b"], batch["observation"][..., 2])


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


# --- one rule for outputs of another dtype, whatever the path

COUNT = 2
BIG = 2**40 + 5
PATHS = {
    "array": lambda: two(),
    "tensor": lambda: TorchVectorEnv(NumberedTorchEnv(COUNT, lengths=[4, 5])),
    "tensordict": lambda: two(RaggedEnv),
}


class Late(TensorDictModuleBase):
    """Writes an entry of one kind in its first calls, and of another kind from the fourth on."""

    in_keys = ["observation"]  # noqa: RUF012 - as tensordict
    out_keys = ["action", "extra"]  # noqa: RUF012

    def __init__(self, first, later, calls=3):
        super().__init__()
        self.values, self.calls = [first] * calls + [later], calls

    def forward(self, td):
        value = self.values.pop(0) if len(self.values) > 1 else self.values[0]
        td["action"] = one_hot(torch.zeros(td.batch_size))
        td["extra"] = value.expand(*td.batch_size, *value.shape)
        return td


LEGAL = {
    "a longer integer": (torch.tensor(1, dtype=torch.int32), torch.tensor(7)),
    "an integer for a float": (torch.tensor(1.0), torch.tensor(7)),
    "a bool for a float": (torch.tensor(1.0), torch.tensor(True)),
    "a whole float for an integer": (torch.tensor(1), torch.tensor(7.0)),
    "a rounded float": (torch.tensor(1.0), torch.tensor(0.1, dtype=torch.float64)),
    "nan": (torch.tensor([1.0] * 2), torch.tensor([torch.nan, torch.inf], dtype=torch.float64)),
    "a number for a bool": (torch.tensor(True), torch.tensor(1)),
    "a real complex number": (torch.tensor(1.0), torch.tensor(7 + 0j)),
    "a conjugate": (torch.tensor(1 + 2j), torch.tensor(7 + 2j, dtype=torch.complex128).conj()),
    "a real number for a complex one": (torch.tensor(1 + 2j), torch.tensor(7)),
    "short integers for bfloat16": (
        torch.tensor(1, dtype=torch.bfloat16),
        torch.tensor(7, dtype=torch.int16),
    ),
}
ILLEGAL = {
    "too large an integer": (torch.tensor(1, dtype=torch.int32), torch.tensor(BIG)),
    "a negative integer": (torch.tensor(1, dtype=torch.uint8), torch.tensor(-1, dtype=torch.int8)),
    "too large a float": (torch.tensor(1.0), torch.tensor(1e300, dtype=torch.float64)),
    "an integer that a float would round": (torch.tensor(1.0), torch.tensor(2**24 + 1)),
    "the largest integer": (torch.tensor(1.0), torch.tensor(2**63 - 1)),
    "a fraction": (torch.tensor(1), torch.tensor(0.5)),
    "a float beyond integers": (torch.tensor(1), torch.tensor(2.0**63)),
    "nan for an integer": (torch.tensor(1), torch.tensor(torch.nan)),
    "two for a bool": (torch.tensor(True), torch.tensor(2)),
    "an imaginary number": (torch.tensor(1.0), torch.tensor(7 + 1j)),
    "too large a complex number": (
        torch.tensor(1 + 1j),
        torch.tensor(1 + 1e300j, dtype=torch.complex128),
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", LEGAL)
def test_an_output_of_another_dtype_is_converted(path, case):
    first, later = LEGAL[case]
    with Collector(PATHS[path](), Late(first, later), frames_per_batch=8) as collector:
        batches = [collector.next() for _ in range(2)]
        assert collector.stats()["env_path"] == path
    assert [batch["extra"].dtype for batch in batches] == [first.dtype] * 2
    expected = [first] * 3 + [*[later.real if case == "a real complex number" else later] * 5]
    for value, shown in zip(torch.cat([b["extra"] for b in batches], 1)[0], expected, strict=True):
        torch.testing.assert_close(value, shown.to(first.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", ILLEGAL)
def test_values_that_the_first_dtype_cannot_hold_are_refused(path, case):
    first, later = ILLEGAL[case]
    with (
        Collector(PATHS[path](), Late(first, later), frames_per_batch=8) as collector,
        pytest.raises(TypeError, match=f"'extra' as {later.dtype}.*at first as {first.dtype}"),
    ):
        collector.next()


@pytest.mark.parametrize(("first", "later"), [LEGAL["nan"], ILLEGAL["too large an integer"]])
def test_the_rule_holds_for_environments_that_are_ready(first, later):
    options = {"frames_per_batch": 8}
    with AsyncBatchedCollector([NumberedEnv], policy=Late(first, later), **options) as collector:
        if first.dtype is torch.float32:
            torch.testing.assert_close(collector.next()["extra"][-1], later.float(), equal_nan=True)
        else:
            with pytest.raises(TypeError, match=r"'extra' as torch\.int64.*first as torch.int32"):
                collector.next()


def test_on_a_late_device_the_batch_names_the_first_step():
    class Gpu(TorchVectorEnv):
        answers_at_once = False

    env = Gpu(NumberedTorchEnv(COUNT, lengths=[4]))
    with (
        Collector(env, Late(*ILLEGAL["too large an integer"]), frames_per_batch=8) as collector,
        pytest.raises(TypeError, match=r"'extra' as torch\.int64 in step 3 of this batch"),
    ):
        collector.next()


class Wide(gymnasium.Env):
    """Has more choices than the dtype of the policy's first action can hold."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(100_000)

    def reset(self, *, seed=None, options=None):
        return self.observe(), {}

    def step(self, action):
        return self.observe(), 0.0, False, False, {}

    def observe(self):
        return np.zeros(1, np.float32)


class WideRagged(Wide):
    observation_space = spaces.Dict(observation=Wide.observation_space, text=spaces.Text(9))

    def observe(self):
        return {"observation": super().observe(), "text": "a"}


class WideTensors:
    single_observation_space, single_action_space = Wide.observation_space, Wide.action_space
    num_envs = COUNT
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self):
        self.unwrapped = self

    def reset(self, *, seed=None, options=None):
        return torch.zeros(COUNT, 1), {}

    def step(self, action):
        never = torch.zeros(COUNT, dtype=torch.bool)
        return torch.zeros(COUNT, 1), torch.zeros(COUNT), never, never, {}

    def close(self):
        pass


@pytest.mark.parametrize("kind", [Wide, WideTensors, WideRagged])
def test_random_actions_follow_the_dtype_of_the_policys(kind):
    adapter = TorchVectorEnv if kind is WideTensors else GymEnv

    def policy(observation):
        return torch.zeros(observation.shape[:-1], dtype=torch.uint8)

    with pytest.raises(TypeError, match=r"random actions gave 'action' as torch\.int64"):
        first_batch(
            adapter(kind(), categorical_action_encoding=True),
            policy,
            frames_per_batch=40,
            init_random_frames=40,
        )


def test_a_shape_that_changes_is_refused_on_torchrls_environments():
    envs = pytest.importorskip("torchrl.envs")

    def policy(td):
        td["action"] = torch.tensor([1, 0])
        td["extra"] = torch.zeros(2 if len(calls) < 3 else 3)
        calls.append(None)
        return td

    calls = []
    with (
        Collector(envs.GymEnv("CartPole-v1"), policy, frames_per_batch=8) as collector,
        pytest.raises(ValueError, match=r"'extra' with shape \(3,\), but at first with shape \(2"),
    ):
        collector.next()
