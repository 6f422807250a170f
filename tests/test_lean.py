"""Processes of Trawl's own import tensordict without the compiler, which works all the same."""

from __future__ import annotations

import nursery

BEGIN = """
import sys
from trawl.lean import import_lean
import_lean()
"""


def run(code: str) -> None:
    """Runs code in a process that has imported torch, but neither tensordict nor the compiler."""
    made = nursery.run(code, within=nursery.bare(), warn=["error"])
    assert not made.returncode, made.stderr


def test_a_worker_collects_without_the_compiler() -> None:
    run(
        BEGIN
        + """
import trawl.collectors.worker
from tensordict.nn import TensorDictModule
from torch import nn
from trawl import Collector

policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
with Collector("Pendulum-v1", policy, frames_per_batch=100) as collector:
    assert collector.next().shape == (100,)
assert "torch._dynamo" not in sys.modules
assert "pandas" not in sys.modules
assert "jax" not in sys.modules
"""
    )


def test_the_compiler_is_told_once_it_is_there() -> None:
    run(
        BEGIN
        + """
import tensordict.utils
import torch
import torch._dynamo
from torch._dynamo import trace_rules

assert tensordict.utils._lock_warn._dynamo_marked_constant
allowed = trace_rules._allowed_callable_ids()
assert id(tensordict.utils._add_batch_dim_c) in allowed

given = tensordict.TensorDict(a=torch.zeros(3))
compiled = torch.compile(lambda values: values + 1, backend="eager", fullgraph=True)
assert (compiled(given)["a"] == 1).all()
"""
    )


def test_torch_and_the_import_system_are_as_before() -> None:
    run(
        """
import gc
import sys
import torch.compiler

marks = torch.compiler.allow_in_graph, torch.compiler.assume_constant_result
finders = list(sys.meta_path)
"""
        + BEGIN
        + """
import tensordict.nn
assert "torch._dynamo" not in sys.modules
assert (torch.compiler.allow_in_graph, torch.compiler.assume_constant_result) == marks
assert gc.isenabled()
import torch._dynamo
assert sys.meta_path == finders
assert type(torch._dynamo.__spec__.loader) is type(torch.__spec__.loader)
"""
    )


def test_nothing_changes_where_tensordict_is_already() -> None:
    run(
        "import sys, tensordict; finders = list(sys.meta_path)"
        + BEGIN
        + "assert sys.meta_path == finders"
    )
