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
before = peak()
trace = read_trace(sys.argv[1])
tables = sum(getattr(trace, name).estimated_size() for name in ("ops", "launches", "kernels", "frames"))
print(trace.meta.events, tables, peak() - before)
"""
_SIZE_BYTES = 100_000_000
_CHUNKS_BYTES = 115_000_000
"""For the decoder, its libraries and the chunks in flight: 70 to 100 million measured, for files of 30 MB as for those of 100 MB."""
_EVENT: dict[str, Any] = {
    "ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 3743411222594.212, "dur": 12.125,
    "args": {"External id": 7, "Ev Idx": 9, "Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"], "note": 'a "}, {" b' * 9},
}  # fmt: skip
_OTHER = {"others": [{"a": {"b": [1, 2, 3]}}] * 100}


def _written(path: Path, layout: str) -> int:
    """Write a trace with as many copies of an event as fit, and return how many these are."""
    space = {"one line": (", ", ": "), "compact": (",", ":")}.get(layout)
    event = json.dumps(_EVENT, separators=space, indent=None if space else 4)
    between = ", " if space else ",\n    "
    other = json.dumps(_OTHER)[1:-1]
    count = _SIZE_BYTES // len(event)
    padding = [f', "other {number}": {{{other}}}' for number in range(_SIZE_BYTES // 10_000)]  # a quarter of the file
    with path.open("w") as file:
        file.write('{"schemaVersion": 1' + ("".join(padding) if layout == "events last" else "") + ', "traceEvents": [')
        file.writelines(between.join([event] * 1000) + (between if row + 1 < count // 1000 else "") for row in range(count // 1000))
        file.write("]" + ("".join(padding) if layout == "events first" else "") + "}")
    return count // 1000 * 1000


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one line", "compact", "pretty", "events first", "events last"])
def test_memory_is_flat_beyond_the_tables(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "trace.json"
    wanted = _written(path, layout)
    run = subprocess.run([sys.executable, "-c", _READ, str(path)], capture_output=True, text=True, check=True)
    events, tables, peak = map(int, run.stdout.split())
    assert events == wanted
    assert peak < 1.5 * tables + _CHUNKS_BYTES, (tables, peak)
