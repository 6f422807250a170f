"""A context of TorchRL chooses the backend of a ``Collector`` that names none."""

import pytest
from collector_parts import by_step
from multi_parts import envs
from torchrl import service_backend

from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector

SIZE = {"frames_per_batch": 10, "total_frames": 20}


def made(**options):
    return Collector(envs(1)[0], by_step(), **SIZE, **options)


@pytest.mark.parametrize(
    ("context", "options", "kind"),
    [
        ("process", {}, MultiAsyncCollector),
        ("multiprocessing", {"sync": True, "num_collectors": 2}, MultiSyncCollector),
        ("direct", {}, Collector),
        ("process", {"backend": "direct"}, Collector),
        # Whose workers are here, and are collectors that name no backend either.
        ("process", {"backend_options": {"start_method": "inline"}}, MultiAsyncCollector),
    ],
)
def test_it_chooses(context, options, kind):
    with service_backend(context), made(**options) as collector:
        assert type(collector) is kind
        assert sum(batch.numel() for batch in collector) == 20
    with made() as collector:
        assert type(collector) is Collector


class Own(Collector):
    """A subclass has no backend to choose."""


def test_a_subclass_is_what_it_says():
    with service_backend("process"), Own(envs(1)[0], by_step(), **SIZE) as collector:
        assert type(collector) is Own


@pytest.mark.parametrize(("context", "options"), [("thread", {}), ("direct", {"sync": True})])
def test_errors_say_where_the_choice_comes_from(context, options):
    with service_backend(context), pytest.raises(ValueError, match=r"torchrl\.service_backend"):
        made(**options)
