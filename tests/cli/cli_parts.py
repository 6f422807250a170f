"""What the tests of the command line share."""

import os
import sys
from pathlib import Path

import nursery
from forked import Forked

# Seconds after which a process counts as stuck.
PATIENCE = 60
# Starts a fresh interpreter, which takes a second or two.
TRAWL = [sys.executable, "-m", "trawl"]
# Fresh interpreters find the policies too.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
}


_COMMAND = "import sys; from trawl.cli import main; sys.exit(main())"


def run(*arguments, cwd):
    """Runs the command in a process of its own."""
    return nursery.run(_COMMAND, *arguments, cwd=cwd)


def start(*arguments, **options):
    """Starts the command in a process of its own."""
    return Forked(_COMMAND, *arguments, **options)
