"""Shared fixtures of the tests of examples."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import nursery
import pytest
import torch
from ray_workers import forked_workers
from schedule import uses_ray

from trawl.extras.clusters.ray.cluster import DEFAULT_RAY_INIT_CONFIG

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _ray_is_connected() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


@pytest.fixture(autouse=True)
def no_service_is_left(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Ends the connection to Ray and the process of W&B that an example has started."""
    joins = "planning-clusters.md" in request.node.nodeid
    if joins:
        request.getfixturevalue("cluster")
    connected = _ray_is_connected()
    # Otherwise, Ray prints the output of actors here as well, at any time.
    monkeypatch.setitem(DEFAULT_RAY_INIT_CONFIG, "log_to_driver", False)
    starts = uses_ray(request.node.nodeid) and not joins
    # The scripts of this page start processes that start others.
    plain = nursery.python() if "weights.md" in request.node.nodeid else None
    with forked_workers() if starts else nullcontext(plain) as interpreter:
        monkeypatch.setattr(sys, "executable", interpreter or sys.executable)
        yield
        _end_services(connected)


def _end_services(connected: bool) -> None:
    if _ray_is_connected() and not connected:
        sys.modules["ray"].shutdown()
    if "wandb" in sys.modules:
        import wandb

        wandb.teardown()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Yields a function that imports an example by its name."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    # Adds the examples to the path, so that workers find them as well.
    monkeypatch.syspath_prepend(str(EXAMPLES))
    found: list[str] = []

    def load(name: str) -> Any:
        found.append(name)
        return importlib.import_module(name)

    yield load
    for name in found:
        sys.modules.pop(name, None)
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
