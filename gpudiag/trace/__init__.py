"""File -> Trace tables."""
