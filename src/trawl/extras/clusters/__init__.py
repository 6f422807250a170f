"""Collectors whose workers are on other machines: launchers (ssh, Slurm), RPC and Ray."""
