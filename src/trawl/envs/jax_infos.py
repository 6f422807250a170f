"""Leaves of frames in environments of JAX: observations, and entries of infos.

The compiled functions of a reset and of a step return infos. The same functions merge the entries
into the observations, so no step needs another call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np
from gymnasium import Space
from typing_extensions import override

from trawl.envs.info_keys import (
    InfoKeys,
    given_entries,
    kept_values,
    names_of,
    placed_entries,
    seen_values,
)
from trawl.envs.infos import InfoCodec, InfoLayout, InfoLeaf, InfoMerger, value_at
from trawl.envs.jax_arrays import as_plain, is_number, jax_ops, load_jax
from trawl.envs.masks import MASK_KEY
from trawl.keys import show_key


def plain_info(info: Any) -> dict[str, Any]:
    """Returns only the numbers and arrays of an info, nested in dicts; arrays have any dtype.

    The action masks of several choices, in a tuple, are joined.

    Raises:
        TypeError: if the info has no named entries.
    """
    plain = as_plain({} if info is None else info)
    if not isinstance(plain, dict):
        raise TypeError(f"an info must be a dict of arrays, but it is {type(info).__name__}")
    mask = plain.get(MASK_KEY)
    if isinstance(mask, tuple) and mask:
        jnp = load_jax().numpy
        plain[MASK_KEY] = jnp.concatenate([jnp.atleast_1d(jnp.asarray(part)) for part in mask])
    return kept_values(plain, _array)


def _array(value: Any) -> Any:
    """Returns a number or an array as an array of JAX; None for other values."""
    jax = load_jax()
    if is_number(value):
        return jax.numpy.asarray(value)
    return value if isinstance(value, jax.Array) else None


def _example(value: Any) -> Any:
    """Returns an array of numpy with a shape and dtype of JAX; None if numpy lacks the dtype."""
    if not is_number(value):
        return None
    return np.broadcast_to(np.zeros((), value.dtype), value.shape)


def info_layout(info_keys: InfoKeys, begun: Any, stepped: Any, name: str) -> InfoLayout:
    """Returns the layout of the entries that ``info_keys`` names.

    Args:
        info_keys: the argument of :class:`~trawl.envs.JaxEnv`.
        begun: shapes and dtypes of the info of a reset.
        stepped: shapes and dtypes of the info of a step.
        name: name of the environment.

    Raises:
        TypeError: if ``info_keys`` has the wrong type.
        ValueError: if an info lacks a name, if keys clash, or if an entry has no fixed layout or a
            dtype that PyTorch and numpy lack.
    """
    given = given_entries(info_keys)
    # The layout is that of the step, with a dtype that also holds the values of the reset.
    shown = [("", kept_values(info, _example)) for info in (stepped, begun)]
    promote = load_jax().numpy.promote_types
    found = seen_values((one for one in [shown]), {"": given}, 0, promote)[""]
    only = f"the info of {name} has only {names_of(found)}"
    for entry in given:
        # A compiled function always returns the same entries, so none appears later.
        if all(value_at(found, path) is None for path in entry.paths()):
            wanted = f"info_keys has {show_key(entry.path)}"
            for info, path in product((begun, stepped), entry.paths()):
                value = value_at(info, path)
                if value is not None and not isinstance(value, dict) and not is_number(value):
                    raise ValueError(
                        f"{wanted}, whose dtype {value.dtype} is not supported: return it as "
                        "another dtype, such as float32"
                    )
            raise ValueError(f"{wanted}, but {only}")
    layout = InfoLayout(placed_entries(given, found, lambda: only))
    layout.check_fixed("JAX has only numbers and arrays")
    return layout


class ShownLeaves(InfoCodec):
    """Codec of the leaves of a frame, which are encoded in compiled functions.

    If the info has an action mask that is not among the leaves, the mask follows after them.

    Args:
        observed: space of an observation.
        layout: layout of the entries of the info that become leaves.
        categorical: True to encode discrete values as indices instead of one-hot vectors.
        infos: shapes and dtypes of the infos of a reset and of a step.

    Attributes:
        mask: index of the action mask of the info in the result; None if there is none.

    Raises:
        ValueError: if an observation has the name of an entry, or if only resets have a mask.
    """

    def __init__(
        self, observed: Space[Any], layout: InfoLayout, categorical: bool, infos: tuple[Any, Any]
    ) -> None:
        super().__init__(InfoMerger(observed, layout), categorical, jax_ops())
        self._readers = [_reader(leaf) for leaf in layout.leaves]
        self.mask: int | None = None
        self._free: Callable[[], Any] | None = None
        shown = [info.get(MASK_KEY) for info in infos]
        masks = [mask if mask is not None and is_number(mask) else None for mask in shown]
        # An observed mask is preferred to one of the info.
        if masks != [None, None] and (MASK_KEY,) not in [leaf.key for leaf in self.leaves]:
            self._find_mask(*masks)

    def _find_mask(self, begun: Any, stepped: Any) -> None:
        if stepped is None:
            raise ValueError(
                f"reset returns info[{MASK_KEY!r}], but step does not: return a mask in both"
            )
        named = [leaf.key for leaf in self.merge.layout.leaves if leaf.path == (MASK_KEY,)]
        places = [i for i, leaf in enumerate(self.leaves) if leaf.key in named]
        # A reset without a mask allows everything. The entry can't be the mask, because it is zero.
        if places and begun is not None and self._encoders[places[0]] is None:
            self.mask = places[0]
            return
        jnp = load_jax().numpy
        self.mask = len(self.leaves)
        # A value of 2 allows both values of a bit.
        self._free = lambda: jnp.full(stepped.shape, 2).astype(stepped.dtype)

    def __call__(self, obs: Any, info: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the leaves, as a step of a single environment shows them.

        Raises:
            TypeError: if a value of the info has another dtype than its layout.
            ValueError: if a value of the info has another shape than its layout.
        """
        leaves = self.encode(obs, info)
        return tuple(leaves) if self._free is None else (*leaves, self._read_mask(info))

    @override
    def encode(self, sample: Any, info: Any = None) -> list[Any]:
        merged = self.merge(as_plain(sample), [read(info) for read in self._readers])
        return [*map(load_jax().numpy.asarray, self.encode_merged(merged))]

    def _read_mask(self, info: Mapping[str, Any]) -> Any:
        assert self._free is not None
        free, shown = self._free(), info.get(MASK_KEY)
        if shown is None:
            return free
        if shown.shape != free.shape:
            raise ValueError(
                f"info[{MASK_KEY!r}] has shape {shown.shape} after a reset, but {free.shape} after "
                "a step: the shape must not change"
            )
        return shown.astype(free.dtype)


def _reader(leaf: InfoLeaf) -> Callable[[Mapping[str, Any]], Any]:
    """Returns a function that returns the value of a leaf, or a blank one, in the leaf's layout."""
    jax = load_jax()
    jnp, dtype = jax.numpy, jax.dtypes.canonicalize_dtype(leaf.dtype)

    def read(info: Mapping[str, Any]) -> Any:
        found = leaf.find(info)
        if isinstance(found, dict):
            raise TypeError(
                f"{leaf.name} has the entries {sorted(found)}, but its layout, as first seen or as "
                "stated in info_keys, has none: name one of the entries"
            )
        return leaf.fitted(jnp.asarray(found)).astype(dtype)

    return read
