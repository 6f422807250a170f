"""Parts that measure: times, statistics, timelines, profiles."""
