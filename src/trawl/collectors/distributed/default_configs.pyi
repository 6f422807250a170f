# What type checkers see, and the list of names that are imported when they are first used.

from trawl.extras.clusters.compat.delayed_launcher import (
    DEFAULT_SLURM_CONF_MAIN as DEFAULT_SLURM_CONF_MAIN,
)
from trawl.extras.clusters.launching.submitit import DEFAULT_SLURM_CONF as DEFAULT_SLURM_CONF
