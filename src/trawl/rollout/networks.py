"""Networks that a policy calls, but that are not part of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

_noting = ContextVar("noting", default=False)


@contextmanager
def networks_noted() -> Iterator[None]:
    """Context in which :func:`call_noting_networks` looks for networks."""
    token = _noting.set(True)
    try:
        yield
    finally:
        _noting.reset(token)


def call_noting_networks(
    policy: Any, call: Callable[..., Any], *inputs: Any
) -> tuple[Any, list[nn.Module]]:
    """Calls a policy, and looks for networks that it calls and that are not part of it.

    It looks only within :func:`networks_noted`, because it has a cost: modules that are compiled
    in the call are compiled again later.

    Args:
        policy: the policy.
        call: function that calls it.
        *inputs: arguments of ``call``.

    Returns:
        The result of ``call``, and the networks that have weights to be trained.
    """
    if not _noting.get():
        return call(*inputs), []
    result, called = called_modules(policy, call, *inputs)
    return result, foreign_networks(policy, called)


def called_modules(
    policy: Any, call: Callable[..., Any], *inputs: Any
) -> tuple[Any, list[nn.Module]]:
    """Calls a policy, and lists the modules that are called, unless it calls only its own.

    Args:
        policy: the policy.
        call: function that calls it.
        *inputs: arguments of ``call``.

    Returns:
        The result of ``call``, and the modules.
    """
    if not _calls_function(policy):
        return call(*inputs), []
    called: list[nn.Module] = []
    thread = get_ident()

    def note(module: nn.Module, _: Any) -> None:
        # A compiled module is called like others, and its inner modules can't be noted.
        if not torch.compiler.is_compiling() and get_ident() == thread:
            called.append(module)

    handle = register_module_forward_pre_hook(note)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using `torch.compile.* global hooks")
            result = call(*inputs)
    finally:
        handle.remove()
    return result, called


def _calls_function(policy: Any) -> bool:
    """Returns True if a policy is a function, or has modules that call functions."""
    if not isinstance(policy, nn.Module):
        return True
    functions = (getattr(module, "module", None) for module in policy.modules())
    return any(callable(one) and not isinstance(one, nn.Module) for one in functions)


def foreign_networks(policy: Any, called: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the called modules with weights to be trained that are not part of the policy.

    Modules within other ones that it returns are left out.
    """
    known = set(policy.modules()) if isinstance(policy, nn.Module) else set()
    found = []
    for module in called:
        trained = any(parameter.requires_grad for parameter in module.parameters())
        if module not in known and trained:
            found.append(module)
        known.update(module.modules())
    return found
