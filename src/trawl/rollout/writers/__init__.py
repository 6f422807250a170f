"""Writers, which fill batches with frames."""
