"""Policies: how they are called, and what they read and write."""
