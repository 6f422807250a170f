"""Environments in processes that fail, die or hang, and are restarted while the others go on."""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos_parts import LENGTHS, PATIENCE, Maker, Trouble, act, block, fail, kill
from tensordict import TensorDictBase

from trawl.collectors import AsyncBatchedCollector, Collector
from trawl.envs import ParallelEnv
from trawl.errors import WorkerDied
from trawl.keys import MASK, TRAJ_IDS
from trawl.testing import NumberedEnv, Script
from trawl.testing.scripted_envs import ScriptedLooseEnv

ENVS = 4


#: Faults of the second environment: at which call, what happens, and what is told.
FAULTS = {
    "exception": (
        Trouble("step", 9, fail),
        "ZeroDivisionError: in environment 1: ZeroDivisionError: the sea is rough",
    ),
    "killed": (
        Trouble("step", 9),
        r"WorkerDied: environments? [01 to]+: its process was killed by SIGKILL",
    ),
    "hang": (
        Trouble("step", 5, block),
        "WorkerDied: environment 1: its process took more than 3 s for a step",
    ),
    "reset": (Trouble("reset", 3, fail), "ZeroDivisionError"),
}


def together(makers: list[Any], frames: int, total: int, each: int, **options: Any) -> Any:
    groups = options.pop("groups", 1)
    timeout = options.pop("worker_timeout", None)
    env = ParallelEnv(
        len(makers), makers, envs_per_worker=each, groups=groups, worker_timeout=timeout
    )
    return Collector(
        env, act, frames_per_batch=frames, total_frames=total, on_env_error="restart", **options
    )


def ready(makers: list[Any], frames: int, total: int, each: int, **options: Any) -> Any:
    return AsyncBatchedCollector(
        makers,
        policy=act,
        frames_per_batch=frames,
        total_frames=total,
        envs_per_worker=each,
        on_env_error="restart",
        **options,
    )


MODES = {"groups": partial(together, groups=2), "ready": ready}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


class Lives:
    """Checks the frames of environments whose number is another one in each life."""

    def __init__(self) -> None:
        self.frames = 0
        self._steps: dict[int, int] = {}
        self._last: dict[int, tuple[list[int], bool, int]] = {}
        self._batch = 0

    def add(self, batch: TensorDictBase) -> None:
        """Checks a batch; frames of an environment are in order."""
        self._batch += 1
        flat = batch.reshape(-1)
        mask = flat.get(MASK, None)
        flat = flat if mask is None else flat[mask]
        now, then = NumberedEnv.numbers(flat).tolist(), NumberedEnv.numbers(flat["next"]).tolist()
        done = flat["next", "done"].reshape(-1).tolist()
        ids = flat[TRAJ_IDS].tolist()
        for before, after, ended, trajectory in zip(now, then, done, ids, strict=True):
            number, episode, step, total, _ = before
            assert total == self._steps.get(number, 0), "a step is missing, or there twice"
            assert after[:4] == [number, episode, step + 1, total + 1]
            if number in self._last:
                last, had_ended, last_id = self._last[number]
                assert last == before or (step == 0 and had_ended)
                assert (trajectory != last_id) == had_ended
            self._steps[number] = total + 1
            self._last[number] = after, ended, trajectory
        self.frames += len(now)

    def cut(self) -> int:
        """Returns the number of lives that ended within an episode, marked as truncated."""
        return sum(
            ended and numbers[2] != LENGTHS[numbers[1] % len(LENGTHS)]
            for numbers, ended, _ in self._last.values()
        )

    @property
    def lives(self) -> int:
        return len(self._steps)


@contextmanager
def restarts(pattern: str, count: int | None = None) -> Iterator[None]:
    """Checks that the only warnings in the context are about restarts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [str(one.message) for one in caught]
    text = rf"environment \d+ failed .* with {pattern}"
    assert all(re.match(text, message) for message in found), found
    assert found if count is None else len(found) == count, found


def makers_of(folder: Path, trouble: Trouble | None = None, count: int = ENVS) -> list[Maker]:
    return [Maker(folder, 0, lane, trouble if lane == 1 else None) for lane in range(count)]


def end(pid: int) -> None:
    """Kills a process, and waits for its end."""
    descriptor = os.pidfd_open(pid)
    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    select.select([descriptor], [], [], PATIENCE)
    os.close(descriptor)


def run_until(collector: Any, lives: Lives, count: int) -> None:
    """Checks batches until ``count`` lives have begun."""
    for batch in collector:
        lives.add(batch)
        if lives.lives >= count:
            break
    assert lives.lives == count
    assert lives.frames == collector.stats()["frames"]


@pytest.mark.parametrize(
    ("fault", "each", "options"),
    [
        ("exception", 1, {"min_batch_size": ENVS, "server_timeout": PATIENCE}),
        ("killed", 2, {}),
        ("hang", 1, {"worker_timeout": 3}),
        ("reset", 1, {}),
    ],
)
def test_a_failed_environment_is_restarted(
    tmp_path: Path, fault: str, each: int, options: dict[str, Any]
) -> None:
    """Functions that can't be imported make the environment anew."""
    trouble, told = FAULTS[fault]
    sources = [lambda maker=maker: maker() for maker in makers_of(tmp_path, trouble)]
    lives = Lives()
    with restarts(told, each), ready(sources, 40, -1, each, **options) as collector:
        run_until(collector, lives, ENVS + each)
        assert collector.stats()["env_restarts"] == each
    # In step with the others, its last frame is in the batch that is being made.
    assert lives.cut() == 1 if "min_batch_size" in options else lives.cut() <= each


