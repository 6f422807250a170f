"""Formats of datasets of other libraries."""
