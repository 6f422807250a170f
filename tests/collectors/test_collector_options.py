import gymnasium
import numpy as np
import pytest
import torch
from collector_parts import batches, choose_by_step, first_batch
from gymnasium import spaces
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch.distributions import OneHotCategorical

from trawl import ExplorationType, exploration_type, set_exploration_type
from trawl.collectors import Collector, MultiSyncCollector
from trawl.envs import GymEnv
from trawl.testing import NumberedEnv

# --- how environments are made


def test_create_env_kwargs_reach_the_environment_of_an_id():
    batch = first_batch(
        "CartPole-v1", frames_per_batch=4, create_env_kwargs={"categorical_action_encoding": True}
    )
    assert batch["action"].shape == (4,)


# --- episodes


def test_a_single_environment_may_have_observations_without_dimensions():
    batch = first_batch(
        GymEnv("FrozenLake-v1", categorical_action_encoding=True), frames_per_batch=4
    )
    assert batch["observation"].shape == batch["action"].shape == (4,)


class Counting(gymnasium.Env):
    """Its episodes have seven steps, which an entry counts that has the name of one of Trawl's."""

    observation_space = spaces.Dict(env_index=spaces.Discrete(5), x=spaces.Box(0, 9))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.shown(), {}

    def shown(self):
        return {"env_index": self.steps % 5, "x": np.full(1, self.steps, np.float32)}

    def step(self, action):
        self.steps += 1
        return self.shown(), 0.0, False, self.steps == 7, {}


def counting():
    return GymEnv(Counting(), categorical_action_encoding=True)


MAKERS = [
    (Collector, [counting] * 2, {}),
    (MultiSyncCollector, [[counting]] * 2, {"start_method": "inline"}),
]


@pytest.mark.filterwarnings("ignore:split_trajs=True pads")
@pytest.mark.parametrize(("made", "source", "more"), MAKERS)
def test_an_observation_called_env_index_is_the_environments_own(made, source, more):
    options = {"frames_per_batch": 20, "total_frames": 20, **more}
    with made(source, None, set_truncated=True, **options) as collector:
        ends = next(iter(collector))["next", "truncated"]
    assert ends.reshape(2, 10).nonzero().tolist() == [[0, 6], [0, 9], [1, 6], [1, 9]]
    with made(source, None, split_trajs=True, **options) as collector:
        assert (
            next(iter(collector))["x"][:, :, 0].tolist()
            == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 0, 0, 0]] * 2
        )
    options |= {"total_frames": 40, "traj_format": "cat"}
    with made(source, None, trajs_per_batch=2, **options) as collector:
        assert next(iter(collector))["x"][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6] * 2


def test_a_batch_does_not_begin_anew_twice():
    with Collector(
        NumberedEnv(lengths=[100]), frames_per_batch=4, reset_at_each_iter=True
    ) as collector:
        next(iter(collector))
        collector.reset()
        assert NumberedEnv.numbers(next(iter(collector)))[:, 1].tolist() == [1] * 4


def test_starts_of_episodes_are_marked_for_a_policy_that_reads_them():
    def choose(observation, is_init):
        return choose_by_step(observation + is_init)

    policy = TensorDictModule(choose, in_keys=["observation", "is_init"], out_keys=["action"])
    batch = first_batch(NumberedEnv(lengths=[3]), policy, frames_per_batch=6)
    assert batch["is_init"][:, 0].tolist() == [True, False, False] * 2
    assert NumberedEnv.action_numbers(batch).tolist() == [1, 1, 2] * 2


# --- what becomes of a batch


def test_postproc_may_change_the_number_of_rows_without_changing_the_count():
    with Collector(
        NumberedEnv(), frames_per_batch=4, total_frames=8, postproc=lambda batch: batch[:1]
    ) as collector:
        assert [len(batch) for batch in collector] == [1, 1]
        assert collector.stats()["frames"] == 8


class Placed:
    device = None

    def to(self, device):
        self.device = device

    def __call__(self, batch):
        return batch


def test_postproc_is_moved_to_the_storing_device():
    postproc = Placed()
    Collector(NumberedEnv(), frames_per_batch=4, storing_device="cpu", postproc=postproc).shutdown()
    assert postproc.device == torch.device("cpu")


def test_postproc_gets_the_split_batch():
    with pytest.warns(UserWarning, match=r"split_trajs"):
        collector = Collector(
            NumberedEnv(lengths=[2]),
            frames_per_batch=6,
            total_frames=6,
            split_trajs=True,
            postproc=lambda batch: batch.batch_size,
        )
    assert batches(collector) == [(3, 2)]


