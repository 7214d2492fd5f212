"""The recorder of sample trainings, tried out on a CPU in tiny sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpudiag.bundle.reader import open_bundle

pytest.importorskip("torch", reason="torch is not installed")

RECORD = Path(__file__).resolve().parents[2] / "samples" / "gpu" / "record.py"


def record(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RECORD), *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.long
def test_each_sample_becomes_a_bundle_that_is_modelled(tmp_path: Path) -> None:
    names = ["transformer_tf32", "transformer_checkpointed", "resnet_bf16", "dlrm"]
    done = record(str(tmp_path), "--device", "cpu", "--tiny", "--only", ",".join(names))
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [line[0] for line in lines if len(line) > 1] == ["sample", *names]
    for name, *cells in lines[-len(names) :]:
        assert float(cells[1].rstrip("%")) >= 95, (name, cells)
    precisions = {name: open_bundle(tmp_path / name).manifest.settings.float32_matmul_precision for name in names}
    assert precisions == {
        "transformer_tf32": "high",
        "transformer_checkpointed": "highest",
        "resnet_bf16": "highest",
        "dlrm": "highest",
    }


@pytest.mark.slow
def test_a_name_that_is_none_is_said(tmp_path: Path) -> None:
    done = record(str(tmp_path / "out"), "--device", "cpu", "--only", "gpt5")
    assert done.returncode == 2
    assert done.stderr.startswith("no such sample: gpt5 (there are transformer_bf16, ")
    assert not (tmp_path / "out").exists()
