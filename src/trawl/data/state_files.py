"""Files of plain data, such as the state of a collector, written by ``torch.save``.

A file with its final name is always complete. The name ends with a digest of the content, as in the
files of ``torch.hub``, so a reader detects damage. Reading a file runs no code from it.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import os
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn

from trawl.data.sinks.files import create, damaged, open_inside, sync
from trawl.schema.checks import MOST_BITS, MOST_LEVELS

SUFFIX = ".pt"
# Number of hexadecimal digits of the digest in a name.
DIGITS = 16
_CHUNK = 1 << 20
# Types that torch.load(weights_only=True) reads. Subclasses are not among them.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_TENSORS = (Tensor, nn.Parameter)
_MAPPINGS = (dict, OrderedDict)
_SEQUENCES = (list, tuple)


def check_plain_data(name: str, value: Any, depth: int = 0) -> None:
    """Checks that a value consists of plain data, which can be written to a file and read again.

    Args:
        name: name of the value, for error messages.
        value: the value.
        depth: number of containers around the value.

    Raises:
        TypeError: if the value contains an object that is neither a tensor nor plain data.
        ValueError: if containers are nested too deeply, or an integer is too large.
    """
    kind = type(value)
    if depth > MOST_LEVELS:
        raise ValueError(
            f"{name.partition('[')[0]} is nested more than {MOST_LEVELS} levels deep, or contains "
            "itself: make it flatter"
        )
    if kind in _TENSORS or kind in _MAPPINGS:
        for attribute, inner in getattr(value, "__dict__", {}).items():
            check_plain_data(f"{name}.{attribute}", inner, depth + 1)
    if kind is int and value.bit_length() > MOST_BITS:
        raise ValueError(
            f"{name} is an integer of {value.bit_length():,} bits, but files hold at most "
            f"{MOST_BITS:,}: convert it to a string"
        )
    if kind in _PLAIN or kind in _TENSORS:
        return
    if kind in _MAPPINGS:
        for key, inner in value.items():
            check_plain_data(f"the keys of {name}", key, depth + 1)
            check_plain_data(f"{name}[{key!r}]", inner, depth + 1)
    elif kind in _SEQUENCES:
        for index, inner in enumerate(value):
            check_plain_data(f"{name}[{index}]", inner, depth + 1)
    else:
        raise TypeError(
            f"{name} must consist of tensors, numbers, strings, bytes, lists, tuples and "
            f"dictionaries, but it is a {kind.__module__}.{kind.__qualname__}: convert it first, "
            "for example with tolist(), torch.as_tensor() or state_dict()"
        )


def write_state(directory: Path, stem: str, content: Mapping[str, Any]) -> str:
    """Writes a file of plain data, which survives a power cut.

    The file is read back before it gets its name, because a file with a name may replace an older
    one.

    Args:
        directory: directory of the file, which must be locked.
        stem: beginning of the file's name.
        content: the data, which :func:`check_plain_data` has checked.

    Returns:
        The file's name.

    Raises:
        OSError: if the file can't be written. In this case, no part of the file is left.
        ValueError: if the file can't be read again; the message names the entry that prevents it.
            In this case, no part of the file is left either.
    """
    unfinished = directory / f".{stem}.unfinished"
    try:
        with open(create(unfinished), "wb") as file:
            hashing = _HashingWriter(file)
            try:
                # torch.save only calls write(), but its annotation asks for a full file.
                torch.save(_writable(content), cast("IO[bytes]", hashing))
            except Exception as error:
                # torch's own error does not say why it can't write.
                raise hashing.error or _unsavable(content, error) from None
            file.flush()
            os.fsync(file.fileno())
        _read_back(unfinished, content)
        name = f"{stem}-{hashing.digest()}{SUFFIX}"
        os.replace(unfinished, directory / name)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync([directory])
    return name


class _EmptyBytes:
    """Stands for empty bytes, which are pickled as a call that weights_only refuses."""

    def __reduce__(self) -> Any:
        return codecs.encode, ("", "latin1")


def _writable(value: Any) -> Any:
    """Returns a value with a stand-in for all empty bytes; the value itself if it has none."""
    kind = type(value)
    if kind is bytes:
        return value or _EmptyBytes()
    if kind in _MAPPINGS:
        pairs = [(_writable(key), _writable(inner)) for key, inner in value.items()]
        if all(
            one is two
            for pair in zip(pairs, value.items(), strict=True)
            for one, two in zip(*pair, strict=True)
        ):
            return value
        made = copy(value)
        made.clear()
        made.update(pairs)
        return made
    if kind in _SEQUENCES:
        items = [*map(_writable, value)]
        same = all(one is other for one, other in zip(items, value, strict=True))
        return value if same else kind(items)
    return value


def _read_back(path: Path, content: Mapping[str, Any]) -> None:
    """Checks that a file that was written has the content, except for the values of tensors."""
    try:
        # Mapped, because tensors need not be read a second time.
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise _unsavable(content, error) from error
    name = _difference("", content, found)
    if name is not None:
        raise ValueError(f"{name} can't be saved, because torch.load reads another value")


def _unsavable(content: Mapping[str, Any], error: Exception) -> Exception:
    """Returns an error that names the entry that can't be written and read again.

    If each entry by itself can be, the error that was raised is returned.
    """
    for name, kind in _unreadable("", content):
        what = str(error).partition("\n")[0] or type(error).__name__
        return ValueError(
            f"{name} can't be saved: torch.save or torch.load(weights_only=True) refuses its "
            f"value, a {kind.__qualname__}: {what}"
        )
    return error


def _unreadable(name: str, value: Any) -> Iterator[tuple[str, type]]:
    """Yields the name and the type of the innermost values that can't be read again."""
    file = io.BytesIO()
    try:
        torch.save(_writable(value), file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except (MemoryError, OSError):
        return
    except Exception:
        inner = [one for part in _items(name, value) for one in _unreadable(*part)]
        yield from inner or [(name, type(value))]


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and the values of the entries of a container."""
    if type(value) in _MAPPINGS:
        for key, inner in value.items():
            yield f"the keys of {name}", key
            yield f"{name}[{key!r}]" if name else str(key), inner
    elif type(value) in _SEQUENCES:
        for index, inner in enumerate(value):
            yield f"{name}[{index}]", inner


def _difference(name: str, one: Any, other: Any) -> str | None:
    """Returns the name of the first entry in which two values differ, or None."""
    kind = type(one)
    if kind is not type(other) and not isinstance(one, Tensor):
        return name
    if isinstance(one, Tensor):
        same = (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
        return None if same else name
    if kind in _MAPPINGS or kind in _SEQUENCES:
        if len(one) != len(other):
            return name
        pairs = zip(_items(name, one), _items(name, other), strict=True)
        found = (_difference(part, mine, its) for (part, mine), (_, its) in pairs)
        return next((part for part in found if part is not None), None)
    return None if one == other or one != one else name


def read_state(
    directory: Path, name: str, *, most: int | None = None, map_location: str | None = None
) -> dict[str, Any]:
    """Returns the content of a file that :func:`write_state` wrote.

    Args:
        directory: directory of the file.
        name: the file's name.
        most: maximum size of the file in bytes.
        map_location: device for the tensors; None for their original devices.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is damaged, is too large, or is not a regular file.
    """
    path = directory / name
    with open(open_inside(directory, name), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise damaged(path, f"it has {size:,} bytes, more than {most:,}")
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        if _short(digest) != name.removesuffix(SUFFIX)[-DIGITS:]:
            raise damaged(path, "its content does not have the digest in its name")
        _check_sizes(file, size, path)
        file.seek(0)
        try:
            found = torch.load(file, map_location=map_location, weights_only=True)
        except Exception as error:  # torch.load documents no errors
            raise damaged(path, f"it can't be loaded: {error}".splitlines()[0]) from error
    if not isinstance(found, dict):
        raise damaged(path, f"it must contain a dictionary, but it contains {type(found).__name__}")
    return found


def _check_sizes(file: io.BufferedReader, size: int, path: Path) -> None:
    """Checks that a small file does not take much memory when it is loaded."""
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise damaged(path, str(error)) from None
    stored = all(part.compress_type == zipfile.ZIP_STORED for part in parts)
    if not stored or sum(part.file_size for part in parts) > size:
        raise damaged(path, "it is compressed")


def _short(digest: Any) -> str:
    return str(digest.hexdigest()[:DIGITS])


class _HashingWriter(io.RawIOBase):
    """File for writing that computes a digest of its content.

    Args:
        file: file to write to.

    Attributes:
        error: the error of the first call that failed.
    """

    def __init__(self, file: io.BufferedWriter) -> None:
        self.error: OSError | None = None
        self._file, self._digest = file, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def digest(self) -> str:
        """Returns the digest of the bytes that were written."""
        return _short(self._digest)
