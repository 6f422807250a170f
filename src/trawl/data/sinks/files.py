"""Safe access to the files of a dataset.

Only files inside the dataset's directory are opened, and written files survive a power cut.

A dataset may come from an untrusted source. Links, devices, pipes and paths with ``..`` inside the
dataset are refused. The path of the directory itself may contain links.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import reprlib
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Number of files to sync at the same time, so that a file system can wait for the disk only once.
_SYNCED_TOGETHER = 16
_NO_REGULAR_FILE = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)
# Errors of file systems that can't sync a directory.
_NOT_SYNCED = (errno.EINVAL, errno.ENOTSUP)
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Maximum size of a JSON file in bytes; the files that sinks write are far smaller.
_LONGEST = 64 << 20
_HERE = os.O_DIRECTORY | os.O_CLOEXEC


def damaged(path: str | os.PathLike[str], what: str) -> ValueError:
    """Returns an error that describes the damage to a file of a dataset."""
    name = str(path)
    return ValueError(f"{name if name.isprintable() else repr(name)} is damaged: {what}")


@contextmanager
def reading(path: Path, *kinds: type[BaseException]) -> Iterator[None]:
    """Reports errors that a library raises within the context as a damaged file.

    Args:
        path: path of the file, for error messages.
        *kinds: types of the errors that a damaged file can cause.
    """
    try:
        yield
    except kinds as error:
        # An OSError about the content of the file has no errno.
        if isinstance(error, ImportError) or getattr(error, "errno", None) is not None:
            raise
        raise damaged(path, str(error) or type(error).__name__) from error


def is_inside(name: str) -> bool:
    """Returns True if a relative path from a dataset stays inside the dataset's directory."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


def open_inside(directory: Path, name: str, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file of a dataset.

    Args:
        directory: path of the dataset.
        name: path of the file within the dataset.
        flags: flags for ``os.open``.

    Returns:
        The file's descriptor.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is not a regular file, or its path in the dataset contains a link.
        OSError: if the file can't be opened.
    """
    *folders, last = name.split("/")
    path = directory / name
    place = os.open(directory, os.O_RDONLY | _HERE)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | _HERE, dir_fd=place)
            os.close(place)
            place = inner
        # O_NONBLOCK, because opening a pipe could block otherwise.
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(last, flags, dir_fd=place)
    except OSError as error:
        if error.errno in _NO_REGULAR_FILE:
            raise _no_file(path) from None
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from None
    finally:
        os.close(place)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _no_file(path)
    return file


def open_frames(directory: Path, name: str, flags: int = os.O_RDONLY) -> int:
    """Opens a file that holds frames, with the same checks as :func:`open_inside`.

    Raises:
        ValueError: also if the file is missing, because the record says that it exists.
    """
    try:
        return open_inside(directory, name, flags)
    except FileNotFoundError:
        raise damaged(directory, f"it lacks the file {name!r}") from None


def read_json(file: int, path: Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds, and closes the file.

    Args:
        file: descriptor of the file.
        path: path of the file, for error messages.

    Raises:
        ValueError: if the file does not hold a JSON object.
    """
    with open(file, "rb") as opened:
        content = opened.read(_LONGEST + 1)
    if len(content) > _LONGEST:
        raise damaged(path, f"it is longer than {_LONGEST:,} bytes")
    try:
        found = json.loads(content)
    except RecursionError:
        raise damaged(path, "it is nested too deeply") from None
    except ValueError as error:
        raise damaged(path, str(error)) from None
    if not isinstance(found, dict):
        raise damaged(path, f"it must contain a JSON object, but it contains {reprlib.repr(found)}")
    return found


@contextmanager
def explaining_full_disks(directory: Path, shown: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the path and the free space to errors that a full disk causes in the context.

    Args:
        directory: absolute path of the directory that is written to.
        shown: path of the directory for error messages.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(directory.parent).free
        reason = f"{os.strerror(error.errno)} ({free:,} bytes free)"
        raise OSError(error.errno, reason, str(shown)) from error


def lock(directory: Path, busy: str) -> int:
    """Locks a directory until the returned descriptor is closed or the process ends.

    Args:
        directory: path of the directory.
        busy: message of the error if the directory is locked already.

    Raises:
        BlockingIOError: if the directory is locked already.
    """
    file = os.open(directory, os.O_RDONLY | _HERE)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise BlockingIOError(error.errno, busy, str(directory)) from None
    return file


def check_plain(directory: Path) -> None:
    """Checks that a dataset has only regular files and folders, before a sink writes to it.

    Raises:
        ValueError: if the dataset contains a link, a device or a pipe.
    """
    for place, folders, files in os.walk(directory, onerror=_raise):
        for name in (*folders, *files):
            mode = os.lstat(os.path.join(place, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise _no_file(Path(place, name))


def _raise(error: OSError) -> None:
    raise error


def _no_file(path: Path) -> ValueError:
    return damaged(
        path, "it is not a regular file, or its path contains a link, and links are not followed"
    )


def create(path: Path) -> int:
    """Creates a file for writing, and replaces any file that a failed attempt has left.

    Returns:
        The file's descriptor.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def write_json(path: Path, content: Mapping[str, Any], *, wait: bool = True) -> None:
    """Writes a JSON file, which atomically replaces an existing file.

    Args:
        path: path of the file.
        content: object to write.
        wait: True to wait until the file is on the disk.
    """
    text = json.dumps(content, indent=2, allow_nan=False)
    new = path.with_name(f".{path.name}")
    with open(create(new), "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        if wait:
            os.fsync(file.fileno())
    os.replace(new, path)
    if wait:
        sync([path.parent])


def sync(paths: Iterable[int | str | os.PathLike[str]]) -> None:
    """Waits until files or directories, given as paths or descriptors, are on the disk."""
    several = list(paths)
    if len(several) > 1:
        with ThreadPoolExecutor(min(len(several), _SYNCED_TOGETHER)) as pool:
            try:
                waits = [pool.submit(_sync, path) for path in several]
            except RuntimeError:  # no thread can start while the interpreter exits
                waits = []
            for wait in waits:
                wait.result()
        if waits:
            return
    for path in several:
        _sync(path)


def sync_tree(directory: Path) -> None:
    """Waits until a directory and everything in it are on the disk."""
    sync([*directory.rglob("*"), directory])


def _sync(path: int | str | os.PathLike[str]) -> None:
    file = path if isinstance(path, int) else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in _NOT_SYNCED or not stat.S_ISDIR(os.fstat(file).st_mode):
            raise
    finally:
        if file is not path:
            os.close(file)
