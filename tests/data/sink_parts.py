"""What the tests of sinks share."""

import json
import os
import resource
import stat
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from trawl.data import MemmapSink, MinariSink, ParquetSink, load

SINKS = {"memmap": MemmapSink, "minari": MinariSink, "parquet": ParquetSink}
LENGTH = 7  # steps of an episode
RECORD = "_dataset.json"
_ENDINGS = {"memmap": "*.memmap", "minari": "*.arrow", "parquet": "*.parquet"}


def frames(start, count, **more):
    """Frames of one environment, each with its number; the last of them ends an episode."""
    number = torch.arange(start, start + count)
    done = (number % LENGTH == LENGTH - 1).unsqueeze(-1)
    done[-1] = True
    none = torch.zeros_like(done)
    observation = torch.stack([number, -number], -1).float()
    rows = {
        "observation": observation,
        "action": number.unsqueeze(-1).float(),
        "done": none,
        "terminated": none.clone(),
        "truncated": none.clone(),
        "next": {
            "observation": torch.stack([number + 1, -number - 1], -1).float(),
            "reward": number.double().unsqueeze(-1),
            "done": done,
            "terminated": none.clone(),
            "truncated": done.clone(),
        },
        "number": number,
        ("collector", "traj_ids"): number // LENGTH,
        **more,
    }
    return TensorDict(rows, [count])


def write(kind, directory, batches, **facts):
    with kind(directory, info=facts) as sink:
        for batch in batches:
            sink.write(batch)


@contextmanager
def files_no_larger_than(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- datasets that are damaged, or made by others


def frame_files(directory, kind):
    """The files that hold frames."""
    return sorted(directory.rglob(_ENDINGS[kind]))


def contents(directory):
    """All that lies there: bytes of files, and targets of links."""
    found = {}
    for path in sorted(Path(directory).rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            found[str(path)] = path.read_bytes()
        else:
            found[str(path)] = os.readlink(path) if stat.S_ISLNK(mode) else mode
    return found


def change(directory, edit):
    """Changes the record by a function."""
    path = directory / RECORD
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))


def refused(directory, kind, words):
    """Neither load, by batches or not, nor a sink that goes on takes it; nothing is changed."""
    before = contents(directory.parent)
    for read in (lambda: load(directory), lambda: list(load(directory, 5))):
        with pytest.raises(ValueError, match=words):
            read()
    with pytest.raises(ValueError, match=words):
        SINKS[kind](directory, resume=True)
    assert contents(directory.parent) == before, "what was refused was changed"
