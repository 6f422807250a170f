"""Writes numbered frames in processes that are killed at random moments, and checks what is left.

It forks, so it has a process of its own.
"""

import gc
import importlib
import itertools
import os
import random
import signal
import time
import traceback

import torch
from sink_parts import LENGTH, SINKS, frames

from trawl.data import info, load

KILLS, MORE = 5, 100
OPTIONS = {"memmap": {}, "minari": {}, "parquet": {"commit_bytes": 5000}}
# Imported before there are processes, so that these are killed while they write.
LIBRARIES = (
    "pyarrow.dataset",
    "pyarrow.parquet",
    "minari",
    "minari.dataset._storages.arrow_storage",
)


def numbered(start, count):
    """Frames of one environment; what has not ended goes on with the frames after it."""
    batch = frames(start, count)
    ends = (batch["number"] % LENGTH == LENGTH - 1).unsqueeze(-1)
    batch["next", "done"] = batch["next", "truncated"] = ends
    return batch


def forked(work):
    """Runs it in a process that ends without cleaning up; gives its id."""
    # A forked process has no other threads. Looking for garbage among what they have left, such as
    # the frames of their functions, may end it with a segmentation fault.
    gc.disable()
    process = os.fork()
    if process:
        gc.enable()
    else:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return process


def in_a_process(work):
    status = os.waitpid(forked(work), 0)[1]
    assert status == 0, status


def writing(kind, directory, seed, total=None, told=None):
    """Goes on with the dataset, up to its end or for ever; tells of each batch by a pipe."""
    draw = random.Random(seed)
    with SINKS[kind](directory, resume=True, **OPTIONS[kind]) as sink:
        at = sink.frames
        while total is None or at < total:
            count = draw.randint(1, 60)
            count = count if total is None else min(count, total - at)
            sink.write(numbered(at, count))
            at += count
            if told is not None:
                os.write(told, b".")


def killed(work, draw):
    """Runs it in a process that is killed at a random moment, some batches after it began."""
    reading, told = os.pipe()
    process = forked(lambda: work(told))
    os.close(told)  # so that its end is seen
    began = time.monotonic()
    batches = draw.randint(0, 12)
    for _ in range(batches):
        assert os.read(reading, 1), "it ended by itself"
    time.sleep(draw.random() * (time.monotonic() - began) / max(1, batches))
    os.kill(process, signal.SIGKILL)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    os.close(reading)


def checking(kind, directory):
    """What was committed is there: each frame once, in order, unharmed."""
    if (
        not os.path.exists(os.path.join(directory, "_dataset.json"))
        or not info(directory)["frames"]
    ):
        return
    found = load(directory)
    count = len(found)
    expected = numbered(0, count)
    assert torch.equal(found["number"], torch.arange(count)), "frames are missing, or there twice"
    assert torch.equal(found["next", "observation"], expected["next", "observation"])
    ids = found["collector", "traj_ids"]
    steps = (ids[1:] != ids[:-1]).nonzero().flatten()
    assert (ids[1:] >= ids[:-1]).all(), "an id was used again"
    # A trajectory ends where it was said to, or where its process died.
    assert (found["number"][steps] % LENGTH == LENGTH - 1).sum() >= len(steps) - KILLS
    if kind == "minari":
        from minari import MinariDataset

        dataset = MinariDataset(os.path.join(directory, "data"))
        numbers = [
            n
            for e in map(dataset.__getitem__, range(len(dataset)))
            for n in e.infos["number"].ravel()[:-1]
        ]
        assert len(numbers) == dataset.total_steps >= count
        assert [int(n) for n in numbers] == list(range(len(numbers)))


def main(kind, directory, seed):
    draw = random.Random(seed)
    for name in LIBRARIES:
        importlib.import_module(name)
    grown = []
    for turn in range(KILLS):
        killed(lambda told, turn=turn: writing(kind, directory, turn, told=told), draw)
        in_a_process(lambda: checking(kind, directory))
        place = os.path.join(directory, "_dataset.json")
        grown.append(info(directory)["frames"] if os.path.exists(place) else 0)
    assert grown == sorted(grown), grown
    assert sum(one < other for one, other in itertools.pairwise([0, *grown])) >= 1, grown
    total = grown[-1] + MORE
    in_a_process(lambda: writing(kind, directory, KILLS, total))
    in_a_process(lambda: checking(kind, directory))
    facts = info(directory)
    assert (facts["frames"], facts["complete"]) == (total, True), facts
    print(f"{KILLS} kills; committed after each: {grown}")
    left = {"_dataset.json", "data" if kind == "minari" else "frames"}
    assert set(os.listdir(directory)) == left, os.listdir(directory)
