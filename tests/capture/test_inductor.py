"""What torch.compile generated reaches the bundle, whatever state torch is in, and changes nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import types
from pathlib import Path

import polars as pl
import pytest
from inductor_text import CPP, TRITON
from noticewords import format_notices

from gpudiag.analysis import analyse
from gpudiag.capture import inductor
from gpudiag.capture.bundle import open_bundle
from gpudiag.capture.inductor import read_graph
from gpudiag.capture.session import Session
from gpudiag.inputs import resolve_input
from gpudiag.model.bundle import INDUCTOR_VERSION, CompiledGraph, InductorCode


class CompiledFxGraph:
    """As torch's, as far as it is read."""

    def __init__(self, key: object, source: object) -> None:
        self._fx_graph_cache_key, self.source_code = key, source


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> type[CompiledFxGraph]:
    """Stand in for the module that holds torch's class."""
    home = types.ModuleType("torch._inductor.output_code")
    home.CompiledFxGraph = CompiledFxGraph  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home.__name__, home)
    return CompiledFxGraph


def test_live_graphs_are_found(compiled: type[CompiledFxGraph]) -> None:
    alive = compiled("fabc", CPP), compiled("fdef", TRITON)
    code, problem = inductor.collect_generated_code()
    assert code is not None
    assert {graph.key: graph.kernels for graph in code.graphs} == {"fabc": read_graph(CPP), "fdef": read_graph(TRITON)}
    assert problem == ""
    del alive


def test_no_compiled_graph_leaves_no_trace(compiled: type[CompiledFxGraph]) -> None:
    assert inductor.collect_generated_code() == (None, "")


def test_graphs_of_another_format_are_one_warning(compiled: type[CompiledFxGraph]) -> None:
    alive = [compiled("fabc", CPP), compiled("fbad", "def call(:"), compiled(None, 7), compiled("fnone", None)]
    code, problem = inductor.collect_generated_code()
    assert code is not None
    assert [graph.key for graph in code.graphs] == ["fabc"]
    assert problem == f"the generated code of 3 of {len(alive)} compiled graphs could not be read"


def test_a_bundle_holds_the_code_and_no_source_text(compiled: type[CompiledFxGraph], tmp_path: Path) -> None:
    alive = compiled("fabc", TRITON)
    with Session(tmp_path / "run"):
        pass
    text = (tmp_path / "run" / "inductor" / "rank0.json").read_text()
    assert "inductor_cache" not in text
    assert "tl.load" not in text
    bundle = open_bundle(tmp_path / "run")
    assert bundle.inductor == InductorCode(graphs=(CompiledGraph("fabc", read_graph(TRITON)),))
    del alive


def test_a_failure_is_a_warning_and_the_bundle_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("internals changed")

    monkeypatch.setattr(inductor, "collect_generated_code", fail)
    with pytest.warns(RuntimeWarning, match="torch.compile generated could not be read"), Session(tmp_path / "run"):
        pass
    bundle = open_bundle(tmp_path / "run")
    assert bundle.manifest.finished
    assert bundle.inductor is None
    assert "the code that torch.compile generated could not be read: RuntimeError" in bundle.manifest.warnings


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"graphs": [{"key": 1}]}', f'{{"version": {INDUCTOR_VERSION + 1}}}'.encode(), b"\xff"])
def test_a_damaged_file_is_left_out_with_a_warning(tmp_path: Path, content: bytes) -> None:
    with Session(tmp_path / "run"):
        pass
    (tmp_path / "run" / "inductor").mkdir(exist_ok=True)
    (tmp_path / "run" / "inductor" / "rank0.json").write_bytes(content)
    bundle = open_bundle(tmp_path / "run")
    assert bundle.inductor is None
    assert any(warning.startswith("inductor/rank0.json could not be read") for warning in format_notices(bundle.notices))


RUN = """
import sys
import torch
from torch import nn
from gpudiag.capture.session import Session

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256))
compiled = torch.compile(model)
data = [torch.randn(512, 256) for _ in range(12)]

def step(x):
    compiled(x).square().mean().backward()
    model.zero_grad()

if sys.argv[2] == "warm":
    step(data[0])  # compiled before the recording begins
with Session(sys.argv[1], skip=1, warm=1, record=4, sites=0) as prof:
    for x in prof.steps(data):
        step(x)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
@pytest.mark.parametrize("when", [pytest.param("cold", marks=pytest.mark.long), "warm"])
def test_a_compiled_training_run_is_modelled(tmp_path_factory: pytest.TempPathFactory, when: str) -> None:
    folder = tmp_path_factory.mktemp(when)
    cache = tmp_path_factory.getbasetemp() / "inductor"  # the second run finds the code of the first one: a cache hit
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "2",
    }
    subprocess.run([sys.executable, "-c", RUN, str(folder / "run"), when], check=True, env=environment, timeout=300)
    bundle = open_bundle(folder / "run")
    assert bundle.inductor is not None
    forward = next(graph for graph in bundle.inductor.graphs if any("backward" not in kernel.name for kernel in graph.kernels))
    assert all(buffer.shape is not None for kernel in forward.kernels for buffer in kernel.buffers)
    analysis = analyse(resolve_input(str(folder / "run"), None), lambda _: None)
    assert analysis.coverage.modelled_share is not None
    assert analysis.coverage.modelled_share >= 0.95
    graphs = analysis.trace.kernels.filter(pl.col("name").cast(pl.String).str.starts_with("## Call CompiledFxGraph"))
    assert graphs.height == 2 * 4
    assert set(graphs["provenance"]) == {"derived"}
    # at least the activations of one layer pass the bus: gelu reads and writes 512 x 1024 fp32
    assert graphs["bytes_moved"].min() >= 2 * 4 * 512 * 1024
