"""Tensor that can't be changed in place, because the change would be lost."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Self, override

from trawl.computed_tensor import ComputedTensor
from trawl.foreign.torch import make_wrapper, schema_of, tree_map
from trawl.operators import is_written, named_arguments

CANT_CHANGE = (
    "a slice or a view of StackedFrames can't be changed in place, because it shares no memory "
    "with the stacks: change stacks.to_dense(), and assign the result to the batch"
)


class ReadOnlyView(ComputedTensor):
    """View of the pixels of ``StackedFrames``, such as ``stacks.flatten(1)``.

    Its values were computed for the view, so a change of them would not reach the stacks. An
    operation in place raises an error, a view of the view is read-only, too, and all other
    operations return ordinary tensors.
    """

    computed: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> ReadOnlyView:
        """Returns a view that has the memory of ``values``."""
        layout = {"dtype": values.dtype, "device": values.device}
        made: ReadOnlyView = make_wrapper(cls, values.shape, strides=values.stride(), **layout)
        made.computed = values
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Applies an operation to the values, unless it changes a view."""
        kwargs = kwargs or {}
        for declared, value in named_arguments(func, args, kwargs):
            values = value if isinstance(value, (list, tuple)) else (value,)
            if is_written(declared) and any(isinstance(one, cls) for one in values):
                raise RuntimeError(CANT_CHANGE)
        return read_only(func, func(*tree_map(_plain, args), **tree_map(_plain, kwargs)))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Returns the name of the tensor that this one consists of, for ``torch.compile``."""
        return ["computed"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, _: Any, size: Any, stride: Any) -> ReadOnlyView:
        """Returns the view of the tensor ``inner``, for ``torch.compile``."""
        return ReadOnlyView(inner["computed"])

    @override
    def to_dense(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the values as an ordinary tensor, which shares no memory with this one."""
        return self.computed.clone()

    @override
    def __setitem__(self, index: Any, value: Any) -> None:
        raise RuntimeError(CANT_CHANGE)

    @override
    def is_shared(self) -> bool:
        return bool(self.computed.is_shared())

    @override
    def share_memory_(self) -> Self:
        self.computed.share_memory_()
        return self

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.to_dense().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.computed)


def _plain(value: Any) -> Any:
    return value.computed if isinstance(value, ReadOnlyView) else value


def read_only(func: Any, results: Any) -> Any:
    """Returns the results of an operator, where views of its arguments are read-only.

    Args:
        func: the operator, which changes no argument.
        results: its results.
    """
    schema = schema_of(func)
    if schema.is_mutable or not any(one.alias_info for one in schema.returns):
        return results
    return tree_map(_view, results)


def _view(value: Any) -> Any:
    # Values that were computed for this operation may be of another class, in its own charge.
    return value if isinstance(value, ComputedTensor) else ReadOnlyView(value)
