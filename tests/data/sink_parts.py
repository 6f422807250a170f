"""What the tests of sinks share."""

import resource
from contextlib import contextmanager

import torch
from tensordict import TensorDict

from trawl.data import MemmapSink, MinariSink, ParquetSink

SINKS = {"memmap": MemmapSink, "minari": MinariSink, "parquet": ParquetSink}
LENGTH = 7  # steps of an episode


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
