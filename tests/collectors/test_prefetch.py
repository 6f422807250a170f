"""What ``prefetch=1`` promises: one batch ahead, one update behind, the same data on each run."""

import os
import signal
import time
from functools import partial

import pytest
import torch
from multi_parts import LENGTHS, Chooser, actions, make, same
from torch import nn

from trawl.testing import NumberedEnv


def ahead(**options):
    return make(**{"prefetch": 1, "start_method": "inline", **options})


def shared_buffer():
    """A buffer that workers write into themselves."""
    data = pytest.importorskip("torchrl.data")
    return data.ReplayBuffer(storage=data.LazyMemmapStorage(100_000), batch_size=64, shared=True)


def choices(collector, updates=1, pause=0.0):
    """The actions and versions of each batch of a learner that changes its choice after each."""
    found = []
    with collector:
        for count, batch in enumerate(collector):
            time.sleep(pause)
            found.append((actions(batch), set(batch["policy_version"].flatten().tolist())))
            for _ in range(updates):
                collector.policy.become((count + 1) % 4)
                collector.update_policy_weights_()
    return found


# --- weights


@pytest.mark.parametrize(
    ("method", "updates", "pause"),
    [("messages", 1, 0.0), ("forkserver", 1, 0.0), ("forkserver", 3, 0.0), ("forkserver", 3, 0.05)],
)
def test_each_batch_is_one_update_behind(method, updates, pause):
    """Whatever the speed of anything."""
    collector = ahead(
        policy=Chooser(), total_frames=60, start_method=method, track_policy_version=True
    )
    expected = [({k and k - 1 and (k - 1) % 4}, {max(0, updates * (k - 1))}) for k in range(6)]
    assert choices(collector, updates, pause) == expected


def test_the_lag_is_reported():
    collector = ahead(policy=Chooser(), total_frames=50)
    choices_of = iter(collector)
    for count in range(5):
        next(choices_of)
        if count < 4:
            collector.update_policy_weights_()
    facts = collector.stats()
    collector.shutdown()
    assert (facts["policy_lag_0"], facts["policy_lag_1"]) == (10, 40)


@pytest.mark.parametrize("method", ["inline", "messages"])
def test_updates_of_some_workers_and_of_parts_are_all_kept(method):
    policy = Chooser()
    with ahead(policy=policy, total_frames=40, start_method=method) as collector:
        collector.next()
        for worker, choice in ((0, 3), (1, 2), (0, 1)):
            policy.become(choice)
            collector.update_policy_weights_(worker_ids=[worker])
        # A learner may change its weights after an update.
        policy.become(0)
        collector.next()
        batch = collector.next()
        assert [actions(batch[i]) for i in range(2)] == [{1}, {2}]


def test_the_newest_weights_are_known_before_they_are_sent():
    policy = Chooser()
    with ahead(policy=policy, total_frames=40, start_method="messages") as collector:
        collector.next()
        policy.become(3)
        collector.update_policy_weights_()
        policy.become(0)
        assert collector.get_cached_weights("policy")["choice"] == 3
        assert collector.get_distant_attr("policy.choice") == [3, 3]


def test_weights_sent_at_each_batch_are_those_of_its_request():
    policy = Chooser()
    found = []
    with ahead(policy=policy, total_frames=50, update_at_each_batch=True) as collector:
        for count, batch in enumerate(collector):
            found.append(actions(batch))
            policy.become((count + 1) % 4)
    assert found == [{0}, {0}, {1}, {2}, {3}]


def test_a_replacement_acts_with_the_weights_of_the_batch(tmp_path):
    """Its predecessor died while the learner had newer weights already."""
    policy, mark = Chooser(), tmp_path / "died"
    with ahead(
        policy=policy,
        create_env_fn=[partial(DiesOnce, number, mark=mark) for number in range(2)],
        total_frames=40,
        start_method="forkserver",
        track_policy_version=True,
    ) as collector:
        collector.next()
        policy.become(3)
        collector.update_policy_weights_()
        with pytest.warns(RuntimeWarning, match="takes its place"):
            second = collector.next()
        third = collector.next()
    assert (actions(second), actions(third)) == ({0}, {3})
    assert set(second["policy_version"].flatten().tolist()) == {0}


