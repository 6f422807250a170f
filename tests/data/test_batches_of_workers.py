"""Batches of several workers: whole trajectories, episodes and datasets out of them."""

import pytest

from trawl import MultiCollector
from trawl.data import TrajectoryAssembler
from trawl.testing import NumberedEnv

LENGTHS = [3, 1, 4, 7]


def collector(sync, num_envs, **options):
    def make(worker, index):
        return lambda: NumberedEnv(number=10 * worker + index, lengths=LENGTHS)

    envs = [[make(worker, index) for index in range(num_envs)] for worker in range(2)]
    return MultiCollector(
        envs if num_envs > 1 else [env for (env,) in envs],
        sync=sync,
        frames_per_batch=20,
        total_frames=400,
        start_method="inline",
        **options,
    )


def test_a_wrong_number_of_workers_is_noticed():
    assembler = TrajectoryAssembler()
    with collector(True, 1, cat_results=-1) as source:
        batch = source.next()
    with pytest.raises(ValueError, match="pass the number of workers"):
        assembler.add(batch)
