"""The public facade: the one place where the pipeline is strung together.

`profile` records, `diagnose` reads and judges, `Report` wraps the result. Heavy layers are imported where they are used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from gpudiag.capture.session import Session
from gpudiag.errors import InputError, UsageError
from gpudiag.model.hardware import Device

if TYPE_CHECKING:
    import polars as pl

    from gpudiag.capture.bundle import OpenedBundle
    from gpudiag.model.analysis import Analysis
    from gpudiag.model.bundle import Manifest
    from gpudiag.model.report import ReportData, Source
    from gpudiag.model.trace import Trace

Progress = Callable[[str], None]

MIN_STEPS_FOR_SLOWDOWN = 3
"""Fewer profiled or plain steps than this give no ratio."""

SETTLED_AFTER = 2
"""The first steps of a run are slow for other reasons (allocation, autotuning): they are no yardstick for the profiler."""


class Report:
    """One diagnosis: `data` is the Report JSON (version 1); the methods are its renderings."""

    def __init__(self, data: ReportData) -> None:
        self.data = data

    def text(self, width: int | None = None, top: int = 10, color: bool = False) -> str:
        """Return the report for a terminal of `width` columns (default 100) with the `top` ops."""
        from gpudiag.report import text

        return text.render(self.data, width=100 if width is None else width, top=top, color=color)

    def markdown(self, top: int = 20) -> str:
        """Return the report as GitHub Markdown with the `top` ops."""
        from gpudiag.report import markdown

        return markdown.render(self.data, top=top)

    def html(self) -> str:
        """Return the report as one self-contained HTML page."""
        from gpudiag.report import html

        return html.render(self.data)

    def json(self) -> bytes:
        """Return the report as JSON (schema: `gpudiag schema report`)."""
        from gpudiag.model.report import to_json

        return to_json(self.data)

    def save(self, path: str | Path) -> None:
        """Write the report in the format that the suffix of `path` names: .html, .md or .json. Raises UsageError for another one."""
        makers: dict[str, Callable[[], bytes]] = {
            ".html": lambda: self.html().encode(),
            ".md": lambda: self.markdown().encode(),
            ".json": self.json,
        }
        maker = makers.get(Path(path).suffix.lower())
        if maker is None:
            raise UsageError(f"{path}: cannot tell the format", f"use one of {', '.join(makers)}")
        Path(path).write_bytes(maker())

    def __str__(self) -> str:
        return self.text()


class profile(Session):  # noqa: N801 - used like a function: `with gpudiag.profile("runs/x") as prof:`
    """Records a training loop into the bundle at `path`: `for batch in prof.steps(loader): ...`, or `prof.step()` after each step.

    Options: skip=5 steps, then warm=2, then record=6 steps with shapes, then sites=2 steps with Python stacks. No failure of the
    recording stops the training.
    """

    def __init__(self, path: str | Path = "", **options: Any) -> None:
        options.setdefault("peaks", _cached_peaks)
        super().__init__(Path(path or f"runs/{time.strftime('%Y%m%d-%H%M%S')}"), **options)

    def report(self) -> Report:
        """Return the diagnosis of the recorded bundle; call it after the `with` block."""
        return diagnose(str(self.path))


class DemoResult(msgspec.Struct, frozen=True):
    """What `gpudiag demo` made."""

    report: Report
    bundle: str
    html: str


class _Input(NamedTuple):
    """One window to analyse and what was recorded beside it."""

    trace: Path | str
    source: Source
    bundle: OpenedBundle | None = None
    sites: Path | None = None
    warnings: tuple[str, ...] = ()


def diagnose(path: str, *, rank: int | None = None, rules_dirs: Sequence[str] = (), progress: Progress | None = None) -> Report:
    """Return the report on a trace file, a bundle, or a folder of ranks (`rank`: which one, default the lowest).

    `rules_dirs`: folders with further rules; `progress` is told what is being done. Raises InputError where nothing can be read.
    """
    from gpudiag.diagnosis import judge, load_rules
    from gpudiag.model.report import Tool
    from gpudiag.report.build import build

    tell = progress or (lambda _: None)
    rules = load_rules(list(rules_dirs))
    chosen = _resolve(path, rank)
    tell("reading")
    analysis, sites = _analyse(chosen, tell)
    tell("judging")
    judgement = judge(analysis, rules)
    failed = tuple(f"fact {name} failed ({error}): this is a bug of gpudiag" for name, error in judgement.fact_errors.items())
    analysis = msgspec.structs.replace(analysis, warnings=(*chosen.warnings, *analysis.warnings, *failed))
    data = build(
        analysis, judgement.findings, judgement.outcomes, tool=Tool("gpudiag", _version()), source=chosen.source,
        sites=sites.site, site_match_share=sites.match_share,
    )  # fmt: skip
    return Report(data)


def _version() -> str:
    try:
        return metadata.version("gpudiag")
    except metadata.PackageNotFoundError:
        return "unknown"


def _resolve(path: str, rank: int | None) -> _Input:
    """Return what `path` names: a bundle, a folder of ranks, or a trace file."""
    from gpudiag.capture.bundle import is_bundle
    from gpudiag.model.report import Source

    if "://" in path or not Path(path).is_dir():
        if rank is not None:
            raise UsageError(f"{path}: --rank chooses from a folder or a bundle, this is one trace", "leave --rank out")
        return _Input(path if "://" in path else Path(path), Source(path, "trace"))
    if is_bundle(Path(path)):
        return _from_bundle(path, rank)
    return _from_folder(path, rank)


def _from_folder(path: str, rank: int | None) -> _Input:
    from gpudiag.model.report import Source
    from gpudiag.trace.folder import rank_files

    files = rank_files(Path(path))
    chosen = min(files) if rank is None else rank
    if chosen not in files:
        raise InputError(f"{path}: no rank {chosen}", f"it holds {_listed(files)}")
    others = [number for number in files if number != chosen]
    warnings = (f"rank {chosen} only; not analysed: {_listed(others)}",) if others else ()
    return _Input(files[chosen], Source(path, "folder", tuple(files)), warnings=warnings)


def _listed(ranks: Any) -> str:
    ranks = list(ranks)
    shown = ", ".join(str(number) for number in ranks[:16])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{f' and {len(ranks) - 16} more' if len(ranks) > 16 else ''}"


def _from_bundle(path: str, rank: int | None) -> _Input:
    from gpudiag.capture.bundle import open_bundle
    from gpudiag.model.report import Source

    bundle = open_bundle(Path(path), rank)
    timing, sites = bundle.window("timing"), bundle.window("sites")
    notes = list(dict.fromkeys((*bundle.manifest.warnings, *bundle.warnings)))
    others = [number for number in bundle.ranks if number != bundle.rank]
    if others:
        notes.append(f"rank {bundle.rank} only; not analysed: {_listed(others)}")
    if timing is None and sites is None:
        raise InputError(
            f"{path}: no window was recorded in this bundle ({bundle.manifest.steps} steps)",
            "the loop ended before the profiled steps: record more steps, or lower skip= and record=",
        )
    if timing is None:
        notes.append("the timing window is missing: times are those of the site window, which Python stacks slow down")
    elif sites is None:
        notes.append("the site window is missing: no call sites")
    return _Input(timing or sites or "", Source(path, "bundle", bundle.ranks), bundle, sites if timing else None, tuple(notes))


class _Found(NamedTuple):
    """The device of a trace: kind, number, peaks, and what to know about them."""

    kind: Any
    number: int | None
    device: Device | None
    warnings: tuple[str, ...]


def _analyse(chosen: _Input, tell: Progress) -> tuple[Analysis, Any]:
    """Return the analysis of one window and the call sites of its ops."""
    from gpudiag.attribution import cpu, gaps, intervals
    from gpudiag.attribution.device import kind_of_run
    from gpudiag.attribution.links import link
    from gpudiag.attribution.sites import find_sites
    from gpudiag.attribution.steps import find_steps
    from gpudiag.model.analysis import Analysis
    from gpudiag.roofline.classify import classify
    from gpudiag.roofline.coverage import coverage
    from gpudiag.roofline.oprows import op_rows
    from gpudiag.roofline.owners import find_owners
    from gpudiag.timeline.breakdown import breakdown, device_time, unknown_breakdown
    from gpudiag.trace import read

    trace = read(chosen.trace)
    run = kind_of_run(trace)
    steps = find_steps(trace)
    window = intervals.of(steps.table.filter("analysed"))
    tell("linking")
    trace, nesting = link(trace, steps.table, on_cpu=run == "cpu")
    manifest = chosen.bundle.manifest if chosen.bundle else None
    found = _device(trace, run, manifest)
    if run == "cpu":
        rows, spans = cpu.cpu_spans(trace.ops, trace.kernels, nesting)
        idle = gaps.cpu_gaps(spans, window)
    else:
        trace = _one_device(trace, found.number)
        rows, spans = _kernel_spans(trace)
        idle = gaps.gaps(trace.kernels, trace.launches, window)
    tell("costing")
    trace = classify(trace, find_owners(trace, on_cpu=run == "cpu"), idle, found.device)
    parts = unknown_breakdown(window) if run == "gpu without events" else breakdown(trace.kernels["bound"].gather(rows), spans, window)
    parts.validate()
    records = chosen.bundle.step_records if chosen.bundle else None
    analysis = Analysis(
        trace=trace,
        device_kind=found.kind,
        device=found.device,
        device_index=found.number,
        steps=steps.table,
        steps_source=steps.source,
        idle=idle if run != "gpu without events" else idle.clear(),
        breakdown=parts,
        device_time=device_time(trace.kernels) if run == "gpu" else None,
        coverage=coverage(trace),
        op_rows=op_rows(trace, steps.table),
        manifest=manifest,
        step_records=records,
        host_marks=chosen.bundle.host_marks if chosen.bundle else None,
        profiler_slowdown=None if records is None else slowdown(records),
        warnings=(*trace.meta.warnings, *found.warnings, *steps.warnings, *_shape_warnings(trace)),
    )
    return analysis, find_sites(trace, steps.table, _site_window(chosen.sites))


def _kernel_spans(trace: Trace) -> tuple[Any, Any]:
    """Return (kernel rows, spans) of a device: each kernel is one span."""
    return trace.kernels["id"], trace.kernels.select("start_ns", "end_ns").to_numpy()


def _one_device(trace: Trace, index: int | None) -> Trace:
    """Return `trace` with the kernels of the analysed device alone, renumbered; collectives keep pointing at them."""
    import polars as pl

    if index is None or trace.kernels.filter(pl.col("device").ne_missing(index)).is_empty():
        return trace
    kept = (
        trace.kernels.filter(pl.col("device") == index).rename({"id": "old"}).with_row_index("id").with_columns(pl.col("id").cast(pl.Int64))
    )
    renamed = kept.select(pl.col("old").alias("kernel"), pl.col("id").alias("new"))
    collectives = trace.collectives.join(renamed, on="kernel", how="left", maintain_order="left")
    collectives = collectives.with_columns(pl.col("new").alias("kernel")).drop("new")
    return msgspec.structs.replace(trace, kernels=kept.drop("old"), collectives=collectives)


def _device(trace: Trace, run: str, manifest: Manifest | None) -> _Found:
    from gpudiag.attribution.device import busiest
    from gpudiag.hardware.resolve import resolve

    if run == "cpu":
        return _cpu_device(manifest)
    index, others = busiest(trace.kernels)
    notes = [f"device {index} only; not analysed: device{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"] if others else []
    if run == "gpu without events":
        notes.append(
            "no device events were recorded, though the run used an accelerator: record with activities=[CPU, CUDA] "
            "and no other profiler attached; what the device did is unknown"
        )
    observed = [item for item in trace.meta.devices if item.index == index] or list(trace.meta.devices[:1])
    if manifest is not None and manifest.device is not None and not observed:
        observed = [manifest.device]
    if not observed:
        return _Found("gpu", index, None, (*notes, "the device is not named in the recording: no roofline"))
    resolution = resolve(observed[0])
    device = manifest.peaks if manifest is not None and manifest.peaks is not None and manifest.peaks.kind == "gpu" else resolution.device
    notes.extend(resolution.warnings)
    if device is None:
        notes.append("no peaks are known for this device: no roofline")
    elif device.bandwidth_byte_per_s is None:
        notes.append(f"the memory bandwidth of {device.name} is not known: its memory roof is missing, most bounds are unknown")
    return _Found("gpu", index, device, tuple(notes))


def _cpu_device(manifest: Manifest | None) -> _Found:
    """Return the CPU as the device: peaks from the manifest, else measured ones kept for such a machine."""
    device = None
    if manifest is not None:
        device = manifest.peaks or _cached_peaks(manifest)
    if device is not None:
        return _Found("cpu", None, device, ())
    where = (
        "run `gpudiag calibrate` on the machine that recorded it"
        if manifest
        else "record with gpudiag.profile, then run `gpudiag calibrate`"
    )
    return _Found("cpu", None, None, (f"the peaks of this CPU are not known, so there is no roofline: {where}",))


def _shape_warnings(trace: Trace) -> tuple[str, ...]:
    if not trace.ops.height:
        return ("no ops were recorded (device activity only): nothing can be linked or modelled; record with activities=[CPU, CUDA]",)
    if not trace.signatures.height:
        return ("no shapes were recorded: no op can be modelled; record with record_shapes=True",)
    return ()


def _site_window(path: Path | None) -> tuple[Trace, pl.DataFrame] | None:
    """Return the linked site window and its steps; None where it was not recorded or cannot be read."""
    from gpudiag.attribution.links import link
    from gpudiag.attribution.steps import find_steps
    from gpudiag.trace import read

    if path is None:
        return None
    try:
        trace = read(path)
    except InputError:
        return None
    steps = find_steps(trace).table
    return link(trace, steps, on_cpu=not trace.kernels.height)[0], steps


def slowdown(records: pl.DataFrame) -> float | None:
    """Return the median profiled step over the median plain step of the same run; None where there are too few of either."""
    import polars as pl

    settled = records.filter(pl.col("step") >= SETTLED_AFTER)
    profiled = settled.filter(pl.col("window") == "timing")["wall_ns"]
    plain = settled.filter(pl.col("window") == "plain")["wall_ns"]
    if min(len(profiled), len(plain)) < MIN_STEPS_FOR_SLOWDOWN:
        return None
    above, below = profiled.median(), plain.median()
    return float(above) / float(below) if below else None  # type: ignore[arg-type]


def _peaks_key(manifest: Manifest) -> str:
    from gpudiag.hardware.calibrate import cache_key

    gpu = manifest.device.name if manifest.device_kind == "gpu" and manifest.device else None
    return cache_key(manifest.machine, threads=manifest.settings.threads, gpu=gpu)


def _cached_peaks(manifest: Manifest) -> Device | None:
    """Return peaks measured before for such a machine; None where there are none. Measures nothing."""
    from gpudiag.hardware.calibrate import load_cached

    return load_cached(_peaks_key(manifest))


def calibrate(device: str = "auto") -> Device:
    """Return the measured peaks of `device` ('auto', 'cpu' or 'cuda') and keep them for reports; measured in a child process."""
    from gpudiag.capture import environment
    from gpudiag.hardware.calibrate import cache_key, measure_in_child, store_cached

    measured = measure_in_child(device)  # type: ignore[arg-type]
    gpu = measured.name if measured.kind == "gpu" else None
    warning = store_cached(measured, cache_key(environment.machine(), threads=environment.threads(), gpu=gpu))
    return msgspec.structs.replace(measured, notes=(*measured.notes, warning)) if warning else measured


def _measured_peaks(manifest: Manifest) -> Device | None:
    """Return the kept peaks of such a machine, else measure them now in a child process (the training loop has ended)."""
    from gpudiag.hardware.calibrate import measure_in_child, store_cached

    known = _cached_peaks(manifest)
    if known is None:
        known = measure_in_child("cuda" if manifest.device_kind == "gpu" else "cpu", manifest.settings.threads)
        store_cached(known, _peaks_key(manifest))
    return known


def demo(folder: str, log: Progress) -> DemoResult:
    """Return the report on a small transformer trained for a few seconds on whatever device is there, recorded below `folder`."""
    from gpudiag.capture.demo import train_demo

    run = train_demo(Path(folder), log=log, peaks=_measured_peaks)
    log("reporting")
    report = diagnose(str(run.path))
    html = run.path / "report.html"
    report.save(html)
    report.save(run.path / "report.json")
    return DemoResult(report, str(run.path), str(html))


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of the Report JSON, version 1."""
    from gpudiag.model.report import json_schema

    return json_schema()
