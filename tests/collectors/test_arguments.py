"""What `help()` shows of each collector's constructor, and what becomes of its options."""

import inspect
import pydoc
import re
from dataclasses import fields

import pytest
from multi_parts import make

from trawl.collectors import (
    AsyncCollector,
    Collector,
    CollectorConfig,
    MultiAsyncCollector,
    MultiCollector,
    MultiConfig,
    MultiSyncCollector,
    RandomPolicy,
)
from trawl.collectors.distributed import (
    DistributedCollector,
    DistributedSyncCollector,
    RayCollector,
    RPCCollector,
)
from trawl.collectors.options import LIST, tagged
from trawl.testing import NumberedEnv

# Arguments of collectors with workers that may be lists, besides options of the table.
LISTS = {"policy", "frames_per_batch"}
# Beside those of the others: options that a class has, and options of its parents that it refuses.
OWN = {
    Collector: (["interruptor", "backend", "num_collectors"], ["num_workers"]),
    MultiCollector: (
        ["num_workers", "start_method", "sync"],
        ["interruptor", "backend", "return_same_td"],
    ),
    MultiSyncCollector: (["cat_results", "start_method", "worker_idx"], ["sync"]),
    MultiAsyncCollector: (["max_policy_lag", "start_method"], ["return_same_td", "sync"]),
    AsyncCollector: (["worker_timeout", "start_method"], ["interruptor", "sync"]),
    RayCollector: (["sync", "remote_configs"], ["start_method", "launcher"]),
    DistributedCollector: (["sync", "launcher", "backend"], ["start_method", "remote_configs"]),
    DistributedSyncCollector: (["update_interval"], ["sync", "update_after_each_batch"]),
    RPCCollector: (["sync", "tensorpipe_options"], ["start_method", "update_interval"]),
}


@pytest.mark.parametrize("cls", OWN)
def test_signature_and_help_show_what_the_class_takes(cls):
    shown = list(inspect.signature(cls).parameters)
    assert shown[:3] == ["create_env_fn", "policy", "frames_per_batch"]
    own, others = OWN[cls]
    assert set(own) <= set(shown)
    assert not set(others) & set(shown)
    text, _ = pydoc.render_doc(cls, renderer=pydoc.plaintext).split("Method resolution order")
    documented = re.findall(r"^ \|      (\w+): ", text, re.MULTILINE)
    # The meaning of each argument is told once.
    assert [name for name in documented if name in shown] == shown
    assert "**options:" not in text


def test_a_class_that_overrides_an_option_tells_its_own_meaning():
    assert "collector that each worker runs" in RayCollector.__doc__
    assert "class of the workers' collectors: a subclass" in MultiSyncCollector.__doc__
    assert inspect.signature(DistributedSyncCollector).parameters["update_interval"].default == 1
    given = inspect.signature(AsyncCollector).parameters
    # Editors know which options may be lists.
    lists = {name for name, one in given.items() if "Sequence[" in str(one.annotation)}
    assert lists == tagged(CollectorConfig, LIST) | LISTS


# Pages have the defaults, and tests compare them with those of TorchRL.
def test_arguments_of_one_name_have_one_default():
    environment, policy, *others = inspect.signature(Collector).parameters.values()
    assert environment.default is inspect.Parameter.empty
    assert policy.default is None
    for one in (environment, policy):
        assert one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in others)
    alone = {one.name: one.default for one in others}
    for cls in (MultiCollector, MultiSyncCollector, MultiAsyncCollector, AsyncCollector):
        shown = {name: p.default for name, p in inspect.signature(cls).parameters.items()}
        # A collector in one process makes the choice for others.
        for name in set(alone) & set(shown) - {"sync"}:
            assert shown[name] == alone[name]


# --- what is given, and read again


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        ((), {}, r"needs the argument frames_per_batch"),
        ((None, 10), {}, r"at most 2 positional arguments.*got 3.*by name"),
        (
            (),
            {"frames_per_batch": 1, "frame_per_batch": 2, "quick": True},
            r"unknown arguments: frame_per_batch, quick",
        ),
        ((), {"num_envs": 2}, r": num_envs\. .* such as create_env_kwargs=\{'num_envs': \.\.\.\}$"),
        ((), {"n_envs": 2}, r": n_envs\. .*\['CartPole-v1'\] \* 4"),
        ((), {"env": 2}, r": env\. The environment is the first argument, create_env_fn$"),
        ((), {"n_steps": 2}, r": n_steps; did you mean frames_per_batch\?"),
        ((), {"n_workers": 2}, r": n_workers\. Only collectors with workers.* num_workers$"),
        ((), {"update_interval": 2}, r": update_interval\. Only Dist.*; elsewhere, update_pol"),
        (
            (),
            {"verbose": 2},
            r": verbose\. CollectionProgress\(collector\), of trawl\.observe",
        ),
        (
            (RandomPolicy,),
            {"frames_per_batch": 1},
            r"class RandomPolicy: .*, RandomPolicy\(\)$",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, options, match):
    with pytest.raises(TypeError, match=match):
        Collector("CartPole-v1", *arguments, **options)


def test_options_can_be_read_as_attributes():
    with Collector(NumberedEnv(), frames_per_batch=10, total_frames=30) as collector:
        assert collector.total_frames == 30
        assert collector.replay_buffer is None
        # Random actions are trusted.
        assert collector.trust_policy is True
        with pytest.raises(AttributeError, match=r"'Collector' object has no .* 'total_frame'"):
            _ = collector.total_frame
    with make(total_frames=30, cat_results=-1, num_sub_threads=2) as collector:
        for field in fields(MultiConfig):
            assert field.name == "worker_idx" or hasattr(collector, field.name)
        assert (collector.total_frames, collector.cat_results) == (30, -1)
        assert (collector.num_sub_threads, collector.requested_frames_per_batch) == (2, 10)
