"""Environments of JAX."""
