"""An upper bound agrees with the breakdown beside it: never more than the causes took in the same window, never all of the time."""

from __future__ import annotations

from pathlib import Path

import kept
import pytest
import simulator as s
from realtraces import SHARED, recordings
from simulator import Hardware, Recording, simulate

from gpudiag.model.report import ReportData
from gpudiag.model.timeline import BUCKETS
from gpudiag.pipeline import open_recording

FOUND = [*recordings(SHARED / "traces"), *recordings(SHARED / "evidence" / "traces"), *(SHARED / "evidence" / "nsys").glob("*.sqlite")]
RECORDINGS = sorted(path.relative_to(SHARED).as_posix() for path in FOUND)

WORK = ("compute", "memory", "overhead", "unknown")
LATE_HOST = ("idle_launch", "idle_dependency")
EVERYTHING = tuple(bucket for bucket in BUCKETS if bucket != "outside_recording")
COPIES = ("exposed_copy", *LATE_HOST, "idle_sync")
CAUSES: dict[str, tuple[str, ...]] = {
    "idle_launch": LATE_HOST,
    "idle_sync": ("idle_sync",),
    "idle_data": ("idle_data", *LATE_HOST),
    "idle_allocation": ("idle_allocation", *LATE_HOST),
    "idle_compile": ("idle_compile", "idle_gc", "idle_init", *LATE_HOST),
    "idle_io": ("idle_gc", "idle_io", *LATE_HOST),
    "copy": COPIES,
    "communication": ("exposed_communication", "idle_dependency", *WORK),
    "compute": (*WORK, *LATE_HOST),
    "memory": (*WORK, *LATE_HOST),
    "overhead": EVERYTHING,
}
"""What a finding is about (`bound`) -> the buckets that its change can shorten: an earlier host is then ahead of later launches too. Larger
batches share out every cost of a step."""
OF_RULE: dict[str, tuple[str, ...]] = {
    "OVH-04": (*WORK, *LATE_HOST, "idle_sync", "idle_unexplained"),  # what runs and waits between two graphs, whatever it is
    "SYN-05": (*COPIES, "idle_unexplained"),
}
OF_WHAT_IF: dict[str, tuple[str, ...]] = {
    "host": LATE_HOST,
    "launch": (*LATE_HOST, "idle_profiler"),
    **{name: (f"idle_{name}", *LATE_HOST) for name in ("sync", "gc", "io", "allocation", "compile", "profiler")},
    "loader": ("idle_data", *LATE_HOST),
    "roof": (*WORK, "exposed_communication", "exposed_copy"),
    "fused": (*WORK, *LATE_HOST),
    "copies": COPIES,
    "communication": ("exposed_communication", "idle_dependency", *WORK),
}


def _share(report: ReportData, buckets: tuple[str, ...]) -> float:
    return sum(getattr(report.breakdown.buckets_ns, bucket) for bucket in set(buckets)) / report.breakdown.wall_ns


def _find_oversold(report: ReportData) -> list[str]:
    """Return what is promised beyond what the causes took, by more than 1 % of the window, or all of the window."""
    promises = [
        (finding.rule, finding.ceiling.share, OF_RULE.get(finding.rule, CAUSES.get(finding.bound, EVERYTHING)))
        for finding in report.findings
        if finding.ceiling is not None
    ]
    promises += [
        (found.name, found.share, OF_WHAT_IF[found.name.partition("=")[0]])
        for found in report.what_ifs
        if not found.name.startswith("batch=")  # its gain is per sample
    ]
    taken = [(name, share, _share(report, buckets)) for name, share, buckets in promises]
    for found in report.what_ifs:
        cause = OF_WHAT_IF.get(found.name.partition("=")[0], ("",))[:1]
        if cause[0].startswith("idle") and _share(report, cause) == 0:  # what costs nothing gives nothing back
            taken.append((found.name, found.share, 0.0))
    return [f"{name}: up to {share:.1%} of {most:.1%}" for name, share, most in taken if share > most + 0.01 or share >= 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDINGS or ["none"])
def test_no_real_recording_is_promised_more_than_its_causes_took(name: str) -> None:
    if not (SHARED / name).exists():
        pytest.skip(f"no recordings here: {SHARED} (third-party data, not part of the project)")
    assert _find_oversold(kept.report(SHARED / name)) == []


def _layers(count: int = 10, us: float = 60, host: float = 15) -> list[s.Instruction]:
    side = [[2048, 2048], [2048, 2048]]
    return [s.op("aten::mm", [s.python(host), s.launch("gemm_kernel", us)], shapes=side) for _ in range(count)]


PLANTED: dict[str, list[s.Instruction]] = {
    "a late host": _layers(us=10, host=60),
    "a late host that reads a result": [*_layers(us=10, host=60), s.item(), s.python(500)],
    "a loader, then a host that is ahead": [s.loader(2000), *_layers()],
    "a loader and a late host": [s.loader(1000), *_layers(us=10, host=60), s.sync("device")],
    "garbage, files and allocations": [*_layers(), s.gc(700), s.io(900), s.malloc(500), *_layers(us=10, host=60)],
    "compilation, and reads amid": [s.compile(3000), *[part for _ in range(5) for part in (*_layers(2), s.item())]],
    "copies that block": [s.copy("H2D pageable", 900), *_layers(us=20, host=30), s.copy("D2H pageable", 700), s.sync("device")],
}


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("name", sorted(PLANTED))
def test_no_planted_run_is_promised_more_than_its_causes_took(name: str, steps: int, tmp_path: Path) -> None:
    program = [*([s.step(), *PLANTED[name], s.python(30, "train.py(9): main")] * steps), s.step()]
    run = simulate(program, recording=Recording(stacks=True), hardware=Hardware(queue_limit=64), seed=3, jitter=0.1)
    report = open_recording(str(run.write(tmp_path / "trace.json"))).report
    assert report.what_ifs
    assert _find_oversold(report) == []


def test_a_sync_that_costs_nothing_gains_nothing(tmp_path: Path) -> None:
    """One pass that waits for its work at the end: nothing follows that the host could have issued meanwhile."""
    run = simulate([s.step(), *_layers(), s.sync("device"), s.step()], recording=Recording(stacks=True))
    report = open_recording(str(run.write(tmp_path / "trace.json"))).report
    assert report.breakdown.buckets_ns.idle_sync < 0.01 * report.breakdown.wall_ns
    assert all(found.share < 0.01 for found in report.what_ifs if found.name.startswith("sync"))
