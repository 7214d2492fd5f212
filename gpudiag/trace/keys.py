"""What is kept once and referred to by number: the names of each table, the threads, the signatures."""

from __future__ import annotations

from typing import Any

from gpudiag.trace.columns import Names, OperatorNames, RawNames, Signatures, Threads


class _TableNames(dict[str, Names]):
    """The names of each table."""

    def __init__(self) -> None:
        super().__init__({table: Names() for table in ("launches", "kernels", "frames", "marks")})
        self.ops = self["ops"] = OperatorNames()


class Keys:
    """The keys of a file, or of the part of it that one process reads, each numbered in the order of appearance."""

    def __init__(self) -> None:
        self.names = _TableNames()
        self.launched = RawNames()
        self.threads = Threads()
        self.signatures = Signatures()

    def numbered(self) -> dict[str, dict[Any, int]]:
        """Return the number of each key, by the kind of key."""
        return {"threads": self.threads.rows, "signatures": self.signatures, "launched": self.launched.names, **self.names}


USED = {
    ("ops", "thread"): "threads",
    ("ops", "name"): "ops",
    ("ops", "signature"): "signatures",
    ("launches", "thread"): "threads",
    ("launches", "api"): "launches",
    ("launches", "kernel"): "launched",
    ("kernels", "name"): "kernels",
    ("frames", "thread"): "threads",
    ("frames", "name"): "frames",
    ("marks", "thread"): "threads",
    ("marks", "name"): "marks",
    ("allocations", "thread"): "threads",
}
"""(table, column) whose values are numbers of keys, and of which kind."""
