"""Files of a dataset: opened inside it only, and written so that they outlive a power cut.

A dataset may come from a stranger. Nothing in it is followed out of its directory: no link, no
path with ``..``, no device and no pipe. The directory itself may be reached through a link.
"""

from __future__ import annotations

import errno
import json
import os
import reprlib
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# A file system waits for the disk once for several files, if they are asked for together.
_SYNCED_TOGETHER = 16
_NO_REGULAR_FILE = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)
# File systems that can't sync a directory say so.
_NOT_SYNCED = (errno.EINVAL, errno.ENOTSUP)
# Of a JSON file; none of ours comes near it.
_LONGEST = 64 << 20
_HERE = os.O_DIRECTORY | os.O_CLOEXEC


def damaged(path: str | os.PathLike[str], what: str) -> ValueError:
    """The error that says what is wrong with a file of a dataset."""
    name = str(path)
    return ValueError(f"{name if name.isprintable() else repr(name)} is damaged: {what}")


def is_inside(name: str) -> bool:
    """Returns whether a path, as a dataset tells it, stays in the directory it is relative to."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


def open_inside(directory: Path, name: str, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file of a dataset.

    Args:
        directory: the dataset.
        name: the file's path in it.
        flags: of ``os.open``.

    Returns:
        Its descriptor.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: if it is no regular file, or is reached through a link.
        OSError: if it can't be opened.
    """
    *folders, last = name.split("/")
    path = directory / name
    place = os.open(directory, os.O_RDONLY | _HERE)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | _HERE, dir_fd=place)
            os.close(place)
            place = inner
        # A pipe without a reader must not hold us.
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
    """Opens a file that holds frames, as :func:`open_inside` does.

    Raises:
        ValueError: also if it is not there, since the record says that it is.
    """
    try:
        return open_inside(directory, name, flags)
    except FileNotFoundError:
        raise damaged(directory, f"it lacks {name!r}") from None


def read_json(file: int, path: Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds, and closes the file.

    Args:
        file: its descriptor.
        path: its path, for messages.

    Raises:
        ValueError: if it holds no object.
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
        raise damaged(path, f"it must be an object, but it is {reprlib.repr(found)}")
    return found


def check_plain(directory: Path) -> None:
    """Checks that a dataset, which is to be written into, consists of files and folders.

    Raises:
        ValueError: if there is a link, a device or a pipe.
    """
    for place, folders, files in os.walk(directory, onerror=_raise):
        for name in (*folders, *files):
            mode = os.lstat(os.path.join(place, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise _no_file(Path(place, name))


def _raise(error: OSError) -> None:
    raise error


def _no_file(path: Path) -> ValueError:
    return damaged(path, "it is no regular file, or a link leads to it, and none is followed")


def create(path: Path) -> int:
    """Opens a new file for writing, in the place of one that an attempt before may have left."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def write_json(path: Path, content: Mapping[str, Any], *, wait: bool = True) -> None:
    """Puts a JSON file into the place of one that may be there, at once.

    Args:
        path: the file.
        content: what it holds.
        wait: whether to wait until the disk has it.
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
    """Waits until the disk has files or directories, given by their paths or descriptors."""
    several = list(paths)
    if len(several) > 1:
        with ThreadPoolExecutor(min(len(several), _SYNCED_TOGETHER)) as pool:
            try:
                waits = [pool.submit(_sync, path) for path in several]
            except RuntimeError:  # no thread begins while the interpreter ends
                waits = []
            for wait in waits:
                wait.result()
        if waits:
            return
    for path in several:
        _sync(path)


def sync_tree(directory: Path) -> None:
    """Waits until the disk has a directory, and all that is under it."""
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
