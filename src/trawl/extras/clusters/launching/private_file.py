"""Files that only the user of this process can read or write."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def write_private(folder: Path, data: bytes) -> Path:
    """Writes a new file that nobody else can read.

    Args:
        folder: the folder of the file; created if it is missing.
        data: content of the file.

    Returns:
        The path of the file, whose name nobody can guess.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{secrets.token_hex(16)}.private"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    return path


def read_private(path: Path) -> bytes:
    """Reads a file that no other user can have written or read.

    Raises:
        OSError: if there is no such file.
        PermissionError: if the file belongs to another user, or other users have rights to it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
            raise PermissionError(
                f"{path} must be owned by the user of this process (uid {os.geteuid()}) and have "
                f"mode 0600, but it is owned by uid {found.st_uid} and has mode "
                f"{stat.S_IMODE(found.st_mode):04o}: delete it. If that does not help, use a "
                "folder on a file system that supports owners and modes"
            )
        return file.read()
