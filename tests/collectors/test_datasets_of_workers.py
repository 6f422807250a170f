"""A collector with workers writes on disk what it delivers."""

import pytest
from collector_parts import by_step
from dataset_parts import SYNC, check_dataset

from trawl import MultiCollector


@SYNC
@pytest.mark.parametrize("kind", ["memmap", "parquet", "minari"])
def test_each_frame_is_in_the_dataset_once(sync, kind, tmp_path):
    def make(source, **options):
        return MultiCollector(source, by_step(), sync=sync, frames_per_batch=20, **options)

    check_dataset(make, tmp_path, kind)
