"""What Trawl takes from the standard library under a private name, and what breaks without it."""

import subprocess
import sys

from trawl.foreign.stdlib import interpreter_options


def test_another_interpreter_has_the_options_of_this_one():
    """Workers would otherwise show warnings that the program turns off, or miss ``-X`` options."""
    code = "from trawl.foreign import stdlib as it; print(*it.interpreter_options(), sep=',')"
    options = ["-W", "ignore:x", "-X", "dev", "-B"]
    run = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, check=True
    )
    found = run.stdout.strip().split(",")
    assert {"-B", "-Wignore:x", "dev"} <= set(found)
    assert all(isinstance(one, str) for one in interpreter_options())
