"""A collector with workers writes on disk what it delivers."""

import pytest
from collector_parts import by_step
from dataset_parts import check_dataset

from trawl import Collector, MultiCollector, MultiSyncCollector
from trawl.data import MemmapSink, info


@pytest.mark.parametrize(
    ("sync", "kind"), [(True, "memmap"), (False, "parquet"), (False, "minari")]
)
def test_each_frame_is_in_the_dataset_once(sync, kind, tmp_path):
    def make(source, **options):
        return MultiCollector(source, by_step(), sync=sync, frames_per_batch=20, **options)

    check_dataset(make, tmp_path, kind)


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_a_dataset_says_what_its_values_are(cls, tmp_path):
    source = ["Pendulum-v1"] if cls is MultiSyncCollector else "Pendulum-v1"
    options = {"frame_stack": 3, "normalize_rewards": True}
    sink = MemmapSink(tmp_path / "d", {"note": "mine"})
    with cls(source, frames_per_batch=8, total_frames=8, sink=sink, **options) as collector:
        list(collector)
    found = info(tmp_path / "d")
    assert (found["frame_stack"], found["normalize_rewards"]) == (3, True)
    assert "normalize_observations" not in found
    assert found["note"] == "mine"
