"""A collector whose workers are Ray actors writes on disk what it delivers."""

import pytest
from collector_parts import by_step
from dataset_parts import check_dataset

from trawl.collectors.distributed import RayCollector


@pytest.mark.usefixtures("cluster")
def test_each_frame_is_in_the_dataset_once(tmp_path):
    def make(source, **options):
        options = {"frames_per_batch": 20, "sync": False, **options}
        return RayCollector(source, by_step(), remote_configs={"num_cpus": 0}, **options)

    check_dataset(make, tmp_path, "parquet")
