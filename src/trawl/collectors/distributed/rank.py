"""A rank that works for the collector of rank 0: ``python -m trawl.collectors.distributed.rank``.

The number of this rank and the address of rank 0 come from environment variables, which
``torchrun`` sets.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from trawl.collectors.distributed import run_rank

    sys.exit(run_rank())
