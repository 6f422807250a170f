"""Environments of several agents."""
