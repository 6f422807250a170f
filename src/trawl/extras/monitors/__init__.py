"""Progress, plots and monitors of a collection, and the destinations of its statistics."""
