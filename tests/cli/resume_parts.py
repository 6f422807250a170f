"""Runs of ``trawl collect`` that are killed, and what is compared with an unbroken one."""

import random
import signal

import killing
import torch

from trawl.data import info, load

PROGRAM = """
if sys.argv.pop(1) == "True":
    from trawl.extras.cli import saving
    saving._SHARE, saving._SECONDS = 1e9, 0.0
from trawl.extras.cli import main
code = main()
print("events", _count)
sys.exit(code)
"""


def collect(*arguments, cwd, at=0, number=signal.SIGKILL, always=True):
    """Runs ``trawl collect``, whose last argument is the folder of the dataset.

    A signal comes at an event with the dataset's files, given by its number. With ``always``, the
    state is saved with each batch.
    """
    place = cwd / arguments[-1]
    return killing.run(
        PROGRAM, always, "collect", *arguments, cwd=cwd, place=place, at=at, number=number
    )


# The frames of unbroken runs, and the numbers of their events, by the arguments.
_WHOLE = {}


def whole(arguments, cwd):
    """An unbroken run, which tests share; gives its frames, and the number of its events."""
    name = tuple(map(str, arguments))
    if name not in _WHOLE:
        done = collect(*arguments, "--out", "whole-v0", cwd=cwd)
        assert done.returncode == 0, done.stderr
        _WHOLE[name] = load(cwd / "whole-v0").clone(), int(done.stdout.split()[-1])
    return _WHOLE[name]


def broken(arguments, cwd, count, kills, seed, number=signal.SIGKILL):
    """A run of so many events that gets several signals, at random events; gives its frames."""
    draw, got = random.Random(seed), 0
    while True:
        at = draw.randint(1, max(2, 2 * count // (kills + 1))) if got < kills else 0
        # At first, there are as many events as in the unbroken run.
        always = not got or draw.random() < 0.7
        done = collect(*arguments, "--resume", "--out", "parts-v0", cwd=cwd, at=at, number=number,
                       always=always)  # fmt: skip
        assert "new episodes" not in done.stderr, done.stderr
        if done.returncode == 0:
            break
        expected = -signal.SIGKILL if number == signal.SIGKILL else 128 + number
        assert done.returncode == expected, done.stderr
        got += 1
    assert got, "no signal came"
    assert info(cwd / "parts-v0")["complete"]
    return load(cwd / "parts-v0")


def equal(one, other):
    """Whether two datasets have the same frames, bit for bit."""
    if one.shape != other.shape or set(one.keys(True, True)) != set(other.keys(True, True)):
        return False
    pairs = [(one.get(key), other.get(key)) for key in one.keys(True, True)]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
