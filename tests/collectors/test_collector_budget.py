import math

import pytest
import torch
from collector_parts import Buffer, batches, by_step
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from trawl.testing import NumberedEnv


def three():
    return [lambda i=i: NumberedEnv(i) for i in range(3)]


def test_iteration_ends_when_the_frames_are_delivered():
    assert [
        len(b) for b in batches(Collector(NumberedEnv(), frames_per_batch=5, total_frames=15))
    ] == [
        5,
        5,
        5,
    ]


@pytest.mark.parametrize("end", ["iteration", "next"])
def test_iterating_over_a_finished_collector_warns(end):
    with Collector(NumberedEnv(), frames_per_batch=5, total_frames=10) as collector:
        if end == "iteration":
            assert len(list(collector)) == 2
        else:
            assert [len(collector.next()) for _ in range(2)] == [5, 5]
        with pytest.warns(UserWarning, match=r"ends at once: all 10 frames of total_frames"):
            assert list(collector) == []
        assert not collector.closed


def test_a_remainder_is_met_by_a_whole_batch_with_a_warning():
    with pytest.warns(
        UserWarning, match=r"total_frames=12 .* 5 frames in a batch: 15 frames .* 3 batches"
    ):
        collector = Collector(NumberedEnv(), frames_per_batch=5, total_frames=12)
    assert sum(len(batch) for batch in batches(collector)) == 15
    assert collector.stats()["frames"] == 15


def test_the_warning_holds_where_rows_are_masked():
    # Each episode has one step, and the step after it is spent on a reset.
    functions = [lambda i=i: NumberedEnv(i, lengths=[1]) for i in range(2)]
    vector = SyncVectorEnv(functions, autoreset_mode=AutoresetMode.NEXT_STEP)
    numbers = r"total_frames=12 .* 10 frames in a batch: 20 frames .* 2 batches .*up to 21 frames"
    with pytest.warns(UserWarning, match=numbers):
        collector = Collector(RecordEpisodeStatistics(vector), frames_per_batch=10, total_frames=12)
    collected = [int(batch["collector", "mask"].sum()) for batch in batches(collector)]
    assert collected == [6, 4, 6]
    assert collector.stats()["frames"] == 16


def test_frames_per_batch_is_rounded_up_with_a_warning():
    with pytest.warns(
        UserWarning, match=r"frames_per_batch=10 .* environments, 3: .* 12 frames, 4 from each"
    ):
        collector = Collector(three(), frames_per_batch=10)
    with collector:
        assert collector.requested_frames_per_batch == 12
        assert collector.frames_per_batch == 4
        assert next(iter(collector)).batch_size == (3, 4)


def test_warnings_of_rounding_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("RL_WARNINGS", "0")
    Collector(three(), frames_per_batch=10, total_frames=31, init_random_frames=5).shutdown()


def test_the_warning_points_at_the_users_line():
    with pytest.warns(UserWarning, match=r"total_frames") as caught:
        Collector(NumberedEnv(), frames_per_batch=5, total_frames=12).shutdown()
    assert caught[0].filename == __file__


@pytest.mark.parametrize("total", [-1, None, math.inf])
def test_without_a_total_there_is_no_end(total):
    with Collector(NumberedEnv(), frames_per_batch=5, total_frames=total) as collector:
        iterator = iter(collector)
        assert [len(next(iterator)) for _ in range(20)] == [5] * 20
        assert "completed" not in collector.stats()
        with pytest.raises(TypeError, match=r"endless collector .* has no length"):
            len(collector)


def test_a_float_that_is_whole_is_a_number_of_frames():
    collector = Collector(NumberedEnv(), frames_per_batch=5.0, total_frames=1e1)
    assert sum(len(batch) for batch in batches(collector)) == 10


def test_a_number_of_numpy_or_torch_is_a_number_of_frames():
    collector = Collector(NumberedEnv(), frames_per_batch=5, total_frames=torch.tensor(10))
    assert sum(len(batch) for batch in batches(collector)) == 10


def test_the_length_is_the_number_of_batches():
    with Collector(NumberedEnv(), frames_per_batch=5, total_frames=20) as collector:
        assert len(collector) == 4


def test_iterators_share_one_count():
    with Collector(NumberedEnv(lengths=[100]), frames_per_batch=5, total_frames=20) as collector:
        one, two = iter(collector), iter(collector)
        steps = [NumberedEnv.numbers(next(it))[0, 3].item() for it in (one, two, one, two)]
        assert steps == [0, 5, 10, 15]
        assert list(one) == []
        assert list(two) == []


def test_iterating_again_after_a_break_goes_on():
    with Collector(NumberedEnv(lengths=[100]), frames_per_batch=5, total_frames=20) as collector:
        for _ in collector:
            break
        rest = list(collector)
    assert [NumberedEnv.numbers(batch)[0, 3].item() for batch in rest] == [5, 10, 15]


