"""What the tests of the command line share."""

import csv
import io
import json
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import nursery
import pytest
from forked import Forked

from trawl.data import load
from trawl.extras.cli import main

# Seconds after which a process counts as stuck.
PATIENCE = 300
# Options of two workers in this process, where it makes no difference that they are in others.
INLINE = ["--workers", 2, "--backend", "inline"]
_COMMAND = "import sys; from trawl.extras.cli import main; sys.exit(main())"


@contextmanager
def working_in(folder):
    """Works in a folder; what is put on the path there goes with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        yield


def trawl(*arguments):
    """Runs the command in this process; gives its exit code, and what it printed."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def collected(*arguments, out="d"):
    """Collects in this process, and gives the frames."""
    code, _, err = trawl("collect", *arguments, "--out", out)
    assert code == 0, err
    return load(out)


def refused(*arguments):
    """What the command says in one line, of something that it doesn't do."""
    code, out, err = trawl(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), out + err
    assert err.startswith("trawl: ")
    return err.removeprefix("trawl: ")


def run(*arguments, cwd="."):
    """Runs the command in a process of its own."""
    return nursery.run(_COMMAND, *arguments, cwd=cwd)


def start(*arguments, **options):
    """Starts the command in a process of its own."""
    return Forked(_COMMAND, *arguments, **options)


def lines_of(text):
    """The words of each line."""
    return [line.split() for line in text.splitlines()]


def evaluated(*arguments):
    """Evaluates in this process; gives the facts, and what was printed."""
    code, out, err = trawl("evaluate", *arguments, "--out", "e.json")
    assert code == 0, err
    found = Path("e.json")
    facts = json.loads(found.read_text())
    found.unlink()
    return facts, out


def logged(file):
    """The rows of a file of statistics."""
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))
