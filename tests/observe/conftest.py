"""Fixtures of the tests of statistics, displays and monitors."""

import threading

import pytest
from open_files import open_files

# What processes of workers leave: connections, and memory of batches until it is collected.
_NO_FILES = ("pipe:", "socket:", "anon_inode:", "/memfd:", "/dev/", "/proc/")


@pytest.fixture
def nothing_left():
    """Fails if a test leaves threads or open files behind."""
    threads, files = set(threading.enumerate()), open_files()
    yield
    assert {thread.name for thread in set(threading.enumerate()) - threads} == set()
    left = {name for _, name in open_files() - files}
    assert [name for name in left if not name.startswith(_NO_FILES)] == []
