import sys

import pytest

from trawl.cli import main


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Each test runs in a folder of its own, and what it puts on the path goes with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def trawl(capsys):
    """Runs the command in this process; gives its exit code, and what it printed."""

    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call
