"""Batches of whole trajectories: ``trajs_per_batch``, ``traj_format``, ``trajs_per_write``."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import count
from typing import Any

import pytest
import tensordict
from collector_parts import Buffer, by_step, keys
from tensordict import TensorDictBase
from whole_parts import MASK, TRAJ_IDS, Episodes, Writes, cycling, rows_of

from trawl import Collector, MultiSyncCollector
from trawl.collectors import MultiAsyncCollector
from trawl.testing import NumberedEnv, RaggedEnv

LENGTHS = [3, 1, 5]
FORMATS = pytest.mark.parametrize("layout", ["padded", "cat"])


def env(number: int = 0, lengths: Any = LENGTHS, **more: Any) -> Any:
    return partial(NumberedEnv, number, lengths=lengths, **more)


def make(source: Any = None, **options: Any) -> Collector:
    options.setdefault("frames_per_batch", 7)
    options.setdefault("trajs_per_batch", 2)
    if "replay_buffer" not in options and options["trajs_per_batch"] is not None:
        options.setdefault("traj_format", "cat")
    return Collector(env() if source is None else source, by_step(), **options)


def ends_of(lanes: int, lengths: Any, steps: int) -> list[tuple[int, int]]:
    """Environment and episode of all that ends within so many steps of each, in that order."""
    found = []
    for lane in range(lanes):
        at = 0
        for episode in count():
            at += lengths[episode % len(lengths)]
            if at > steps:
                break
            found.append((at, lane, episode))
    return [(lane, episode) for _, lane, episode in sorted(found)]


# --- what is delivered


def test_frames_without_a_fixed_layout_can_be_padded_since_tensordict_0_15() -> None:
    with Collector(
        partial(RaggedEnv, lengths=LENGTHS),
        frames_per_batch=7,
        trajs_per_batch=3,
        traj_format="padded",
    ) as collector:
        if tuple(map(int, tensordict.__version__.split(".")[:2])) >= (0, 15):
            assert [len(row) for row in rows_of(collector.next())] == LENGTHS
            return
        with pytest.raises(TypeError, match=r"can't be padded.*traj_format='cat'"):
            collector.next()


def test_as_many_batches_of_frames_are_collected_as_it_takes() -> None:
    with make(frames_per_batch=2, trajs_per_batch=3) as collector:
        assert len(rows_of(collector.next())) == 3
        assert collector.stats()["frames"] == 10
    with make(frames_per_batch=90, trajs_per_batch=3) as collector:
        for _ in range(9):
            assert len(rows_of(collector.next())) == 3
            assert collector.stats()["frames"] == 90
        assert collector.stats()["batches"] == 9


def test_it_ends_when_there_are_not_enough() -> None:
    with make(total_frames=21, trajs_per_batch=4) as collector:
        assert [len(rows_of(batch)) for batch in collector] == [4]
        assert collector.next() is None
        with pytest.warns(UserWarning, match="ends at once"):
            assert list(collector) == []
        assert not collector.closed
        assert collector.stats()["trajectories_waiting"] == 3
    assert collector.next() is None


def test_batches_that_wait_are_delivered_after_the_last_frame() -> None:
    with make(frames_per_batch=9, total_frames=9, trajs_per_batch=1) as collector:
        assert [len(batch) for batch in collector] == LENGTHS


def test_their_number_is_not_known_beforehand() -> None:
    with make(total_frames=70) as collector, pytest.raises(TypeError, match="trajs_per_batch"):
        len(collector)
    with make(total_frames=70, replay_buffer=Writes()) as collector:
        assert len(collector) == 10


def test_what_waits_keeps_no_memory_of_batches() -> None:
    with make(frames_per_batch=100, trajs_per_batch=500) as collector:
        collector.next()
        assert collector.stats()["batches_held"] <= 1


@FORMATS
def test_a_fake_batch_has_the_layout_of_a_real_one(layout: str) -> None:
    with make(traj_format=layout) as collector:
        fake, batch = collector.fake_tensordict(), collector.next()
    assert keys(fake) == keys(batch)
    assert (MASK in keys(batch)) == (layout == "padded")
    assert fake.ndim == batch.ndim
    assert batch.names == (["time"] if layout == "cat" else [None, None])
    assert all(fake[key].dtype is batch[key].dtype for key in keys(batch))


# --- what cuts trajectories off


def test_frames_that_others_took_leave_a_hole() -> None:
    episodes = Episodes(cycling([4, 2]))
    with make(env(lengths=[4, 2]), frames_per_batch=3, trajs_per_batch=1) as collector:
        assert len(collector.rollout()) == 3
        for _ in range(2):
            episodes.add(collector.next())
        collector.rollout()
        for _ in range(4):
            episodes.add(collector.next())
    assert all(count == sorted(count) for count in episodes.by_env.values())
    # The first began in frames that were not collected for batches.
    assert (0, 0) not in episodes.found


def test_what_a_reset_truncates_is_an_end_if_it_is_told() -> None:
    for made in (make, partial(_multi, MultiSyncCollector), partial(_multi, MultiAsyncCollector)):
        with made(
            env(lengths=[3]),
            frames_per_batch=4,
            reset_at_each_iter=True,
            set_truncated=True,
            total_frames=8,
        ) as collector:
            found = [row for batch in collector for row in rows_of(batch)]
        assert [len(row) for row in found] == [3, 1, 3, 1]
        assert all(row["next", "done"][-1] for row in found)


def _multi(cls: Any, source: Any, **options: Any) -> Any:
    options = {"start_method": "inline", "trajs_per_batch": 2, "traj_format": "cat", **options}
    return cls([source], by_step(), **options)


# --- replay buffers


BATCHES = [[0, 1], [2, 3, 4], [5, 6], [7, 8], [9, 10]]


@pytest.mark.parametrize(
    ("group", "layout", "expected"),
    [
        (None, None, BATCHES),
        (1, "cat", [[i] for i in range(11)]),
        (2, "padded", [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9, 10]]),
        (10, None, BATCHES),
    ],
)
def test_whole_trajectories_are_written(group: Any, layout: Any, expected: Any) -> None:
    """They are flat whatever the format is."""
    buffer = Writes()
    options = {"trajs_per_write": group, "traj_format": layout}
    with make(total_frames=35, replay_buffer=buffer, **options) as collector:
        assert list(collector) == [None] * 5
        facts = collector.stats()
    found = [batch[TRAJ_IDS].unique().tolist() for batch in buffer.written]
    assert found == expected
    episodes = Episodes(cycling(LENGTHS))
    for batch in buffer.written:
        episodes.add(batch)
        assert batch.names == ["time"]
        assert MASK not in keys(batch)
    assert (facts["trajectories"], facts["trajectories_waiting"]) == (11, 0)
    assert facts["batches"] == 5


@pytest.mark.parametrize(
    ("cls", "group"), [(Collector, None), (MultiSyncCollector, 1), (MultiAsyncCollector, 2)]
)
def test_a_write_mode_asks_for_whole_trajectories(cls: Any, group: int | None) -> None:
    written = []
    for how in ({"replay_write_mode": "trajectory"}, {"trajs_per_batch": 2}):
        buffer = Writes()
        with alone(cls, replay_buffer=buffer, trajs_per_write=group, **how) as collector:
            assert list(collector) == [None] * 5
            assert len(collector) == 5
        written.append([batch[TRAJ_IDS].tolist() for batch in buffer.written])
        episodes = Episodes(cycling(LENGTHS))
        for batch in buffer.written:
            episodes.add(batch)
        assert episodes.found == ends_of(1, LENGTHS, 35)
    assert written[0] == written[1]


def test_a_write_mode_may_take_turns() -> None:
    source, buffer = [env(0, [2]), env(1, [5])], Writes()
    more = {"traj_sampling": "per_env", "replay_write_mode": "trajectory"}
    more |= {"frames_per_batch": 14, "total_frames": 70, "trajs_per_batch": None}
    with make(source, replay_buffer=buffer, **more) as collector:
        list(collector)
    rows = [row for batch in buffer.written for row in rows_of(batch)]
    assert [len(row) for row in rows] == [*[2, 5] * 7, 2]


def alone(cls: Any, **options: Any) -> Any:
    """Makes a collector of one environment, in this process."""
    if cls is not Collector:
        options["start_method"] = "inline"
    source = env() if cls is Collector else [env()]
    return cls(source, by_step(), frames_per_batch=7, total_frames=35, **options)


def test_hooks_and_postproc_see_what_is_delivered() -> None:
    seen: list[tuple[str, Any]] = []

    def postproc(batch: TensorDictBase) -> TensorDictBase:
        seen.append(("postproc", batch.shape))
        return batch.set("_private", batch["done"]).set("more", batch["done"])

    def hook(batch: TensorDictBase) -> None:
        seen.append(("hook", batch))

    with make(postproc=postproc, post_collect_hook=hook) as collector:
        batch = collector.next()
    assert seen == [("postproc", (4,)), ("hook", batch)]
    assert seen[1][1] is batch
    assert "more" in keys(batch)
    assert "_private" not in keys(batch)
    seen.clear()
    buffer = Writes()
    with make(
        postproc=postproc, post_collect_hook=hook, replay_buffer=buffer, trajs_per_write=1
    ) as collector:
        assert collector.next() is None
    assert [what for what, _ in seen] == ["postproc", "hook"] * 2
    assert [len(batch) for batch in buffer.written] == [3, 1]


def test_an_error_while_they_are_delivered_closes_the_collector() -> None:
    def broken(batch: TensorDictBase) -> TensorDictBase:
        raise ZeroDivisionError("no way")

    collector = make(postproc=broken)
    with pytest.raises(ZeroDivisionError):
        collector.next()
    assert collector.closed
    with pytest.raises(RuntimeError, match="shut down after ZeroDivisionError: no way"):
        collector.next()


# --- states


@pytest.mark.parametrize("made", [make, partial(_multi, MultiSyncCollector)], ids=["one", "two"])
def test_a_state_can_be_gone_back_to(made: Any) -> None:
    with made(env(), frames_per_batch=17, trajs_per_batch=1) as collector:
        collector.next()
        state = collector.state_dict()
        after = [collector.next() for _ in range(3)]
        collector.load_state_dict(state)
        again = [collector.next() for _ in range(3)]
        collector.next()
    assert all((one == other).all() for one, other in zip(after, again, strict=True))


def test_a_state_without_trajectories_can_be_loaded() -> None:
    with make(trajs_per_batch=None) as collector:
        collector.next()
        state = collector.state_dict()
    assert "trajectories" not in state
    with make(frames_per_batch=17) as other:
        other.next()
        other.load_state_dict(state)
        assert other.stats()["trajectories_waiting"] == 0


# --- arguments


WRONG: list[tuple[dict[str, Any], Any, str]] = [
    ({"trajs_per_batch": 0}, ValueError, "trajs_per_batch must be at least 1, but it is 0"),
    ({"trajs_per_batch": -1}, ValueError, "trajs_per_batch must be at least 1"),
    ({"trajs_per_batch": 1.5}, TypeError, "trajs_per_batch must be an integer"),
    (
        {"trajs_per_batch": 2, "traj_format": "nested"},
        ValueError,
        "traj_format must be 'padded' or 'cat', but it is 'nested'",
    ),
    (
        {"trajs_per_batch": 2, "trajs_per_write": 0, "replay_buffer": Writes()},
        ValueError,
        "trajs_per_write must be at least 1",
    ),
    (
        {"replay_write_mode": "frames", "replay_buffer": Writes()},
        ValueError,
        "replay_write_mode must be 'rollout' or 'trajectory', but it is 'frames'",
    ),
    ({"replay_write_mode": True}, ValueError, "replay_write_mode must be .* it is True"),
    (
        {"trajs_per_batch": 1, "traj_sampling": "x"},
        ValueError,
        "traj_sampling must be 'per_env' or None, but it is 'x'",
    ),
    (
        {"replay_write_mode": "rollout", "replay_buffer": Writes(), "trajs_per_write": 2},
        ValueError,
        "trajs_per_write=2 .* or replay_write_mode='trajectory'",
    ),
    (
        {"replay_write_mode": "trajectory", "replay_buffer": Writes(), "trajs_per_write": 0},
        ValueError,
        "trajs_per_write must be at least 1",
    ),
    (
        {"replay_write_mode": "trajectory", "replay_buffer": Writes(), "traj_format": "cat"},
        ValueError,
        "traj_format='cat' needs trajs_per_batch",
    ),
]


def test_wrong_arguments_are_refused() -> None:
    for options, error, told in WRONG:
        for cls in (Collector, MultiSyncCollector, MultiAsyncCollector):
            with pytest.raises(error, match=told):
                alone(cls, **options)


def test_a_format_is_to_be_said() -> None:
    with pytest.warns(FutureWarning, match="traj_format='padded' or traj_format='cat'") as caught:
        collector = Collector(env(), frames_per_batch=10, trajs_per_batch=2)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with collector:
        assert collector.traj_format == "padded"
        assert collector.next().shape == (2, 3)
    with pytest.warns(FutureWarning, match="traj_format") as caught:
        MultiSyncCollector(
            [env()], frames_per_batch=10, trajs_per_batch=2, start_method="inline"
        ).shutdown()
    assert len(caught) == 1


def test_with_a_buffer_there_is_no_format_to_say() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cls in (Collector, MultiSyncCollector, MultiAsyncCollector):
            alone(cls, trajs_per_batch=2, replay_buffer=Writes()).shutdown()


# --- the same as TorchRL's


@pytest.mark.parametrize(("layout", "frames"), [("padded", 7), ("cat", 35)])
def test_torchrl_gives_the_same(layout: str, frames: int) -> None:
    theirs = pytest.importorskip("torchrl.collectors").Collector
    envs = pytest.importorskip("torchrl.envs")

    def wrapped() -> Any:
        made = NumberedEnv(lengths=LENGTHS)
        made.spec = None
        return envs.GymWrapper(made)

    options = {"total_frames": 70, "trajs_per_batch": 2, "traj_format": layout}
    options["auto_register_policy_transforms"] = False
    there = theirs(wrapped, by_step(), frames_per_batch=frames, **options)
    expected = [batch.clone() for batch in there]
    there.shutdown()
    with Collector(wrapped, by_step(), frames_per_batch=frames, **options) as here:
        found = list(here)
    assert len(found) >= len(expected) > 5
    for one, other in zip(found, expected, strict=False):
        assert one.shape == other.shape
        # Of padded trajectories, TorchRL 0.15 names the dimension of time.
        assert list(one.names) == ([None, None] if layout == "padded" else list(other.names))
        assert keys(one) == keys(other)
        assert (one == other).all()


# --- when nothing is delivered


@pytest.mark.parametrize("workers", [0, 2])
def test_a_budget_that_ends_before_the_first_batch_is_warned_of(workers: int) -> None:
    options: dict[str, Any] = {"frames_per_batch": 8, "total_frames": 8, "traj_format": "cat"}
    options["trajs_per_batch"] = 50
    collector: Any = make(**options)
    if workers:
        collector = MultiSyncCollector([env(), env(1)], by_step(), **options)
    with collector:
        with pytest.warns(UserWarning, match="no batch is delivered") as caught:
            assert list(collector) == []
        waiting = collector.stats()["trajectories_waiting"]
        # Nothing is said twice.
        assert collector.next() is None
    assert waiting > 0
    assert str(caught[0].message) == (
        f"no batch is delivered: within total_frames=8, the number of whole trajectories is "
        f"{waiting}, but a batch has 50 (trajs_per_batch). Increase total_frames, decrease "
        "trajs_per_batch, or end episodes earlier"
    )


def test_when_it_is_warned_of() -> None:
    """By next() as well; but not of a rest after the last batch, and not with a buffer."""
    options = {"frames_per_batch": 8, "total_frames": 8, "trajs_per_batch": 50}
    with make(**options) as collector, pytest.warns(UserWarning, match="no batch is delivered"):
        assert collector.next() is None
    with make(env(lengths=[100]), replay_buffer=Buffer(), **options) as collector:
        assert list(collector) == [None]
    options |= {"total_frames": 16, "trajs_per_batch": 4}
    with make(env(lengths=[3]), **options) as collector:
        assert len(list(collector)) == 1
        assert collector.stats()["trajectories_waiting"] == 1
