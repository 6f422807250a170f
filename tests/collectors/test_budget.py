"""How many frames there are, whatever the workers, environments and numbers asked for."""

import math
import warnings
from functools import partial
from itertools import islice

import pytest
import torch
from collector_parts import by_step
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from hypothesis import given
from hypothesis import strategies as st
from multi_parts import ALL, envs, ledger, make, together

from trawl.collectors import AsyncCollector, Collector, MultiAsyncCollector
from trawl.testing import NumberedEnv

sizes = st.tuples(
    st.integers(1, 3),  # workers
    st.sampled_from([None, 1, 2, 3]),  # environments of each
    st.integers(1, 40),  # frames of a batch
    st.integers(1, 130),  # frames in all
)


@ALL
@pytest.mark.filterwarnings("ignore:the iteration ends at once")
@given(size=sizes, how=st.sampled_from([None, "stack", 0, -1]), breaks=st.sets(st.integers(0, 9)))
def test_whole_batches_come_up_to_the_budget(cls, size, how, breaks):
    workers, lanes, frames, total = size
    own = () if lanes is None else (lanes,)
    options = {"frames_per_batch": frames, "total_frames": total}
    if together(cls):
        options["cat_results"] = how
    elif cls is Collector:
        workers = 1
    steps = math.ceil(frames / (workers if together(cls) else 1))
    steps = math.ceil(steps / (lanes or 1))
    batch_frames = steps * (lanes or 1) * (workers if together(cls) else 1)
    book, shapes = ledger(workers, lanes), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = make(cls, workers, lanes, **options)
    with collector:
        assert collector.requested_frames_per_batch == batch_frames
        count = math.ceil(total / batch_frames)
        assert len(collector) == count
        going = True
        while going:
            going = False
            for batch in collector:
                book.add(batch)
                shapes.append(tuple(batch.shape))
                going = True
                if len(shapes) in breaks:
                    break
            else:
                break
        assert collector.next() is None
        stats = collector.stats()
    assert len(shapes) == stats["batches"] == count
    assert book.frames == stats["frames"] == count * batch_frames
    assert stats["completed"]
    if not together(cls):
        expected = (*own, steps)
    elif how in (None, "stack"):
        expected = (workers, *own, steps)
    elif how == 0 and lanes is not None:
        expected = (workers * lanes, steps)
    else:
        expected = (*own, workers * steps)
    assert set(shapes) == {expected}


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.sampled_from([None, 2]),
    st.integers(1, 60),
)
def test_workers_may_have_different_shares(frames, lanes, total):
    workers = len(frames)
    steps = [math.ceil(each / (lanes or 1)) for each in frames]
    book = ledger(workers, lanes)
    options = {"frames_per_batch": frames, "total_frames": total, "cat_results": -1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = make(workers=workers, lanes=lanes, **options)
    with collector:
        for batch in collector:
            book.add(batch)
            assert batch.shape[-1] == sum(steps)
    batch_frames = sum(steps) * (lanes or 1)
    assert book.frames == math.ceil(total / batch_frames) * batch_frames
    assert [collector.frames_per_batch_worker(i) for i in range(workers)] == frames


# --- what is said of numbers that don't fit


#: Collector, its options, what is said once, and frames of a batch after that.
ROUNDED = [
    (
        make,
        {"frames_per_batch": 21},
        r"frames_per_batch=21 .* workers, 2: each worker will collect 11 frames, 22 in total",
        (2, 11),
    ),
    (
        partial(make, lanes=3),
        {"frames_per_batch": 40},
        r"20 frames of worker 0 .* environments, 3: it will collect 21 frames at a time, 7 from",
        (2, 3, 7),
    ),
    (
        partial(make, Collector, lanes=3),
        {"frames_per_batch": 10},
        r"frames_per_batch=10 .* environments, 3: .* 12 frames, 4 from each",
        (3, 4),
    ),
]


@pytest.mark.parametrize(("maker", "options", "told", "shape"), ROUNDED)
def test_frames_of_a_batch_are_rounded_up(maker, options, told, shape):
    with pytest.warns(UserWarning, match=told) as caught:
        collector = maker(**options)
    with collector:
        assert collector.next().shape == shape
        assert collector.requested_frames_per_batch == math.prod(shape)
    assert len(caught) == 1


@ALL
def test_a_remainder_is_warned_of_once_at_the_users_line(cls, monkeypatch):
    told = r"total_frames=25 .* 30 frames will be .* 3"
    if cls is Collector:
        told = r"total_frames=25 .* 10 frames in a batch: 30 frames .* 3 batches"
    source, policy = (envs(2), by_step()) if cls is not Collector else (NumberedEnv(), by_step())
    method = {} if cls is Collector else {"start_method": "inline"}
    with pytest.warns(UserWarning, match=told) as caught:
        cls(source, policy, frames_per_batch=10, total_frames=25, **method).shutdown()
    assert [one.filename for one in caught] == [__file__]
    # Warnings of rounding can be turned off.
    monkeypatch.setenv("RL_WARNINGS", "0")
    make(cls, lanes=3, total_frames=31, init_random_frames=5).shutdown()


def test_the_warning_holds_where_rows_are_masked():
    # Each episode has one step, and the step after it is spent on a reset.
    functions = [lambda i=i: NumberedEnv(i, lengths=[1]) for i in range(2)]
    vector = SyncVectorEnv(functions, autoreset_mode=AutoresetMode.NEXT_STEP)
    numbers = r"total_frames=12 .* 10 frames in a batch: 20 frames .* 2 batches .*up to 21 frames"
    with pytest.warns(UserWarning, match=numbers):
        collector = Collector(RecordEpisodeStatistics(vector), frames_per_batch=10, total_frames=12)
    with collector:
        collected = [int(batch["collector", "mask"].sum()) for batch in collector]
    assert collected == [6, 4, 6]
    assert collector.stats()["frames"] == 16


# --- endless, and ended


@ALL
def test_without_a_total_it_goes_on(cls):
    for total in (-1, None, math.inf, -100.0):
        with make(cls, total_frames=total) as collector:
            assert collector.total_frames == math.inf
            with pytest.raises(TypeError, match=r"endless collector .* has no length"):
                len(collector)
            assert sum(batch.numel() for batch in islice(collector, 7)) == 70
            assert not {"completed", "total_frames"} & collector.stats().keys()
    # Numbers of any kind are numbers of frames.
    for size, total in ((10.0, 2e1), (10, torch.tensor(20))):
        with make(cls, frames_per_batch=size, total_frames=total) as collector:
            assert sum(batch.numel() for batch in collector) == 20


@ALL
def test_iterators_share_one_count(cls):
    book = ledger(2)
    with make(cls, total_frames=60) as collector:
        one, other = iter(collector), collector.iterator()
        for batch in (next(one), next(other), next(one), collector.next(), *other):
            book.add(batch)
        assert next(one, None) is None
    assert book.frames == 60


@ALL
@pytest.mark.parametrize("by_next", [False, True])
def test_nothing_comes_after_the_end(cls, by_next):
    told = r"ends at once: all 20 frames of total_frames"
    with make(cls, total_frames=20) as collector:
        batches = [collector.next(), collector.next()] if by_next else list(collector)
        assert sum(batch.numel() for batch in batches) == 20
        with pytest.warns(UserWarning, match=told):
            assert list(collector) == []
        assert not collector.closed
        assert collector.stats().get("workers_alive", 2) == 2
    assert collector.next() is None
    with pytest.warns(UserWarning, match=told):
        assert list(collector) == []


def test_no_worker_makes_more_than_it_is_asked_for():
    with make(MultiAsyncCollector, workers=3, total_frames=40) as collector:
        list(collector)
        assert sum(one["frames"] for one in collector.map_fn("stats")) == 40
    with make(total_frames=100) as collector:
        collector.next()
        assert [one["frames"] for one in collector.map_fn("stats")] == [5, 5]


def test_the_workers_of_an_async_collector_go_on_by_themselves():
    with make(MultiAsyncCollector, start_method="forkserver") as collector:
        collector.next()
        # One is delivered, and no worker has more than the one it is at and the next.
        frames = 0
        while frames < 40:
            frames = sum(one["frames"] for one in collector.map_fn("stats"))
        assert frames <= 50


# --- random frames


def is_by_step(batch):
    """Whether each action is the one that the policy would choose."""
    return (NumberedEnv.action_numbers(batch) == NumberedEnv.numbers(batch)[..., 2] % 4).tolist()


ENDLESS = envs(2, lengths=[1000])


@ALL
def test_the_first_frames_are_random_in_whole_batches(cls):
    told = r"init_random_frames=35 .* 40 frames will be random"
    if cls is Collector:
        told = r"init_random_frames=35 .* 10 frames in a batch: 40 frames"
    with pytest.warns(UserWarning, match=told):
        collector = make(cls, init_random_frames=35, total_frames=100, create_env_fn=ENDLESS)
    with collector:
        found = [torch.tensor(is_by_step(batch)).all() for batch in collector]
    # Of asynchronous workers it is certain which were ordered first, but not who delivers first.
    if not together(cls) and cls is not Collector:
        found = sorted(found)
    assert found == [False] * 4 + [True] * 6


@ALL
@pytest.mark.parametrize("none", [None, 0, -1, -3.0])
def test_a_number_that_is_not_positive_turns_an_option_off(cls, none):
    options = {"max_frames_per_traj": none, "init_random_frames": none}
    with make(cls, create_env_fn=ENDLESS, **options) as collector:
        # Trainers compare these: ``frames >= collector.init_random_frames``.
        assert (collector.init_random_frames, collector.max_frames_per_traj) == (0, 0)
        assert (collector.trust_policy, collector.split_trajs) == (False, False)
        batch = collector.next()
    assert torch.tensor(is_by_step(batch)).all()
    assert not batch["next", "done"].any()
    assert "step_count" not in batch


def test_the_policy_is_not_called_for_random_frames():
    calls = []

    def policy(observation):
        calls.append(1)
        return by_step().module(observation)

    with Collector(NumberedEnv(), policy, frames_per_batch=10, init_random_frames=10) as collector:
        before = len(calls)
        collector.next()
        assert len(calls) == before
        collector.next()
        assert len(calls) == before + 10


# --- one worker


@pytest.mark.parametrize("lanes", [None, 3])
def test_a_collector_in_one_other_process(lanes):
    """A list is the batch of environments of the one worker."""
    book, options = ledger(1, lanes), {"frames_per_batch": 12, "total_frames": 48}
    with AsyncCollector(envs(1, lanes)[0], **options) as collector:
        assert isinstance(collector, MultiAsyncCollector)
        assert collector.num_workers == 1
        for batch in collector:
            book.add(batch)
            assert batch.shape == ((12,) if lanes is None else (3, 4))
    assert book.frames == 48


def test_it_has_one_worker_and_no_more():
    with pytest.raises(ValueError, match=r"has one worker, but num_workers=2: use MultiAsync"):
        AsyncCollector(NumberedEnv, frames_per_batch=10, num_workers=2)
