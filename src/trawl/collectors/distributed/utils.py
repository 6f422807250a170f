"""The launcher of Slurm jobs, under the module path of TorchRL."""

from trawl.collectors.distributed.launchers import submitit_delayed_launcher

__all__ = ["submitit_delayed_launcher"]
