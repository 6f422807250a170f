"""Signatures by which a program recognises pickles that its own processes made."""

from __future__ import annotations

import hmac
import secrets

# A process that another process of the program starts gets the key of the other process.
_keys = [secrets.token_bytes(32)]


def signing_key() -> bytes:
    """Returns the key of this process, which must be passed to the processes that it starts."""
    return _keys[0]


def use_signing_key(key: bytes) -> None:
    """Makes this process sign with the key of the process that started it."""
    _keys[0] = key


def sign(data: bytes) -> bytes:
    """Returns the signature of data."""
    return hmac.digest(_keys[0], data, "sha256")


def is_own(data: bytes, signature: bytes) -> bool:
    """Returns True if a process of this program has signed the data."""
    return hmac.compare_digest(signature, sign(data))
