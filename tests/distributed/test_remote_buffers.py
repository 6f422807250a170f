"""TorchRL's buffers of all kinds are filled by workers behind process groups and RPC."""

import pytest
from buffer_parts import BUFFERS, check_background, check_iteration
from collector_parts import by_step
from distributed_parts import CLASSES

both = pytest.mark.parametrize("cls", CLASSES)


def of(cls, sync):
    def make(source, **options):
        options = {"launcher": "mp", "frames_per_batch": 20, "sync": sync, **options}
        return cls(source, by_step(), **options)

    return make


@both
@pytest.mark.parametrize(
    ("kind", "sync"), [("memory", True), ("shared", False), ("prioritized", True)]
)
def test_iteration_fills_it_exactly(cls, kind, sync):
    check_iteration(of(cls, sync), kind)


@both
def test_it_is_filled_in_the_background(cls):
    check_background(of(cls, False), BUFFERS["memory"]())
