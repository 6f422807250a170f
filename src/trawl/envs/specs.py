"""Specs of an environment's inputs and outputs: shape, dtype and domain of every entry.

A spec describes the values that a tensor may hold, and can draw random values. A leaf spec
describes one tensor, and a :class:`Composite` describes a TensorDict. Random values come from
torch's default generator, so ``torch.manual_seed`` (or ``Collector.set_seed``) determines them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, stack
from torch import Tensor
from typing_extensions import override

from trawl.keys import Key


class Spec:
    """Spec of one tensor of an environment: its shape, dtype and device.

    Args:
        shape: shape of the tensor, including the environment's batch dimensions.
        dtype: dtype of the tensor; by default, the class's ``default_dtype``.
        device: device of the results of :meth:`rand` and :meth:`zero`.
    """

    default_dtype = torch.float32

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = self.default_dtype if dtype is None else dtype
        self.device = torch.device("cpu") if device is None else torch.device(device)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the tensor."""
        return len(self.shape)

    def rand(self, shape: Sequence[int] = ()) -> Tensor:
        """Draws a random tensor of shape ``(*shape, *self.shape)``."""
        return self._draw(torch.Size((*shape, *self.shape))).to(self.device)

    def zero(self, shape: Sequence[int] = ()) -> Tensor:
        """Returns a tensor of zeros of shape ``(*shape, *self.shape)``."""
        return torch.zeros((*shape, *self.shape), dtype=self.dtype, device=self.device)

    def is_in(self, value: Tensor) -> bool:
        """Returns True if ``value`` has the spec's dtype, and its values are in the domain.

        The last dimensions of ``value`` must have the spec's shape; dimensions before them are
        ignored.
        """
        tail = value.shape[value.ndim - len(self.shape) :]
        return tail == self.shape and value.dtype == self.dtype and self.contains(value)

    def expand(self, *shape: int) -> Spec:
        """Returns a copy with ``shape`` prepended to its shape, for a batch of environments."""
        new = self.clone()
        new.shape = torch.Size((*shape, *self.shape))
        return new

    def to(self, device: torch.device | str) -> Spec:
        """Returns a copy on another device."""
        new = self.clone()
        new.device = torch.device(device)
        return new

    def clone(self) -> Spec:
        """Returns a copy that can be changed without changing this spec."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def _draw(self, shape: torch.Size) -> Tensor:
        raise TypeError(f"{type(self).__name__} can't draw random values")

    def contains(self, value: Tensor) -> bool:
        """Returns True if all values are in the domain, regardless of their dtype."""
        return True

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._describe()}, dtype={self.dtype})"

    def _describe(self) -> str:
        return f"shape={tuple(self.shape)}"


class Unbounded(Spec):
    """Any value of the dtype; random floats come from a standard normal distribution."""

    def _draw(self, shape: torch.Size) -> Tensor:
        if self.dtype.is_floating_point:
            return torch.randn(shape, dtype=self.dtype)
        if self.dtype is torch.bool:
            return torch.randint(0, 2, shape).bool()
        info = torch.iinfo(self.dtype)
        return torch.randint(max(info.min, -(2**62)), min(info.max, 2**62), shape).to(self.dtype)


class Bounded(Spec):
    """Values between ``low`` and ``high``, both included.

    Random floats have the same distributions as in ``gymnasium.spaces.Box``: uniform if both bounds
    are finite, exponential if only one is finite, and standard normal if neither is finite.
    """

    def __init__(
        self,
        low: Tensor,
        high: Tensor,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(low.shape, dtype, device)
        self.low, self.high = low, high
        wide = low.to(torch.float64), high.to(torch.float64)
        self._low_finite, self._high_finite = (bound.isfinite() for bound in wide)
        self._all_finite = bool((self._low_finite & self._high_finite).all())

    def _draw(self, shape: torch.Size) -> Tensor:
        if not self.dtype.is_floating_point:
            return self._draw_integers(shape)
        uniform = torch.rand(shape, dtype=self.dtype)
        if self._all_finite:
            return self._between(uniform)
        spread = -torch.log1p(-uniform)
        drawn = torch.randn(shape, dtype=self.dtype)
        drawn = torch.where(self._low_finite, self.low + spread, drawn)
        drawn = torch.where(self._high_finite, self.high - spread, drawn)
        both = self._low_finite & self._high_finite
        return torch.where(both, self._between(uniform), drawn)

    def _between(self, uniform: Tensor) -> Tensor:
        # Each bound is scaled on its own: ``high - low`` may overflow.
        return (self.low * (1 - uniform) + self.high * uniform).clamp_(self.low, self.high)

    def _draw_integers(self, shape: torch.Size) -> Tensor:
        low, high = self.low.to(torch.float64), self.high.to(torch.float64)
        drawn = (low + torch.rand(shape, dtype=torch.float64) * (high - low + 1)).floor()
        return torch.minimum(drawn, high).to(self.dtype)

    @override
    def contains(self, value: Tensor) -> bool:
        # The arrays are compared in numpy, because torch can't compare unsigned integers that are
        # wider than 8 bits.
        low, high, array = (tensor.cpu().numpy() for tensor in (self.low, self.high, value))
        return bool(((array >= low) & (array <= high)).all())

    @override
    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Bounded)
            and super().__eq__(other)
            and torch.equal(self.low, other.low)
            and torch.equal(self.high, other.high)
        )

    __hash__ = Spec.__hash__

    def _describe(self) -> str:
        low, high = self.low.numpy(), self.high.numpy()
        bounds = (low.min(), high.max()) if low.size else (math.nan, math.nan)
        return f"shape={tuple(self.shape)}, low={bounds[0]}, high={bounds[1]}"


class Categorical(Spec):
    """One choice among ``n`` values, as an int64 index."""

    def __init__(
        self,
        n: int,
        shape: Sequence[int] = (),
        dtype: torch.dtype = torch.int64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(shape, dtype, device)
        self.n = n

    def _draw(self, shape: torch.Size) -> Tensor:
        return torch.randint(0, self.n, shape).to(self.dtype)

    @override
    def contains(self, value: Tensor) -> bool:
        return bool(((value >= 0) & (value < self.n)).all())

    def _describe(self) -> str:
        return f"n={self.n}, shape={tuple(self.shape)}"


class MultiCategorical(Spec):
    """Several choices as int64 indices; ``nvec`` has the number of values of each choice."""

    def __init__(
        self,
        nvec: Tensor,
        dtype: torch.dtype = torch.int64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(nvec.shape, dtype, device)
        self.nvec = nvec

    def _draw(self, shape: torch.Size) -> Tensor:
        drawn = (torch.rand(shape, dtype=torch.float64) * self.nvec).floor().to(self.dtype)
        return torch.minimum(drawn, self.nvec.to(self.dtype) - 1)

    @override
    def contains(self, value: Tensor) -> bool:
        return bool(((value >= 0) & (value < self.nvec)).all())

    def _describe(self) -> str:
        return f"nvec={self.nvec.tolist()}, shape={tuple(self.shape)}"


class MultiOneHot(Spec):
    """Several choices as concatenated one-hot vectors, of shape ``(sum(nvec),)``."""

    def __init__(
        self,
        nvec: Sequence[int],
        dtype: torch.dtype = torch.int64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__((sum(nvec),), dtype, device)
        self.nvec = list(nvec)

    def _draw(self, shape: torch.Size) -> Tensor:
        parts = [torch.nn.functional.one_hot(torch.randint(0, n, shape[:-1]), n) for n in self.nvec]
        return torch.cat(parts, -1).to(self.dtype)

    @override
    def contains(self, value: Tensor) -> bool:
        return all(
            bool((part.bool().sum(-1) == 1).all() and ((part == 0) | (part == 1)).all())
            for part in value.split(self.nvec, -1)
        )

    def _describe(self) -> str:
        return f"nvec={self.nvec}, shape={tuple(self.shape)}"


class OneHot(MultiOneHot):
    """One choice among ``n`` values as a one-hot vector, of shape ``(n,)``."""

    def __init__(
        self,
        n: int,
        dtype: torch.dtype = torch.int64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__([n], dtype, device)
        self.n = n

    def _describe(self) -> str:
        return f"n={self.n}, shape={tuple(self.shape)}"


class Binary(Spec):
    """Zeros and ones."""

    default_dtype = torch.int8

    def _draw(self, shape: torch.Size) -> Tensor:
        return torch.randint(0, 2, shape).to(self.dtype)

    @override
    def contains(self, value: Tensor) -> bool:
        return bool(((value == 0) | (value == 1)).all())


def is_of_tensors(spec: Any) -> bool:
    """Returns True for a leaf spec of tensors, of Trawl or of another library."""
    return "NonTensor" not in type(spec).__name__


def is_fixed(spec: Any) -> bool:
    """Returns True for a leaf spec of tensors of fixed shape and dtype."""
    sizes = all(size >= 0 for size in spec.shape)
    return sizes and isinstance(spec.dtype, torch.dtype) and is_of_tensors(spec)


class NonTensor(Spec):
    """Data without a fixed layout (text, graphs, sequences), stored unchanged.

    Args:
        space: the Gymnasium space of the data, which draws the random values.
        shape: the environment's batch dimensions.
    """

    def __init__(self, space: gymnasium.Space[Any], shape: Sequence[int] = ()) -> None:
        super().__init__(shape, torch.float32)
        self.space = copy.deepcopy(space)

    def rand(self, shape: Sequence[int] = ()) -> Any:
        """Draws a random value of the space, as ``NonTensorData`` (for a batch, as a stack)."""
        # The seed comes from torch's generator, which the other specs draw from.
        return self._sample(shape, int(torch.randint(2**31, ())))

    def zero(self, shape: Sequence[int] = ()) -> Any:
        """Returns a fixed value of the space."""
        return self._sample(shape, 0)

    def _sample(self, shape: Sequence[int], seed: int) -> Any:
        full = torch.Size((*shape, *self.shape))
        self.space.seed(seed)
        draws = [NonTensorData(self.space.sample()) for _ in range(full.numel())]
        return draws[0] if not full else stack(draws).reshape(full)

    def is_in(self, value: Any) -> bool:
        """Returns True if the space contains ``value`` or, for a stack, each of its entries."""
        if isinstance(value, NonTensorStack):
            return all(self.is_in(entry) for entry in value.unbind(0))
        return bool(self.space.contains(value.data if isinstance(value, NonTensorData) else value))

    def _describe(self) -> str:
        return repr(self.space)


class Composite:
    """Specs of a TensorDict's entries, by key; nested entries have nested specs.

    Args:
        specs: a spec or a nested :class:`Composite` for each key.
        shape: batch size of the TensorDicts that the composite describes.

    Examples:
        >>> import torch
        >>> from trawl.envs.specs import Composite, Unbounded
        >>> spec = Composite({"observation": Unbounded((3,))})
        >>> spec.rand()["observation"].shape
        torch.Size([3])
    """

    def __init__(
        self,
        specs: dict[str, Spec | Composite] | None = None,
        shape: Sequence[int] = (),
    ) -> None:
        self._specs: dict[str, Spec | Composite] = dict(specs or {})
        self.shape = torch.Size(shape)

    @property
    def ndim(self) -> int:
        """Number of batch dimensions."""
        return len(self.shape)

    def __getitem__(self, key: str | Key) -> Any:
        if isinstance(key, str):
            return self._specs[key]
        head, *tail = key
        found = self._specs[head]
        return found[tuple(tail)] if tail and isinstance(found, Composite) else found

    def __setitem__(self, key: str | Key, spec: Spec | Composite) -> None:
        if isinstance(key, str):
            key = (key,)
        head, *tail = key
        if not tail:
            self._specs[head] = spec
            return
        child = self._specs.setdefault(head, Composite(shape=self.shape))
        if not isinstance(child, Composite):
            raise KeyError(f"{head!r} already holds a leaf, so it can't hold {tuple(tail)!r}")
        child[tuple(tail)] = spec

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> Iterator[str | Key]:
        """Yields the keys; with ``include_nested``, also the keys of nested specs, as tuples."""
        for name, spec in self._specs.items():
            if isinstance(spec, Composite):
                if not leaves_only:
                    yield name
                if include_nested:
                    for key in spec.keys(True, leaves_only):
                        yield (name, *((key,) if isinstance(key, str) else key))
            else:
                yield name

    def values(
        self, include_nested: bool = False, leaves_only: bool = False
    ) -> Iterator[Spec | Composite]:
        """Returns the specs, in the order of :meth:`keys`."""
        return (self[key] for key in self.keys(include_nested, leaves_only))

    def items(
        self, include_nested: bool = False, leaves_only: bool = False
    ) -> Iterator[tuple[str | Key, Any]]:
        """Returns pairs of key and spec, in the order of :meth:`keys`."""
        return ((key, self[key]) for key in self.keys(include_nested, leaves_only))

    def __contains__(self, key: object) -> bool:
        return key in set(self.keys(True))

    def __iter__(self) -> Iterator[str | Key]:
        return self.keys()

    def __len__(self) -> int:
        return len(self._specs)

    def rand(self, shape: Sequence[int] = ()) -> TensorDict:
        """Draws a TensorDict of random entries, of batch size ``(*shape, *self.shape)``."""
        values = {name: spec.rand(shape) for name, spec in self._specs.items()}
        return TensorDict(values, (*shape, *self.shape))

    def zero(self, shape: Sequence[int] = ()) -> TensorDict:
        """Returns a TensorDict of zeros, of batch size ``(*shape, *self.shape)``."""
        values = {name: spec.zero(shape) for name, spec in self._specs.items()}
        return TensorDict(values, (*shape, *self.shape))

    def is_in(self, value: TensorDictBase) -> bool:
        """Returns True if every entry is present and matches its spec."""
        keys = set(value.keys())
        return all(key in keys and spec.is_in(value.get(key)) for key, spec in self.items())

    def expand(self, *shape: int) -> Composite:
        """Returns a copy with ``shape`` prepended to the shape of every spec."""
        specs = {name: spec.expand(*shape) for name, spec in self._specs.items()}
        return Composite(specs, (*shape, *self.shape))

    def to(self, device: torch.device | str) -> Composite:
        """Returns a copy on another device."""
        return Composite({k: spec.to(device) for k, spec in self._specs.items()}, self.shape)

    def clone(self) -> Composite:
        """Returns a copy that can be changed without changing these specs."""
        return Composite({k: spec.clone() for k, spec in self._specs.items()}, self.shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Composite):
            return False
        return self.shape == other.shape and dict(self.items()) == dict(other.items())

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        body = "".join(
            f"\n  {k}: {repr(v).replace(chr(10), chr(10) + '  ')}" for k, v in self.items()
        )
        return f"Composite({body})"
