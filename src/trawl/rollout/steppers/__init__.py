"""Steppers, which step environments of each kind and write the results into rows."""
