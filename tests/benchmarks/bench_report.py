"""Prints what reading and reporting cost against a floor measured in the same run: `make bench` (Linux, macOS).

Every figure is one fresh process, start included: wall seconds, and peak resident memory as the system counted it.
Ratios on a busy machine mean more than seconds; nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHARED = HERE.parents[2] / "shared"
REAL = ("h100_qwen1.5-0.5b_prefill", "mi300x_resnet18_ddp8_actckpt_train_rank0", "v100_ddp2_inductor_train_rank1")
GROWN = REAL[1]
RSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of ru_maxrss: getrusage(2) of the system."""

READ = "import sys; from pathlib import Path; from gpudiag.trace import read; read(Path(sys.argv[1]))"
JSON = "import gzip, json, sys; json.loads(gzip.open(sys.argv[1]).read().decode('utf-8', 'replace'), strict=False)"
SIZE = "import sys; from isal import igzip; f = igzip.open(sys.argv[1]); print(sum(len(b) for b in iter(lambda: f.read(1 << 24), b'')))"

COMMANDS = {
    "floor": [sys.executable, str(HERE / "floor.py")],
    "trace.read": [sys.executable, "-c", READ],
    "gpudiag report": [sys.executable, "-m", "gpudiag", "report"],
    "json.load": [sys.executable, "-c", JSON],
}


def measure(command: list[str]) -> tuple[float, float, str] | None:
    """Return wall seconds, peak resident MB and the output of `command` in a fresh process; None where it failed (said on stderr)."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)  # reaped here, so that Popen does not wait for it again
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            tail = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            print(f"failed ({process.returncode}): {' '.join(command)[-100:]}: {tail}", file=sys.stderr)
            return None
        return wall_s, usage.ru_maxrss * RSS_BYTES / 1e6, output.read().decode(errors="replace").strip()


def best(command: list[str], repeat: int) -> tuple[float, float, str] | None:
    """Return the run of least wall time out of `repeat` (the least disturbed one); None as soon as one fails."""
    runs = []
    for _ in range(repeat):
        run = measure(command)
        if run is None:
            return None
        runs.append(run)
    return min(runs)


def rows(trace: Path, repeat: int) -> list[str]:
    """Return the lines of the table for one trace."""
    size = measure([sys.executable, "-c", SIZE, str(trace)])
    floor = best([*COMMANDS["floor"], str(trace)], repeat)
    size_mb = int(size[2]) / 1e6 if size else 0.0
    lines = [f"{trace.name}: {size_mb:.0f} MB, {floor[2] if floor else 'unknown'} events"]
    for name, command in COMMANDS.items():
        run = floor if name == "floor" else best([*command, str(trace)], repeat)
        if run is None:
            lines.append(f"  {name:<16} failed")
            continue
        ratio = f"{run[0] / floor[0]:6.2f} x floor" if floor else f"{'':14}"
        share = f"{run[1] / size_mb:5.2f} x size" if size_mb else ""
        lines.append(f"  {name:<16}{run[0]:8.2f} s {ratio}{run[1]:9.0f} MB peak {share}")
    return lines


def traces(folder: Path, size_mb: float) -> list[Path]:
    """Return the traces to measure: real ones and a grown one where they are at hand, else a synthetic one made in `folder`."""
    real, maker = SHARED / "traces", SHARED / "bench" / "make_large_trace.py"
    large = folder / f"grown-{size_mb:.0f}mb.json.gz"
    found = [path for name in REAL if (path := real / f"{name}.json.gz").is_file()]
    if found and maker.is_file():
        subprocess.run(
            [sys.executable, maker, real / f"{GROWN}.json.gz", large, "--size-mb", str(size_mb)], check=True, stdout=subprocess.DEVNULL
        )
        return [*found, large]
    print(f"no real traces and no {maker.name} in {SHARED}: measuring a synthetic trace of {size_mb:.0f} MB instead")
    large = folder / f"synthetic-{size_mb:.0f}mb.json.gz"
    subprocess.run([sys.executable, HERE / "synthetic.py", large, str(size_mb)], check=True)
    return [*found, large]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="gpudiag against the floor of reading")
    parser.add_argument("--size-mb", type=float, default=250, help="uncompressed size of the grown or synthetic trace (default 250)")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each; the fastest is shown (default 1)")
    parser.add_argument("--only-large", action="store_true", help="measure the grown or synthetic trace alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpudiag-bench-") as folder:
        chosen = traces(Path(folder), options.size_mb)
        for trace in chosen[-1:] if options.only_large else chosen:
            print("\n".join(rows(trace, options.repeat)), flush=True)
    start = best([sys.executable, "-m", "gpudiag", "--help"], 5)
    print(f"gpudiag --help: {start[0]:.2f} s" if start else "gpudiag --help: failed")


if __name__ == "__main__":
    main()
