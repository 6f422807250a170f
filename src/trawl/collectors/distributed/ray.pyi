# What type checkers see, and the list of names that are imported when they are first used.

from trawl.extras.clusters.ray.cluster import DEFAULT_RAY_INIT_CONFIG as DEFAULT_RAY_INIT_CONFIG
from trawl.extras.clusters.ray.cluster import (
    DEFAULT_REMOTE_CLASS_CONFIG as DEFAULT_REMOTE_CLASS_CONFIG,
)
from trawl.extras.clusters.ray.collector import RayCollector as RayCollector
from trawl.extras.clusters.ray.collector import RayOptions as RayOptions
