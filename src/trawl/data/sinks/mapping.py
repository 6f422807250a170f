"""Files in memory, of which changes stay in memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

# Python knows it from 3.13 on; the value is that of x86-64 and ARM. Without it the kernel refuses
# to map files that are larger than memory, as it would have to keep each page that is changed.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_private(file: int, nbytes: int) -> Any:
    """Maps the beginning of a file, copy-on-write: what is changed in memory is not in the file.

    Unlike ``mmap.mmap`` before Python 3.13 it keeps no descriptor, of which a process has few.

    Args:
        file: its descriptor, which may be closed afterwards.
        nbytes: how much of it, more than 0 and not more than it has.

    Returns:
        A writable buffer, which is unmapped when nothing refers to it any more.

    Raises:
        OSError: if it can't be mapped.
    """
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _NO_RESERVE
    address = _libc.mmap(None, nbytes, protection, flags, file, 0)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit: tensors may be read until the very end.
    weakref.finalize(buffer, _libc.munmap, address, nbytes).atexit = False
    return buffer
