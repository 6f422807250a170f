"""Runs of ``trawl collect`` that are killed, and what is compared with an unbroken one."""

import random
import signal

import nursery
import torch

from trawl.data import info, load

# Counts what the process does with files of the dataset, and ends it at a given number of these.
PROGRAM = """
import os, sys, signal

at, number, always = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
del sys.argv[1:4]
if always:
    from trawl.cli import saving
    saving._SHARE, saving._SECONDS = 1e9, {}
count, place = 0, os.path.abspath(sys.argv[-1])
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}

def hook(event, args):
    global count
    if event in EVENTS and isinstance(args[0], (str, bytes, os.PathLike)):
        # Files are opened by their names in a folder, too.
        name = os.path.abspath(os.fsdecode(args[0]))
        if name.startswith(place) or not os.path.dirname(os.fsdecode(args[0])):
            count += 1
            if count == at:
                os.kill(os.getpid(), number)

sys.addaudithook(hook)
from trawl.cli import main
code = main()
print("events", count)
sys.exit(code)
"""


def collect(*arguments, cwd, at=0, number=signal.SIGKILL, always=True):
    """Runs ``trawl collect``, with its --out last; a signal comes at the event ``at``."""
    return nursery.run(PROGRAM, at, int(number), always, "collect", *arguments, cwd=cwd)


def events(done):
    """How many events there were in a run."""
    return int(done.stdout.split()[-1])


def whole(arguments, cwd):
    """An unbroken run; gives its frames, and the number of its events."""
    done = collect(*arguments, "--out", "whole-v0", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return load(cwd / "whole-v0"), events(done)


def broken(arguments, cwd, count, kills, seed, number=signal.SIGKILL):
    """A run that gets several signals, at random events; gives its frames.

    Args:
        arguments: of the command.
        cwd: the folder that it runs in.
        count: number of events in an unbroken run.
        kills: number of signals.
        seed: of the random numbers.
        number: the signal.
    """
    draw, got = random.Random(seed), 0
    while True:
        at = draw.randint(1, max(2, 2 * count // (kills + 1))) if got < kills else 0
        always = draw.random() < 0.7
        done = collect(*arguments, "--resume", "--out", "parts-v0", cwd=cwd, at=at, number=number,
                       always=always)  # fmt: skip
        if done.returncode == 0:
            break
        expected = -signal.SIGKILL if number == signal.SIGKILL else 128 + number
        assert done.returncode == expected, done.stderr
        assert "new episodes" not in done.stderr, done.stderr
        got += 1
    assert got, "no signal came"
    assert "new episodes" not in done.stderr, done.stderr
    facts = info(cwd / "parts-v0")
    assert facts["complete"]
    return load(cwd / "parts-v0")


def equal(one, other):
    """Whether two datasets have the same frames, bit for bit."""
    if one.shape != other.shape or set(one.keys(True, True)) != set(other.keys(True, True)):
        return False
    pairs = [(one.get(key), other.get(key)) for key in one.keys(True, True)]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
