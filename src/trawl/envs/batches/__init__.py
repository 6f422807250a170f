"""Batches of environments: lists, pools, ends of episodes."""
