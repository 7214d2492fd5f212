"""A real job of two processes (gloo): what its bundle says of a late rank and of repeated exchanges."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpudiag.analysis import analyse
from gpudiag.diagnosis import judge, load_rules
from gpudiag.facts import Facts
from gpudiag.inputs import resolve_input

pytestmark = pytest.mark.slow

TRAIN = """
import time, torch
import torch.distributed as dist
from gpudiag import profile
dist.init_process_group("gloo")
late = dist.get_rank() == 1
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        for _ in range(40):
            time.sleep(0.06 if late else 0.005)
            yield torch.ones(8, 64)
with profile("runs/x", skip=14, warm=1, record=3, sites=0, telemetry_hz=0) as prof:
    for batch in prof.steps(torch.utils.data.DataLoader(Batches(), batch_size=None)):
        for part in batch.chunk(2):
            model(part).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_a_late_rank_and_an_exchange_after_each_micro_batch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    analysis = analyse(resolve_input(str(tmp_path / "runs" / "x"), None), lambda _: None)
    facts = Facts(analysis)
    assert facts.value("late_rank") == "1"
    assert facts.value("late_rank_phase") == "loader"
    assert facts.value("exchanges_per_update") == 2
    findings = judge(analysis, load_rules(), facts).findings
    named = {rule for finding in findings for rule in (finding.rule, *finding.folded)}
    assert {"DST-03", "DST-06"} <= named
    assert "DST-10" not in named
