"""File -> Trace tables."""

from gpudiag.trace.trace_files import read_trace

__all__ = ["read_trace"]
