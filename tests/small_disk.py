"""A disk that is soon full."""

import contextlib
import os
import subprocess

import pytest


@contextlib.contextmanager
def small_disk(folder, size):
    """Mounts a new disk as an existing folder, for the programs that join a mount namespace.

    Args:
        folder: where it is mounted.
        size: how large it is, as after ``mount -o size=``.

    Yields:
        The paths of the namespaces, for :func:`nursery.run`.
    """
    root = os.geteuid() == 0
    script = 'mount -t tmpfs -o "size=$1" tmpfs "$0" && echo mounted && read -r end'
    command = ["unshare", "--mount" if root else "-rm", "sh", "-c", script, folder, size]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        process = subprocess.Popen(command, **pipes)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    with process:
        if process.stdout.readline() != b"mounted\n":
            pytest.skip("no disk may be mounted here")
        yield [f"/proc/{process.pid}/ns/{name}" for name in ("user", "mnt")[root:]]
        process.communicate(b"\n")
