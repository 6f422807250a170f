"""The launcher of Slurm jobs, available at the same module path as in TorchRL."""

from trawl.collectors.distributed.launchers import submitit_delayed_launcher

__all__ = ["submitit_delayed_launcher"]
