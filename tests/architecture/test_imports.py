"""What an import costs and what the analysis needs, seen from fresh interpreters."""

from __future__ import annotations

import ast
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "gpudiag").rglob("*.py"))

RUN_MAIN = """
import sys
sys.argv = ["gpudiag", *sys.argv[1:]]
from gpudiag.cli import main
code = 0
try:
    code = main()
except SystemExit as stop:
    code = stop.code
print("LOADED", *sorted(name for name in sys.modules if "." not in name), file=sys.stderr)
sys.exit(code)
"""

BLOCK_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "pynvml", "nvtx", "dash"}:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked by the test)", name=name)
sys.meta_path.insert(0, Blocker())
"""


def _python(code: str, *arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def _loaded(done: subprocess.CompletedProcess[str]) -> set[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("LOADED")]
    return set(line.split()[1:])


def _of_the_root(text: str) -> list[str]:
    """Return the imports in a module's text that run the package root's lazy lookup, each with what to write instead."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and "gpudiag" in [alias.name for alias in node.names]:
            found.append(f"line {node.lineno}: import the module that is meant")
        if isinstance(node, ast.ImportFrom) and node.module == "gpudiag" and node.level == 0:
            # `from gpudiag import units` names a module; `from gpudiag import Report` runs the root's lazy lookup
            modules = [
                alias.name
                for alias in node.names
                if (ROOT / "gpudiag" / alias.name).is_dir() or (ROOT / "gpudiag" / f"{alias.name}.py").is_file()
            ]
            if len(modules) != len(node.names):
                found.append(f"line {node.lineno}: import from the module that defines it")
    return found


def test_no_module_imports_the_package_root() -> None:
    assert len(MODULES) > 50
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in MODULES}
    assert not [f"{path}: {what}" for path, text in texts.items() if "gpudiag" in text for what in _of_the_root(text)]


@pytest.mark.parametrize(
    ("text", "count"),
    [("import gpudiag", 1), ("import os\nif os:\n    from gpudiag import errors, Report", 1), ("from gpudiag import errors", 0)],
)
def test_imports_of_the_package_root_are_found(text: str, count: int) -> None:
    assert len(_of_the_root(text)) == count


def test_importing_gpudiag_loads_nothing_heavy() -> None:
    done = _python("import sys, gpudiag; print('LOADED', *sorted(name for name in sys.modules if '.' not in name), file=sys.stderr)")
    assert not _loaded(done) & {"torch", "polars", "numpy", "plotly", "dash", "rich", "typer"}


@pytest.mark.parametrize("arguments", [("--help",), ("report", "--help"), ("--version",)])
def test_help_answers_without_the_analysis_libraries(arguments: tuple[str, ...]) -> None:
    heavy = {"torch", "polars", "plotly", "numpy", "dash", "jinja2", "yaml", "msgspec"}
    assert not _loaded(_python(RUN_MAIN, *arguments)) & heavy


def _event(name: str, category: str, start_us: float, duration_us: float, thread: int, **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start_us, "dur": duration_us, "args": args}


def _step(index: int, start_us: float) -> list[dict[str, object]]:
    """Return one step: a bf16 matrix product of 4096 x 4096 x 4096 and its kernel."""
    shapes = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    return [
        _event(f"ProfilerStep#{index}", "user_annotation", start_us, 1000, 1),
        _event("aten::mm", "cpu_op", start_us + 50, 100, 1, **shapes, **{"External id": 10 + index}),
        _event("cudaLaunchKernel", "cuda_runtime", start_us + 80, 10, 1, correlation=100 + index),
        _event(
            "sm90_xmma_gemm_bf16bf16",
            "kernel",
            start_us + 100,
            300,
            7,
            device=0,
            stream=7,
            correlation=100 + index,
            grid=[32, 32, 1],
            block=[128, 1, 1],
        ),
    ]


@pytest.fixture
def small_trace(tmp_path: Path) -> Path:
    """A hand-made trace of four steps on an H100, as the profiler writes them."""
    device = {
        "id": 0,
        "name": "NVIDIA H100 80GB HBM3",
        "totalGlobalMem": 85_000_000_000,
        "computeMajor": 9,
        "computeMinor": 0,
        "warpSize": 32,
        "numSms": 132,
    }
    document = {
        "schemaVersion": 1,
        "deviceProperties": [device],
        "traceEvents": [event for k in range(4) for event in _step(k, 1000.0 * k)],
    }
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


@pytest.mark.slow
def test_a_report_needs_no_torch(small_trace: Path) -> None:
    done = _python(BLOCK_TORCH + RUN_MAIN, "report", small_trace)
    assert not _loaded(done) & {"torch", "pynvml", "dash", "sqlite3", "plotly", "jinja2", "psutil", "scipy"}
    assert "H100" in done.stdout
    assert "aten::mm" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["html", "md", "json"])
def test_a_report_is_written_without_torch(small_trace: Path, suffix: str) -> None:
    target = small_trace.with_name(f"report.{suffix}")
    done = _python(BLOCK_TORCH + RUN_MAIN, "report", small_trace, "-o", target)
    assert "plotly" not in _loaded(done)
    text = target.read_text(encoding="utf-8")
    assert "aten::mm" in text
    assert "H100" in text


def test_the_blocker_blocks() -> None:
    done = _python(BLOCK_TORCH + "import torch")
    assert "blocked by the test" in done.stderr
