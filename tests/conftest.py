"""Settings and services that all tests share."""

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import nursery
import pytest
import torch
from hypothesis import HealthCheck, settings
from ray_workers import forked_workers
from schedule import ByDuration, Clock, plan, uses_ray

from trawl import exploration_type, set_exploration_type
from trawl.backends.processes import server

# Examples are searched for anew on a developer's machine, and always the same ones elsewhere.
_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("local", max_examples=20, **_common)
settings.register_profile("ci", max_examples=20, derandomize=True, **_common)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# Ray's workers have the lowest priority but a few, unless this says otherwise: beside tests that
# keep all processors busy they would hardly ever run.
os.environ.setdefault("RAY_worker_niceness", "0")
# A thread that exports Ray's metrics has crashed the process of the tests.
os.environ.setdefault("RAY_enable_metrics_collection", "0")

# The memory of Arrow would be cleaned by a thread, also in processes from which others are forked.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

# JAX would look for other devices, and warn if it finds none that it can use.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs that run for some steps are compiled sooner than they are optimized.
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_QUICK += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", _QUICK)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So begins what a shell runs in the background, and what tests start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# TorchRL sets this when it is imported, unless processes were started before: no test should
# depend on which tests ran before it.
multiprocessing.set_start_method("spawn", force=True)


# What modules of tests import, which each worker would import anew for the classes defined there.
server.PRELOADED = (*server.PRELOADED, "pytest", "hypothesis", "psutil", "trawl.testing")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "write tests/durations.txt, by which tests are distributed over processes"
    parser.addoption("--keep-durations", action="store_true", help=text)


# What the processes of pytest-xdist import before they begin.
_PREPARED = ("pandas", "trawl.extras.cli.collect", "trawl.testing")
_PREPARED += ("trawl.collectors", "torchrl.collectors", "torchrl.envs", "torchrl.modules")
_PREPARED += ("collected",)


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "tx", None):
        # One process imports this for all, which are forked from it.
        python = nursery.interpreter(*_PREPARED, COLLECTED=json.dumps(config.args))
        places = [one.replace("popen", f"popen//python={python}") for one in config.option.tx]
        config.option.tx = places
    if config.option.keep_durations:
        config.pluginmanager.register(Clock())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with what takes long."""
    tests = [test for unit in plan([item.nodeid for item in items]).values() for test in unit]
    places = {test: place for place, test in enumerate(tests)}
    items.sort(key=lambda item: places[item.nodeid])


def pytest_collection_finish() -> None:
    """Exempts what all tests have imported from garbage collection, which many tests call.

    By itself it comes less often than in other programs: a collector makes many objects anew.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distributes tests by what they take, but those that use Ray go to one process together.

    A program joins the Ray cluster that it finds on its machine, so that two processes of tests
    would get into each other's way; and one cluster for all starts sooner than one for each file.
    """
    return ByDuration(config, log)


# What is to be ended of the Ray cluster; None while there is none.
_cluster: contextlib.ExitStack | None = None


@pytest.fixture(scope="module")
def cluster() -> Any:
    """The module ``ray``, connected to a cluster with few CPUs, which tests share."""
    pytest.importorskip("ray")
    from trawl.extras.clusters.ray.cluster import DEFAULT_RAY_INIT_CONFIG, connect, import_ray

    global _cluster
    ray = import_ray()
    if _cluster is None:
        options = {"address": "local", "num_cpus": 4, "object_store_memory": 300 << 20}
        options |= {"log_to_driver": False}
        with contextlib.ExitStack() as started:
            interpreter = started.enter_context(forked_workers())
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "executable", interpreter)
                assert connect({**DEFAULT_RAY_INIT_CONFIG, **options})
            started.callback(ray.shutdown)
            _cluster = started.pop_all()
    return ray


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the cluster after the last test that uses it: others look at what runs here."""
    global _cluster
    if _cluster is not None and (nextitem is None or not uses_ray(nextitem.nodeid)):
        _cluster.close()
        _cluster = None


# What a whole process has once, and how it is set again: a test that changes it would make others
# fail, depending on which come after it.
_ONCE = {
    "exploration type": (exploration_type, lambda kind: set_exploration_type(kind).__enter__()),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "folder": (os.getcwd, os.chdir),
    "profiler": (sys.getprofile, sys.setprofile),
    "SIGINT": (partial(signal.getsignal, signal.SIGINT), partial(signal.signal, signal.SIGINT)),
    "SIGTERM": (partial(signal.getsignal, signal.SIGTERM), partial(signal.signal, signal.SIGTERM)),
}


@pytest.fixture(autouse=True)
def _the_process_is_as_before() -> Iterator[None]:
    """Fails the test that leaves a change in its process."""
    before = {name: look() for name, (look, _) in _ONCE.items()}
    yield
    after = {name: look() for name, (look, _) in _ONCE.items()}
    changed = {name: value for name, value in after.items() if value != before[name]}
    for name in changed:
        _ONCE[name][1](before[name])
    # TorchRL handles signals from the first storage in files on, and Ray from its start on.
    theirs = ("torchrl", "ray")
    changed = {
        name: value
        for name, value in changed.items()
        if not str(getattr(value, "__module__", "")).startswith(theirs) or name[:3] != "SIG"
    }
    if changed:
        pytest.fail(f"the test changed its process: {changed}")
