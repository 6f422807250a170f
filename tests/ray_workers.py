"""Workers of a Ray cluster that start at once, as they are forked.

Ray runs a fresh interpreter for each, which imports Ray, PyTorch and Trawl: that takes a processor
longer than most tests do. Here it runs a small program instead, which asks a nursery for the same
worker.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator

import pytest
from nursery import IS_MODULE, IS_SERVER, PYTHON, Nursery, write_python

_MODULES = (
    "trawl.extras.clusters.ray.collector",
    "trawl.collectors.workers.service",
    "trawl.data",
)
# Ray reads its settings as it is imported, which TorchRL does as well.
_RAY = (
    "ray._private.workers.default_worker",
    "torchrl.data",
    # What it imports when the first object is sent.
    "pydantic.v1",
    "pydantic.main",
    "pyarrow.json",
    "starlette.datastructures",
    "ray._common.pydantic_compat",
    "ray._common.usage.usage_lib",
    "ray._private.arrow_serialization",
)


@contextlib.contextmanager
def forked_workers() -> Iterator[str]:
    """Gives what is to be ``sys.executable`` when a cluster is started: one cluster, within it."""
    # Workers are to find no more than others do: not the modules of tests.
    path = [os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        place = os.path.join(folder, "nursery")
        is_worker = 'os.path.basename(arguments[0]) == "default_worker.py"'
        caller = write_python(folder, place, f"{is_worker} or {IS_MODULE} or {IS_SERVER}", PYTHON)
        nursery = Nursery(*_MODULES, place=place, later=_RAY, PYTHONPATH=os.pathsep.join(path))
        try:
            with _orderly():
                yield caller
        finally:
            nursery.close()


@contextlib.contextmanager
def _orderly() -> Iterator[None]:
    """Ray waits for the processes that it kills, and does not print what it learns of workers.

    Before 2.57 it does not wait, and Python warns of that. What it prints may come at any time,
    also in an example whose output is compared.
    """
    if importlib.util.find_spec("ray") is None:
        yield
        return
    from trawl.extras.clusters.ray.cluster import import_ray

    import_ray()
    node = importlib.import_module("ray._private.node").Node
    kill = functools.partialmethod(node.kill_all_processes, wait=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "kill_all_processes", kill)
        patch.setattr("ray._private.worker.print_to_stdstream", lambda *_, **__: None)
        yield
