"""The bench itself: its floor reads every event, its synthetic trace is one, its figures are of the process it names."""

from __future__ import annotations

import gzip
import importlib.util
import json
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from examples import sample

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # the scripts here import each other


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_floor_reads_every_event_whatever_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floor, synthetic = _load("floor"), _load("synthetic")
    path = tmp_path / "small.json.gz"
    written = synthetic.write(path, 1)
    assert len(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]) == written
    for size in (1 << 24, 100_000, 3_000):
        monkeypatch.setattr(floor, "CHUNK_BYTES", size)
        assert floor.read(path) == written


@pytest.mark.parametrize("name", sample(["h100_bert-small", "mi300x_norm_layers_fwd_bwd", "v100_resnet50_train_2021_memory_callstack"]))
def test_the_floor_reads_real_traces(traces: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    floor = _load("floor")
    path = traces / f"{name}.json.gz"
    document = json.loads(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"), strict=False)
    monkeypatch.setattr(floor, "CHUNK_BYTES", 1_000_000)
    assert floor.read(path) == len(document if isinstance(document, list) else document["traceEvents"])


def test_memory_and_time_are_those_of_the_child() -> None:
    bench = _load("measuring")
    run = bench.measure([sys.executable, "-c", "import time; x = bytearray(200_000_000); time.sleep(0.2); print(len(x))"])
    assert run.wall_s >= 0.2
    assert 0 < run.cpu_s < run.wall_s + 0.1
    own_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bench.RSS_BYTES / 1e6
    assert 200 < run.peak_mb < 400 + own_mb  # a child shares the memory of its parent until it has become another program
    assert run.output == "200000000"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes below a command are found in /proc")
def test_memory_of_processes_below_the_command_counts() -> None:
    hold = "import time; x = bytearray(150_000_000); time.sleep(0.6)"
    both = f"import subprocess, sys; x = bytearray(150_000_000); subprocess.run([sys.executable, '-c', {hold!r}])"
    assert _load("measuring").measure([sys.executable, "-c", both]).peak_mb > 300


def test_a_failing_command_gives_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert _load("measuring").measure([sys.executable, "-c", "raise SystemExit('no')"]) is None
    assert "failed (1)" in capsys.readouterr().err


def test_the_replay_bench_tells_error_and_time_of_each_step(traces: Path) -> None:
    (row,) = _load("bench_replay").rows(str(traces / "h100_bert-small.json.gz"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:3] == ["h100_bert-small", "ProfilerStep#6", "fastest, median, slowest"]
    assert abs(float(cells[6].rstrip("%"))) < 3
    assert float(cells[-1]) < 2


@pytest.mark.long
def test_the_pairs_bench_sets_the_what_if_beside_the_good_run() -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, HERE / "bench_planted_pairs.py", "checkpoint"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    cells = [cell.strip() for cell in done.stdout.splitlines()[-1].strip("|").split("|")]
    assert cells[:2] == ["checkpoint", "io=0"]
    bad, changed, good = (float(cell) for cell in cells[2:5])
    assert 0 < changed < bad
    assert good > 0


def test_the_capture_bench_gives_an_interval_over_processes() -> None:
    bench = _load("bench_capture")
    runs = [{"inside": [102.0, 103.0, 101.0], "torch.profiler": [100.0, 100.0, 100.0]}, {"inside": [202.0], "torch.profiler": [200.0]}]
    middle, low, high = bench.ratio(runs, "inside", "torch.profiler")
    assert middle == pytest.approx((1.02 * 1.01) ** 0.5)
    assert low < 1.01 < 1.02 < high
    assert bench.interval([1.5] * 4) == (pytest.approx(1.5),) * 3


@pytest.mark.long
def test_the_capture_bench_times_every_arm() -> None:
    pytest.importorskip("torch")
    command = [sys.executable, HERE / "bench_capture.py", "--child", "small", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    times = json.loads(done.stdout.splitlines()[-1])
    assert set(times) == {"bare", "outside", "torch.profiler", "inside"}
    assert all(len(turns) == 1 and turns[0] > 0 for turns in times.values())
