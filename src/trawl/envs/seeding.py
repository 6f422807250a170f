"""Seeds of independent random streams, derived from one seed."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np


def derive(seed: int, *path: str | int) -> int:
    """Returns a 32-bit seed for the stream at ``path`` under ``seed``.

    Equal arguments give equal seeds on every machine. Different paths give streams that are
    independent for all practical purposes, because ``numpy.random.SeedSequence`` derives them.
    """
    spawn_key = tuple(zlib.crc32(p.encode()) if isinstance(p, str) else p for p in path)
    return int(np.random.SeedSequence(seed, spawn_key=spawn_key).generate_state(1)[0])


def stream_seed(seed: int) -> int:
    """Returns the seed of the global generators where environments or a policy have ``seed``."""
    return derive(seed, "policy")


def next_seed(seed: int, static_seed: bool = False) -> int:
    """Returns the next environment's seed: ``seed`` if ``static_seed``, else a derived seed."""
    return seed if static_seed else derive(seed, "next")


def rebuilt_seed(seed: int, *rebuilds: int) -> int:
    """Returns the seed of an environment that is made anew, because ``seed`` would repeat episodes.

    Args:
        seed: seed that was set last.
        *rebuilds: number of rebuilds since; in a batch, after the number of the environment.
    """
    return derive(seed, "rebuild", *rebuilds)


def next_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of ``reset`` for the next environment of a batch.

    A ``seed`` among the arguments is replaced with a seed derived from it. With the same seed, all
    environments would produce the same episodes.
    """
    seed = kwargs.get("seed")
    return kwargs if seed is None else {**kwargs, "seed": next_seed(seed)}


def check_seed(seed: object) -> int:
    """Returns ``seed`` as an int.

    Raises:
        TypeError: if ``seed`` is not an integer.
        ValueError: if ``seed`` is negative.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed must be an integer, but it is {type(seed).__name__}: {seed!r}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, but it is {seed}")
    return int(seed)
