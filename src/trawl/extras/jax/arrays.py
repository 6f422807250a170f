"""Conversion between the arrays of JAX, tensors, and the entries of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from trawl.devices import check_device
from trawl.envs.arguments import needed
from trawl.envs.entries.spaces import SpaceOps
from trawl.keys import Key, show_key

# Dtypes that JAX has only if its option jax_enable_x64 is set, and their replacements.
_NARROW = {torch.int64: torch.int32, torch.float64: torch.float32}


def load_jax() -> Any:
    """Returns the module ``jax``.

    Raises:
        ImportError: if JAX is not installed; the message names the extra.
    """
    with needed("JaxEnv", "JAX", "jax"):
        return import_module("jax")


def devices_of(device: torch.device | str | None) -> tuple[Any, torch.device]:
    """Returns a device of JAX, and the same device of PyTorch.

    Args:
        device: the device of PyTorch; None for the default device of JAX.

    Raises:
        TypeError: if ``device`` has the wrong type.
        ValueError: if JAX or PyTorch can't use the device.
    """
    jax = load_jax()
    if device is None:
        found = jax.config.jax_default_device or jax.devices()[0]
        found = jax.devices(found)[0] if isinstance(found, str) else found
        if found.platform not in ("cpu", "gpu"):
            raise ValueError(
                f"the default device of JAX is {found}, which PyTorch can't read: pass device='cpu'"
            )
    else:
        wanted = check_device("device", device, here=False)
        platform = "gpu" if wanted.type == "cuda" else wanted.type
        try:
            found = jax.devices(platform)[wanted.index or 0]
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"device={str(device)!r}: JAX has no such device: {error}") from error
    if found.platform == "cpu":
        return found, torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            f"the environment would be on {found}, but this PyTorch has no CUDA: pass device='cpu'"
        )
    return found, torch.device("cuda", found.local_hardware_id)


def as_plain(obs: Any) -> Any:
    """Returns a pytree with dicts for named tuples, dataclasses and mappings.

    Sequences become tuples. Fields that are None are left out.
    """
    if isinstance(obs, Mapping):
        items: Any = obs.items()
    elif isinstance(obs, tuple) and hasattr(obs, "_asdict"):
        items = obs._asdict().items()
    elif is_dataclass(obs):
        items = ((field.name, getattr(obs, field.name)) for field in fields(obs))
    elif isinstance(obs, (tuple, list)):
        return tuple(as_plain(part) for part in obs)
    else:
        return obs
    return {str(name): as_plain(part) for name, part in items if part is not None}


def observation_space(plain: Any) -> Space[Any]:
    """Returns a space for the shapes and dtypes of an observation.

    Args:
        plain: shapes and dtypes, nested as :func:`as_plain` returns them.

    Raises:
        TypeError: if PyTorch has no such dtype.
    """
    if isinstance(plain, dict):
        return spaces.Dict({name: observation_space(part) for name, part in plain.items()})
    if isinstance(plain, tuple):
        return spaces.Tuple([observation_space(part) for part in plain])
    if not is_number(plain):
        raise TypeError(
            f"an observation must have numbers or bools, but its dtype is {plain.dtype}"
        )
    dtype = np.dtype(plain.dtype)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, plain.shape, dtype.type)
    if dtype.kind == "b":
        return spaces.Box(0, 1, plain.shape, np.bool_)
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, plain.shape, dtype.type)


def is_number(value: Any) -> bool:
    """Returns True for numbers, bools, and arrays of these."""
    dtype = getattr(value, "dtype", type(value))
    return dtype in (bool, int, float) or (isinstance(dtype, np.dtype) and dtype.kind in "fiub")


def flat(plain: Any, path: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yields the leaves of an observation, as :func:`as_plain` returns it, with their paths."""
    if not isinstance(plain, (dict, tuple)):
        yield path, plain
        return
    items = plain.items() if isinstance(plain, dict) else enumerate(plain)
    for name, part in items:
        yield from flat(part, (*path, str(name)))


def jax_ops() -> SpaceOps:
    """Returns the operations on arrays of JAX, in functions that it compiles."""
    jax = load_jax()
    jnp, index = jax.numpy, jax.dtypes.canonicalize_dtype(np.int64)

    def copier(dtype: Any) -> Callable[[Any], Any]:
        own = jax.dtypes.canonicalize_dtype(dtype)
        return lambda array: array.astype(own)

    return SpaceOps(
        array=jnp.asarray,
        indices=lambda value: jnp.asarray(value).astype(index),
        offset=lambda start: np.asarray(start, np.int32),
        one_hot=lambda values, n: jax.nn.one_hot(values, n, dtype=index),
        join=lambda parts: jnp.concatenate(parts, -1),
        stack=lambda parts: jnp.stack(parts, -1),
        split=lambda array, sizes: jnp.split(array, np.cumsum(sizes)[:-1], -1),
        copier=copier,
    )


def giver(device: torch.device) -> Callable[[Tensor], Any]:
    """Returns a function that makes an argument for a compiled function from a tensor.

    The argument is a copy, because JAX may still read it after the call has returned.
    """
    jax = load_jax()
    narrow = {} if jax.config.jax_enable_x64 else _NARROW

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, narrow.get(tensor.dtype, tensor.dtype), copy=True)

    if device.type == "cpu":
        # Takes half the time of dlpack, which has no compiled path for arguments.
        return lambda tensor: copied(tensor).numpy()
    return lambda tensor: jax.dlpack.from_dlpack(copied(tensor))


def viewer(device: torch.device) -> Callable[[Any], Tensor]:
    """Returns a function that makes a tensor in the memory of an array.

    The tensor keeps the memory alive. On the CPU, the function waits until the array is computed;
    on a GPU, the current stream does.
    """
    if device.type == "cpu":
        # Without the questions that from_dlpack asks first, which take as long as the rest.
        return lambda array: from_dlpack(array.__dlpack__())
    return from_dlpack


def as_saved(array: Any) -> Tensor:
    """Returns a copy of an array, or of the numbers in a random key, as a tensor."""
    jax = load_jax()
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    found = np.array(array)
    # Numpy does not know bfloat16, and PyTorch can't load all unsigned dtypes.
    known = found.dtype.kind in "bifc"
    return torch.from_numpy(found if known else found.view(f"i{found.itemsize}"))


def as_jax(saved: Tensor, like: Any) -> Any:
    """Returns an array, or a random key, from what :func:`as_saved` returned.

    Args:
        saved: the data.
        like: array or key of the same shape and dtype.
    """
    jax, found = load_jax(), saved.numpy()
    if jax.numpy.issubdtype(like.dtype, jax.dtypes.prng_key):
        numbers = found.view(jax.random.key_data(like).dtype)
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(like))
    # A copy, because JAX may use the memory of its argument.
    return jax.numpy.array(found.view(like.dtype))


def name_of(path: Key) -> str:
    """Returns the name of a leaf of an observation, for messages."""
    return show_key(path or ("observation",))
