"""What the tests of the command line share."""

import os
import sys
from pathlib import Path

import nursery

# Seconds after which a process counts as stuck.
PATIENCE = 300
TRAWL = [sys.executable, "-m", "trawl"]
# Processes of their own find the policies too.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
}


def run(*arguments, cwd):
    """Runs the command in a process of its own."""
    return nursery.run(
        "import sys; from trawl.cli import main; sys.exit(main())", *arguments, cwd=cwd
    )
