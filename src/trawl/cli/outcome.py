"""Facts about a run of ``trawl collect``, for the dataset's record and the summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from trawl.cli.arguments import CollectArguments
from trawl.observe import Bottleneck, CollectionProgress
from trawl.observe.bottleneck import bottleneck_of


def run_facts(progress: CollectionProgress) -> dict[str, Any]:
    """Returns the statistics, the throughput and the bottleneck of a run, as plain JSON."""
    found = progress.bottleneck
    return {
        "stats": plain(progress.stats),
        "throughput": [[round(seconds, 3), frames] for seconds, frames in progress.throughput],
        "bottleneck": None if found.part == "unknown" else plain(asdict(found)),
    }


def plain(value: Any) -> Any:
    """Returns a value as plain JSON, in which None stands for numbers that are not finite.

    Examples:
        >>> plain({"frames": 10, "episode_return_mean": float("nan")})
        {'frames': 10, 'episode_return_mean': None}
    """
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None


def bottleneck_finder(args: CollectArguments) -> Callable[[Mapping[str, Any]], Bottleneck]:
    """Returns a function that finds the bottleneck of a run, and names options of the command.

    Args:
        args: arguments of the command.
    """

    def find(stats: Mapping[str, Any]) -> Bottleneck:
        found = bottleneck_of(stats)
        subject, remedy = _subject(found), _remedy(found.part, args)
        if subject is None:
            return found
        return replace(found, sentence=f"{subject}: {remedy}." if remedy else f"{subject}.")

    return find


def _subject(found: Bottleneck) -> str | None:
    """Returns the first part of the sentence; None if the sentence need not be changed."""
    busy, total = f"({found.share:.0%} of busy time)", f"({found.share:.0%} of the time)"
    match found.part:
        case "environment":
            return f"The environment limits the rate {busy}"
        case "policy":
            return f"The policy limits the rate {busy}"
        case "overhead":
            return f"The overhead of batches limits the rate {busy}"
        case "learner":
            return f"Writing the dataset limits the rate {total}"
        case "driver":
            return f"Receiving batches limits the rate {total}"
        case "straggler":
            return f"Worker {found.worker} limits the rate, because the others wait for it"
        case _:
            return None


def _remedy(part: str, args: CollectArguments) -> str | None:
    """Returns an option that may help; None if there is none."""
    match part:
        case "environment":
            return "use more --workers if there are idle cores"
        case "policy":
            return "use more --envs, to act for many at once"
        case "overhead" | "driver" | "learner":
            return "use a larger --frames-per-batch"
        case "straggler" if not args.asynchronous:
            return "with --async, no worker waits"
        case _:
            return None
