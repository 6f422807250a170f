"""Key that ranks share if they are started from outside."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from trawl.backends.authentication import KEY_BYTES
from trawl.backends.network import is_loopback, own_address
from trawl.backends.private_file import read_private, write_private

#: Environment variable with the secret text from which all processes of a run derive their keys.
VARIABLE = "TRAWL_KEY"
_SHORTEST = 32


def environment_key(host: str, port: int) -> bytes | None:
    """Returns the key of all ranks that connect to an address.

    The key is derived from the environment variable ``TRAWL_KEY``. If the variable is not set, and
    all ranks are on this machine, they use the key in a file of this user. The file is created on
    first use.

    Returns:
        The key; None if there is none.

    Raises:
        ValueError: if the text in the variable is too short for a key.
        PermissionError: if other users can read or write the file.
    """
    text = os.environ.get(VARIABLE)
    if text:
        if len(text) < _SHORTEST:
            raise ValueError(
                f"{VARIABLE} has {len(text)} characters, but must have at least {_SHORTEST} that "
                "nobody can guess: `openssl rand -hex 32` generates such a key"
            )
        return hashlib.sha256(text.encode()).digest()
    return _users_key() if _within_this_machine(host, port) else None


def _within_this_machine(host: str, port: int) -> bool:
    """Returns True if all ranks are processes of this machine."""
    everywhere = os.environ.get("WORLD_SIZE")
    if everywhere is not None and os.environ.get("LOCAL_WORLD_SIZE") == everywhere:
        return True
    return is_loopback(own_address(host, port))


def _users_key() -> bytes | None:
    """Returns the key in the file of this user; None if the file can't be created."""
    try:
        path = _folder() / "key"
        if not path.exists():
            _write_key(path)
    except (OSError, RuntimeError):
        return None
    return read_private(path)


def _folder() -> Path:
    given = os.environ.get("XDG_STATE_HOME")
    return (Path(given) if given else Path.home() / ".local" / "state") / "trawl"


def _write_key(path: Path) -> None:
    written = write_private(path.parent, os.urandom(KEY_BYTES))
    try:
        # Another process may have created the file first.
        with contextlib.suppress(FileExistsError):
            os.link(written, path)
    finally:
        written.unlink()
