"""TorchRL's buffers of all kinds are filled by workers behind process groups and RPC."""

import pytest
from buffer_parts import BUFFERS, check_background, check_iteration
from collector_parts import by_step
from distributed_parts import CLASSES


def of(cls, sync):
    def make(source, **options):
        options = {"launcher": "mp", "frames_per_batch": 20, "sync": sync, **options}
        return cls(source, by_step(), **options)

    return make


@pytest.mark.parametrize(
    ("cls", "kind", "sync"),
    [
        (CLASSES[0], "memory", True),
        (CLASSES[1], "shared", False),
        (CLASSES[0], "prioritized", True),
    ],
)
def test_iteration_fills_it_exactly(cls, kind, sync):
    check_iteration(of(cls, sync), kind)


def test_it_is_filled_in_the_background():
    check_background(of(CLASSES[1], False), BUFFERS["memory"]())
