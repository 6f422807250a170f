"""Statistics of episodes, progress displays and plots for a collection."""

from trawl.observe.episodes import Episodes, EpisodeStats
from trawl.observe.progress import CollectionProgress

__all__ = ["CollectionProgress", "EpisodeStats", "Episodes"]
