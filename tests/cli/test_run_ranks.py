"""`gpudiag run` and torchrun: the same steps on all ranks, one report when all are over, what is left where ranks are killed or apart."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import polars as pl
import pytest

from gpudiag.bundle.reader import OpenedBundle, open_bundle
from gpudiag.model.report import decode_report
from gpudiag.trace import read_trace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("known_peaks"),
    pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc, to find the launcher"),
]

GPUDIAG = [sys.executable, "-m", "gpudiag", "run"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
QUICK = ["--skip", "4", "--warm", "1", "--record", "3", "--sites", "1", "--telemetry-hz", "0"]

TRAIN = """
    import os, signal, sys, time, torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    plain = torch.nn.Linear(64, 64)
    model = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    def after(step): pass
    BODY
    for step, batch in enumerate(DataLoader(torch.randn(200, 64), batch_size=4)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    dist.destroy_process_group()
    """


def script(folder: Path, body: str = "") -> Path:
    path = folder / "train.py"
    lines = textwrap.dedent(TRAIN).replace("BODY", textwrap.dedent(body))
    path.write_text(lines)
    return path


def start(folder: Path, *words: str | Path) -> subprocess.Popen[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(list(map(str, words)), cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Return the exit code, and what gpudiag said."""
    _, errors = process.communicate(timeout=240)
    return process.returncode, [line for line in errors.splitlines() if line.startswith("gpudiag: ")]


def bundles(folder: Path, ranks: int = 2) -> list[OpenedBundle]:
    return [open_bundle(folder, rank) for rank in range(ranks)]


def windows(bundle: OpenedBundle) -> list[tuple[int, int, int]]:
    return [(window.index, window.first_step, window.steps) for window in bundle.recorded().values()]


def messages(bundle: OpenedBundle) -> int:
    """Return how many exchanges of gradients the timing window of a rank holds."""
    trace = bundle.window("timing")
    assert trace is not None
    return read_trace(trace).ops.filter(pl.col("name") == "gloo:all_reduce").height


LATE_AND_VALIDATING = """
    if rank == 1:
        time.sleep(1.5)
    def after(step):
        if rank == 0 and step in (4, 30):
            with torch.no_grad():
                for held_out in DataLoader(torch.randn(32, 64), batch_size=4):
                    plain(held_out)
    """


def test_all_ranks_record_the_same_steps_though_one_begins_late_and_one_validates_alone(tmp_path: Path) -> None:
    """Step 4 is passed over on rank 0 alone, before the first window; further windows do not wait for the traces of a slower disk."""
    train = script(tmp_path, LATE_AND_VALIDATING)
    code, said = finish(start(tmp_path, *GPUDIAG, *QUICK, "--repeat", "3", "--no-report", "-o", "run", *TORCHRUN, train))
    assert code == 0, said
    first, second = bundles(tmp_path / "run")
    assert windows(first) == windows(second) == [(0, 5, 3), (1, 10, 1), (2, 13, 3), (3, 18, 3)]
    assert messages(first) == messages(second) > 0
    steps = first.rank_records().filter(pl.len().over("step") == 2)
    begun = steps.group_by("step").agg((pl.col("start_unix_ns").max() - pl.col("start_unix_ns").min()).alias("apart"))
    typical = steps["wall_ns"].median()
    assert begun["apart"].median() < typical  # were the numbers one step apart, they would begin a step apart
    assert second.step_records.height - first.step_records.height == 2  # the two that rank 0 validated in
    assert {bundle.manifest.host for bundle in (first, second)} == {"node 0"}
    assert not [path for path in (tmp_path / "run").glob("manifest*.json") if f'"{platform.node()}"' in path.read_text()]
    assert (first.manifest.rank, second.manifest.rank) == (0, 1)


KILLED = """
    def after(step):
        if rank == 1 and step == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
    """


def test_a_rank_that_is_killed_costs_no_report(tmp_path: Path) -> None:
    """torchrun ends the other rank with SIGTERM: neither bundle is finished, both windows are there."""
    code, said = finish(start(tmp_path, *GPUDIAG, *QUICK, "-o", "run", *TORCHRUN, script(tmp_path, KILLED)))
    assert code == 1
    assert "gpudiag: ranks 0-1 did not finish: killed, or still recording" in said
    assert said[-1] == "gpudiag: the recording is run; the page is run/report.html"
    assert [windows(bundle) for bundle in bundles(tmp_path / "run")] == [[(0, 5, 3), (1, 10, 1)]] * 2
    assert [bundle.manifest.finished for bundle in bundles(tmp_path / "run")] == [False, False]


def test_ranks_that_torchrun_starts_as_gpudiag_run_are_reported_on_once_when_all_are_over(tmp_path: Path) -> None:
    """The first rank is over seconds before the second has finished its bundle."""
    body = """
    import atexit
    first = plain.weight.register_hook(lambda gradient: (first.remove(), atexit.register(time.sleep, 4 * rank))[0])
    """
    train = script(tmp_path, body)
    code, said = finish(start(tmp_path, sys.executable, *TORCHRUN, "--no-python", *GPUDIAG, *QUICK, "-o", "run", train))
    assert code == 0, said
    assert said[-1] == "gpudiag: the recording is run; the page is run/report.html"
    # on a busy machine rank 0 takes as long to end; the command of the launcher is not known, so that no next one is named
    over = "gpudiag: the script has ended; the report follows (Ctrl-C skips it)"
    assert said[:-1] in ([over], ["gpudiag: waiting for rank 1 to finish recording", over])
    found = bundles(tmp_path / "run")
    assert all(bundle.manifest.finished for bundle in found)
    page = (tmp_path / "run" / "report.json").stat().st_mtime
    assert page > max(path.stat().st_mtime for path in (tmp_path / "run" / "steps").rglob("*.json"))
    assert decode_report((tmp_path / "run" / "report.json").read_bytes()).source.ranks == (0, 1)


@pytest.mark.long
@pytest.mark.parametrize("shared", [True, False])
def test_two_machines_say_where_the_ranks_are(tmp_path: Path, shared: bool) -> None:
    """Each with a launcher of its own. In one folder the machine of rank 0 reports on both; else each on its own, and says so."""
    train = script(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    machines = []
    for node in (0, 1):
        launch = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", f"--master-port={port}"]
        folder = "run" if shared else f"run{node}"
        machines.append(start(tmp_path, *GPUDIAG, *QUICK, "--no-report", "-o", folder, *launch, train))
    (code, first), (other, second) = map(finish, machines)
    assert (code, other) == (0, 0), (first, second)
    if shared:
        assert first == ["gpudiag: the recording is run; `gpudiag report run` reports on it"]
        assert second == ["gpudiag: rank 1 of 2 recorded into run: where rank 0 ran, all are reported on"]
        assert [bundle.manifest.host for bundle in bundles(tmp_path / "run")] == ["node 0", "node 1"]
    else:
        assert all(said[0].startswith("gpudiag: 1 of 2 ranks are in this bundle: ") for said in (first, second))
        assert [said[-1] for said in (first, second)] == [
            f"gpudiag: the recording is run{node}; `gpudiag report run{node}` reports on it" for node in (0, 1)
        ]
        assert open_bundle(tmp_path / "run1").ranks == (1,)
