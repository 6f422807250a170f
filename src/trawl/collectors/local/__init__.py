"""Parts of a collector without workers: its environment and loop."""
