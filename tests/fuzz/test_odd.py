"""Traces of valid structure and odd content: a report, or one clear error; the parts of the report still sum to the whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.documents import Document, gpu_training
from fuzz.strategies import documents
from fuzz.survival import survives
from hypothesis import HealthCheck, given, settings

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


def _survives(folder: Path, document: Document) -> None:
    path = folder / "trace.json"
    path.write_text(json.dumps(document))
    survives(path)


@pytest.mark.slow
@settings(max_examples=5, **COMMON)  # type: ignore[arg-type]
@given(document=documents())
def test_odd_traces(tmp_path: Path, document: Document) -> None:
    _survives(tmp_path, document)


@pytest.mark.slow
@settings(max_examples=12, **COMMON)  # type: ignore[arg-type]
@given(document=documents(most=9))
def test_many_odd_traces(tmp_path: Path, document: Document) -> None:
    _survives(tmp_path, document)


MILLION = 1_000_000
LIMIT_BYTES = 1_400_000_000
"""Of private memory that can be written, the interpreter's and its libraries' own included; 0.94 GB were resident where it was measured."""
_CHILD = f"""
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_DATA, ({LIMIT_BYTES}, {LIMIT_BYTES}))
from fuzz.survival import survives
sys.exit(not survives(Path(sys.argv[1])))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a process may write to")
def test_a_million_threads_fit_into_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with path.open("w") as file:
        file.write(json.dumps(gpu_training())[:-2])
        for thread in range(MILLION):
            event = f'"name": "aten::mm", "pid": {thread % 7}, "tid": {thread}, "ts": {1000 + thread * 0.002}, "dur": 20'
            file.write(f',\n{{"ph": "X", "cat": "cpu_op", {event}}}')
        file.write("]}")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "POLARS_MAX_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", _CHILD, str(path)], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
