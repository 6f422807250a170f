import gc

import pytest
import torch
from collector_parts import batches, by_step, first_batch, keys, layout
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import Collector
from trawl.testing import Ledger, NumberedEnv

ROOT = {"observation", "action", "done", "terminated", "truncated"}
NEXT = {("next", key) for key in ("observation", "reward", "done", "terminated", "truncated")}
TRAJ_IDS = ("collector", "traj_ids")


def test_a_batch_has_the_documented_keys_shapes_and_dtypes():
    batch = first_batch(NumberedEnv(), frames_per_batch=12)
    flag = ((12, 1), torch.bool)
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
    }
    assert batch.batch_size == (12,)
    assert batch.names == ["time"]


def test_environments_of_a_batch_come_before_time():
    batch = first_batch([lambda i=i: NumberedEnv(i) for i in range(3)], frames_per_batch=12)
    assert batch.batch_size == (3, 4)
    assert batch.names == [None, "time"]
    assert batch[TRAJ_IDS].shape == (3, 4)
    assert NumberedEnv.numbers(batch)[:, :, 0].tolist() == [[0] * 4, [1] * 4, [2] * 4]


def test_a_batch_is_plain_data_of_its_own():
    weights = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    batch = first_batch("Pendulum-v1", weights, frames_per_batch=5)
    assert isinstance(batch, TensorDict)
    assert not batch.is_locked
    assert not any(value.requires_grad for value in batch.values(True, True))
    assert batch.device is None


def test_frames_are_real_and_in_order():
    ledger = Ledger([NumberedEnv(lengths=[4, 1, 7])])
    for batch in batches(
        Collector(NumberedEnv(lengths=[4, 1, 7]), frames_per_batch=10, total_frames=50)
    ):
        ledger.add(batch)
    assert ledger.frames == 50


def test_a_batch_begins_where_the_one_before_ended():
    one, two = batches(Collector(NumberedEnv(lengths=[50]), frames_per_batch=8, total_frames=16))
    assert torch.equal(one["next", "observation"][-1], two["observation"][0])
    assert one[TRAJ_IDS][-1] == two[TRAJ_IDS][0]


def test_rows_within_a_batch_go_on_from_each_other():
    batch = first_batch(NumberedEnv(lengths=[5]), frames_per_batch=20)
    goes_on = ~batch["next", "done"][:-1, 0]
    after, root = batch["next", "observation"][:-1], batch["observation"][1:]
    assert torch.equal(after[goes_on], root[goes_on])
    assert not torch.equal(after[~goes_on], root[~goes_on])


def test_flags_of_a_frame_are_those_before_its_step():
    batch = first_batch(NumberedEnv(lengths=[2], ends=["truncated"]), frames_per_batch=6)
    assert not batch["done"].any()
    assert batch["next", "done"][:, 0].tolist() == [False, True] * 3
    assert batch["next", "truncated"][:, 0].tolist() == [False, True] * 3
    assert not batch["next", "terminated"].any()


def test_trajectory_ids_grow_and_go_on_over_batches():
    one, two = batches(Collector(NumberedEnv(lengths=[3]), frames_per_batch=5, total_frames=10))
    assert one[TRAJ_IDS].tolist() == [0, 0, 0, 1, 1]
    assert two[TRAJ_IDS].tolist() == [1, 2, 2, 2, 3]


def test_environments_of_a_batch_have_their_own_trajectories():
    envs = [lambda: NumberedEnv(0, lengths=[2]), lambda: NumberedEnv(1, lengths=[3])]
    batch = first_batch(envs, frames_per_batch=8)
    assert batch[TRAJ_IDS].tolist() == [[0, 0, 2, 2], [1, 1, 1, 3]]


def test_batches_stay_valid_when_others_follow():
    collector = Collector(NumberedEnv(), by_step(), frames_per_batch=6, total_frames=60)
    kept, copies = [], []
    for batch in collector:
        kept.append(batch)
        copies.append(batch.clone())
    collector.shutdown()
    del collector
    gc.collect()
    assert all((a == b).all() for a, b in zip(kept, copies, strict=True))


