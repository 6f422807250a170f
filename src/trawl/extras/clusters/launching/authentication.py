"""Authentication of connections between processes that share a key, and of their messages.

Both ends of a connection prove that they know the key: each sends a random number, and answers with
an HMAC (RFC 2104) over both numbers. Each message then carries an HMAC over a counter and its
content, so forged, changed and replayed messages are rejected. The HMAC does not cover the memory
of large arrays (:func:`trawl.extras.clusters.network.frames.seal`). Nothing is encrypted.

Files with keys can be read and written only by the user of the process.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

KEY_BYTES = NONCE_BYTES = TAG_BYTES = 32
_HELLO_BYTES = hashlib.sha256().digest_size + NONCE_BYTES
# First byte of the answer to a greeting.
_EXPECTED, _UNKNOWN = b"+", b"-"
_NUMBER = struct.Struct("!Q")
# Seconds that a client waits before it reconnects, if the listener closed the connection.
_PAUSE = 0.1
# Rights of others to a file.
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class AuthenticationError(RuntimeError):
    """Raised if the other end lacks the key, or a message did not come from the other end."""


def derived_key(key: bytes, purpose: str) -> bytes:
    """Derives a key for one purpose. The derived key reveals nothing about the original one."""
    return hmac.digest(key, purpose.encode(), "sha256")


class Session:
    """Authenticates the messages of one connection, both ways.

    Each direction has its own key and its own message counter. The keys depend on a random number
    from each end, so messages from other connections are rejected.

    Args:
        key: the key that both ends know.
        purpose: the purpose of the connection; both ends must pass the same text.
        nonces: the random numbers of the client and of the server.
        client: True if this end is the client.
    """

    def __init__(self, key: bytes, purpose: str, nonces: tuple[bytes, bytes], client: bool) -> None:
        seed = hmac.digest(derived_key(key, purpose), b"".join(nonces), "sha256")
        to_server, to_client = derived_key(seed, "to server"), derived_key(seed, "to client")
        self._sending = hmac.new(to_server if client else to_client, digestmod="sha256")
        self._receiving = hmac.new(to_client if client else to_server, digestmod="sha256")
        self._sent = self._received = 0

    def tag(self, *parts: bytes) -> bytes:
        """Returns the tag of the next message that this end sends.

        Args:
            *parts: the content of the message. The receiver must be able to compute the length of
                each part from the earlier parts.
        """
        self._sent += 1
        return _tag(self._sending, self._sent, parts)

    def check(self, tag: bytes, *parts: bytes) -> None:
        """Checks the tag of the next message received.

        Raises:
            AuthenticationError: if the message did not come from the other end, or is out of order.
        """
        self._received += 1
        if not hmac.compare_digest(_tag(self._receiving, self._received, parts), tag):
            raise AuthenticationError(
                "a message failed authentication: the other end of the connection did not send it"
            )


def _tag(keyed: Any, number: int, parts: tuple[bytes, ...]) -> bytes:
    mac = keyed.copy()
    mac.update(_NUMBER.pack(number))
    for part in parts:
        mac.update(part)
    tag: bytes = mac.digest()
    return tag


# --- the client


def connect(
    host: str, port: int, name: str, key: bytes, timeout: float
) -> tuple[socket.socket, Session]:
    """Connects to a listener that expects a connection with this name.

    Args:
        host: address of the listener.
        port: port of the listener.
        name: name of the connection.
        key: the key that both ends know.
        timeout: seconds that connecting may take.

    Raises:
        OSError: if the listener is out of reach, or expects no connection with this name.
        AuthenticationError: if the other end does not know the key.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return _connected(host, port, name, key, deadline)
        except ConnectionResetError:
            if time.monotonic() + _PAUSE >= deadline:
                raise
        # The listener hung up: it had too many clients, or this client was too slow.
        time.sleep(_PAUSE)


def _connected(
    host: str, port: int, name: str, key: bytes, deadline: float
) -> tuple[socket.socket, Session]:
    end = socket.create_connection((host, port), _left(deadline))
    try:
        session = _introduce(end, name, key, deadline)
        end.settimeout(None)
    except BrokenPipeError:
        end.close()
        raise ConnectionResetError(f"the listener at {host}:{port} closed the connection") from None
    except BaseException:
        end.close()
        raise
    return end, session


def _introduce(end: socket.socket, name: str, key: bytes, deadline: float) -> Session:
    """Proves to the listener that this process knows the key, and requires the same proof."""
    own = os.urandom(NONCE_BYTES)
    end.sendall(_digest(name) + own)
    answer = _read(end, 1 + NONCE_BYTES, deadline)
    if answer[:1] != _EXPECTED:
        raise ConnectionRefusedError(f"the listener does not expect a connection named {name!r}")
    session = Session(key, name, (own, answer[1:]), client=True)
    end.sendall(session.tag())
    proof = _read(end, TAG_BYTES, deadline)
    try:
        session.check(proof)
    except AuthenticationError:
        raise AuthenticationError(
            "this worker and the process that it connected to have different keys: set TRAWL_KEY "
            "to the same text in all processes, or unset it in all of them"
        ) from None
    return session


def _read(end: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        end.settimeout(_left(deadline))
        more = end.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the listener closed the connection")
        data += more
    return data


def _left(deadline: float) -> float:
    """Returns the seconds until a deadline, but never 0, which would make a socket non-blocking."""
    return max(0.001, deadline - time.monotonic())


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


# --- the server


class Expected(NamedTuple):
    """Connection that a listener expects.

    Attributes:
        name: name of the connection.
        key: the key that the client knows.
        admit: function to call with the connection and its session.
    """

    name: str
    key: bytes
    admit: Callable[[socket.socket, Session], None]

    @property
    def digest(self) -> bytes:
        """Digest of the name. A client sends this digest instead of the name."""
        return _digest(self.name)


def greeting(
    find: Callable[[bytes], Expected | None],
) -> Generator[tuple[bytes, int], bytes, tuple[Expected, Session, bytes]]:
    """Runs the server's side of the handshake with a client, without doing any I/O itself.

    The generator yields bytes to send to the client, and the number of bytes to read from it
    afterwards. The caller then passes the bytes that it read to the generator's ``send`` method.

    Args:
        find: function that maps the digest of a name to the expected connection, or to None.

    Returns:
        The expected connection, its session, and the last bytes to send.

    Raises:
        AuthenticationError: if the client is unexpected or lacks the key. The error's argument
            contains the bytes to send to the client.
    """
    hello = yield b"", _HELLO_BYTES
    digest, nonce = hello[:-NONCE_BYTES], hello[-NONCE_BYTES:]
    expected = find(digest)
    own = os.urandom(NONCE_BYTES)
    if expected is None:
        raise AuthenticationError(_UNKNOWN + own)
    session = Session(expected.key, expected.name, (nonce, own), client=False)
    proof = yield _EXPECTED + own, TAG_BYTES
    try:
        session.check(proof)
    except AuthenticationError:
        # Zeros instead of a proof tell a client at once that it has the wrong key.
        raise AuthenticationError(bytes(TAG_BYTES)) from None
    return expected, session, session.tag()


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
