"""What tests of the backends have in common."""

import gc
import os

from open_files import open_files


def descriptors():
    """How many files this process has open, those of garbage not counted."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def held_files():
    """How many pipes, files and pieces of memory this process has open, without garbage.

    Sockets and events are not counted: threads of libraries open and close their own at any time.
    """
    gc.collect()
    return sum(not kind.startswith(("socket:", "anon_inode:")) for _, kind in open_files())
