import functools

import pytest
import torch
from collector_parts import Scorer, by_step, choose_by_step, first_batch, keys
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from trawl import ExplorationType
from trawl.collectors import Collector, RandomPolicy
from trawl.envs import GymEnv
from trawl.testing import NestedEnv, NumberedEnv

BY_STEP = [0, 1, 2, 3, 0, 0, 1, 2]


def actions(policy, **options):
    """The first eight actions of a policy, in episodes of five steps."""
    batch = first_batch(NumberedEnv(), policy, frames_per_batch=8, **options)
    return NumberedEnv.action_numbers(batch).tolist()


def of_td(td):
    return td.set("action", choose_by_step(td["observation"]))


def of_tensordict(tensordict):
    return tensordict.set("action", choose_by_step(tensordict["observation"]))


def of_annotated(data: TensorDictBase):
    return data.set("action", choose_by_step(data["observation"]))


def of_a_copy(tensordict):
    return TensorDict({"action": choose_by_step(tensordict["observation"])}, tensordict.shape)


def of_the_observation(observation):
    return choose_by_step(observation)


def by_keyword_only(*, observation):
    return choose_by_step(observation)


def with_an_option_before(scale=1, *, observation):
    return choose_by_step(observation * scale)


class Module(nn.Module):
    def forward(self, observation):
        return choose_by_step(observation)


class TensorDictReader(nn.Module):
    def forward(self, tensordict):
        return tensordict.set("action", choose_by_step(tensordict["observation"]))


class Callable:
    def __call__(self, observation):
        return choose_by_step(observation)


@pytest.mark.parametrize(
    "policy",
    [
        by_step(),
        TensorDictSequential(by_step()),
        of_td,
        of_tensordict,
        of_annotated,
        of_a_copy,
        of_the_observation,
        by_keyword_only,
        with_an_option_before,
        lambda observation: choose_by_step(observation),
        functools.partial(of_the_observation),
        Module(),
        TensorDictReader(),
        Callable(),
    ],
    ids=lambda policy: getattr(policy, "__name__", type(policy).__name__),
)
def test_a_policy_may_come_in_many_ways(policy):
    assert actions(policy) == BY_STEP


def test_a_factory_makes_the_policy():
    assert actions(None, policy_factory=by_step) == BY_STEP


def test_without_a_policy_actions_fill_their_space():
    actions = first_batch("Pendulum-v1", frames_per_batch=200)["action"]
    assert actions.abs().max() <= 2
    assert actions.min() < -1
    assert actions.max() > 1


def test_a_compiled_module_is_used_as_it_is():
    assert actions(torch.compile(by_step(), backend="eager")) == BY_STEP


# --- wrapping


def test_a_function_of_several_observations_gets_them_by_name():
    seen = {}

    def policy(last, env, unused=None):
        seen["last"], seen["env"] = last.shape, env.shape
        return torch.tensor([1, 0]), torch.ones(2, dtype=torch.int8), torch.zeros(1)

    batch = first_batch(NestedEnv(), policy, frames_per_batch=4)
    assert seen == {"last": (1, 2), "env": (8,)}
    assert NestedEnv.action_numbers(batch).tolist() == [3] * 4


def test_nested_actions_are_written_where_the_environment_reads_them():
    policy = TensorDictModule(
        lambda env: (torch.tensor([0, 1]), torch.tensor([0, 1], dtype=torch.int8), torch.ones(1)),
        in_keys=["env"],
        out_keys=[("pick", "0"), ("pick", "1"), "push"],
    )
    batch = first_batch(NestedEnv(), policy, frames_per_batch=4)
    assert NestedEnv.action_numbers(batch).tolist() == [5] * 4
    assert NestedEnv.numbers(batch["next"])[:, 4].tolist() == [5] * 4


# --- random policies


def test_a_random_policy_takes_the_environments_spec():
    policy = RandomPolicy()
    batch = first_batch(NumberedEnv(), policy, frames_per_batch=50)
    assert set(NumberedEnv.action_numbers(batch).tolist()) == {0, 1, 2, 3}
    assert policy.action_spec == GymEnv(NumberedEnv()).full_action_spec
    with (
        Collector("Pendulum-v1", policy, frames_per_batch=4) as one,
        Collector(["Pendulum-v1"] * 2, policy, frames_per_batch=4) as two,
    ):
        shapes = [each.next()["action"].shape for each in (one, two, one)]
    assert shapes == [(4, 1), (2, 2, 1), (4, 1)]


