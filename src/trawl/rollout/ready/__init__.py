"""The loop that acts for the environments that are ready."""