# --- one object


def test_the_same_object_takes_batches_of_other_shapes():
    with pytest.warns(UserWarning, match=r"split_trajs"):
        collector = Collector(
            NumberedEnv(lengths=[2, 4, 3]),
            frames_per_batch=6,
            total_frames=18,
            split_trajs=True,
            return_same_td=True,
        )
    found = [
        (batch, batch.batch_size, int(batch["collector", "mask"].sum())) for batch in collector
    ]
    collector.shutdown()
    assert len({id(batch) for batch, *_ in found}) == 1
    assert [frames for *_, frames in found] == [6, 6, 6]
    assert [tuple(size) for _, size, _ in found] == [(2, 4), (3, 3), (2, 3)]


def test_the_same_object_keeps_its_memory_or_each_batch_is_another():
    for same in (True, False):
        seen = []
        options = {"frames_per_batch": 4, "total_frames": 12, "return_same_td": same}
        with Collector(NumberedEnv(lengths=[100]), **options) as collector:
            for number, batch in enumerate(collector):
                seen.append((batch, batch["observation"]))
                assert batch["observation"][:, 3].tolist() == [4 * number + i for i in range(4)]
        assert len({id(batch) for batch, _ in seen}) == (1 if same else 3)
        assert len({rows.data_ptr() for _, rows in seen}) == (1 if same else 3)


# --- exploration


def actor(seen):
    """A stochastic policy that tells which exploration type it sees."""

    def scores(observation):
        seen.append(exploration_type())
        return torch.tensor([0.0, 0.0, 1.0, 0.0]).expand(*observation.shape[:-1], 4)

    return ProbabilisticTensorDictSequential(
        TensorDictModule(scores, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=OneHotCategorical
        ),
    )


def test_the_name_of_an_exploration_type_will_do():
    with Collector(NumberedEnv(), frames_per_batch=4, exploration_type="mean") as collector:
        assert collector.exploration_type is ExplorationType.MEAN


def test_the_users_exploration_type_is_left_alone():
    with set_exploration_type(ExplorationType.MEAN):
        first_batch(NumberedEnv(), actor(seen := []), frames_per_batch=4)
        assert exploration_type() is ExplorationType.MEAN
    assert seen[-1] is ExplorationType.RANDOM


# --- hooks


def test_hooks_are_called_around_each_batch():
    events = []
    with Collector(
        NumberedEnv(),
        frames_per_batch=4,
        total_frames=8,
        pre_collect_hook=lambda: events.append("pre"),
        postproc=lambda batch: events.append("postproc") or batch,
        post_collect_hook=lambda batch: events.append(batch),
    ) as collector:
        yielded = list(collector)
    assert events == ["pre", "postproc", events[2], "pre", "postproc", events[5]]
    assert events[2] is yielded[0]
    assert events[5] is yielded[1]


def test_hooks_can_be_set_later():
    events = []
    with Collector(NumberedEnv(), frames_per_batch=4, total_frames=12) as collector:
        iterator = iter(collector)
        next(iterator)
        collector.pre_collect_hook = lambda: events.append("pre")
        collector.set_post_collect_hook(events.append)
        with pytest.raises(TypeError, match="hook must be callable, but it is int: 3"):
            collector.set_post_collect_hook(3)
        batch = next(iterator)
        collector.pre_collect_hook = None
        collector.post_collect_hook = None
        next(iterator)
    assert events == ["pre", batch]


def test_a_rollout_begins_with_the_hook_too():
    events = []
    with Collector(
        NumberedEnv(), frames_per_batch=4, pre_collect_hook=lambda: events.append("pre")
    ) as collector:
        collector.rollout()
    assert events == ["pre"]


# --- workers


def test_a_worker_knows_its_number():
    with Collector(NumberedEnv(), frames_per_batch=4, worker_idx=3) as collector:
        assert collector.worker_idx == 3


def test_policy_and_environment_are_told_of_their_collector():
    told = []

    class Env(GymEnv):
        def register_collector(self, collector):
            told.append(("env", collector))

    class Policy(TensorDictModule):
        def register_collector(self, collector):
            told.append(("policy", collector))

    policy = Policy(choose_by_step, in_keys=["observation"], out_keys=["action"])
    with Collector(Env(NumberedEnv()), policy, frames_per_batch=4) as collector:
        assert told == [("policy", collector), ("env", collector)]