def test_a_random_policy_keeps_its_own_spec():
    env = GymEnv(NumberedEnv())

    class OnlyTwo(type(env.action_spec)):
        def _draw(self, shape):
            return nn.functional.one_hot(torch.full(shape[:-1], 2), 4)

    first = first_batch(env, RandomPolicy(OnlyTwo(4)), frames_per_batch=20)
    assert set(NumberedEnv.action_numbers(first).tolist()) == {2}


def test_a_random_policy_may_come_from_a_factory():
    batch = first_batch(NumberedEnv(), policy_factory=RandomPolicy, frames_per_batch=50)
    assert set(NumberedEnv.action_numbers(batch).tolist()) == {0, 1, 2, 3}


def test_a_random_policy_can_be_called_by_hand():
    env = GymEnv(NumberedEnv())
    root = RandomPolicy(env.action_spec, action_key="choice")(env.reset())
    assert root["choice"].sum() == 1


def test_a_random_policy_of_several_actions_writes_each():
    env = GymEnv(NestedEnv())
    assert {("pick", "0"), ("pick", "1"), "push"} <= keys(
        RandomPolicy(env.full_action_spec)(env.reset())
    )


def test_a_random_policy_without_a_spec_says_so():
    with pytest.raises(RuntimeError, match=r"RandomPolicy has no action spec.*env.action_spec"):
        RandomPolicy()(TensorDict())


# --- memory of a policy


def test_what_a_function_wrote_is_its_environments_own():
    def policy(tensordict):
        zero = torch.zeros(*tensordict.shape, 1)
        tensordict["count"] = tensordict.get("count", zero) + 1
        return of_tensordict(tensordict)

    envs = [lambda: NumberedEnv(0, lengths=[2]), lambda: NumberedEnv(1, lengths=[3])]
    batch = first_batch(envs, policy, frames_per_batch=12)
    assert batch["count"][..., 0].tolist() == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]]


# --- autograd, modes, changes


def test_policies_run_without_autograd():
    seen = []

    class Policy(Scorer):
        def forward(self, observation):
            seen.append(torch.is_grad_enabled())
            return super().forward(observation)

    first_batch(NumberedEnv(), Policy(), frames_per_batch=4)
    assert seen
    assert not any(seen)


def test_an_optimiser_step_shows_in_the_next_batch():
    policy = Scorer(0)
    with Collector(NumberedEnv(), policy, frames_per_batch=4) as collector:
        iterator = iter(collector)
        next(iterator)
        optimiser = torch.optim.SGD(policy.parameters(), lr=10.0)
        (-policy.scores[2]).backward()
        optimiser.step()
        assert NumberedEnv.action_numbers(next(iterator)).tolist() == [2] * 4


def test_a_hook_added_later_is_called():
    net = nn.Linear(3, 1)
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    with Collector("Pendulum-v1", policy, frames_per_batch=4) as collector:
        iterator = iter(collector)
        next(iterator)
        net.register_forward_hook(lambda module, inputs, output: torch.full_like(output, 1.5))
        assert next(iterator)["action"].flatten().tolist() == [1.5] * 4


def test_the_mode_of_a_module_is_the_users():
    class Noisy(nn.Module):
        def forward(self, observation):
            return nn.functional.one_hot(torch.tensor(3 if self.training else 1), 4)

    policy = Noisy()
    with Collector(NumberedEnv(), policy, frames_per_batch=4) as collector:
        iterator = iter(collector)
        assert NumberedEnv.action_numbers(next(iterator)).tolist() == [3] * 4
        policy.eval()
        assert NumberedEnv.action_numbers(next(iterator)).tolist() == [1] * 4


def test_a_deterministic_policy_is_the_same_whatever_the_exploration():
    for kind in ExplorationType:
        assert actions(by_step(), exploration_type=kind) == BY_STEP
