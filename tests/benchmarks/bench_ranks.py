"""Measures how the report on a job grows with its ranks: 1 to 512, a real job replicated (Linux).

python tests/benchmarks/bench_ranks.py --ranks 1 8 64        # prints the table; bench_report.py takes it into RESULTS.md
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from isal import igzip

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from measuring import measure  # noqa: E402

JOB = HERE.parents[2] / "shared" / "traces" / "v100_dlrm_train_8ranks"
COUNTS = (1, 8, 64, 512)
MOST_ALONE = 64
"""Ranks up to which one worker is measured too: beyond, its time a rank is taken to be that of the largest job that was."""

SYNTHETIC_MB = 1.0
WANTED_EFFICIENCY = 0.85
ALIKE = 1.15
"""Ratio up to which two measurements are taken to be the same."""
HEAD_BYTES = 1 << 16
LOOK_S = 0.1


class Job(msgspec.Struct):
    """What one reading of a job cost."""

    ranks: int
    workers: int
    wall_s: float
    """From the first trace to the last summary, start of the workers included."""
    compare_s: float
    """What comparing all ranks took, in CPU time."""
    cpu_s: float
    parent_mb: float
    """Peak of resident memory of 10^6 bytes, before one rank is analysed to be shown."""
    worker_mb: tuple[float, float]
    """The least and the most that a worker took; of this process where there is none."""
    load: float = 0.0


# -- a job of many ranks ------------------------------------------------------------------------------------------------------


def bases(folder: Path) -> list[Path]:
    """Return the traces to replicate: a real job of 8 ranks, else a synthetic trace."""
    if JOB.is_dir():
        return sorted(JOB.glob("rank*.json.gz"))
    made = folder / "base.json.gz"
    subprocess.run([sys.executable, str(HERE / "synthetic.py"), str(made), str(SYNTHETIC_MB)], check=True, stdout=subprocess.DEVNULL)
    return [made]


def replicate(folder: Path, count: int, base: Sequence[Path]) -> Path:
    """Return `folder` with the traces of a job of `count` ranks; the header of each tells its own rank."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [gzip.decompress(path.read_bytes()) for path in base]
    for rank in range(count):
        text = texts[rank % len(texts)]
        head = re.sub(rb'("rank": *)\d+', rb"\g<1>%d" % rank, text[:HEAD_BYTES])
        head = re.sub(rb'("world_size": *)\d+', rb"\g<1>%d" % count, head)
        (folder / f"rank{rank}.json.gz").write_bytes(igzip.compress(head + text[HEAD_BYTES:], 1))
    return folder


# -- one measurement, in a process of its own ---------------------------------------------------------------------------------


def summed_up(folder: Path, workers: int) -> Job:
    """Return what it costs to sum up and compare the ranks in `folder` with so many workers (0: in this process)."""
    import resource

    from gpudiag import ranks as jobs
    from gpudiag import workers as workers_module
    from gpudiag.job.job import compare_rank_summaries
    from gpudiag.job.message_table import MessageTableBuilder
    from gpudiag.job.rank_summary import decode_summary
    from gpudiag.recordings.paths import find_ranks
    from gpudiag.workers import UnreadRank

    recording = find_ranks([str(folder)])
    requests = [msgspec.json.encode(item) for item in recording.ranks]
    how: Any = partial(workers_module.run_in_processes, processes=workers)
    with _Watched() as watched:
        begun = time.perf_counter()
        found = [answer for _, answer in how(jobs.SUMMARISE, requests)]
        wall_s = time.perf_counter() - begun
    unread = [answer for answer in found if isinstance(answer, UnreadRank)]
    if unread:
        raise SystemExit(f"{len(unread)} ranks were not read: {unread[0].message}")
    begun = time.process_time()
    pile = MessageTableBuilder()
    for answer in found:
        pile.add(decode_summary(answer))
    compare_rank_summaries(pile.stack(), {})
    compare_s = time.process_time() - begun
    own, theirs = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    parent_mb = own.ru_maxrss * 1024 / 1e6
    peaks = sorted(watched.peaks_mb.values()) or [parent_mb]
    cpu_s = own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime
    return Job(len(requests), max(1, workers), wall_s, compare_s, cpu_s, parent_mb, (peaks[0], peaks[-1]))


class _Watched:
    """Looks at the peak memory of this process's children (VmHWM of /proc/PID/status, proc(5))."""

    def __init__(self) -> None:
        self.peaks_mb: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            for pid in _children():
                with suppress(OSError, AttributeError):
                    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                    self.peaks_mb[pid] = int(found[1]) * 1024 / 1e6  # type: ignore[index]


def _children() -> Iterator[int]:
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, path.read_text().split())


# -- all of them --------------------------------------------------------------------------------------------------------------


