"""Collectors in the places of PyTorch and TorchRL that take a dataset, or TorchRL's collector."""

import copy
import pickle

import nursery
import pytest
from collector_parts import by_step
from multi_parts import CLASSES, make
from torch.utils.data import DataLoader, IterableDataset

from trawl.collectors import BaseCollector, Collector
from trawl.testing import NumberedEnv


def single(**options):
    return Collector(NumberedEnv(), by_step(), frames_per_batch=10, **options)


MAKERS = [single, *[lambda cls=cls, **options: make(cls, **options) for cls in CLASSES]]
makers = pytest.mark.parametrize("maker", MAKERS, ids=["single", "sync", "async"])


@makers
def test_a_data_loader_gives_its_batches(maker):
    with maker(total_frames=40) as collector:
        assert isinstance(collector, IterableDataset)
        # PyTorch's own conversion takes a TensorDict for a plain mapping.
        loader = DataLoader(collector, batch_size=None, collate_fn=lambda batch: batch)
        assert sum(batch.numel() for batch in loader) == 40


@makers
def test_it_is_a_collector_of_torchrl_where_torchrl_is(maker):
    theirs = pytest.importorskip("torchrl.collectors")
    with maker() as collector:
        assert isinstance(collector, theirs.BaseCollector)
        assert isinstance(collector, BaseCollector)


def test_torchrl_is_not_imported_for_it():
    program = (
        "import sys; from trawl.collectors import Collector; "
        "Collector('CartPole-v1', frames_per_batch=4).shutdown(); "
        "print('torchrl' in sys.modules)"
    )
    run = nursery.run(program)
    assert run.stdout.strip() == "False", run.stderr


@makers
@pytest.mark.parametrize("call", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_can_not_be_pickled_or_copied(maker, call):
    with (
        maker() as collector,
        pytest.raises(TypeError, match=r"Collector can't be pickled or.*state_dict"),
    ):
        call(collector)


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
