# What type checkers see, and the list of names that are imported when they are first used.

from trawl.extras.clusters.compat.delayed_launcher import (
    submitit_delayed_launcher as submitit_delayed_launcher,
)
