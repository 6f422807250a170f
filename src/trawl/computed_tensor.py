"""Base of tensors whose values are computed when they are read."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from trawl.foreign.torch import no_torch_function


class ComputedTensor(Tensor):
    """Tensor without memory of its own; ``to_dense()`` computes its values.

    The methods here read or write memory, so PyTorch doesn't pass them to ``__torch_dispatch__``.
    """

    # Operations reach __torch_dispatch__ without detours.
    __torch_function__: ClassVar[Any] = no_torch_function

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
    def data_ptr(self) -> int:
        raise RuntimeError(
            "a tensor whose values are computed when they are read has no memory: call to_dense() "
            "first, or use the frames and positions of the stacks"
        )

    @override
    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()