def test_statistics_count_what_was_delivered():
    with Collector(NumberedEnv(), by_step(), frames_per_batch=5, total_frames=10) as collector:
        before = collector.stats()
        next(iter(collector))
        within = collector.stats()
        next(iter(collector))
        after = collector.stats()
    names = ("frames", "batches", "requested_frames_per_batch", "total_frames", "completed")
    assert [before[name] for name in names] == [0, 0, 5, 10, False]
    assert [within[name] for name in names] == [5, 1, 5, 10, False]
    assert [after[name] for name in names] == [10, 2, 5, 10, True]


def test_statistics_are_flat_numbers_and_texts():
    with Collector(NumberedEnv(), frames_per_batch=5, track_policy_version=True) as collector:
        next(iter(collector))
        stats = collector.stats()
    assert all(isinstance(value, (bool, int, float, str)) for value in stats.values())
    assert stats["policy_version"] == 0
    assert 0 < stats["env_time_share"] <= 1


def test_statistics_say_which_path_is_taken():
    with Collector(NumberedEnv(), by_step(), frames_per_batch=5) as collector:
        next(iter(collector))
        stats = collector.stats()
    assert (stats["env_path"], stats["policy_path"]) == ("array", "direct")


# --- random frames


def is_by_step(batch):
    """Whether each action is the one that the policy would choose."""
    return (NumberedEnv.action_numbers(batch) == NumberedEnv.numbers(batch)[..., 2] % 4).tolist()


def test_random_frames_are_rounded_up_to_batches_with_a_warning():
    with pytest.warns(
        UserWarning, match=r"init_random_frames=25 .* 20 frames in a batch: 40 frames"
    ):
        collector = Collector(
            NumberedEnv(lengths=[1000]),
            by_step(),
            frames_per_batch=20,
            total_frames=60,
            init_random_frames=25,
        )
    assert [all(is_by_step(batch)) for batch in batches(collector)] == [False, False, True]


@pytest.mark.parametrize("none", [None, -1, 0])
def test_there_may_be_no_random_frames(none):
    collector = Collector(
        NumberedEnv(lengths=[1000]),
        by_step(),
        frames_per_batch=20,
        total_frames=20,
        init_random_frames=none,
    )
    assert all(is_by_step(batches(collector)[0]))


def test_the_policy_is_not_called_for_random_frames():
    calls = []

    def policy(observation):
        calls.append(1)
        return by_step().module(observation)

    with Collector(NumberedEnv(), policy, frames_per_batch=10, init_random_frames=10) as collector:
        before = len(calls)
        next(iter(collector))
        assert len(calls) == before
        next(iter(collector))
        assert len(calls) == before + 10


def test_single_random_frames_are_exact():
    buffer = Buffer()
    with Collector(
        NumberedEnv(lengths=[1000]),
        by_step(),
        frames_per_batch=10,
        total_frames=200,
        init_random_frames=97,
        replay_buffer=buffer,
        extend_buffer=False,
    ) as collector:
        list(collector)
    right = is_by_step(buffer.content())
    assert all(right[97:])
    # By chance one in four is right: with 97 draws far from all of them.
    assert sum(right[:97]) < 60


@pytest.mark.parametrize(
    ("cls", "value"),
    [
        (Collector, None),
        (Collector, -100.0),
        (MultiSyncCollector, -1),
        (MultiSyncCollector, math.inf),
        (MultiAsyncCollector, -2),
    ],
)
def test_any_negative_number_of_frames_is_endless(cls, value):
    more = {} if cls is Collector else {"num_workers": 1, "start_method": "inline"}
    with cls(NumberedEnv, frames_per_batch=5, total_frames=value, **more) as collector:
        assert collector.total_frames == math.inf
        frames = 0
        while frames < 15 < collector.total_frames:
            frames += collector.next().numel()
        assert "total_frames" not in collector.stats()
        with pytest.raises(TypeError, match="endless"):
            len(collector)
    assert frames == 15


@pytest.mark.parametrize("value", [None, 0, -7, -3.0])
@pytest.mark.parametrize(
    ("cls", "name"),
    [(Collector, "max_frames_per_traj"), (MultiSyncCollector, "init_random_frames")],
)
def test_a_negative_number_turns_an_option_off(cls, name, value):
    more = {} if cls is Collector else {"num_workers": 1, "start_method": "inline"}
    with cls(NumberedEnv, by_step(), frames_per_batch=12, **{name: value}, **more) as collector:
        batch = collector.next().reshape(-1)
    with Collector(NumberedEnv, by_step(), frames_per_batch=12) as other:
        expected = other.next()
    assert set(batch.keys(True, True)) == set(expected.keys(True, True))
    assert torch.equal(batch["next", "done"], expected["next", "done"])
    assert torch.equal(batch["action"], expected["action"])
