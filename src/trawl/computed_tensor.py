"""Base of tensors whose values are computed when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from typing_extensions import Self, override

from trawl.foreign.torch import make_wrapper, no_torch_function, schema_of, tree_map

_NO_CHANGE = (
    "StackedFrames, their slices and their views can't be changed in place, because they have no "
    "memory that holds the stacks, and nor has a clone(): change what to_dense() returns, and "
    "assign it to the batch"
)


class _CantChangeError(RuntimeError, KeyError):
    """Raised by operations that would write into a computed tensor, or ask for its memory.

    It is a KeyError, too, because a TensorDict puts all other errors of a write in place into a
    ``ValueError`` that prints the whole batch.
    """

    # A KeyError would print the message as it stands in code.
    __str__ = RuntimeError.__str__


def _refuse() -> NoReturn:
    raise _CantChangeError(_NO_CHANGE)


class ComputedTensor(Tensor):
    """Tensor without memory of its own; ``to_dense()`` computes its values.

    An operation that ``handlers`` don't have is applied to the values, and returns ordinary
    tensors. Views of the values are read-only, because a change of them would be lost. For the same
    reason, operations in place and those with ``out`` raise an error.

    The methods after ``__torch_dispatch__`` read or write memory, so PyTorch doesn't pass them to
    it.

    Attributes:
        handlers: functions for operators that need no values. They return NotImplemented if they
            need them after all.
    """

    handlers: ClassVar[Mapping[Any, Callable[..., Any]]] = {}
    # Operations reach __torch_dispatch__ without detours.
    __torch_function__: ClassVar[Any] = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Applies an operation.

        Raises:
            RuntimeError: if the operation changes a computed tensor, or sends or receives one.
        """
        kwargs = kwargs or {}
        handler = cls.handlers.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        _check_only_read(func, args, kwargs)
        results = func(*tree_map(_values, args), **tree_map(_values, kwargs))
        schema = schema_of(func)
        views = any(one.alias_info for one in schema.returns) and not schema.is_mutable
        return tree_map(_view, results) if views else results

    def values_to_read(self) -> Tensor:
        """Returns the values as an ordinary tensor, which nobody may change."""
        return self.to_dense()

    @override
    def __setitem__(self, index: Any, value: Any) -> None:
        raise _CantChangeError(_NO_CHANGE)

    @override
    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.to_dense().numpy(*args, **kwargs)

    @override
    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.to_dense().__array__(*args, **kwargs)

    @override
    def tolist(self) -> Any:
        return self.to_dense().tolist()

    @override
    def __format__(self, spec: str) -> str:
        return self.to_dense().__format__(spec) if spec else repr(self)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.to_dense().__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return self.to_dense().__dlpack_device__()

    @override
    def untyped_storage(self) -> torch.UntypedStorage:
        storage = super().untyped_storage()
        # A TensorDict compares addresses of memory when a write in place has failed. PyTorch's
        # error, that there is no address, would hide why.
        vars(storage)["data_ptr"] = _refuse
        return storage

    @override
    def data_ptr(self) -> int:
        raise RuntimeError(
            "a tensor whose values are computed when they are read has no memory: call to_dense() "
            "first, or use the frames and positions of the stacks"
        )

    @override
    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()


class ReadOnlyView(ComputedTensor):
    """View of the pixels of ``StackedFrames``, such as ``stacks.flatten(1)``.

    Its values were computed for the view, so a change of them would not reach the stacks. A view of
    the view is read-only, too.
    """

    computed: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> ReadOnlyView:
        """Returns a view that has the memory of ``values``."""
        layout = {"dtype": values.dtype, "device": values.device}
        made: ReadOnlyView = make_wrapper(cls, values.shape, strides=values.stride(), **layout)
        made.computed = values
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Returns the name of the tensor that this one consists of, for ``torch.compile``."""
        return ["computed"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, _: Any, size: Any, stride: Any) -> ReadOnlyView:
        """Returns the view of the tensor ``inner``, for ``torch.compile``."""
        return ReadOnlyView(inner["computed"])

    @override
    def values_to_read(self) -> Tensor:
        return self.computed

    @override
    def to_dense(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the values as an ordinary tensor, which shares no memory with this one."""
        return self.computed.clone()

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


def _check_only_read(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises an error if an operator writes into a computed tensor."""
    schema = schema_of(func)
    # Operators of torch.distributed read and write memory without declaring it.
    if func.namespace == "c10d":
        raise RuntimeError(
            f"torch.distributed ({schema.name}) can't send or receive StackedFrames, because they "
            "have no memory that holds the stacks: call to_dense() first"
        )
    if not schema.is_mutable:
        return
    for place, declared in enumerate(schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(declared.name)
            several = given if isinstance(given, (list, tuple)) else (given,)
            if any(isinstance(one, ComputedTensor) for one in several):
                raise _CantChangeError(_NO_CHANGE)


def _values(value: Any) -> Any:
    return value.values_to_read() if isinstance(value, ComputedTensor) else value


def _view(value: Any) -> Any:
    # Values that were computed for this operation may be of another class, in its own charge.
    return value if isinstance(value, ComputedTensor) else ReadOnlyView(value)
