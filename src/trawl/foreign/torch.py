"""Private names of PyTorch."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_unflatten

# PyTorch has no public module for pytrees, nor for modes that see each operator.
__all__ = ["TorchDispatchMode", "tree_map", "tree_unflatten"]

#: Makes a tensor of a subclass without memory. PyTorch's notes on subclasses name no other way.
make_wrapper: Any = Tensor._make_wrapper_subclass

#: ``__torch_function__`` of a subclass whose operations reach ``__torch_dispatch__`` at once.
#: PyTorch's notes name it; without it, each operation takes a detour through Python.
no_torch_function: Any = torch._C._disabled_torch_function_impl

#: Copies tensors into others by one call. A loop over ``copy_`` takes several times as long.
copy_all: Any = torch._foreach_copy_

#: Returns the schema of an operator: its arguments and results, and which of them it changes. No
#: public name tells that.
schema_of: Any = attrgetter("_schema")

#: Returns the number of times that a tensor was written to. Otherwise, only a comparison of all
#: values shows whether a tensor has changed.
writes_of: Any = attrgetter("_version")

# Operators that only compiled and copied code calls, by their full names. The public functions,
# such as `view` and `to`, become other operators.
UNSAFE_VIEW: Any = torch.ops.aten._unsafe_view.default
TO_COPY: Any = torch.ops.aten._to_copy.default
PIN_MEMORY: Any = torch.ops.aten._pin_memory.default

#: Names of functions that draw random numbers, which distributions call.
SAMPLERS = ("_sample_dirichlet", "_standard_gamma")

# Attributes of a module in which its entries and its hooks lie. The public iterators make new
# objects, and can't tell whether an entry was replaced.
BUFFERS = "_buffers"
TENSORS = ("_parameters", BUFFERS)
ENTRIES = (*TENSORS, "_modules")
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
HOOKS = (*FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks")

#: Returns a module's own parameters, buffers and submodules, as the mappings in which they lie.
entries_of: Any = attrgetter(*ENTRIES)

#: Returns a module's own buffers, as the mapping in which they lie.
buffers_of: Any = attrgetter(BUFFERS)

#: Returns True if there are hooks for the calls of all modules, of which there is no public list.
has_global_hook: Any = _has_any_global_hook

_COMPILED_CALL, _COMPILED_FUNCTION = "_compiled_call_impl", "_torchdynamo_orig_callable"
#: Attributes of compiled modules, and of compiled functions.
COMPILED = ("_orig_mod", _COMPILED_FUNCTION)
_VALIDATES, _UNTYPED = "_validate_args", "_untyped_storage"


def saves_specially(module: nn.Module) -> bool:
    """Returns True if a module writes its own state in another way than ordinary modules do.

    Only such a module, for example a quantized one, may have weights that are not tensors. To find
    out from the state itself, it would have to be made.
    """
    return type(module)._save_to_state_dict is not nn.Module._save_to_state_dict


def has_compiled_call(module: nn.Module) -> bool:
    """Returns True if ``module.compile()`` was called, which has no other visible effect."""
    return getattr(module, _COMPILED_CALL, None) is not None


def is_compiled(policy: Any) -> bool:
    """Returns True if ``torch.compile`` made a policy, which has no public mark."""
    return any(hasattr(policy, name) for name in COMPILED)


def uncompiled(function: Any) -> Any:
    """Returns the function that ``torch.compile`` was given, or the function itself.

    What the compiled function keeps is the compiler's, and not the user's.
    """
    return getattr(function, _COMPILED_FUNCTION, function)


def validates(distribution: Any) -> bool:
    """Returns True if distributions check their arguments; the public method can only set this."""
    found: bool = getattr(distribution, _VALIDATES)
    return found


def untyped(storage: Any) -> Any:
    """Returns the storage in a typed one. ``storage.untyped()`` warns that it is deprecated."""
    return getattr(storage, _UNTYPED, storage)
