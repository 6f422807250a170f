"""Workers that are killed while a collector fills a replay buffer in the background."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from chaos_parts import PATIENCE, Buffer, Crew, Trouble, block, collector_of, frames_of, replaced
from killing import strike, watched
from modes import ASYNC, SYNC

from trawl.errors import WorkerDied

pytestmark = pytest.mark.usefixtures("nobody_is_left")


@SYNC
def test_killed_in_the_background(tmp_path: Path, sync: bool) -> None:
    crew = Crew(tmp_path, troubles={0: Trouble("step", 3), 1: Trouble("reset", 2)})
    buffer = Buffer(crew)
    frames = frames_of(sync, crew, 5)
    collector = collector_of(crew, sync, total_frames=frames, replay_buffer=buffer)
    with collector, replaced(r"worker \d was killed by SIGKILL", 2):
        collector.start()
        buffer.wait_for(frames)
        collector.async_shutdown(PATIENCE)
    assert buffer.frames == crew.frames == frames


@ASYNC
def test_killed_while_it_is_held(tmp_path: Path, sync: bool) -> None:
    crew = Crew(tmp_path)
    buffer = Buffer(crew)
    with collector_of(crew, sync, total_frames=-1, replay_buffer=buffer) as collector:
        collector.start()
        buffer.wait_for(40)
        with replaced(r"worker \d was killed by SIGKILL", 2):
            with collector.pause():
                held = buffer.frames
                strike(crew.pid(0), crew.pid(1))
                assert len(collector.state_dict()) >= 2
                assert buffer.frames == held
            buffer.wait_for(held + 60)
            collector.async_shutdown(PATIENCE)
    assert buffer.frames == crew.frames == collector.stats()["frames"]


@SYNC
def test_killed_while_holding_waits_for_it(tmp_path: Path, sync: bool) -> None:
    # The worker dies in the batch that pause() waits for, or in the batch before.
    crew = Crew(tmp_path, workers=3, troubles={2: Trouble("step", 25)})
    buffer = Buffer(crew)
    with collector_of(crew, sync, total_frames=-1, replay_buffer=buffer) as collector:
        with replaced("worker 2 was killed by SIGKILL", 1):
            collector.start()
            while len(crew.makers[2][0].lives.pids) == 1:
                with collector.pause():
                    held = buffer.frames
                assert buffer.frames >= held
            buffer.wait_for(buffer.frames + 60)
        collector.async_shutdown(PATIENCE)
    assert buffer.frames == crew.frames


@ASYNC
def test_killed_for_good_in_the_background(
    tmp_path: Path, sync: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    crew = Crew(tmp_path, troubles={1: Trouble("step", 13)})
    buffer = Buffer(crew)
    collector = collector_of(crew, sync, total_frames=-1, replay_buffer=buffer, max_restarts=0)
    collector.start()
    with watched(*crew.pids()) as wait:
        wait()
    with pytest.raises(WorkerDied, match="worker 1 was killed by SIGKILL, and is not replaced"):
        collector.async_shutdown(PATIENCE)
    assert collector.closed
    assert "WorkerDied" in capfd.readouterr().err


def test_a_shutdown_that_can_not_wait(tmp_path: Path) -> None:
    # The collector is synchronous, so a worker that blocks shows that the batch has begun.
    gates = [tmp_path / f"gate{worker}" for worker in range(2)]
    for gate in gates:
        os.mkfifo(gate)
    troubles = {i: Trouble("step", 23, partial(_tell_and_block, gates[i])) for i in range(2)}
    crew = Crew(tmp_path, troubles=troubles)
    buffer = Buffer(crew)
    collector = collector_of(crew, True, total_frames=-1, replay_buffer=buffer, max_restarts=0)
    collector.start()
    for gate in gates:
        gate.read_bytes()
    with pytest.raises(TimeoutError):
        collector.async_shutdown(0.1)
    assert not collector.closed
    # The end of the workers ends the batch that it waits for.
    strike(*crew.pids())
    with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
        collector.async_shutdown(PATIENCE)


def _tell_and_block(gate: Path) -> None:
    gate.write_bytes(b"blocked")
    block()
