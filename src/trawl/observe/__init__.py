"""Statistics, progress, bottlenecks, timelines and plots of a collection."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trawl.observe.bottleneck import Bottleneck
    from trawl.observe.episodes import Episodes, EpisodeStats
    from trawl.observe.progress import CollectionProgress
    from trawl.observe.report import Report
    from trawl.observe.timeline import Instant, Span, Timeline, read_trace
    from trawl.observe.trace_options import TraceOptions

__all__ = [
    "Bottleneck",
    "CollectionProgress",
    "EpisodeStats",
    "Episodes",
    "Instant",
    "Report",
    "Span",
    "Timeline",
    "TraceOptions",
    "read_trace",
]

# Module of each public name. The module is imported when the name is first used, because collectors
# need only some of them.
_HOMES = {
    "Bottleneck": "bottleneck",
    "CollectionProgress": "progress",
    "EpisodeStats": "episodes",
    "Episodes": "episodes",
    "Instant": "timeline",
    "Report": "report",
    "Span": "timeline",
    "Timeline": "timeline",
    "TraceOptions": "trace_options",
    "read_trace": "timeline",
}


# Hidden from type checkers, because with this function they would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
