"""Batches of whole trajectories: ``trajs_per_batch``, ``traj_format``, ``trajs_per_write``."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import tensordict
from collector_parts import Buffer, by_step, keys
from tensordict import TensorDictBase
from whole_parts import MASK, TRAJ_IDS, Episodes, Writes, cycling, rows_of

from trawl import Collector, MultiSyncCollector
from trawl.testing import NumberedEnv, RaggedEnv

LENGTHS = [3, 1, 5]


def env(number: int = 0, lengths: Any = LENGTHS, **more: Any) -> Any:
    return partial(NumberedEnv, number, lengths=lengths, **more)


def make(source: Any = None, **options: Any) -> Collector:
    options.setdefault("frames_per_batch", 7)
    options.setdefault("trajs_per_batch", 2)
    if "replay_buffer" not in options and options["trajs_per_batch"] is not None:
        options.setdefault("traj_format", "cat")
    return Collector(env() if source is None else source, by_step(), **options)


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
    with make(frames_per_batch=90, total_frames=90, trajs_per_batch=3) as collector:
        for number, batch in enumerate(collector, 1):
            assert len(rows_of(batch)) == 3
            assert (collector.stats()["frames"], collector.stats()["batches"]) == (90, number)
    assert number == 10


def test_it_ends_when_there_are_not_enough() -> None:
    with make(total_frames=21, trajs_per_batch=4) as collector:
        assert [len(rows_of(batch)) for batch in collector] == [4]
        assert collector.next() is None
        with pytest.warns(UserWarning, match="ends at once"):
            assert list(collector) == []
        assert not collector.closed
        assert collector.stats()["trajectories_waiting"] == 3
    assert collector.next() is None


def test_their_number_is_not_known_beforehand() -> None:
    with make(total_frames=70) as collector, pytest.raises(TypeError, match="trajs_per_batch"):
        len(collector)
    with make(total_frames=70, replay_buffer=Writes()) as collector:
        assert len(collector) == 10


def test_what_waits_keeps_no_memory_of_batches() -> None:
    with make(frames_per_batch=100, trajs_per_batch=500) as collector:
        collector.next()
        assert collector.stats()["batches_held"] <= 1


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


# --- replay buffers


BATCHES = [[0, 1], [2, 3, 4], [5, 6], [7, 8], [9, 10]]


MODE = {"replay_write_mode": "trajectory", "trajs_per_batch": None}


@pytest.mark.parametrize(
    ("group", "options", "expected"),
    [
        (None, {}, BATCHES),
        (None, MODE, BATCHES),
        (1, {"traj_format": "cat"}, [[i] for i in range(11)]),
        (2, {"traj_format": "padded"}, [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9, 10]]),
        (2, MODE, [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9, 10]]),
        (10, {}, BATCHES),
    ],
)
def test_whole_trajectories_are_written(group: Any, options: Any, expected: Any) -> None:
    """They are flat whatever the format is."""
    buffer = Writes()
    options = {"total_frames": 35, "replay_buffer": buffer, "trajs_per_write": group, **options}
    with make(**options) as collector:
        assert list(collector) == [None] * 5
        assert len(collector) == 5
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


def test_a_write_mode_may_take_turns() -> None:
    source, buffer = [env(0, [2]), env(1, [5])], Writes()
    more = {"traj_sampling": "per_env", "replay_write_mode": "trajectory"}
    more |= {"frames_per_batch": 14, "total_frames": 70, "trajs_per_batch": None}
    with make(source, replay_buffer=buffer, **more) as collector:
        list(collector)
    rows = [row for batch in buffer.written for row in rows_of(batch)]
    assert [len(row) for row in rows] == [*[2, 5] * 7, 2]


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


BUFFERED = {"replay_buffer": Writes()}
MODES = "replay_write_mode must be 'rollout' or 'trajectory', but it is 'frames'"
WRONG: list[tuple[dict[str, Any], Any, str]] = [
    ({"trajs_per_batch": 0}, ValueError, "trajs_per_batch must be at least 1, but it is 0"),
    ({"trajs_per_batch": 1.5}, TypeError, "trajs_per_batch must be an integer"),
    ({"traj_format": "nested"}, ValueError, "traj_format must be 'padded' or 'cat', but it is 'n"),
    ({"trajs_per_write": 0, **BUFFERED}, ValueError, "trajs_per_write must be at least 1"),
    ({"replay_write_mode": "frames", **BUFFERED}, ValueError, MODES),
    ({"replay_write_mode": True}, ValueError, "replay_write_mode must be .* it is True"),
    ({"traj_sampling": "x"}, ValueError, "traj_sampling must be 'per_env' or None, but it is 'x'"),
]


def test_wrong_arguments_are_refused() -> None:
    for options, error, told in WRONG:
        with pytest.raises(error, match=told):
            make(**options)


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
        make(replay_buffer=Writes()).shutdown()
        sources = [env()]
        MultiSyncCollector(
            sources, frames_per_batch=7, trajs_per_batch=2, start_method="inline", **BUFFERED
        ).shutdown()


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


def test_a_budget_that_ends_before_the_first_batch_is_warned_of() -> None:
    options: dict[str, Any] = {"frames_per_batch": 8, "total_frames": 8, "traj_format": "cat"}
    options["trajs_per_batch"] = 50
    inline = MultiSyncCollector([env(), env(1)], by_step(), start_method="inline", **options)
    for collector in (make(**options), inline):
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
    # By next() as well; but not of a rest after the last batch, and not with a buffer.
    with make(**options) as collector, pytest.warns(UserWarning, match="no batch is delivered"):
        assert collector.next() is None
    with make(env(lengths=[100]), replay_buffer=Buffer(), **options) as collector:
        assert list(collector) == [None]
    options |= {"total_frames": 16, "trajs_per_batch": 4}
    with make(env(lengths=[3]), **options) as collector:
        assert len(list(collector)) == 1
        assert collector.stats()["trajectories_waiting"] == 1
