"""The launcher of Slurm jobs, available at the same module path as in TorchRL."""

from trawl.compat.delayed_launcher import submitit_delayed_launcher

__all__ = ["submitit_delayed_launcher"]
