"""What tests of the backends have in common."""

import gc
import os

from open_files import open_files

# The file whose tests have collected what was left before.
_collected = None


def _collect():
    """Collects garbage. What was there before the tests of a file is looked at once: it is much."""
    global _collected
    gc.collect()
    file = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
    if file != _collected:
        gc.freeze()
        _collected = file


def descriptors():
    """How many files this process has open, those of garbage not counted."""
    _collect()
    return len(os.listdir("/proc/self/fd"))


def held_files():
    """How many pipes, files and pieces of memory this process has open, without garbage.

    Sockets and events are not counted: threads of libraries open and close their own at any time.
    """
    _collect()
    return sum(not kind.startswith(("socket:", "anon_inode:")) for _, kind in open_files())
