"""Batches of a collector in one process: their layout, and what options make of them."""

import gymnasium
import numpy as np
import pytest
import torch
from collector_parts import Buffer, choose_by_step, first_batch, keys, layout
from gymnasium import spaces
from multi_parts import TRAJ_IDS, Chooser
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import OneHotCategorical

from trawl import ExplorationType, exploration_type, set_exploration_type
from trawl.collectors import Collector, MultiSyncCollector
from trawl.envs import GymEnv
from trawl.testing import NumberedEnv, SelfResettingVectorEnv

# --- the layout


def test_a_batch_has_the_documented_keys_shapes_and_dtypes():
    options = {"max_frames_per_traj": 5, "auto_register_policy_transforms": True}
    options |= {"frames_per_batch": 12, "track_policy_version": True}
    batch = first_batch(NumberedEnv(), **options)
    flag, count, version = ((12, 1), torch.bool), ((12, 1), torch.int64), ((12,), torch.int64)
    assert layout(batch) == {
        "observation": ((12, 5), torch.float32),
        "action": ((12, 4), torch.int64),
        "done": flag,
        "terminated": flag,
        "truncated": flag,
        ("next", "observation"): ((12, 5), torch.float32),
        ("next", "reward"): ((12, 1), torch.float32),
        ("next", "done"): flag,
        ("next", "terminated"): flag,
        ("next", "truncated"): flag,
        TRAJ_IDS: ((12,), torch.int64),
        "is_init": flag,
        ("next", "is_init"): flag,
        "step_count": count,
        ("next", "step_count"): count,
        "policy_version": version,
        ("next", "policy_version"): version,
    }
    assert batch.batch_size == (12,)
    assert batch.names == ["time"]
    weights = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    batch = first_batch("Pendulum-v1", weights, frames_per_batch=5)
    assert isinstance(batch, TensorDict)
    assert not batch.is_locked
    assert not any(value.requires_grad for value in batch.values(True, True))
    assert batch.device is None


def test_a_rollout_is_neither_counted_nor_processed():
    events = []
    with Collector(
        NumberedEnv(),
        frames_per_batch=4,
        total_frames=8,
        pre_collect_hook=lambda: events.append("pre"),
        postproc=lambda batch: batch.exclude("done"),
    ) as collector:
        assert "done" in keys(collector.rollout())
        assert events == ["pre"]
        assert collector.stats()["frames"] == 0
        assert len(list(collector)) == 2


def test_a_fake_batch_is_processed_as_a_real_one():
    with Collector(
        NumberedEnv(),
        frames_per_batch=6,
        set_truncated=True,
        track_policy_version=True,
        storing_device="cpu",
        postproc=lambda batch: batch.set("more", torch.ones(batch.shape)),
    ) as collector:
        fake, real = collector.fake_tensordict(), collector.next()
    assert layout(fake) == layout(real)
    assert (fake.shape, fake.names, fake.device) == (real.shape, real.names, real.device)
    assert fake["next", "truncated"][:, 0].tolist() == [False] * 5 + [True]


class Indexed(NumberedEnv):
    """Has an entry that has the name of one of Trawl's."""

    def __init__(self):
        super().__init__(lengths=[7])
        self.observation_space = spaces.Dict(env_index=spaces.Discrete(5), x=self.observation_space)

    def _observe(self):
        return {"env_index": len(self.actions) % 5, "x": super()._observe()}


MAKERS = [
    (Collector, [Indexed] * 2, {}),
    (MultiSyncCollector, [[Indexed]] * 2, {"start_method": "inline"}),
]


@pytest.mark.filterwarnings("ignore:split_trajs=True pads")
@pytest.mark.parametrize(("made", "source", "more"), MAKERS)
def test_an_observation_called_env_index_is_the_environments_own(made, source, more):
    options = {"frames_per_batch": 20, "total_frames": 20, **more}
    with made(source, None, set_truncated=True, **options) as collector:
        ends = next(iter(collector))["next", "done"]
    assert ends.reshape(2, 10).nonzero().tolist() == [[0, 6], [0, 9], [1, 6], [1, 9]]
    with made(source, None, split_trajs=True, **options) as collector:
        pieces = next(iter(collector))["x"][..., 2]
    assert pieces.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 0, 0, 0]] * 2
    options |= {"total_frames": 40, "traj_format": "cat"}
    with made(source, None, trajs_per_batch=2, **options) as collector:
        assert next(iter(collector))["x"][:, 2].tolist() == [0, 1, 2, 3, 4, 5, 6] * 2


