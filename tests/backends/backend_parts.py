"""What tests of the backends have in common."""

import gc
import os

_CONNECTIONS = ("socket:", "anon_inode:")


def descriptors():
    """How many files this process has open, those of garbage not counted.

    Connections are not counted either: threads of other libraries close theirs when they like.
    """
    gc.collect()
    found = [_leads_to(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sum(not where.startswith(_CONNECTIONS) for where in found)


def _leads_to(link):
    try:
        return os.readlink(link)
    except FileNotFoundError:
        # Closed meanwhile, as that of the folder itself.
        return _CONNECTIONS[0]
