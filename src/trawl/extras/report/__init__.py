"""The HTML report of a dataset."""
