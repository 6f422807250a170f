"""Where Trawl is imported first, no compiler is there until it is used: nothing else changes."""

from __future__ import annotations

import nursery


def run(code: str) -> None:
    """Runs code in a process that has imported torch, but neither tensordict nor the compiler."""
    made = nursery.run(code, within=nursery.bare(), warn=["error"])
    assert not made.returncode, made.stderr


def test_a_worker_collects_without_the_compiler_and_it_is_told_once_it_is_there() -> None:
    """PyTorch and the import system are as before, with and without it."""
    run(
        """
import gc
import sys
import torch.compiler

marks = torch.compiler.allow_in_graph, torch.compiler.assume_constant_result
before = list(sys.meta_path)

import trawl.collectors.workers.service
from tensordict.nn import TensorDictModule
from torch import nn
from trawl import Collector

policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
with Collector("Pendulum-v1", policy, frames_per_batch=100) as collector:
    assert collector.next().shape == (100,)
for name in ("torch._dynamo", "pandas", "jax"):
    assert name not in sys.modules
assert (torch.compiler.allow_in_graph, torch.compiler.assume_constant_result) == marks
assert gc.isenabled()

import tensordict.utils
import torch._dynamo
from torch._dynamo import trace_rules

assert sys.meta_path == before
assert type(torch._dynamo.__spec__.loader) is type(torch.__spec__.loader)
assert tensordict.utils._lock_warn._dynamo_marked_constant
allowed = trace_rules._allowed_callable_ids()
assert id(tensordict.utils._add_batch_dim_c) in allowed
given = tensordict.TensorDict(a=torch.zeros(3))
compiled = torch.compile(lambda values: values + 1, backend="eager", fullgraph=True)
assert (compiled(given)["a"] == 1).all()
"""
    )


def test_nothing_changes_where_tensordict_is_already() -> None:
    run(
        """
import sys
import tensordict

before = list(sys.meta_path)
import trawl.collectors
assert sys.meta_path == before
"""
    )
