"""File -> Trace tables."""

from gpudiag.trace.reader import read

__all__ = ["read"]
