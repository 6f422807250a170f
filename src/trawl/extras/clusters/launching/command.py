"""Launcher that starts workers with a user's command, such as ``ssh`` or ``kubectl exec``.

Run as a program, this module is the worker that the command has to start.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from typing_extensions import override

from trawl.backends.processes.loop import explain, leave
from trawl.errors import WorkerDied
from trawl.extras.clusters.launching.authentication import read_private, write_private
from trawl.extras.clusters.launching.launch import Ended, Launcher, Process
from trawl.extras.clusters.network.link import Address
from trawl.extras.clusters.network.rank import run_rank_at

Template = str | Sequence[str]

#: Environment variable with the key of the worker that a command starts, in hexadecimal digits.
KEY = "TRAWL_WORKER_KEY"
_KEY_FILE = "key_file"
PLACEHOLDERS = ("worker", "arguments", "index", "rank", "address", "port", "name", _KEY_FILE)
# When a command ends, the end of its stderr is reported: at most this many lines, and bytes.
_TAIL = 20
_TAIL_BYTES = 8192
# A command that has never started its worker is given up if it ends so many times in a row with the
# same status: 1 if the shell can't run it, otherwise 3, because a host may be busy.
_TRIES = {126: 1, 127: 1}
_TRIES_OTHERWISE = 3
# Seconds that a command may run on after its worker has ended, and that the command's other
# processes may run on after the command has ended.
_LINGERING = 5.0
# Seconds to wait for the last errors of a command that has ended. Its children may still hold the
# pipe open.
_LAST_ERRORS = 1.0
# Seconds to wait for the end of a command that was killed.
_JOINING = 5.0


def check_template(name: str, template: Any) -> None:
    """Checks the template of a command.

    Raises:
        TypeError: if the template is neither a string nor a list of strings.
        ValueError: if the template has an unknown placeholder, or does not start a worker.
    """
    if not isinstance(template, (str, list, tuple)) or not all(
        isinstance(part, str) for part in template
    ):
        raise TypeError(f"{name} must be a string or a list of strings, but it is {template!r}")
    try:
        found = _fields(template)
    except ValueError as error:
        raise ValueError(
            f"{name}={template!r}: {error}. For a literal brace write {{{{ or }}}}"
        ) from None
    known = ", ".join(f"{{{one}}}" for one in PLACEHOLDERS)
    for field in sorted(found.difference(PLACEHOLDERS)):
        raise ValueError(
            f"{name} has the unknown placeholder {{{field}}}. The placeholders are {known}; for "
            f"text in braces write {{{{{field}}}}}"
        )
    if not found & {"worker", "arguments"}:
        raise ValueError(
            f"{name} must contain the placeholder {{worker}} (or {{arguments}}), for the command "
            f"line that starts a worker, but it is {template!r}"
        )


def _fields(template: Template) -> set[str]:
    """Returns the placeholders in a template."""
    parts = [template] if isinstance(template, str) else template
    found = (field for part in parts for _, field, _, _ in string.Formatter().parse(part))
    return {field for field in found if field is not None}


class CommandLauncher(Launcher):
    """Starts each worker with a command, and ends the command's processes when the worker ends.

    The command receives the worker's key in its environment, and as the first line of its input.
    The key is never part of the command line, which other users can see.

    Args:
        template: the command, with placeholders in braces (see ``launcher_command`` of
            :class:`~trawl.extras.clusters.remote.RemoteOptions`). A string is
            run by a shell, and a list is run without a shell.
    """

    def __init__(self, template: Template) -> None:
        self._template = template
        self._folder: Path | None = None
        self._started: list[_Command] = []
        self._tries: dict[int, list[_Command]] = {}

    @override
    def start(self, index: int, address: Address, ended: Ended) -> Process:
        tries = self._tries.setdefault(index, [])
        _check_hope(index, tries)
        values = {
            "index": index,
            "rank": index + 1,
            "address": address.host,
            "port": address.port,
            "name": address.prefix,
        }
        arguments = ["-m", __name__, address.host, str(address.port), address.prefix]
        arguments.append(f"{address.timeout:g}")
        if _KEY_FILE in _fields(self._template):
            values[_KEY_FILE] = self._write_key(address.key)
            arguments.append(str(values[_KEY_FILE]))
        worker = [sys.executable, *arguments]
        joined = {"worker": shlex.join(worker), "arguments": shlex.join(arguments)}
        if isinstance(self._template, str):
            quoted = {name: shlex.quote(str(value)) for name, value in values.items()}
            command = ["/bin/sh", "-c", self._template.format(**quoted, **joined)]
            shown = command[-1]
        else:
            lists = {"{worker}": worker, "{arguments}": arguments}
            values |= joined
            parts = [lists.get(part) or [part.format(**values)] for part in self._template]
            command = [part for some in parts for part in some]
            shown = shlex.join(command)
        self._started = [one for one in self._started if one.watched]
        started = _Command(command, shown, address.key.hex(), ended)
        self._started.append(started)
        tries.append(started)
        return started

    def _write_key(self, key: bytes) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="trawl"))
        return write_private(self._folder, key)

    @override
    def close(self) -> None:
        for command in self._started:
            command.kill()
            command.join()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _check_hope(index: int, tries: list[_Command]) -> None:
    """Checks that the command of a worker has started the worker before, or may still do so.

    Raises:
        WorkerDied: if the command has ended too often, each time with the same status.
    """
    if any(one.joined for one in tries):
        tries[:] = [one for one in tries if one.joined][:1]
    elif tries:
        last = tries[-1]
        same = takewhile(lambda one: one.status == last.status, reversed(tries))
        if (count := len(list(same))) >= _TRIES.get(last.status or 0, _TRIES_OTHERWISE):
            times = "" if count == 1 else f" {count} times in a row"
            advice = "" if last.status else ". The command must run for as long as its worker does"
            raise WorkerDied(
                f"launcher_command did not start worker {index}{times}: before the worker joined, "
                f"the command {last.end}{advice}"
            )


class _Command(Process):
    """Running command that starts a worker.

    Args:
        command: the command line, as a list.
        shown: the command as text for error messages.
        key: the worker's key, in hexadecimal digits.
        ended: function to call with the reason when the command has ended.

    Attributes:
        joined: True if the worker has joined.
        status: exit status of the command; None while it runs.
        end: how the command has ended, as the end of a sentence.
    """

    reports_end = True

    def __init__(self, command: list[str], shown: str, key: str, ended: Ended) -> None:
        self.joined = False
        self.status: int | None = None
        self.end = ""
        self._shown = shown
        self._tail = b""
        self._killed = threading.Event()
        self._timer: threading.Timer | None = None
        try:
            # The command runs in a new session. Therefore Ctrl-C does not reach it, and all its
            # processes can be ended together.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, KEY: key},
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"launcher_command can't be run: {shown}: {error}") from None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as given:
            given.write(f"{key}\n".encode())
        self._thread = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        self._thread.start()

    @property
    def watched(self) -> bool:
        """True until the end of the command has been reported."""
        return self._thread.is_alive()

    @override
    def kill(self) -> None:
        self._killed.set()
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)

    @override
    def note_joined(self) -> None:
        self.joined = True

    @override
    def expect_end(self) -> None:
        if self._process.poll() is None:
            self._timer = threading.Timer(_LINGERING, self.kill)
            self._timer.daemon = True
            self._timer.start()

    def join(self) -> None:
        """Waits until the end of the command has been reported, but only for a few seconds."""
        if self._thread is not threading.current_thread():
            self._thread.join(_JOINING)

    def _signal(self, signum: int) -> bool:
        """Sends a signal to all processes of the command; returns True if there are any."""
        try:
            os.killpg(self._process.pid, signum)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _watch(self, ended: Ended) -> None:
        errors = threading.Thread(target=self._read, args=(self._process.stderr,), daemon=True)
        errors.start()
        status = self._process.wait()
        if self._timer is not None:
            self._timer.cancel()
        # A command (such as a shell) may leave processes behind. SIGTERM lets these processes close
        # their environments.
        left = self._signal(signal.SIGTERM)
        errors.join(_LAST_ERRORS)
        lines = self._tail.decode(errors="replace").strip().splitlines()
        tail = "\n".join(lines[-_TAIL:])
        said = f"; its stderr ended with:\n{tail}\n" if tail else ""
        self.end = f"{explain(status)} (launcher_command: {self._shown!r}{said})"
        self.status = status
        ended(self.end)
        if left:
            self._killed.wait(_LINGERING)
            self._signal(signal.SIGKILL)

    def _read(self, stream: IO[bytes]) -> None:
        """Writes the command's stderr to the stderr of this process, and keeps the end of it."""
        with stream:
            # A progress bar may be one long line.
            while chunk := os.read(stream.fileno(), 1 << 16):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
                with contextlib.suppress(OSError):
                    os.write(2, chunk)


def _own_key(file: Path | None) -> bytes:
    """Returns the key of this worker: from a file, the environment, or the first line of input."""
    if file is not None:
        key = read_private(file)
        # The file is no longer needed.
        with contextlib.suppress(OSError):
            file.unlink()
        return key
    text = os.environ.pop(KEY, None) or sys.stdin.readline().strip()
    if not text:
        raise RuntimeError(
            "this worker has no key: launcher_command must pass on the environment variable "
            f"{KEY} or the standard input, or contain {{{_KEY_FILE}}}, the path of a file that "
            "this worker can read"
        )
    return bytes.fromhex(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a worker, and returns its exit status."""
    parser = argparse.ArgumentParser(description="Runs a worker that launcher_command started.")
    parser.add_argument("host", help="address of the collector")
    parser.add_argument("port", type=int, help="port of the collector")
    parser.add_argument("name", help="name of this worker")
    parser.add_argument("timeout", type=float, help="seconds within which the worker must join")
    parser.add_argument("key_file", type=Path, nargs="?", help="file with the key of this worker")
    given = parser.parse_args(arguments)
    key = _own_key(given.key_file)
    return run_rank_at(Address(given.host, given.port, given.timeout, given.name, key))


if __name__ == "__main__":
    leave(main())
