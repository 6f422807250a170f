import torch
from collector_parts import by_step, first_batch, keys, layout
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import Collector
from trawl.testing import Ledger, NumberedEnv

TRAJ_IDS = ("collector", "traj_ids")


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


def test_a_batch_is_plain_data_of_its_own():
    weights = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    batch = first_batch("Pendulum-v1", weights, frames_per_batch=5)
    assert isinstance(batch, TensorDict)
    assert not batch.is_locked
    assert not any(value.requires_grad for value in batch.values(True, True))
    assert batch.device is None


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
