"""Default parameters of Slurm jobs, available at the same module path as in TorchRL."""

from trawl.backends.launching.submitit import DEFAULT_SLURM_CONF
from trawl.compat.delayed_launcher import DEFAULT_SLURM_CONF_MAIN

__all__ = ["DEFAULT_SLURM_CONF", "DEFAULT_SLURM_CONF_MAIN"]