@modes
def test_an_environment_that_always_fails_is_given_up(tmp_path: Path, mode: Any) -> None:
    makers = makers_of(tmp_path, Trouble("step", 0, fail, lives=100))
    with (
        restarts("ZeroDivisionError", 9),
        pytest.raises(ZeroDivisionError) as raised,
        mode(makers, 40, -1, 1) as collector,
    ):
        list(collector)
    assert "failed 10 times without a successful step" in "".join(raised.value.__notes__)


@modes
def test_an_environment_that_can_not_be_made_again_is_given_up(tmp_path: Path, mode: Any) -> None:
    class Breaks:
        def __call__(self) -> NumberedEnv:
            if (tmp_path / "made").exists():
                raise OSError("no display")
            (tmp_path / "made").touch()
            return Maker(tmp_path, 0, 1, Trouble("step", 3, kill))()

    makers = makers_of(tmp_path)
    makers[1] = Breaks()  # type: ignore[call-overload]
    with (
        restarts("(WorkerDied|OSError)"),
        pytest.raises(OSError, match="no display"),
        mode(makers, 40, -1, 1) as collector,
    ):
        list(collector)


@modes
def test_a_storm(tmp_path: Path, mode: Any) -> None:
    """Processes are killed again and again; each step is delivered once at most."""
    makers, lives, kills = makers_of(tmp_path), Lives(), 4
    randomly = random.Random(0)
    with restarts("WorkerDied"), mode(makers, 40, -1, 1) as collector:
        batches = iter(collector)
        for number in range(1, kills + 1):
            for _ in range(randomly.randrange(1, 4)):
                lives.add(next(batches))
            os.kill(randomly.choice(makers).lives.pids[-1], signal.SIGKILL)
            while sum(len(maker.lives.pids) for maker in makers) < ENVS + number:
                lives.add(next(batches))
        assert collector.stats()["frames"] == lives.frames
    pids = [pid for maker in makers for pid in maker.lives.pids]
    assert len(pids) == ENVS + kills
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(processes, PATIENCE)
    assert not alive


@pytest.mark.parametrize(
    ("mode", "call", "frames"),
    [
        (MODES["groups"], "set_seed", 40),
        (together, "reset", 40),
        (ready, "set_seed", 40),
        (ready, "reset", 42),
    ],
)
def test_a_process_that_died_between_batches(
    tmp_path: Path, mode: Any, call: str, frames: int
) -> None:
    makers = makers_of(tmp_path)
    options = {"min_batch_size": ENVS, "server_timeout": PATIENCE} if mode is ready else {}
    with warnings.catch_warnings(), mode(makers, frames, -1, 1, **options) as collector:
        warnings.simplefilter("ignore")
        collector.next()
        end(*makers[2].lives.pids)
        collector.set_seed(0) if call == "set_seed" else collector.reset()
        for _ in range(4):
            frames_of_it = collector.next().reshape(-1)
        numbers = NumberedEnv.numbers(frames_of_it)[:, 0]
        assert 102 in numbers.tolist()
        assert len(makers[2].lives.pids) == 2


def test_a_process_that_died_while_its_frame_waited(tmp_path: Path) -> None:
    """Its frame is dropped, and not taken for the first one of its next life."""
    makers, lives = makers_of(tmp_path), Lives()
    options = {"min_batch_size": ENVS, "server_timeout": PATIENCE}
    with restarts("WorkerDied", 1), ready(makers, 4 * 9 + 2, -1, 1, **options) as collector:
        lives.add(collector.next())
        end(*makers[3].lives.pids)
        collector.reset(0)
        later = collector.next()
        later = later[later["env_index"] == 3]
        now = NumberedEnv.numbers(later)[:, 0]
        assert (NumberedEnv.numbers(later["next"])[:, 0] == now).all()
        assert set(now.tolist()) == {103}


def test_failures_of_an_environment_that_is_used_again_are_raised(tmp_path: Path) -> None:
    makers = makers_of(tmp_path, Trouble("step", 12, fail))
    env = ParallelEnv(ENVS, makers)
    collector = Collector(env, act, frames_per_batch=40, on_env_error="restart")
    collector.next()
    collector.shutdown(close_env=False)
    with pytest.raises(ZeroDivisionError):
        env.rollout(10)
    env.close()


def test_without_restarts_a_hang_is_an_error(tmp_path: Path) -> None:
    makers = makers_of(tmp_path, Trouble("step", 3, block))
    env = ParallelEnv(ENVS, makers, worker_timeout=1)
    with (
        Collector(env, act, frames_per_batch=40) as collector,
        pytest.raises(WorkerDied, match="environment 1: its process took more than 1 s"),
    ):
        list(collector)


def test_a_thread_can_not_be_killed() -> None:
    with pytest.raises(ValueError, match="worker_timeout=1 needs backend='process'"):
        ParallelEnv(2, NumberedEnv, backend="thread", worker_timeout=1)


def test_groups_have_no_effect_without_a_fixed_layout() -> None:
    env = ParallelEnv(2, partial(ScriptedLooseEnv, Script()), groups=2)
    with pytest.warns(UserWarning, match="groups of a ParallelEnv have no effect here"):
        collector = Collector(env, frames_per_batch=40)
    with collector:
        assert collector.next().shape == (2, 20)
