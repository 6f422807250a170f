"""Collectors in the places of PyTorch and TorchRL that take a dataset, or TorchRL's collector."""

import copy
import pickle
from functools import partial

import nursery
import pytest
from multi_parts import CLASSES, make
from torch.utils.data import DataLoader, IterableDataset

from trawl.collectors import BaseCollector, Collector

MAKERS = [partial(make, cls) for cls in (Collector, *CLASSES)]
makers = pytest.mark.parametrize("maker", MAKERS, ids=["single", "sync", "async"])


@makers
def test_it_is_a_collector_of_torchrl_where_torchrl_is(maker):
    theirs = pytest.importorskip("torchrl.collectors")
    with maker() as collector:
        assert isinstance(collector, theirs.BaseCollector)


@makers
def test_it_is_a_dataset_that_can_not_be_pickled_or_copied(maker):
    with maker(total_frames=40) as collector:
        assert isinstance(collector, IterableDataset)
        assert isinstance(collector, BaseCollector)
        for call in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"Collector can't be pickled or.*state_dict"):
                call(collector)
        # PyTorch's own conversion takes a TensorDict for a plain mapping.
        loader = DataLoader(collector, batch_size=None, collate_fn=lambda batch: batch)
        assert sum(batch.numel() for batch in loader) == 40


def test_torchrl_is_not_imported_for_it():
    program = (
        "import sys; from trawl.collectors import Collector; "
        "Collector('CartPole-v1', frames_per_batch=4).shutdown(); "
        "print('torchrl' in sys.modules)"
    )
    run = nursery.run(program)
    assert run.stdout.strip() == "False", run.stderr


@makers
def test_an_iterator_ends_when_the_loop_closes_its_collector(maker):
    """Only a new loop, which would do nothing, is refused."""
    collector = maker()
    for _ in collector:
        collector.shutdown()
    with pytest.raises(
        RuntimeError, match=r"iteration failed because the collector was shut down$"
    ):
        iter(collector)
