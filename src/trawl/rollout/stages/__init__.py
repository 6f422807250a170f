"""Stages, which frames pass on their way to a batch."""
