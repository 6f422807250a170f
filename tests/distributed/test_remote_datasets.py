"""A collector whose workers are behind process groups or RPC writes on disk what it delivers."""

import pytest
from collector_parts import by_step
from dataset_parts import check_dataset
from distributed_parts import EACH


@pytest.mark.parametrize(("cls", "sync"), EACH)
def test_each_frame_is_in_the_dataset_once(cls, sync, tmp_path):
    def make(source, **options):
        return cls(source, by_step(), launcher="mp", sync=sync, frames_per_batch=20, **options)

    check_dataset(make, tmp_path, "memmap")
