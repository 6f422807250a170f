"""How many frames there are, whatever the workers, environments and numbers asked for."""

import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multi_parts import CLASSES, envs, ledger, make, together

from trawl.collectors import AsyncCollector, MultiAsyncCollector, MultiSyncCollector
from trawl.testing import NumberedEnv

sizes = st.tuples(
    st.integers(1, 3),  # workers
    st.sampled_from([None, 1, 2, 3]),  # environments of each
    st.integers(1, 40),  # frames of a batch
    st.integers(1, 130),  # frames in all
)


def _expected(cls, workers, lanes, frames):
    """Steps of each environment, and frames of a batch."""
    each = math.ceil(frames / workers) if together(cls) else frames
    steps = math.ceil(each / (lanes or 1))
    return steps, steps * (lanes or 1) * (workers if together(cls) else 1)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.filterwarnings("ignore:the iteration ends at once")
@given(size=sizes, how=st.sampled_from([None, "stack", 0, -1]), breaks=st.sets(st.integers(0, 9)))
def test_whole_batches_come_up_to_the_budget(cls, size, how, breaks):
    workers, lanes, frames, total = size
    how = how if together(cls) else None
    steps, batch_frames = _expected(cls, workers, lanes, frames)
    book, shapes = ledger(workers, lanes), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = make(
            cls, workers, lanes, frames_per_batch=frames, total_frames=total, cat_results=how
        )
    with collector:
        assert collector.requested_frames_per_batch == batch_frames
        assert len(collector) == math.ceil(total / batch_frames)
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
    count = math.ceil(total / batch_frames)
    assert len(shapes) == count
    assert book.frames == stats["frames"] == count * batch_frames
    assert stats["completed"]
    assert stats["batches"] == count
    own = () if lanes is None else (lanes,)
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = make(
            workers=workers,
            lanes=lanes,
            frames_per_batch=frames,
            total_frames=total,
            cat_results=-1,
        )
    with collector:
        for batch in collector:
            book.add(batch)
            assert batch.shape[-1] == sum(steps)
    batch_frames = sum(steps) * (lanes or 1)
    assert book.frames == math.ceil(total / batch_frames) * batch_frames
    assert [collector.frames_per_batch_worker(i) for i in range(workers)] == frames


# --- what is said of numbers that don't fit


def test_frames_that_workers_cannot_share_are_rounded_up():
    match = r"frames_per_batch=21 .* workers, 2: each worker will collect 11 frames, 22 in total"
    with pytest.warns(UserWarning, match=match):
        collector = make(frames_per_batch=21)
    with collector:
        assert collector.next().shape == (2, 11)
        assert collector.requested_frames_per_batch == 22


def test_frames_that_environments_cannot_share_are_rounded_up():
    match = r"20 frames of worker 0 .* environments, 3: it will collect 21 frames at a time, 7 from"
    with pytest.warns(UserWarning, match=match) as caught:
        collector = make(lanes=3, frames_per_batch=40)
    with collector:
        assert collector.next().shape == (2, 3, 7)
        assert collector.requested_frames_per_batch == 42
    assert len(caught) == 1


@pytest.mark.parametrize("cls", CLASSES)
def test_a_remainder_is_warned_of_once(cls):
    with pytest.warns(UserWarning, match=r"total_frames=25 .* 30 frames will be .* 3") as caught:
        make(cls, total_frames=25).shutdown()
    assert len(caught) == 1


def test_warnings_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("RL_WARNINGS", "0")
    make(frames_per_batch=21, total_frames=50).shutdown()


# --- endless, and ended


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("total", [-1, None, float("inf")])
def test_without_a_total_it_goes_on(cls, total):
    with make(cls, total_frames=total) as collector:
        with pytest.raises(TypeError, match="no length"):
            len(collector)
        assert sum(batch.numel() for batch, _ in zip(collector, range(7), strict=False)) == 70
        assert "completed" not in collector.stats()


@pytest.mark.parametrize("cls", CLASSES)
def test_iterators_share_one_count(cls):
    book = ledger(2)
    with make(cls, total_frames=60) as collector:
        one, other = iter(collector), collector.iterator()
        for source in (one, other, one):
            book.add(next(source))
        book.add(collector.next())
        for batch in other:
            book.add(batch)
        assert next(one, None) is None
    assert book.frames == 60


@pytest.mark.parametrize("cls", CLASSES)
def test_nothing_comes_after_the_end(cls):
    with make(cls, total_frames=20) as collector:
        assert len(list(collector)) == 2
        with pytest.warns(UserWarning, match="ends at once"):
            assert list(collector) == []
        assert collector.stats()["workers_alive"] == 2
    assert collector.next() is None
    with pytest.warns(UserWarning, match="ends at once"):
        assert list(collector) == []


def test_workers_of_an_async_collector_make_no_frame_too_many():
    with make(MultiAsyncCollector, workers=3, total_frames=40) as collector:
        list(collector)
        made = [one["frames"] for one in collector.map_fn("stats")]
    assert sum(made) == 40


def test_the_workers_of_a_sync_collector_wait_to_be_asked():
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


@pytest.mark.parametrize("cls", CLASSES)
def test_the_first_frames_are_random(cls):
    with make(
        cls, init_random_frames=40, total_frames=100, create_env_fn=envs(2, lengths=[1000])
    ) as collector:
        found = list(collector)
    by_step = [
        bool((NumberedEnv.action_numbers(b) == NumberedEnv.numbers(b)[..., 2] % 4).all())
        for b in found
    ]
    if together(cls):
        assert by_step == [False] * 4 + [True] * 6
    else:
        # Which were ordered first is certain, but not who delivers first.
        assert sorted(by_step) == [False] * 4 + [True] * 6


def test_random_frames_are_whole_batches():
    with pytest.warns(UserWarning, match=r"init_random_frames=15 .* 20 frames will be random"):
        make(init_random_frames=15).shutdown()


# --- one worker


def test_a_collector_in_one_other_process():
    book = ledger(1)
    with AsyncCollector(envs(1)[0], frames_per_batch=10, total_frames=50) as collector:
        assert isinstance(collector, MultiAsyncCollector)
        assert collector.num_workers == 1
        for batch in collector:
            book.add(batch)
            assert batch.shape == (10,)
    assert book.frames == 50


def test_a_list_is_the_batch_of_environments_of_the_one_worker():
    book = ledger(1, 3)
    with AsyncCollector(
        envs(1, 3)[0], frames_per_batch=12, total_frames=24, start_method="inline"
    ) as collector:
        for batch in collector:
            book.add(batch)
            assert batch.shape == (3, 4)
    assert book.frames == 24


def test_it_has_one_worker_and_no_more():
    with pytest.raises(ValueError, match=r"has one worker, but num_workers=2: use MultiAsync"):
        AsyncCollector(NumberedEnv, frames_per_batch=10, num_workers=2)


def test_one_worker_gives_a_batch_of_one_row():
    with make(MultiSyncCollector, workers=1) as collector:
        assert collector.next().shape == (1, 10)