# --- resets, seeds and states


def test_a_batch_does_not_begin_anew_twice():
    with Collector(
        NumberedEnv(lengths=[100]), frames_per_batch=4, reset_at_each_iter=True
    ) as collector:
        next(iter(collector))
        collector.reset()
        assert NumberedEnv.numbers(next(iter(collector)))[:, 1].tolist() == [1] * 4
    with (
        Collector([NumberedEnv, NumberedEnv], frames_per_batch=4) as collector,
        pytest.raises(IndexError, match=r"index 5 is out of bounds.* size 2"),
    ):
        collector.reset(5)


def test_the_first_frame_after_a_seed_is_the_environments():
    env = gymnasium.make("Pendulum-v1")
    first, _ = env.reset(seed=9)
    with Collector("Pendulum-v1", frames_per_batch=2) as collector:
        before = next(iter(collector))
        collector.set_seed(9)
        batch = next(iter(collector))
    assert np.array_equal(batch["observation"][0].numpy(), first)
    second, reward, *_ = env.step(batch["action"][0].numpy())
    env.close()
    assert np.array_equal(batch["next", "observation"][0].numpy(), second)
    assert batch["next", "reward"][0].item() == pytest.approx(reward, rel=1e-6)
    # Without a seed, batches differ.
    other = first_batch("Pendulum-v1", frames_per_batch=2)
    assert not torch.equal(other["observation"], before["observation"])
    assert not torch.equal(other["action"], before["action"])


def test_a_state_says_what_was_done():
    options = {"frames_per_batch": 5, "total_frames": 20, "track_policy_version": True}
    with Collector(NumberedEnv(), Chooser(2), **options) as collector:
        next(iter(collector))
        collector.increment_version()
        state = collector.state_dict()
        strange = state | {"policy_state_dict": {"other": torch.zeros(4)}}
        with pytest.raises(RuntimeError, match=r'Missing key.*"choice".*\n.*Unexpected.*"other"'):
            collector.load_state_dict(strange)
    assert (state["frames"], state["iter"], state["policy_version"]) == (5, 1, 1)
    # Weights are named as in the user's policy.
    assert set(state["policy_state_dict"]) == set(Chooser().state_dict())
    assert state["policy_state_dict"]["choice"] == 2
    assert state["env_state_dict"] == {}
    assert int(state["traj_pool"]["traj_id"]) == 2


def test_ids_are_not_used_again_in_new_episodes():
    def vector():
        return SelfResettingVectorEnv([lambda: NumberedEnv(lengths=[2])])

    with Collector(vector(), frames_per_batch=5) as collector:
        seen = set(next(iter(collector))[TRAJ_IDS].reshape(-1).tolist())
        state = collector.state_dict()
    with Collector(vector(), frames_per_batch=5) as resumed:
        resumed.load_state_dict(state)
        assert seen & set(next(iter(resumed))[TRAJ_IDS].reshape(-1).tolist()) == {-1}


# --- what becomes of a batch


def test_postproc_is_moved_to_the_storing_device_and_gets_the_split_batch():
    class Placed:
        def to(self, device):
            self.device = device

        def __call__(self, batch):
            self.shape = batch.shape
            return batch[:1]

    postproc = Placed()
    options = {"frames_per_batch": 6, "total_frames": 12, "split_trajs": True}
    with pytest.warns(UserWarning, match=r"split_trajs"):
        collector = Collector(
            NumberedEnv(lengths=[2]), storing_device="cpu", postproc=postproc, **options
        )
    with collector:
        assert [batch.shape for batch in collector] == [(1, 2)] * 2
        # What it leaves out is counted.
        assert collector.stats()["frames"] == 12
    assert (postproc.device, postproc.shape) == (torch.device("cpu"), (3, 2))


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


