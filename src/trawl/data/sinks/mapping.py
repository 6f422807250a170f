"""Memory mapping of files, copy-on-write: changes stay in memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

# Python has defined this flag since 3.13; 0x4000 is its value on x86-64 and ARM. Without the flag,
# the kernel reserves memory for changes to all pages, and refuses to map files larger than memory.
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
    """Maps the beginning of a file copy-on-write: changes in memory do not reach the file.

    Unlike ``mmap.mmap`` before Python 3.13, this function keeps no descriptor open, because a
    process can have only a limited number of descriptors.

    Args:
        file: descriptor of the file, which the caller may close afterwards.
        nbytes: number of bytes to map, more than 0 and at most the size of the file.

    Returns:
        A writable buffer, which is unmapped when nothing refers to it any more.

    Raises:
        OSError: if the file can't be mapped.
    """
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _NO_RESERVE
    address = _libc.mmap(None, nbytes, protection, flags, file, 0)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    # Keeps the mapping at exit, because tensors may still be read then.
    weakref.finalize(buffer, _libc.munmap, address, nbytes).atexit = False
    return buffer
