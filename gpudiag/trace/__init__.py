"""File -> Trace tables."""

from gpudiag.trace.formats import read

__all__ = ["read"]
