"""What the tests of the command line share."""

import os
import subprocess
import sys
from pathlib import Path

# Seconds after which a process counts as stuck.
PATIENCE = 300
TRAWL = [sys.executable, "-m", "trawl"]
# Processes of their own find the policies too.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
}


def run(*arguments, cwd, **options):
    """Runs the command in a process of its own."""
    return subprocess.run(
        [*TRAWL, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=ENVIRONMENT,
        **options,
    )
