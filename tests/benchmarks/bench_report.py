"""Measures what reading and reporting cost, against a floor and against peers in the same run: `make bench` (Linux, macOS).

Writes RESULTS.md beside this file where all sizes were measured. Ratios on a busy machine mean more than seconds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import peers  # noqa: E402
from measuring import Run, best, measure  # noqa: E402
from results import AGAIN, FLOOR, LARGE_MB, READ, REPORT, Measured, keep_sections, page, rows, targets  # noqa: E402

from gpudiag.cache import find_place  # noqa: E402

SHARED = HERE.parents[2] / "shared"
REAL = ("h100_qwen1.5-0.5b_prefill", "mi300x_resnet18_ddp8_actckpt_train_rank0", "v100_ddp2_inductor_train_rank1")
GROWN = REAL[1]
SIZES_MB = (100.0, 300.0, 1000.0)
SMALL_MB = 25.0
"""Up to here a trace counts as one of ten megabytes."""

READ_CODE = "import sys; from pathlib import Path; from gpudiag.trace import read_trace; read_trace(Path(sys.argv[1]))"
SIZE_CODE = (
    "import sys; from isal import igzip; f = igzip.open(sys.argv[1]); print(sum(len(b) for b in iter(lambda: f.read(1 << 24), b'')))"
)

COMMANDS = {
    FLOOR: [sys.executable, str(HERE / "floor.py")],
    READ: [sys.executable, "-c", READ_CODE],
    REPORT: [sys.executable, "-m", "gpudiag", "report"],
}


def measured(trace: Path, repeat: int, others: dict[str, list[str]] | None = None) -> Measured:
    """Return what floor, reading, the first and the second report on one trace cost, and `others` (peers), which are run once."""
    runs: dict[str, Run | None] = {}
    for name, command in COMMANDS.items():
        runs[name] = _first(trace, command, repeat)
    if cached(trace).is_dir():
        runs[AGAIN] = best([*COMMANDS[REPORT], str(trace)], repeat)
    shutil.rmtree(cached(trace), ignore_errors=True)
    for name, command in (others or {}).items():
        runs[name] = measure([*command, str(trace)])
    floor = runs[FLOOR]
    return Measured(trace.name, size_mb(trace), int(floor.output) if floor else 0, runs)


def cached(trace: Path) -> Path:
    """Return where what is kept of traces in that folder lies."""
    place = find_place(trace)
    assert place is not None
    return place


def size_mb(trace: Path) -> float:
    """Return the uncompressed size of a trace in 10^6 bytes; 0 where it cannot be read."""
    size = measure([sys.executable, "-c", SIZE_CODE, str(trace)])
    return int(size.output) / 1e6 if size else 0.0


def _first(trace: Path, command: list[str], repeat: int) -> Run | None:
    """Return the best run of a command that finds nothing kept from the run before."""
    runs = []
    for _ in range(repeat):
        shutil.rmtree(cached(trace), ignore_errors=True)
        run = measure([*command, str(trace)])
        if run is None:
            return None
        runs.append(run)
    return min(runs)


def made(folder: Path, size_mb: float) -> Path:
    """Return a trace of that size: a real one grown, else a synthetic one; one that is in `folder` already is taken."""
    base, maker = SHARED / "traces" / f"{GROWN}.json.gz", SHARED / "bench" / "make_large_trace.py"
    real = base.is_file() and maker.is_file()
    target = folder / f"{'grown' if real else 'synthetic'}-{size_mb:.0f}mb.json.gz"
    if target.is_file():
        return target
    print(f"making {target.name}", file=sys.stderr)
    begun = target.with_name(f".{target.name.removesuffix('.json.gz')}.part.json.gz")
    synthetic = [sys.executable, str(HERE / "synthetic.py"), str(begun), str(size_mb)]
    command = [sys.executable, str(maker), str(base), str(begun), "--size-mb", str(size_mb)] if real else synthetic
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    begun.rename(target)
    return target


def placed(trace: Path, folder: Path) -> Path:
    """Return `trace` in `folder`, so that what is kept beside it is ours alone."""
    target = folder / trace.name
    if target.exists():  # it was made there
        return target
    with suppress(OSError):
        os.link(trace, target)
        return target
    shutil.copyfile(trace, target)
    return target


def small_traces() -> list[Path]:
    """Return real traces, where they are at hand."""
    return [path for name in REAL if (path := SHARED / "traces" / f"{name}.json.gz").is_file()]


def rank_lines(counts: list[int] | None) -> list[str]:
    """Return what the scaling over ranks says, in Markdown; nothing where it was not asked for (None; []: of the usual jobs)."""
    if counts is None:
        return []
    import bench_ranks

    return ["## Ranks", "", *bench_ranks.markdown(counts or bench_ranks.COUNTS)]


def main() -> None:
    """Print the table as it grows, then write RESULTS.md."""
    options = _options()
    commands, missing = peers.prepare(options.peers) if options.peers else ({}, {})
    for name, reason in missing.items():
        print(f"{name}: {reason}", file=sys.stderr)
    found: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="gpudiag-bench-", dir=options.keep) as scratch:
        given = options.traces or [made(options.keep or Path(scratch), size) for size in sorted(options.size_mb)]
        grown = sorted((placed(path, Path(scratch)) for path in given), key=lambda path: path.stat().st_size)
        real = [] if options.only_large else [placed(path, Path(scratch)) for path in small_traces()]
        large = next((trace for trace in grown if size_mb(trace) >= LARGE_MB), grown[-1])  # peers would not fit the memory with more
        for trace in [*real, *grown]:
            one = measured(trace, options.repeat, commands if trace in (*real, large) else None)
            print("\n".join(rows(one)), flush=True)
            found.append(one)
    grown_rows = found[-len(grown) :]
    small = next((one for one in found if one.size_mb <= SMALL_MB and one.size_mb > 5), None)
    start = best([sys.executable, "-m", "gpudiag", "--help"], 5)
    reached = targets(grown_rows, small, start, missing)
    for target in reached:
        print(f"{target.wanted}: {target.found}{'' if target.met is None else ': met' if target.met else ': missed'}")
    notes = [f"{name} {peers.version(command, name)} ran in an environment of its own." for name, command in commands.items()]
    notes += [f"{name}: {reason}." for name, reason in missing.items()]
    notes += [f"{name} on {one.name}: {run.output}." for one in found for name in commands if (run := one.runs.get(name)) and run.output]
    text = page(found, reached, notes, rank_lines(options.ranks), repeat=options.repeat)
    if options.out is not None:
        options.out.write_text(
            keep_sections(text, options.out.read_text(encoding="utf-8") if options.out.is_file() else ""), encoding="utf-8"
        )
        print(f"written: {options.out}", file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="gpudiag against the floor of reading, and against its peers")
    parser.add_argument("--size-mb", type=float, nargs="+", default=SIZES_MB, help="uncompressed sizes (default: 100 300 1000)")
    parser.add_argument("--traces", type=Path, nargs="+", help="measure these traces instead of grown ones")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep grown traces there, and take those that are there already")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each; the fastest is shown (default 2)")
    parser.add_argument("--only-large", action="store_true", help="leave the real traces out")
    parser.add_argument(
        "--peers", type=Path, nargs="?", const=peers.ROOT / ".venv-peers", metavar="DIR", help="run HTA and TraceLens, installed there"
    )
    parser.add_argument(
        "--ranks", type=int, nargs="*", metavar="N", help="measure jobs of N ranks too (bench_ranks.py; default 1 8 64 512)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results there (default: RESULTS.md, where all was measured)")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    whole = options.traces is None and set(SIZES_MB) <= set(options.size_mb) and not options.only_large
    if options.out is None and whole and options.peers is not None and options.ranks == []:
        options.out = HERE / "RESULTS.md"
    return options


if __name__ == "__main__":
    main()
