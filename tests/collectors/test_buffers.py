"""TorchRL's buffers of all kinds are filled by collectors on this machine."""

from __future__ import annotations

from typing import Any

import pytest
from buffer_parts import BUFFERS, check_background, check_iteration
from collector_parts import by_step

from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector


def single(source: list[Any], **options: Any) -> Collector:
    return Collector(source[0], by_step(), frames_per_batch=20, **options)


def of(cls: Any, **where: Any) -> Any:
    def make(source: list[Any], **options: Any) -> Any:
        return cls(source, by_step(), frames_per_batch=20, **where, **options)

    return make


PLACES = {
    "single": single,
    "sync, inline": of(MultiSyncCollector, start_method="inline"),
    "async, inline": of(MultiAsyncCollector, start_method="inline"),
    "sync, processes": of(MultiSyncCollector),
    "async, processes": of(MultiAsyncCollector),
}
places = pytest.mark.parametrize("place", PLACES)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        *[("single", kind) for kind in BUFFERS],
        ("sync, inline", "disk"),
        ("sync, inline", "prioritized"),
        ("async, inline", "list"),
        ("async, inline", "shared"),
        ("sync, processes", "memory"),
        ("sync, processes", "shared"),
        ("async, processes", "shared"),
        ("async, processes", "torchrl_prioritized"),
    ],
)
def test_iteration_fills_it_exactly(place: str, kind: str) -> None:
    check_iteration(PLACES[place], kind)


@pytest.mark.parametrize(
    ("place", "kind"),
    [("single", "memory"), ("sync, inline", "shared"), ("async, processes", "shared")],
)
def test_it_is_filled_step_by_step(place: str, kind: str) -> None:
    check_iteration(PLACES[place], kind, extend_buffer=False)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("single", "disk"),
        ("sync, inline", "memory"),
        ("async, inline", "prioritized"),
        ("sync, processes", "shared"),
        ("async, processes", "memory"),
    ],
)
def test_it_is_filled_in_the_background(place: str, kind: str) -> None:
    check_background(PLACES[place], BUFFERS[kind]())
