"""Collectors of clusters on one machine: next to those of many processes, and to TorchRL's."""
