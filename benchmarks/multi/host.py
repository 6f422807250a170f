"""A process of its own for each contender, which runs only while it is its turn.

Between its turns a contender is stopped together with all processes that it started: workers that
run ahead, poll, or keep a core busy while they wait cost the others nothing.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import psutil

BENCHMARKS = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 60.0
SAID = "\nIts output ends with:\n"


class Contestant(Protocol):
    """What a contender does, in its own process.

    Attributes:
        facts: What was measured while it was made.
        layout: Shape and dtype of the leaves of its first batch; empty if it delivers none.
    """

    facts: dict[str, float]
    layout: dict[str, str]

    def turn(self, seconds: float) -> dict[str, float]:
        """Work for about so long, and say what was measured."""

    def close(self) -> None:
        """End all processes."""


class Host:
    """Makes a contestant in a fresh interpreter, and asks it for turns.

    Args:
        build: Makes the contestant. It is pickled, and called there.
        patience: Seconds without an answer after which it has failed; None: no limit.

    Raises:
        ImportError: if the contestant is not installed.
        RuntimeError: if it fails.
    """

    def __init__(self, build: Callable[[], Contestant], patience: float | None = None) -> None:
        self._patience = patience
        self._grace = GRACE_SECONDS
        ours, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the host
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "multi.host", str(theirs.fileno())],
                cwd=BENCHMARKS,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
        self._connection = Connection(ours.detach())
        try:
            self.facts, self.layout = self._ask(build)
            self._stop()
        except BaseException:
            self.close()
            raise

    def turn(self, seconds: float) -> dict[str, float]:
        """Let the contestant work, and only then."""
        self._continue()
        measured: dict[str, float] = self._ask(seconds)
        self._stop()
        return measured

    def close(self) -> None:
        """End the contestant, and what it left behind."""
        self._continue()
        family = self._family()
        self._connection.close()  # which it waits for
        try:
            self._process.wait(self._grace)
        except subprocess.TimeoutExpired:
            print("\nA contender did not end by itself.", file=sys.stderr)
        _, left = psutil.wait_procs(family, timeout=5)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._output.close()

    def _ask(self, question: Any) -> Any:
        try:
            # Not `send`, which would hand over a network's parameters as shared memory.
            self._connection.send_bytes(pickle.dumps(question))
            if self._connection.poll(self._patience):
                kind, answer = self._connection.recv()
            else:
                kind, answer = "failed", f"no answer within {self._patience:g} s"
                self._grace = 0.0
        except (EOFError, ConnectionError):
            kind, answer = "failed", "the process ended"
        if kind == "missing":
            raise ImportError(answer)
        if kind == "failed":
            raise RuntimeError(f"{answer}{SAID}{self._said()}")
        return answer

    def _said(self) -> str:
        self._output.seek(0)
        return self._output.read()[-4000:].decode(errors="replace")

    def _family(self) -> list[psutil.Process]:
        """The process and all below it, elders first."""
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _stop(self) -> None:
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def _continue(self) -> None:
        for process in reversed(self._family()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def serve(connection: Connection) -> None:
    """Make the contestant that is asked for, and give it turns until nobody asks any more."""
    contestant: Contestant | None = None
    with contextlib.suppress(EOFError):
        while True:
            asked = connection.recv_bytes()
            try:
                question = pickle.loads(asked)
                if contestant is None:
                    contestant = question()
                    answer: Any = (contestant.facts, contestant.layout)
                else:
                    answer = contestant.turn(question)
                connection.send(("done", answer))
            except ImportError as error:
                connection.send(("missing", str(error)))
            except Exception:
                connection.send(("failed", traceback.format_exc()))
    if contestant is not None:
        contestant.close()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
