import pytest
import torch
from collector_parts import Buffer, batches, by_step, keys
from multi_parts import envs, make
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
from torchrl.envs.transforms import MultiStepTransform  # noqa: E402


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
    for made, frames, shape in [([NumberedEnv()], 17, ()), (three(), 18, (3, 1))]:
        sink, ledger = Sink(), Ledger(env() if callable(env) else env for env in made)
        source = made[0] if len(made) == 1 else made
        filled(sink, source, frames_per_batch=6, total_frames=frames, extend_buffer=False)
        assert {tuple(frame.batch_size) for frame in sink.added} == {shape}
        assert all((one == copy).all() for one, copy in zip(sink.added, sink.copies, strict=True))
        ledger.add(torch.cat(sink.added, -1) if shape else torch.stack(sink.added))
        assert ledger.frames == frames


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


def test_the_buffer_gets_what_hooks_see_after_postproc_without_private_entries():
    def policy(tensordict):
        tensordict["_hidden"] = torch.ones(tensordict.shape)
        return by_step()(tensordict)

    seen, frames, single = [], [], Buffer()
    options = {"postproc": lambda batch: batch.exclude("done"), "post_collect_hook": seen.append}
    filled(frames, policy=policy, **options)
    content = torch.stack(frames)
    assert [len(batch) for batch in seen] == [30] * 3
    assert (torch.cat(seen) == content).all()
    assert "done" not in keys(content)
    assert content["next", "reward"][:, 0].tolist() == list(range(1, 91))
    filled(single, policy=policy, extend_buffer=False)
    for found in (content, single.content()):
        assert not {"_hidden", ("next", "_hidden")} & keys(found)


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
    collector = make(
        MultiSyncCollector if workers else Collector, 1, replay_buffer=Sink(), **options
    )
    assert batches(collector) == [None] * 3
    assert collector.stats()["replay_written_frames"] == written


# --- random frames


@pytest.mark.parametrize(("options", "random"), [({}, 60), ({"extend_buffer": False}, 47)])
def test_frames_are_random_until_the_buffer_holds_enough(options, random):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    for _ in range(2):
        # The second time, the buffer has them.
        filled(buffer, NumberedEnv(lengths=[1000]), by_step(), init_random_frames=random, **options)
    frames = buffer[:]
    wrong = NumberedEnv.action_numbers(frames) != NumberedEnv.numbers(frames)[..., 2] % 4
    assert len(wrong) == 180
    assert wrong[:30].any()
    assert wrong[30:random].any()
    assert not wrong[random:].any()


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.filterwarnings("ignore:split_trajs=True pads")
def test_split_trajectories_of_all_lengths_are_written(kind, workers, tmp_path):
    place = {"scratch_dir": tmp_path} if kind is LazyMemmapStorage else {}
    buffer = ReplayBuffer(storage=kind(200, **place), collate_fn=list)
    sources = envs(2, lengths=[3, 1, 6, 2])
    options = {"replay_buffer": buffer, "total_frames": 60, "split_trajs": True}
    cls, sources = (MultiSyncCollector, sources) if workers else (Collector, [sources])
    list(batches(make(cls, create_env_fn=sources, **options)))
    rows = [buffer[index] for index in range(len(buffer))]
    lengths = {len(row) for row in rows}
    assert lengths == {5} if kind is not ListStorage else max(lengths) <= 5
    frames = [row[row["collector", "mask"]] for row in rows]
    assert sum(map(len, frames)) == 60
    for part in frames:
        assert NumberedEnv.numbers(part)[:, 1].unique().numel() == 1


# --- TorchRL's buffers


@pytest.mark.parametrize("extend", [True, False], ids=["batches", "frames"])
def test_a_buffer_of_two_dimensions_holds_environments_and_time(extend):
    buffer = ReplayBuffer(storage=LazyTensorStorage(200, ndim=2), batch_size=8)
    filled(buffer, three(), by_step(), extend_buffer=extend, init_random_frames=30)
    content, ledger = buffer[:], Ledger(env() for env in three())
    assert content.batch_size == (3, 30)
    assert NumberedEnv.numbers(content)[:, :, 0].tolist() == [[0] * 30, [1] * 30, [2] * 30]
    ledger.add(content)
    assert ledger.frames == 90
    # Frames of all environments count as random ones, though the buffer counts rows.
    wrong = NumberedEnv.action_numbers(content) != NumberedEnv.numbers(content)[..., 2] % 4
    assert wrong[:, :10].any()
    assert not wrong[:, 10:].any()


def test_multi_step_returns_can_be_made_by_the_buffer():
    transform = MultiStepTransform(n_steps=3, gamma=0.5)
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=8, transform=transform)
    filled(buffer, NumberedEnv(lengths=[1000]), frames_per_batch=10, total_frames=30)
    # The last frames wait in the transform for those after them.
    expected = [n + (n + 1) / 2 + (n + 2) / 4 for n in range(1, 28)]
    assert buffer[:]["next", "reward"][:, 0].tolist() == pytest.approx(expected)
