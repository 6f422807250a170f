from functools import partial

import pytest
import torch
from collector_parts import Buffer, batches, by_step, keys
from tensordict import TensorDict

from trawl.collectors import Collector, MultiSyncCollector
from trawl.testing import Ledger, NumberedEnv

torchrl_data = pytest.importorskip("torchrl.data")

from torchrl.data import (  # noqa: E402
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
)
from torchrl.data.postprocs import MultiStep  # noqa: E402
from torchrl.data.replay_buffers.samplers import (  # noqa: E402
    SliceSampler,
)
from torchrl.envs.transforms import MultiStepTransform  # noqa: E402

TRAJ_IDS = ("collector", "traj_ids")


def filled(buffer, env=None, policy=None, **options):
    """The collector, after it has put all its frames into ``buffer``."""
    options = {"frames_per_batch": 30, "total_frames": 90} | options
    collector = Collector(env or NumberedEnv(), policy, replay_buffer=buffer, **options)
    assert all(batch is None for batch in batches(collector))
    return collector


def three(**arguments):
    return [lambda i=i: NumberedEnv(i, **arguments) for i in range(3)]


# --- any buffer


class Sink:
    """Keeps what is added, and what it was at that time."""

    def __init__(self):
        self.added, self.copies = [], []

    def add(self, frames):
        self.added.append(frames)
        self.copies.append(frames.clone())

    extend = add


def test_single_frames_arrive_one_by_one_or_together():
    """Those of several environments arrive together; none is changed later."""
    for envs, frames, shape in [([NumberedEnv()], 17, ()), (three(), 18, (3, 1))]:
        sink, ledger = Sink(), Ledger(env() if callable(env) else env for env in envs)
        source = envs[0] if len(envs) == 1 else envs
        filled(sink, source, frames_per_batch=6, total_frames=frames, extend_buffer=False)
        assert {tuple(frame.batch_size) for frame in sink.added} == {shape}
        assert all((one == copy).all() for one, copy in zip(sink.added, sink.copies, strict=True))
        ledger.add(torch.cat(sink.added, -1) if shape else torch.stack(sink.added))
        assert ledger.frames == frames


def test_a_list_is_a_buffer_of_frames():
    frames = []
    filled(frames)
    assert torch.stack(frames)["next", "reward"][:, 0].tolist() == list(range(1, 91))


def test_single_frames_begin_batches_too():
    events = []

    class Steps:
        def add(self, frame):
            events.append(NumberedEnv.numbers(frame)[2].item())

    filled(
        Steps(),
        NumberedEnv(lengths=[100]),
        frames_per_batch=4,
        total_frames=12,
        extend_buffer=False,
        reset_at_each_iter=True,
        pre_collect_hook=lambda: events.append("pre"),
    )
    assert events == ["pre", 0, 1, 2, 3] * 3


def test_the_last_single_frame_of_a_batch_is_marked_as_truncated():
    buffer, env = Buffer(), NumberedEnv(lengths=[100])
    options = {"extend_buffer": False, "set_truncated": True}
    filled(buffer, env, frames_per_batch=4, total_frames=10, **options)
    expected = [False, False, False, True] * 2 + [False, True]
    for name in ("truncated", "done"):
        assert buffer.content()["next", name][:, 0].tolist() == expected


def test_hooks_see_what_goes_into_the_buffer():
    buffer, seen = Buffer(), []
    filled(buffer, post_collect_hook=seen.append)
    assert [len(batch) for batch in seen] == [30] * 3
    assert (torch.cat(seen) == buffer.content()).all()


def test_postproc_is_applied_before():
    buffer = Buffer()
    filled(buffer, postproc=lambda batch: batch.exclude("done"))
    assert "done" not in keys(buffer.content())
    assert ("next", "done") in keys(buffer.content())


class Batch:
    def __init__(self, frames):
        self.frames = frames


@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.parametrize(
    ("postproc", "written"),
    [
        (lambda batch: batch[:0], 0),
        (lambda batch: batch[:7], 21),
        (lambda batch: batch["observation"], 90),
        (lambda batch: [0, 0] if batch["observation"].numel() else [], 6),
        (lambda batch: {"observation": batch["observation"]}, 90),
        (lambda batch: Batch(batch), 90),
    ],
)
def test_what_the_buffer_gets_is_counted(workers, postproc, written):
    class Sink:
        def extend(self, batch):
            assert not isinstance(batch, TensorDict) or batch.shape.numel()

    options = {"frames_per_batch": 30, "total_frames": 90, "postproc": postproc}
    make = partial(MultiSyncCollector, start_method="inline") if workers else Collector
    sources = [NumberedEnv] if workers else NumberedEnv()
    collector = make(sources, replay_buffer=Sink(), **options)
    assert batches(collector) == [None] * 3
    assert collector.stats()["replay_written_frames"] == written


def test_what_begins_with_an_underscore_is_left_out_of_single_frames():
    def policy(tensordict):
        tensordict["_hidden"] = torch.ones(())
        return by_step()(tensordict)

    buffer = Buffer()
    filled(buffer, policy=policy, extend_buffer=False)
    assert "_hidden" not in keys(buffer.content())


# --- random frames


def random_frames(buffer, **options):
    """Which frames were not chosen by the policy, as far as that shows."""
    filled(buffer, NumberedEnv(lengths=[1000]), by_step(), **options)
    frames = buffer[:]
    return NumberedEnv.action_numbers(frames) != NumberedEnv.numbers(frames)[..., 2] % 4


