"""What goes on in a collection: statistics of episodes, progress, plots."""

from trawl.observe.episodes import Episodes, EpisodeStats
from trawl.observe.progress import CollectionProgress

__all__ = ["CollectionProgress", "EpisodeStats", "Episodes"]
