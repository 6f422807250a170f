"""Environments of TorchRL whose specs differ per agent or per environment: lazy stacks."""

import itertools

import pytest
import torch

import trawl.collectors
from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector

torchrl_collectors = pytest.importorskip("torchrl.collectors")

from torchrl.data import ListStorage, ReplayBuffer  # noqa: E402
from torchrl.envs import SerialEnv  # noqa: E402
from torchrl_parts import Different, halve, quiet, structure  # noqa: E402

SIZE = {"frames_per_batch": 24, "total_frames": 48}
ENVS = {
    "single": Different,
    "batch": lambda: Different((2,)),
    "serial": lambda: SerialEnv(2, Different),
}


def collected(library, env, policy, **options):
    with quiet():
        collector = library.Collector(env, policy, **SIZE | options)
        batches = list(collector)
        collector.shutdown()
    return batches


OPTIONS = [
    {},
    {"init_random_frames": 24},
    {"max_frames_per_traj": 3},
    {"use_buffers": False},
    {"trajs_per_batch": 2, "traj_format": "cat"},
]


@pytest.mark.parametrize(
    ("env", "options", "policy"),
    [
        (list(ENVS)[(number + more) % 3], options, [None, halve][(number + more) % 2])
        for number, options in enumerate(OPTIONS)
        for more in (0, 1)
    ],
)
def test_batches_are_those_of_torchrl(env, options, policy):
    mine, theirs = (
        collected(library, ENVS[env], policy, **options)
        for library in (trawl.collectors, torchrl_collectors)
    )
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        # Trajectories of an environment with a batch size come otherwise nested from TorchRL.
        if "trajs_per_batch" not in options or env == "single":
            assert structure(one) == structure(other)
        assert one.batch_size == other.batch_size
        assert torch.equal(one["next", "reward"], other["next", "reward"])
    for one, agent in itertools.product(mine[1:], range(3)):
        found = one["agents"][..., agent]
        if policy is not None:
            assert torch.equal(found["action"], found["observation"] / 2)


def test_a_batch_that_was_broken_off_is_filled_up():
    asked = itertools.count(1)
    with Collector(
        Different, halve, frames_per_batch=8, interruptor=lambda: next(asked) == 3
    ) as collector:
        batch = collector.next()
    assert batch.shape == (8,)
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, -1, -1, -1, -1, -1]
    assert batch["agents"][:, 2]["action"][:, 0].tolist() == [0, 0.5, 1, 0, 0, 0, 0, 0]


def test_environments_that_differ_from_each_other():
    env = SerialEnv(2, [lambda: Different(sizes=(2, 3)), lambda: Different(sizes=(5, 3))])
    mine = collected(trawl.collectors, env, None)
    env = SerialEnv(2, [lambda: Different(sizes=(2, 3)), lambda: Different(sizes=(5, 3))])
    # With buffers TorchRL fails.
    theirs = collected(torchrl_collectors, env, None, use_buffers=False)
    assert structure(mine[0]) == structure(theirs[0])
    assert mine[0].shape == (2, 12)


@pytest.mark.parametrize(
    ("env", "kind", "how", "shape"),
    [
        (Different, MultiSyncCollector, None, (2, 12)),
        (lambda: Different((2,)), MultiAsyncCollector, None, (2, 12)),
        (Different, MultiSyncCollector, 0, (24,)),
        (Different, MultiSyncCollector, -1, (24,)),
    ],
    ids=["single", "batch", "cat 0", "cat -1"],
)
def test_workers_deliver_lazy_stacks(env, kind, how, shape):
    options = SIZE if how is None else {**SIZE, "cat_results": how}
    with kind([env] * 2, halve, start_method="inline", **options) as collector:
        batches = list(collector)
        fake = collector.fake_tensordict()
    for batch in batches:
        assert batch.shape == shape
        assert structure(batch) == structure(fake)
        for agent, size in enumerate((2, 3, 4)):
            found = batch["agents"][..., agent]
            assert found["action"].shape == (*batch.shape, size)
            assert torch.equal(found["action"], found["observation"] / 2)
        assert found["observation"].reshape(-1, 4)[:, 0].tolist() == [0, 1, 2, 3] * 6


@pytest.mark.parametrize("extend", [True, False])
def test_frames_go_to_a_buffer(extend):
    def filled(library):
        buffer = ReplayBuffer(storage=ListStorage(100), collate_fn=lambda frames: frames)
        collected(library, Different, halve, replay_buffer=buffer, extend_buffer=extend)
        return buffer

    mine, theirs = filled(trawl.collectors), filled(torchrl_collectors)
    assert len(mine) == len(theirs) == 48
    assert structure(mine[0]) == structure(theirs[0])


def test_an_error_of_the_policy_says_what_it_was_given():
    def policy(tensordict):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken") as caught:
        Collector(Different, policy, frames_per_batch=8)
    notes = "\n".join(getattr(caught.value, "__notes__", [str(caught.value)]))
    assert "'agents': several of ('observation': torch.float32 (2,), and 'observation'" in notes
