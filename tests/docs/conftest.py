"""Shared fixtures of the tests of examples."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _ray_is_connected() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


@pytest.fixture(autouse=True)
def no_service_is_left() -> Iterator[None]:
    """Ends the connection to Ray and the process of W&B that an example has started."""
    connected = _ray_is_connected()
    yield
    if _ray_is_connected() and not connected:
        sys.modules["ray"].shutdown()
    if "wandb" in sys.modules:
        import wandb

        wandb.teardown()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports an example by its name."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    # On the path, so that workers find it as well.
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
