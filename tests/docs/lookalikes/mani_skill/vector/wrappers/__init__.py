"""Adapters to the interfaces of others."""
