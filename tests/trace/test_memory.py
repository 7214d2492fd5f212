"""Reading needs the memory of the tables and of a few chunks, whatever the layout and the size of the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is not told on this platform")

_READ = """
import sys
from gpudiag.trace import read_trace
def peak(): return 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
read_trace(sys.argv[1])  # the decoder, its libraries and the chunks in flight: 70 to 120 MB, as the machine has it
before = peak()
trace = read_trace(sys.argv[2])
tables = sum(getattr(trace, name).estimated_size() for name in ("ops", "launches", "kernels", "frames"))
print(trace.meta.events, tables, peak() - before)
"""
_SMALL_BYTES, _LARGE_BYTES = 70_000_000, 130_000_000
_SCATTER_BYTES = 40_000_000
"""More than the peaks of two files of one size differ by, a half of what the larger one has more on disk."""
_EVENT: dict[str, Any] = {
    "ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 3743411222594.212, "dur": 12.125,
    "args": {"External id": 7, "Ev Idx": 9, "Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"], "note": 'a "}, {" b' * 9},
}  # fmt: skip
_OTHER = {"others": [{"a": {"b": [1, 2, 3]}}] * 100}


def write_trace(path: Path, layout: str, size_bytes: int) -> int:
    """Write a trace with as many copies of an event as fit, and return how many these are."""
    space = {"one line": (", ", ": "), "compact": (",", ":")}.get(layout)
    event = json.dumps(_EVENT, separators=space, indent=None if space else 4)
    between = ", " if space else ",\n    "
    other = json.dumps(_OTHER)[1:-1]
    count = size_bytes // len(event)
    padding = [f', "other {number}": {{{other}}}' for number in range(size_bytes // 10_000)]  # a quarter of the file
    with path.open("w") as file:
        file.write('{"schemaVersion": 1' + ("".join(padding) if layout == "events last" else "") + ', "traceEvents": [')
        file.writelines(between.join([event] * 1000) + (between if row + 1 < count // 1000 else "") for row in range(count // 1000))
        file.write("]" + ("".join(padding) if layout == "events first" else "") + "}")
    return count // 1000 * 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [*(pytest.param(one, marks=pytest.mark.long) for one in ("one line", "pretty")), "compact", "events first", "events last"]
)
def test_memory_is_flat_beyond_the_tables(tmp_path: Path, layout: str) -> None:
    small, large = tmp_path / "small.json", tmp_path / "large.json"
    write_trace(small, layout, _SMALL_BYTES)
    wanted = write_trace(large, layout, _LARGE_BYTES)
    run = subprocess.run([sys.executable, "-c", _READ, str(small), str(large)], capture_output=True, text=True, check=True)
    events, tables, more = map(int, run.stdout.split())
    assert events == wanted
    assert more < 1.5 * tables + _SCATTER_BYTES, (tables, more)
