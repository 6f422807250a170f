"""Files of plain data, such as the state of a collector, written by ``torch.save``.

A file with its final name is always complete. The name ends with a digest of the content, as in the
files of ``torch.hub``, so a reader detects damage. Reading a file runs no code from it.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn

from trawl.data.sinks.files import create, damaged, open_inside, sync

SUFFIX = ".pt"
# Number of hexadecimal digits of the digest in a name.
DIGITS = 16
_CHUNK = 1 << 20
# Types that torch.load(weights_only=True) reads. Subclasses are not among them.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_TENSORS = (Tensor, nn.Parameter)
_MAPPINGS = (dict, OrderedDict)
_SEQUENCES = (list, tuple)


def check_plain_data(name: str, value: Any) -> None:
    """Checks that a value consists of plain data, which can be written to a file and read again.

    Args:
        name: name of the value, for error messages.
        value: the value.

    Raises:
        TypeError: if the value contains an object that is neither a tensor nor plain data.
    """
    kind = type(value)
    if kind in _PLAIN or kind in _TENSORS:
        return
    if kind in _MAPPINGS:
        for key, inner in value.items():
            check_plain_data(f"the keys of {name}", key)
            check_plain_data(f"{name}[{key!r}]", inner)
    elif kind in _SEQUENCES:
        for index, inner in enumerate(value):
            check_plain_data(f"{name}[{index}]", inner)
    else:
        raise TypeError(
            f"{name} must consist of tensors, numbers, strings, bytes, lists, tuples and "
            f"dictionaries, but it is a {kind.__module__}.{kind.__qualname__}: convert it first, "
            "for example with tolist(), torch.as_tensor() or state_dict()"
        )


def write_state(directory: Path, stem: str, content: Mapping[str, Any]) -> str:
    """Writes a file of plain data, which survives a power cut.

    Args:
        directory: directory of the file, which must be locked.
        stem: beginning of the file's name.
        content: the data, which :func:`check_plain_data` has checked.

    Returns:
        The file's name.

    Raises:
        OSError: if the file can't be written. In this case, no part of the file is left.
    """
    unfinished = directory / f".{stem}.unfinished"
    try:
        with open(create(unfinished), "wb") as file:
            hashing = _HashingWriter(file)
            try:
                # torch.save only calls write(), but its annotation asks for a full file.
                torch.save(content, cast("IO[bytes]", hashing))
            except Exception as error:
                # torch's own error does not say why it can't write.
                raise hashing.error or error from None
            file.flush()
            os.fsync(file.fileno())
        name = f"{stem}-{hashing.digest()}{SUFFIX}"
        os.replace(unfinished, directory / name)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync([directory])
    return name


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
        found = torch.load(file, map_location=map_location, weights_only=True)
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