class DiesOnce(NumberedEnv):
    """Kills its process in its eighth step; the environment of the replacement goes on."""

    def __init__(self, number, mark):
        super().__init__(number, lengths=LENGTHS)
        self._steps, self._mark = 0, mark

    def step(self, action):
        self._steps += 1
        if self.number == 1 and self._steps == 8 and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


# --- frames


class Noisy(nn.Module):
    def forward(self, observation):
        return torch.randn(*observation.shape[:-1], 1)


# --- control


def test_a_seed_begins_with_the_batch_after_the_one_under_way():
    def run():
        with ahead(
            create_env_fn=["Pendulum-v1"] * 2,
            policy=Noisy(),
            total_frames=50,
            start_method="messages",
        ) as collector:
            collector.next()
            collector.set_seed(4)
            collector.next()
            return [collector.next() for _ in range(3)]

    assert all(same(one, other) for one, other in zip(run(), run(), strict=True))


@pytest.mark.parametrize("method", ["inline", "messages"])
def test_the_state_has_the_newest_weights(method):
    policy = Chooser()
    with ahead(policy=policy, total_frames=50, start_method=method) as collector:
        collector.next()
        policy.become(2)
        collector.update_policy_weights_()
        state = collector.state_dict()
        assert state["frames"] == 10
        assert state["worker0"]["policy_state_dict"]["choice"] == 2
    with ahead(policy=Chooser(), total_frames=50, start_method=method) as other:
        other.next()
        # It replaces the batch under way.
        other.load_state_dict(state)
        assert [actions(other.next()) for _ in range(2)] == [{0}, {2}]
        assert sum(batch.numel() for batch in other) == 20
        # Nothing is requested beyond the budget.
        assert other.stats()["worker_frames"] == 50


# --- what must not get lost on the way


def test_a_version_reaches_its_workers_before_a_later_update_of_others():
    policy = Chooser()
    with ahead(policy=policy, total_frames=60, track_policy_version=True) as collector:
        collector.next()
        collector.increment_version()
        policy.become(3)
        collector.update_policy_weights_(worker_ids=[0])
        # The workers, which collect ahead, don't have it yet.
        assert collector.policy_version_tracker.version == 2
        assert set(collector.next()["policy_version"].flatten().tolist()) == {0}
        batch = collector.next()
    found = [(set(row["policy_version"].tolist()), actions(row)) for row in batch]
    assert found == [({2}, {3}), ({1}, {0})]


def test_extra_state_waits_with_the_weights():
    policy = Stateful()
    with ahead(policy=policy, total_frames=40) as collector:
        collector.next()
        policy.note = "new"
        collector.update_policy_weights_()
        weights = collector.get_cached_weights("policy")
    assert "new" in str(dict(weights.items()))


class Stateful(Chooser):
    note = "old"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def test_many_updates_hold_the_memory_of_one():
    with ahead(policy=Chooser(), total_frames=40) as collector:
        collector.next()
        for _ in range(100):
            collector.update_policy_weights_()
        assert len(collector.parts.weights.sender.held.pop()) == 1


def test_a_pause_with_workers_that_write_goes_on_after_it():
    buffer = shared_buffer()
    collector = ahead(total_frames=-1, replay_buffer=buffer, start_method="forkserver")
    with collector:
        collector.start()
        while buffer.write_count < 50:
            time.sleep(0.001)
        with collector.pause():
            before = buffer.write_count
        while buffer.write_count < before + 50:
            time.sleep(0.001)


def test_a_limit_of_inserts_holds_as_without():
    buffer = shared_buffer()
    options = {"samples_per_insert": 1.0, "inserts_ahead": 20, "start_method": "forkserver"}
    with ahead(total_frames=-1, replay_buffer=buffer, **options) as collector:
        collector.start()
        while buffer.write_count < 20:
            time.sleep(0.001)
        with collector.pause():
            assert buffer.write_count == 20
