"""Division of ``collector_kwargs`` between the workers' collectors and the user's collector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from trawl.collectors.config import CollectorConfig
from trawl.collectors.multi_config import NOT_HERE, MultiConfig
from trawl.collectors.options import EACH, LIST, WHOLE, tagged
from trawl.envs.types import is_list

# Arguments that the collector divides among its workers, or uses to send weights.
OF_ALL = tagged(MultiConfig, WHOLE) | {"create_env_fn", "policy", "num_workers"}
# Options that each worker applies by itself, so that their values may differ between workers.
OF_EACH = tagged(CollectorConfig, EACH)
_DEFAULTS = {one.name: one.default for one in fields(CollectorConfig) if one.name not in OF_ALL}


def share_options(
    given: Sequence[Mapping[str, Any]], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Moves options of the workers' collectors to the user's collector, which has the workers.

    An option with the same value for all workers becomes an option of the user's collector.
    Options in :data:`OF_EACH` may differ between workers. ``init_random_frames`` are summed over
    the workers. A ``storing_device`` in ``options`` takes precedence over a worker's
    ``storing_device``.

    Args:
        given: the options of each worker's collector.
        options: the options of the user's collector; changed in place.

    Returns:
        For each worker, the options that only its own collector gets.

    Raises:
        ValueError: if an option can't be set for workers or can't differ between them, or was
            given twice. The message names the option.
    """
    left = [dict(own) for own in given]
    for name in _names(left):
        _check_name(name)
        if name not in _DEFAULTS:
            continue
        before = options.get(name, _DEFAULTS[name])
        if name == "storing_device" and name in options:
            # The user's collector decides where batches are delivered.
            for own in left:
                own.pop(name, None)
            continue
        if name not in OF_EACH or is_list(before):
            _check_free(name, options)
        values = [own.pop(name, before) for own in left]
        if name == "init_random_frames":
            options[name] = sum(max(value or 0, 0) for value in values)
        elif all(_same(value, values[0]) for value in values):
            options[name] = values[0]
        elif name in tagged(CollectorConfig, LIST) & OF_EACH:
            options[name] = values
        elif name in OF_EACH:
            for own, value in zip(left, values, strict=True):
                own[name] = value
        else:
            raise ValueError(
                f"collector_kwargs has {name!r}, which can't differ between workers: pass one "
                "value for all of them"
            )
    return left


def check_added(given: Sequence[Mapping[str, Any]]) -> None:
    """Checks options that are given for workers that are added later.

    Raises:
        ValueError: if an option can't be set for workers that are added later. The message names
            the option.
    """
    for name in _names(given):
        _check_name(name)
        if name in _DEFAULTS and name not in OF_EACH:
            raise ValueError(
                f"collector_kwargs has {name!r}, which is fixed for all workers when the first "
                "ones are made"
            )


def _names(given: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({name for own in given for name in own})


def _check_name(name: str) -> None:
    if name in OF_ALL:
        raise ValueError(
            f"collector_kwargs has {name!r}, which is an option of the whole collector: pass it "
            "to the collector itself"
        )
    if name in NOT_HERE or name == "worker_idx":
        raise ValueError(
            f"collector_kwargs has {name!r}, which is not an option of a worker's collector: "
            "leave it out"
        )


def _check_free(name: str, options: Mapping[str, Any]) -> None:
    if name in options:
        raise ValueError(f"{name} was passed twice: to the collector, and in collector_kwargs")


def _same(one: Any, other: Any) -> bool:
    plain = isinstance(one, (str, int, float)) and type(one) is type(other)
    return one is other or (plain and bool(one == other))