def memory(**storage):
    return ReplayBuffer(storage=LazyTensorStorage(1000, **storage), batch_size=8)


@pytest.mark.parametrize(("options", "random"), [({}, 60), ({"extend_buffer": False}, 47)])
def test_frames_are_random_until_the_buffer_holds_enough(options, random):
    wrong = random_frames(memory(), init_random_frames=random, **options)
    assert wrong[:30].any()
    assert wrong[30:random].any()
    assert not wrong[random:].any()


def test_frames_that_the_buffer_had_count_as_random():
    buffer = memory()
    for options in ({}, {"init_random_frames": 60}):
        filled(buffer, NumberedEnv(lengths=[1000]), by_step(), total_frames=60, **options)
    frames = buffer[:]
    assert (NumberedEnv.action_numbers(frames) == NumberedEnv.numbers(frames)[:, 2] % 4).all()


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.filterwarnings("ignore:split_trajs=True pads")
def test_split_trajectories_of_all_lengths_are_written(kind, workers, tmp_path):
    place = {"scratch_dir": tmp_path} if kind is LazyMemmapStorage else {}
    buffer = ReplayBuffer(storage=kind(200, **place), collate_fn=list)
    sources = [partial(NumberedEnv, number, lengths=[3, 1, 6, 2]) for number in range(2)]
    options = {"replay_buffer": buffer, "total_frames": 60, "split_trajs": True}
    if workers:
        collector = MultiSyncCollector(
            sources, frames_per_batch=10, start_method="inline", **options
        )
    else:
        collector = Collector(sources, frames_per_batch=10, **options)
    with collector:
        list(collector)
    rows = [buffer[index] for index in range(len(buffer))]
    lengths = {len(row) for row in rows}
    assert lengths == {5} if kind is not ListStorage else max(lengths) <= 5
    frames = [row[row["collector", "mask"]] for row in rows]
    assert sum(map(len, frames)) == 60
    for part in frames:
        assert NumberedEnv.numbers(part)[:, 1].unique().numel() == 1


def test_random_frames_are_counted_over_all_environments():
    buffer = memory(ndim=2)
    filled(buffer, three(lengths=[1000]), by_step(), init_random_frames=30)
    frames = buffer[:]
    wrong = NumberedEnv.action_numbers(frames) != NumberedEnv.numbers(frames)[..., 2] % 4
    assert wrong[:, :10].any()
    assert not wrong[:, 10:].any()


# --- TorchRL's buffers


@pytest.mark.parametrize("extend", [True, False], ids=["batches", "frames"])
def test_a_buffer_of_two_dimensions_holds_environments_and_time(extend):
    buffer = ReplayBuffer(storage=LazyTensorStorage(200, ndim=2), batch_size=8)
    filled(buffer, three(), extend_buffer=extend)
    assert len(buffer) == 90
    content = buffer[:]
    assert content.batch_size == (3, 30)
    assert NumberedEnv.numbers(content)[:, :, 0].tolist() == [[0] * 30, [1] * 30, [2] * 30]
    ledger = Ledger(env() for env in three())
    ledger.add(content)
    assert ledger.frames == 90


@pytest.mark.parametrize(
    ("env", "storage"),
    [(lambda: NumberedEnv(lengths=[10]), {}), (lambda: three(lengths=[10]), {"ndim": 2})],
    ids=["one", "three"],
)
def test_slices_are_of_one_trajectory(env, storage):
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(200, **storage),
        sampler=SliceSampler(slice_len=4, traj_key=TRAJ_IDS),
        batch_size=40,
    )
    filled(buffer, env())
    slices = buffer.sample().reshape(10, 4)
    assert (slices[TRAJ_IDS] == slices[TRAJ_IDS][:, :1]).all()
    assert (NumberedEnv.numbers(slices)[..., 2].diff(dim=-1) == 1).all()


def multi_step(rewards, gamma, steps):
    """Sums of up to ``steps`` discounted rewards, within one long episode."""
    return [
        sum(gamma**i * r for i, r in enumerate(rewards[t : t + steps])) for t in range(len(rewards))
    ]


def test_multi_step_returns_can_be_made_by_postproc():
    options = {"frames_per_batch": 10, "total_frames": 10}
    buffer, expected = Buffer(), multi_step(range(1, 11), 0.5, 3)
    postproc = MultiStep(gamma=0.5, n_steps=3)
    filled(buffer, NumberedEnv(lengths=[1000]), postproc=postproc, **options)
    content = buffer.content()
    assert content["next", "reward"][:, 0].tolist() == pytest.approx(expected)
    assert content["next", "original_reward"][:, 0].tolist() == list(range(1, 11))
    assert NumberedEnv.numbers(content["next"])[:8, 2].tolist() == list(range(3, 11))
    options = {"frames_per_batch": 30, "total_frames": 30}
    (batch,) = batches(Collector(three(lengths=[1000]), postproc=postproc, **options))
    assert batch.batch_size == (3, 10)
    for rewards in batch["next", "reward"][..., 0].tolist():
        assert rewards == pytest.approx(expected)


def test_multi_step_returns_can_be_made_by_the_buffer():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(200),
        batch_size=8,
        transform=MultiStepTransform(n_steps=3, gamma=0.5),
    )
    filled(buffer, NumberedEnv(lengths=[1000]), frames_per_batch=10, total_frames=30)
    # The last frames wait in the transform for those after them.
    expected = multi_step(range(1, 31), 0.5, 3)[:27]
    assert buffer[:]["next", "reward"][:, 0].tolist() == pytest.approx(expected)
