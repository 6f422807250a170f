"""Facts about PyTorch's operators, for tensors without memory of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from trawl.foreign.torch import schema_of


def is_written(declared: Any) -> bool:
    """Returns True if an operator changes an argument, or returns an argument that it changed.

    Args:
        declared: an argument or a result in the schema of the operator.
    """
    return declared.alias_info is not None and declared.alias_info.is_write


def check_namespace(func: Any) -> None:
    """Raises an error if an operator reads and writes memory without declaring it.

    Raises:
        RuntimeError: if the operator belongs to ``torch.distributed``.
    """
    if func.namespace == "c10d":
        raise RuntimeError(
            f"torch.distributed ({schema_of(func).name}) can't send or receive StackedFrames, "
            "because they have no memory that holds the stacks: call to_dense() first"
        )


def check_in_place(func: Any) -> None:
    """Raises an error if an operator changes the shape or the memory of a tensor in place.

    Raises:
        RuntimeError: if it is such an operator.
    """
    if torch.Tag.inplace_view in func.tags:
        name = schema_of(func).name.partition("::")[2]
        raise RuntimeError(
            f"{name}() can't change the shape or the memory of StackedFrames in place: use "
            f"{name.removesuffix('_')}(), or call to_dense() first"
        )


def changed_results(func: Any, results: Any, changed: Sequence[Any]) -> Any:
    """Returns the results of an operator, where changed arguments are those of the caller.

    Args:
        func: the operator.
        results: its results.
        changed: the arguments that the operator changed, in the order of its schema.

    Raises:
        RuntimeError: if a result doesn't have the shape of the argument that should hold it.
    """
    returns = schema_of(func).returns
    one = len(returns) == 1
    given = iter(changed)
    found = [
        _checked(next(given), result) if is_written(declared) else result
        for declared, result in zip(returns, [results] if one else results or (), strict=False)
    ]
    return found[0] if one else tuple(found) if returns else results


def _checked(given: Any, result: Any) -> Any:
    if given.shape != result.shape:
        raise RuntimeError(
            f"out has the shape {tuple(given.shape)}, but the result has {tuple(result.shape)}: "
            "pass a tensor of the shape of the result"
        )
    return given


def named_arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yields each argument of a call as the operator's schema declares it, and its value."""
    declared = schema_of(func).arguments
    yield from zip(declared, args, strict=False)
    yield from ((one, kwargs[one.name]) for one in declared if one.name in kwargs)