def test_the_same_object_takes_batches_of_other_shapes():
    options = {"frames_per_batch": 6, "total_frames": 18, "return_same_td": True}
    with pytest.warns(UserWarning, match=r"split_trajs"):
        collector = Collector(NumberedEnv(lengths=[2, 4, 3]), split_trajs=True, **options)
    with collector:
        found = [
            (id(batch), batch.shape, int(batch["collector", "mask"].sum())) for batch in collector
        ]
    assert len({one for one, *_ in found}) == 1
    assert [(shape, frames) for _, shape, frames in found] == [
        ((2, 4), 6),
        ((3, 3), 6),
        ((2, 3), 6),
    ]
    chosen = iter([("action", "done"), ("action",)])
    options = {**options, "total_frames": 12, "postproc": lambda batch: batch.select(*next(chosen))}
    with Collector(NumberedEnv(), **options) as collector:
        found = [(keys(batch), batch.names) for batch in collector]
    # What only an earlier batch had is gone.
    assert found == [({"action", "done"}, ["time"]), ({"action"}, ["time"])]


class StopEvery:
    """Says stop each time it has been asked ``times`` times."""

    def __init__(self, times):
        self.times = times
        self.asked = 0

    def collection_stopped(self):
        self.asked += 1
        return self.asked % self.times == 0


def test_an_interrupted_batch_keeps_its_shape():
    options = {"frames_per_batch": 8, "set_truncated": True}
    env = NumberedEnv(lengths=[2])
    with Collector(env, interruptor=StopEvery(3), **options) as collector:
        batch = next(iter(collector))
        assert layout(batch) == layout(collector.fake_tensordict())
    assert batch[TRAJ_IDS].tolist() == [0, 0, 1, -1, -1, -1, -1, -1]
    assert batch["next", "reward"][:, 0].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    # The last step that was taken is marked, and rows without a step are no trajectory.
    assert batch["next", "truncated"][:, 0].tolist() == [False] * 2 + [True] + [False] * 5
    with pytest.warns(UserWarning, match=r"split_trajs"):
        collector = Collector(env, interruptor=StopEvery(3), split_trajs=True, **options)
    with collector:
        batch = next(iter(collector))
    assert batch["collector", "mask"].tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize(("extend", "frames"), [(True, 18), (False, 16)])
def test_rows_without_a_step_do_not_reach_the_buffer(extend, frames):
    """Single steps end exactly at the total."""
    buffer = Buffer()
    options = {"frames_per_batch": 8, "total_frames": 16, "interruptor": StopEvery(3)}
    with Collector(
        NumberedEnv(lengths=[100]), replay_buffer=buffer, extend_buffer=extend, **options
    ) as collector:
        collector.next()
        assert len(buffer) == 3
        assert list(collector) == [None] * 5
    assert buffer.content()["next", "reward"][:, 0].tolist() == list(range(1, frames + 1))


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


def test_the_users_exploration_type_is_left_alone():
    with set_exploration_type(ExplorationType.MEAN):
        first_batch(NumberedEnv(), actor(seen := []), frames_per_batch=4)
        assert exploration_type() is ExplorationType.MEAN
    assert seen[-1] is ExplorationType.RANDOM
    # The name of a type will do.
    first_batch(NumberedEnv(), actor(seen), frames_per_batch=4, exploration_type="mode")
    assert seen[-1] is ExplorationType.MODE


# --- hooks


def test_hooks_are_called_around_each_batch_and_can_be_set_later():
    events = []
    with Collector(
        NumberedEnv(),
        frames_per_batch=4,
        total_frames=12,
        pre_collect_hook=lambda: events.append("pre"),
        postproc=lambda batch: events.append("postproc") or batch,
        post_collect_hook=lambda batch: events.append(batch),
    ) as collector:
        iterator = iter(collector)
        first = next(iterator)
        collector.pre_collect_hook = lambda: events.append("other")
        collector.set_post_collect_hook(lambda batch: events.append(("other", batch)))
        with pytest.raises(TypeError, match="hook must be callable, but it is int: 3"):
            collector.set_post_collect_hook(3)
        second = next(iterator)
        collector.pre_collect_hook = collector.post_collect_hook = None
        next(iterator)
    assert events == [
        *("pre", "postproc", first),
        *("other", "postproc", ("other", second)),
        "postproc",
    ]


def test_policy_and_environment_are_told_of_their_collector():
    told = []

    class Env(GymEnv):
        def register_collector(self, collector):
            told.append(("env", collector))

    class Policy(TensorDictModule):
        def register_collector(self, collector):
            told.append(("policy", collector))

    policy = Policy(choose_by_step, in_keys=["observation"], out_keys=["action"])
    with Collector(Env(NumberedEnv()), policy, frames_per_batch=4, worker_idx=3) as collector:
        assert told == [("policy", collector), ("env", collector)]
        assert collector.worker_idx == 3
