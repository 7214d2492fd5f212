"""prof.report() in the middle of a training program: made by a child process, so that workers forked later work."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.documents import gpu_training

from gpudiag import api
from gpudiag.errors import GpudiagError, InputError
from gpudiag.recorder import diagnose_in_child

TRAINING = """
import sys
import polars as pl
import torch
from torch.utils.data import DataLoader, Dataset
import gpudiag

class Frames(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, row):
        frame = pl.DataFrame({"a": list(range(50_000))})
        return torch.full((8,), float(frame.group_by(pl.col("a") % 7).len().height))

model = torch.nn.Linear(8, 8)
with gpudiag.profile(sys.argv[1]) as prof:
    for batch in prof.steps([torch.randn(4, 8)] * 30):
        model(batch).sum().backward()
print("steps", prof.report().data.steps.count)
print("batches", sum(1 for _ in DataLoader(Frames(), batch_size=50, num_workers=2, multiprocessing_context="fork")))
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(gpu_training()).encode()))
    return path


@pytest.mark.slow
def test_the_report_is_that_of_this_process(trace: Path) -> None:
    assert diagnose_in_child(str(trace)) == api.diagnose(str(trace)).data


@pytest.mark.slow
def test_a_relative_path_is_that_of_this_process(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trace.parent)
    assert diagnose_in_child(trace.name).steps.count == 4


def test_what_cannot_be_read_is_the_same_error(tmp_path: Path) -> None:
    with pytest.raises(InputError) as here:
        api.diagnose(str(tmp_path))
    with pytest.raises(InputError) as apart:
        diagnose_in_child(str(tmp_path))
    assert str(apart.value) == str(here.value)


def test_a_process_that_cannot_start_is_one_error(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(trace.parent / "no-python"))
    with pytest.raises(GpudiagError, match="could not start"):
        diagnose_in_child(str(trace))


@pytest.mark.slow
def test_nothing_of_the_folder_of_the_program_is_imported(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (trace.parent / "polars.py").write_text("raise RuntimeError('a file of the user')")
    monkeypatch.chdir(trace.parent)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as in `python -c` and in an interactive session
    assert diagnose_in_child(str(trace)).steps.count == 4


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_workers_forked_after_a_report_do_not_hang(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(tmp_path / "run")], capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-3:] == ["steps 6", "batches 8", ""]
