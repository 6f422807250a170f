"""Default parameters of Slurm jobs, under the module path of TorchRL."""

from trawl.backends.launch_submitit import DEFAULT_SLURM_CONF
from trawl.collectors.distributed.launchers import DEFAULT_SLURM_CONF_MAIN

__all__ = ["DEFAULT_SLURM_CONF", "DEFAULT_SLURM_CONF_MAIN"]
