"""`gpudiag memory` as a user runs it."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

from snapshots import BASE, block, segment, training


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gpudiag", "memory", *args], capture_output=True, text=True, check=False)


def test_a_snapshot_is_told_and_written(tmp_path: Path) -> None:
    path, out = tmp_path / "dump.pickle", tmp_path / "out.json"
    path.write_bytes(pickle.dumps(training()))
    found = run(str(path), "--json", str(out), "--top", "3")
    assert found.returncode == 0, found.stderr
    assert "27.3 MB on cuda:0" in found.stdout
    assert json.loads(out.read_bytes())["memory"]["peak_bytes"] == 26 << 20


def test_a_hostile_pickle_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "dump.pickle"
    path.write_bytes(b"\x80\x04cposix\nsystem\n\x8c\x04echo\x85R.")
    found = run(str(path))
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (2, "", 1)
    assert "is refused" in found.stderr


def test_the_gpu_is_an_option(tmp_path: Path) -> None:
    path = tmp_path / "dump.pickle"
    path.write_bytes(pickle.dumps([segment(BASE, block(BASE, 512)), segment(BASE, block(BASE, 1024), device=1)]))
    found = run(str(path), "--device", "0")
    assert found.returncode == 0, found.stderr
    assert "512 B on cuda:0" in found.stdout
    assert "not analysed: cuda:1" in found.stdout


def test_call_sites_have_the_end_of_their_paths(tmp_path: Path) -> None:
    path = tmp_path / "dump.pickle"
    path.write_bytes(pickle.dumps(training()))
    found = run(str(path), "--json", str(tmp_path / "out.json"))
    assert "train.py:44 <module>" in found.stdout
    assert "/home/me" not in found.stdout + (tmp_path / "out.json").read_text()