def test_a_view_keeps_its_batch_valid():
    with Collector(NumberedEnv(lengths=[1000]), frames_per_batch=6) as collector:
        rewards = [next(iter(collector))["next", "reward"][2] for _ in range(10)]
        gc.collect()
        next(iter(collector))
    assert [reward.item() for reward in rewards] == [3 + 6 * i for i in range(10)]


@pytest.mark.parametrize("use_buffers", [None, True, False])
def test_batches_are_the_same_with_and_without_reused_memory(use_buffers):
    ledger = Ledger([NumberedEnv()])
    with Collector(
        NumberedEnv(), frames_per_batch=7, total_frames=70, use_buffers=use_buffers
    ) as collector:
        for batch in collector:
            ledger.add(batch)
    assert ledger.frames == 70


def test_without_buffers_no_memory_is_kept():
    with Collector(NumberedEnv(), frames_per_batch=7, use_buffers=False) as collector:
        next(iter(collector))
        gc.collect()
        assert collector.stats()["memory_bytes"] == 0


def test_next_gives_a_batch_at_a_time():
    with Collector(NumberedEnv(), frames_per_batch=4, total_frames=8) as collector:
        assert NumberedEnv.numbers(collector.next())[:, 3].tolist() == [0, 1, 2, 3]
        assert NumberedEnv.numbers(collector.next())[:, 3].tolist() == [4, 5, 6, 7]
        assert collector.next() is None


def test_what_begins_with_an_underscore_is_not_delivered():
    def policy(tensordict):
        tensordict["_hidden"] = torch.ones(())
        tensordict["inner", "_deep"] = torch.ones(())
        tensordict["inner", "kept"] = torch.ones(())
        return by_step()(tensordict)

    batch = first_batch(NumberedEnv(), policy, frames_per_batch=4)
    assert keys(batch) == {*ROOT, *NEXT, TRAJ_IDS, ("inner", "kept")}


def test_postproc_sees_what_is_not_delivered():
    def policy(tensordict):
        tensordict["_hidden"] = torch.full((), 7.0)
        return by_step()(tensordict)

    def postproc(batch):
        return batch.set("shown", batch["_hidden"] + 1)

    batch = first_batch(NumberedEnv(), policy, frames_per_batch=4, postproc=postproc)
    assert batch["shown"].tolist() == [8] * 4
    assert "_hidden" not in keys(batch)


def test_a_rollout_is_neither_counted_nor_processed():
    with Collector(
        NumberedEnv(),
        frames_per_batch=4,
        total_frames=8,
        postproc=lambda batch: batch.exclude("done"),
    ) as collector:
        raw = collector.rollout()
        assert "done" in keys(raw)
        assert collector.stats()["frames"] == 0
        assert len(list(collector)) == 2


def test_a_fake_batch_is_zero_and_laid_out_as_a_real_one():
    options = {
        "frames_per_batch": 6,
        "max_frames_per_traj": 3,
        "track_policy_version": True,
        "storing_device": "cpu",
    }
    with Collector(NumberedEnv(), by_step(), **options) as collector:
        fake, real = collector.fake_tensordict(), next(iter(collector))
    assert layout(fake) == layout(real)
    assert (fake.batch_size, fake.names, fake.device) == (real.batch_size, real.names, real.device)
    assert not any(value.any() for value in fake.values(True, True))


def test_a_fake_batch_is_processed_as_a_real_one():
    with Collector(
        NumberedEnv(),
        by_step(),
        frames_per_batch=6,
        compact_obs=True,
        set_truncated=True,
        postproc=lambda batch: batch.set("more", torch.ones(batch.shape)),
    ) as collector:
        fake, real = collector.fake_tensordict(), next(iter(collector))
    assert layout(fake) == layout(real)
    assert fake["next", "truncated"][:, 0].tolist() == [False] * 5 + [True]


def test_a_fake_batch_disturbs_nothing():
    ledger = Ledger([NumberedEnv()])
    with Collector(NumberedEnv(), frames_per_batch=7) as collector:
        for _ in range(3):
            ledger.add(next(iter(collector)))
            collector.fake_tensordict()
    assert ledger.frames == 21
