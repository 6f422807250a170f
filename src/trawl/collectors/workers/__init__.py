"""Parts of a collector with workers, and the service of a worker."""
