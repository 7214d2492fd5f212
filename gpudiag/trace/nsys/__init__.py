"""An SQLite export of Nsight Systems -> Trace tables. Names, units and enumerations are those of NVIDIA's export schema reference.

Tested with generated files only (tests/nsysfile.py): what a version of nsys writes beyond its documents is not known here.
"""

from gpudiag.trace.nsys.reader import read

__all__ = ["read"]