def measured(counts: Sequence[int], workers: int) -> list[Job]:
    """Return what jobs of so many ranks cost: with one worker up to MOST_ALONE ranks, and with all."""
    found = []
    with tempfile.TemporaryDirectory(prefix="gpudiag-bench-") as scratch:
        base = bases(Path(scratch))
        for count in counts:
            folder = replicate(Path(scratch) / f"job{count}", count, base)
            for number in sorted({1 if count <= MOST_ALONE else workers, min(workers, count)}):
                run = measure([sys.executable, __file__, "--one", str(folder), str(number)], {"GPUDIAG_NO_CACHE": "1"})
                if run is not None:
                    found.append(msgspec.structs.replace(msgspec.json.decode(run.output, type=Job), load=run.load))
                    print(row(found[-1], found), file=sys.stderr, flush=True)
    return found


def efficiency(job: Job, jobs: Sequence[Job]) -> float | None:
    """Return t(1 worker) / (workers x t(workers)) of the same ranks; for larger jobs by the time a rank of the largest with one worker."""
    alone = [one for one in jobs if one.workers == 1 and one.ranks <= job.ranks]
    if job.workers == 1 or not alone:
        return None
    largest = max(alone, key=lambda one: one.ranks)
    return largest.wall_s * job.ranks / largest.ranks / (job.workers * job.wall_s)


def row(job: Job, jobs: Sequence[Job]) -> str:
    """Return the line of the table."""
    share = efficiency(job, jobs)
    least, most = job.worker_mb
    worker = f"{most:.0f}" if most - least < 1 else f"{least:.0f} to {most:.0f}"
    cells = (
        job.ranks, job.workers, f"{job.wall_s:.1f}", f"{1e3 * job.wall_s / job.ranks:.0f}", f"{job.cpu_s:.1f}",
        f"{1e3 * job.compare_s:.0f}", f"{job.parent_mb:.0f}", worker, "" if share is None else f"{share:.2f}", f"{job.load:.1f}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def gunzip_line(path: Path) -> str:
    """Return what bounds one file whatever the cores: its gunzip, which is serial."""
    begun = time.process_time()
    size = len(igzip.decompress(path.read_bytes()))
    return (
        f"One file is read at the pace of its gunzip at best, which is serial: {1e3 * (time.process_time() - begun):.1f} ms for "
        f"{size / 1e6:.1f} MB ({path.name}). Ranks are read beside each other."
    )


def markdown(counts: Sequence[int] = COUNTS, workers: int | None = None) -> list[str]:
    """Return the measurement as lines of Markdown: what is replicated, the table, the targets."""
    from gpudiag.workers import count_usable_cores

    found = measured(counts, workers or count_usable_cores())
    with tempfile.TemporaryDirectory(prefix="gpudiag-bench-") as scratch:
        base = bases(Path(scratch))
        what = f"a real job of {len(base)} ranks" if JOB.is_dir() else "a synthetic trace"
        about = f"The traces of {what} ({base[0].stat().st_size / 1e3:.0f} kB compressed each), replicated. {gunzip_line(base[0])}"
    return [
        about,
        "",
        "| ranks | workers | wall s | wall ms a rank | CPU s | comparing, CPU ms | parent peak MB | worker peak MB | efficiency | load |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(row(job, found) for job in found),
        "",
        f"Efficiency is t(1 worker) / (workers x t(workers)); more than {MOST_ALONE} ranks: by the time a rank of the largest job that one "
        "worker read. CPU s are those of all processes, comparing and start included.",
        *_targets(found),
    ]


def _targets(found: Sequence[Job]) -> list[str]:
    many = [job for job in found if job.workers > 1]
    if not many:
        return []
    largest = max(many, key=lambda job: job.ranks)
    share = efficiency(largest, found)
    lines = []
    if share is not None:
        lines += [f"- efficiency {share:.2f} at {largest.ranks} ranks (at least {WANTED_EFFICIENCY}): {_met(share >= WANTED_EFFICIENCY)}"]
    before = max((job for job in many if job.ranks < largest.ranks), key=lambda job: job.ranks, default=None)
    if before is not None:
        ratio = (largest.wall_s / largest.ranks) / (before.wall_s / before.ranks)
        grown = largest.worker_mb[1] / before.worker_mb[1]
        lines += [
            f"- a rank of {largest.ranks} takes {ratio:.2f} x one of {before.ranks} (linear: at most {ALIKE}): {_met(ratio <= ALIKE)}",
            f"- a worker takes {grown:.2f} x the memory (constant: at most {ALIKE}): {_met(grown <= ALIKE)}",
        ]
    return ["", *lines]


def _met(reached: bool) -> str:
    return "met" if reached else "missed"


def main() -> None:
    """Print the table, or the JSON of one measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--workers", type=int, default=None, help="default: the cores that may be used")
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "WORKERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        os.environ["POLARS_MAX_THREADS"] = "1"
        sys.stdout.write(msgspec.json.encode(summed_up(Path(options.one[0]), int(options.one[1]))).decode())
    else:
        print("\n".join(markdown(options.ranks, options.workers)))


if __name__ == "__main__":
    main()
