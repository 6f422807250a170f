"""What ``help()`` and ``inspect.signature`` show of each collector's constructor."""

import inspect
import pydoc
import re

import pytest

from trawl.collectors import (
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)
from trawl.collectors.distributed import (
    DistributedCollector,
    DistributedSyncCollector,
    RayCollector,
    RPCCollector,
)

# Beside those of the others: options that a class has, and options of its parents that it refuses.
OWN = {
    Collector: (["interruptor", "backend", "num_collectors"], ["num_workers"]),
    MultiCollector: (["num_workers", "start_method", "sync"], ["interruptor", "backend"]),
    MultiSyncCollector: (["cat_results", "start_method", "worker_idx"], ["sync"]),
    MultiAsyncCollector: (["max_policy_lag", "start_method"], ["return_same_td", "sync"]),
    AsyncCollector: (["worker_timeout", "start_method"], ["interruptor", "sync"]),
    RayCollector: (["sync", "remote_configs"], ["start_method", "launcher"]),
    DistributedCollector: (["sync", "launcher", "backend"], ["start_method", "remote_configs"]),
    DistributedSyncCollector: (["update_interval"], ["sync", "update_after_each_batch"]),
    RPCCollector: (["sync", "tensorpipe_options"], ["start_method", "update_interval"]),
}


@pytest.mark.parametrize("cls", OWN)
def test_the_signature_shows_what_the_class_takes(cls):
    shown = inspect.signature(cls).parameters
    assert list(shown)[:3] == ["create_env_fn", "policy", "frames_per_batch"]
    own, others = OWN[cls]
    assert set(own) <= set(shown)
    assert not set(others) & set(shown)


@pytest.mark.parametrize("cls", OWN)
def test_help_tells_the_meaning_of_every_argument_once(cls):
    text, _ = pydoc.render_doc(cls, renderer=pydoc.plaintext).split("Method resolution order")
    documented = re.findall(r"^ \|      (\w+): ", text, re.MULTILINE)
    expected = list(inspect.signature(cls).parameters)
    assert [name for name in documented if name in expected] == expected
    assert "**options:" not in text


def test_a_class_that_overrides_an_option_tells_its_own_meaning():
    assert "collector that each worker runs" in RayCollector.__doc__
    assert "class of the workers' collectors: a subclass" in MultiSyncCollector.__doc__
    assert inspect.signature(DistributedSyncCollector).parameters["update_interval"].default == 1
