"""Ranks that are started from outside, such as by ``torchrun``.

A rank finds the driver, which is rank 0, through environment variables. The key that all of them
share comes from the environment, too, or from a file of the user.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from trawl.extras.clusters.launching.authentication import (
    KEY_BYTES,
    derived_key,
    read_private,
    write_private,
)
from trawl.extras.clusters.network.link import Address
from trawl.extras.clusters.network.rank import run_rank_at
from trawl.extras.clusters.network.sockets import is_loopback, own_address

#: Environment variable with the secret text from which all processes of a run derive their keys.
VARIABLE = "TRAWL_KEY"
_SHORTEST = 32


def run_rank(rank: int | None = None, timeout: float = 300.0) -> int:
    """Works for the collector of rank 0 (``launcher="env"``) until the collector is closed.

    In a script that ``torchrun`` starts::

        if int(os.environ["RANK"]) == 0:
            with DistributedCollector(..., launcher="env") as collector:
                ...
        else:
            run_rank()

    Args:
        rank: the rank, from 1. Default: ``RANK`` in the environment.
        timeout: seconds that rank 0 may take to make the collector.

    Returns:
        0, or 1 if the worker failed.

    Raises:
        RuntimeError: if the address of rank 0 is not in the environment, rank 0 does not appear in
            time, or rank 0 has another key (``TRAWL_KEY`` in its environment).
    """
    if rank is None:
        if "RANK" not in os.environ:
            raise RuntimeError("pass rank, or set the environment variable RANK")
        rank = int(os.environ["RANK"])
    host, port, world = ranks_environment(f"rank {rank}")
    if not 1 <= rank < world:
        raise RuntimeError(f"rank {rank} is not a worker: the workers are ranks 1 to {world - 1}")
    prefix = f"{start_prefix()}/{rank}/0"
    key = derived_key(environment_key(host, port) or b"", prefix)
    return run_rank_at(Address(host, port, timeout, prefix, key))


def ranks_environment(who: str) -> tuple[str, int, int]:
    """Returns the address of rank 0 and the number of ranks, as the environment has them.

    Raises:
        RuntimeError: if the environment lacks one of them; ``who`` is who needs them.
    """
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise RuntimeError(
            f"missing environment variables: {', '.join(missing)}. When ranks are started from "
            f"outside, {who} needs them; torchrun and submitit_delayed_launcher set them"
        )
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])


def start_prefix() -> str:
    """Returns the prefix of the names in the store that belong to this start of all ranks."""
    # torchrun may restart all ranks but keep the store, so each start has its own prefix.
    return f"trawl{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


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
