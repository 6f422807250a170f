"""The same for environments of TorchRL, which are built anew as a whole."""

from functools import partial
from itertools import count

import pytest
import torch
from collector_parts import by_step
from test_env_errors import FAILS, IDS, MASK, Broken, Plan, collect

pytest.importorskip("torchrl")
from tensordict import TensorDict
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import ActionMask, EnvBase, GymWrapper, RewardSum, TransformedEnv

from trawl.collectors import Collector
from trawl.envs import SerialEnv
from trawl.testing import NumberedEnv


def same(env):
    return env


def wrapped(maker):
    return lambda: GymWrapper(maker())


class Masked(EnvBase):
    """Allows the action that is its own number, and fails once, in its third step."""

    def __init__(self, number):
        super().__init__()
        self.number, self.steps = number, 0
        self.observation_spec = Composite(action_mask=Binary(4, dtype=torch.bool))
        self.action_spec = Categorical(4)
        self.reward_spec = Unbounded(1)

    def _reset(self, tensordict=None):
        return TensorDict({"action_mask": torch.arange(4) == self.number})

    def _step(self, tensordict):
        self.steps += 1
        if self.number == 0 and self.steps == 3:
            raise RuntimeError("it fails")
        assert tensordict["action"] == self.number
        ends = {"reward": torch.zeros(1), "done": torch.zeros(1, dtype=torch.bool)}
        return self._reset().update(ends)

    def _set_seed(self, seed):
        pass


@FAILS
def test_random_actions_are_those_of_the_new_environment():
    """They follow its mask, from the step after it was made."""
    made = count()
    maker = lambda: TransformedEnv(Masked(next(made)), ActionMask())  # noqa: E731
    with Collector(maker, frames_per_batch=8, on_env_error="restart") as collector:
        collector.next()
    assert next(made) == 2


@FAILS
def test_transforms_and_starts_begin_anew():
    plan = Plan(steps=(4, 3), lengths=(9,))
    maker = plan.maker()
    options = {"auto_register_policy_transforms": True, "max_frames_per_traj": 5}
    (batch,), stats = collect(
        lambda: TransformedEnv(GymWrapper(maker()), RewardSum()), 12, 1, **options
    )
    assert stats["env_restarts"] == 2
    assert [env.was_closed for env in maker.made] == [True] * 3  # the last one with the collector
    assert batch["is_init"][:, 0].int().tolist() == [1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    step = batch["step_count"][:, 0].tolist()
    assert step == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert batch[MASK].int().tolist() == [1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]
    assert batch["next", "episode_reward"][:, 0].tolist() == [1, 3, 6, 10, 0, 1, 3, 6, 0, 1, 3, 6]


@FAILS
def test_members_of_a_batch_are_built_anew_one_by_one():
    """Their transforms begin anew, too; the other members go on with theirs."""
    makers = [Plan(0, (4, 9), lengths=(3,)).maker(), Plan(1, resets=(2,), lengths=(5,)).maker()]
    envs = [lambda one=one: TransformedEnv(GymWrapper(one()), RewardSum()) for one in makers]
    (batch,), stats = collect(lambda: SerialEnv(2, envs), 24, 1, max_frames_per_traj=4)
    assert stats["env_restarts"] == 2
    assert [[env.was_closed for env in maker.made] for maker in makers] == [[True] * 2] * 2
    assert batch["observation"][..., 3].tolist() == [
        [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3],
    ]
    assert batch[MASK].int().tolist() == [[1] * 4 + [0] + [1] * 7, [1] * 12]
    assert batch["next", "done"][..., 0].int().tolist() == [
        [0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0],
        [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1],
    ]
    assert batch["next", "episode_reward"][..., 0].tolist() == [
        [1, 3, 6, 4, 0, 1, 3, 6, 4, 9, 15, 7],
        [1, 3, 6, 10, 5, 11, 18, 26, 1, 3, 6, 10],
    ]
    assert batch[IDS].tolist() == [
        [0, 0, 0, 2, -1, 3, 3, 3, 5, 5, 5, 7],
        [1, 1, 1, 1, 4, 4, 4, 4, 6, 6, 6, 6],
    ]


def test_members_that_were_passed_as_objects():
    maker = Plan(steps=(2,)).maker()
    envs = [GymWrapper(maker()), GymWrapper(NumberedEnv(1))]
    options = {"frames_per_batch": 8, "on_env_error": "restart"}
    with pytest.raises(ValueError, match="environment 1 of the batch is an existing environment"):
        Collector(lambda: SerialEnv(2, [wrapped(maker), envs[1]]), **options)
    again = partial(SerialEnv, 2, [partial(same, env) for env in envs])
    with (
        Collector(again, by_step(), **options) as collector,
        pytest.raises(Broken, match="step 2") as caught,
    ):
        collector.next()
    assert "returned the same object again" in str(caught.value.__notes__)


@FAILS
@pytest.mark.parametrize("member", [False, True])
def test_the_new_environment_is_seeded(member):
    def seeds(seed):
        maker = Plan(steps=(3, 2, 1)).maker()
        source = partial(SerialEnv, 1, wrapped(maker)) if member else wrapped(maker)
        with Collector(
            source,
            by_step(),
            frames_per_batch=12,
            on_env_error="restart",
        ) as collector:
            collector.set_seed(seed)
            collector.next()
            assert collector.env is not None
        return [next(s for s in env.seeds if s is not None) for env in maker.made]

    first = seeds(1)
    assert first == seeds(1)
    assert len({*first, *seeds(2)}) == 8
