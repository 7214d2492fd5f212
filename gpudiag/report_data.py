"""ReportData from an analysis and the findings: rows of ops, kernels, collectives, idle time; texts capped in length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import polars as pl

from gpudiag.attribution.call_sites import find_own_modules
from gpudiag.attribution.names import decode_column, decode_names
from gpudiag.facts import Facts, efficiency
from gpudiag.facts.call_sites import find_largest_lines, split_site, sum_by_call_site
from gpudiag.facts.compilations import build_compile_report
from gpudiag.facts.efficiency import list_mfu_references
from gpudiag.facts.host_time import WAITED, sum_preempted_ns
from gpudiag.facts.window import Window
from gpudiag.model.analysis import Analysis
from gpudiag.model.event_labels import read_evidence
from gpudiag.model.finding import Finding, Missing, RuleOutcome
from gpudiag.model.notices import Notice, NoticeCode, drop_repeated, format_notice, make_notice
from gpudiag.model.ops import BOUNDS, format_signature, parse_signature
from gpudiag.model.report import (
    CollectiveRow,
    IdleRow,
    KernelRow,
    Mfu,
    OpRow,
    Recorded,
    ReportData,
    ReportDevice,
    Source,
    StepSummary,
    SyncRow,
    Tool,
    Trust,
)
from gpudiag.model.timeline import IDLE_BUCKETS, WhatIf
from gpudiag.roofline.op_table import build_op_table
from gpudiag.timeline.breakdown import sum_critical_path
from gpudiag.timeline.host_events import CODED
from gpudiag.trace.collectives import compute_bandwidths, count_message_bytes


def build_report_data(
    analysis: Analysis,
    findings: tuple[Finding, ...],
    outcomes: tuple[RuleOutcome, ...],
    *,
    tool: Tool,
    source: Source,
    facts: Facts | None = None,
) -> ReportData:
    """Return the report. `facts`: those of the rules: none is measured twice."""
    notices, manifest = [*(analysis.job.notices if analysis.job else ()), *analysis.notices], analysis.manifest
    recorded = None
    if manifest is not None:
        machine = msgspec.structs.replace(manifest.machine, gpu_uuid=None)
        program = msgspec.structs.replace(manifest.program, sources=None) if manifest.program else None  # of which `code` has what is named
        recorded = Recorded(machine=machine, settings=manifest.settings, program=program)
    facts = facts or Facts(analysis)
    mfu, idle, history = _build_mfu(facts, notices), build_idle_rows(facts.window), facts.window.history
    lines, compilation = find_largest_lines(facts.window), build_compile_report(facts.window)
    facts.forget_tables()
    what_ifs = select_what_ifs(facts.window.what_ifs.standard, on_cpu=analysis.device_kind == "cpu")
    coverage, told = analysis.coverage, drop_repeated(notices)
    made: ReportData = cap_texts(
        ReportData(
            tool=tool,
            source=source,
            device=_build_device(analysis),
            trust=Trust(
                **{name: getattr(coverage, name) for name in Trust.__struct_fields__ if name in coverage.__struct_fields__},
                events=analysis.trace.meta.events,
                dropped=analysis.trace.meta.dropped,
                profiler_slowdown=analysis.profiler_slowdown,
                replay_error_share=analysis.replay.error_share if analysis.replay else None,
                site_match_share=analysis.site_match_share,
                warnings=tuple(map(format_notice, told)),
                notices=told,
            ),
            steps=_summarize_steps(analysis),
            device_time=analysis.device_time,
            breakdown=analysis.breakdown,
            mfu=mfu,
            ops=_build_op_rows(analysis),
            kernels=_build_kernel_rows(analysis),
            idle=idle,
            collectives=_build_collective_rows(analysis),
            lines=lines,
            findings=findings,
            rules=outcomes,
            syncs=build_sync_rows(analysis),
            queue=analysis.queue,
            critical_path=() if analysis.critical_path is None else sum_critical_path(analysis.critical_path),
            replay=analysis.replay,
            memory=analysis.memory,
            energy=analysis.energy,
            telemetry=analysis.telemetry,
            ranks=analysis.job.ranks if analysis.job else None,
            job=analysis.job,
            what_ifs=what_ifs,
            history=history,
            compilation=compilation,
            recorded=recorded,
            experiments=tuple(one for data in analysis.experiments for one in data.experiments),
        )
    )
    return made


def _build_device(analysis: Analysis) -> ReportDevice | None:
    device = analysis.device
    if device is not None:
        return msgspec.convert(device, ReportDevice, from_attributes=True)
    # What can be called the device where its peaks are not known
    if analysis.device_kind == "cpu":
        name = (analysis.manifest.machine.cpu if analysis.manifest else None) or "CPU"
    else:
        found = (one.name for one in analysis.trace.meta.devices if one.name and one.index == (analysis.device_index or 0))
        name = next(found, "GPU" if analysis.device_time is not None else "")
    return ReportDevice(name, analysis.device_kind, None) if name else None


BATCH_WORTH_TELLING = 0.10
"""A larger batch falls out of a CPU's caches: of promises below a tenth, pairs measured -13 to +13 % (tests/benchmarks/RESULTS.md)."""


def select_what_ifs(found: Sequence[WhatIf], *, on_cpu: bool) -> tuple[WhatIf, ...]:
    """Return the what-ifs that give back enough to be told."""
    least = {"batch": BATCH_WORTH_TELLING} if on_cpu else {}
    return tuple(one for one in found if one.share > least.get(one.name.partition("=")[0], WORTH_TELLING))


def _summarize_steps(analysis: Analysis) -> StepSummary:
    chosen = analysis.steps.filter(pl.col("analysed")).with_columns(ns=pl.col("end_ns") - pl.col("start_ns"))
    lengths, longest, marks = chosen["ns"], chosen.sort("ns", descending=True)["name"].head(1), analysis.host_marks
    median, p95 = (None if (value := lengths.quantile(q, "linear")) is None else round(value) for q in (0.5, 0.95))
    return StepSummary(
        count=chosen.height,
        source=analysis.steps_source,
        wall_ns=analysis.wall_ns,
        median_ns=median,
        p95_ns=p95,
        recorded=analysis.steps.height,
        longest="".join(longest.drop_nulls()),
        longest_ns=lengths.max(),  # type: ignore[arg-type]
        preempted_ns=None if marks is None else sum_preempted_ns(marks, longest) or None,  # none is marked that takes no time
    )


def _build_mfu(facts: Facts, notices: list[Notice]) -> Mfu | None:
    names = ("matrix_flop", "mfu", "matrix_dtype", "recompute_flop", "hfu", "matrix_known_share")
    values = {name: facts.value(name) for name in names}
    for value in values.values():
        if isinstance(value, Missing):
            notices.append(make_notice(NoticeCode.NO_MFU, reason=value.reason))
            return None
    window, analysis = facts.window, facts.window.analysis
    notices.extend(efficiency.list_mfu_notices(window))
    trains = bool((analysis.trace.ops["phase"] == "backward").any())  # published figures are of training
    return Mfu(
        model_flops=float(values["matrix_flop"]),  # type: ignore[arg-type]  # none is Missing
        share=float(values["mfu"]),  # type: ignore[arg-type]
        provenance=efficiency.find_weakest_provenance(window),
        dtype=str(values["matrix_dtype"]),
        modelled_share=analysis.coverage.modelled_share,
        peak_flop_per_s=efficiency.find_peak_flop_per_s(window),
        recompute_flops=float(values["recompute_flop"]),  # type: ignore[arg-type]
        hfu_share=float(values["hfu"]),  # type: ignore[arg-type]
        references=list_mfu_references(window.device, str(values["matrix_dtype"])) if trains else (),
        known_share=float(values["matrix_known_share"]),  # type: ignore[arg-type]
    )


def _build_op_rows(analysis: Analysis) -> tuple[OpRow, ...]:
    # Text, and dtype of the first tensor, of each signature that occurs
    wanted = analysis.op_rows["signature"].drop_nulls().unique()
    signatures = analysis.trace.signatures[wanted.to_list()] if len(wanted) else analysis.trace.signatures.clear()
    texts: dict[int | None, tuple[str | None, str | None]] = {}
    for number, *parts in signatures.select("id", "shapes", "dtypes", "strides", "args").iter_rows():
        signature = parse_signature(*parts)
        texts[number] = (format_signature(signature), next((item.dtype for item in signature.inputs if item.dtype), None))
    where = _find_row_sites(analysis)
    rows, copied = [], [name for name in OpRow.__struct_fields__ if name in analysis.op_rows.columns and name != "signature"]
    for row in analysis.op_rows.iter_rows(named=True):
        text, dtype = texts.get(row["signature"], (None, None))
        rows.append(
            OpRow(
                **{name: row[name] for name in copied},
                signature=text,
                bound_ns={bound: row[f"{bound}_ns"] for bound in BOUNDS if row[f"{bound}_ns"]},
                dtype=dtype,
                where=where.get((row["name"], row["phase"], row["signature"])),
            )
        )
    return tuple(rows)


def list_module_ops(analysis: Analysis) -> tuple[OpRow, ...]:
    """List the op rows of an analysis once more, told apart by nn.Module where Python stacks show it; else as they are in its report."""
    trace, ask = analysis.trace, analysis.ask_frames
    if trace.ops["module"].null_count() == trace.ops.height:
        if not trace.frames.height and ask is None:
            return _build_op_rows(analysis)
        found = ask(find_own_modules) if ask is not None else find_own_modules(trace)
        trace = msgspec.structs.replace(trace, ops=trace.ops.with_columns(found.alias("module")))
    return _build_op_rows(msgspec.structs.replace(analysis, trace=trace, op_rows=build_op_table(trace, analysis.steps)))


def _find_row_sites(analysis: Analysis) -> dict[tuple[str, str | None, int | None], str]:
    ops = analysis.trace.ops.select(pl.col("id").alias("call"), pl.col("name").alias("op_name"), "phase", "signature")
    ops = ops.with_columns(analysis.sites.alias("site")).drop_nulls("site")
    kernels = analysis.trace.kernels.select(pl.coalesce("owner", "op").alias("call"), "busy_ns")
    sums = kernels.join(ops, on="call").group_by("op_name", "phase", "signature", "site").agg(pl.col("busy_ns").sum())
    sums = sums.sort("busy_ns", "site").unique(["op_name", "phase", "signature"], keep="last", maintain_order=True)
    return {
        (name, phase, row): site
        for name, phase, row, site in sums.select(decode_column("op_name"), "phase", "signature", "site").iter_rows()
    }


def _build_kernel_rows(analysis: Analysis) -> tuple[KernelRow, ...]:
    if analysis.device_kind == "cpu":
        return ()
    ops = analysis.trace.ops.select(pl.col("id").alias("op"), pl.col("name").alias("op_name"))
    frame = analysis.trace.kernels.select("op", "name", "kind", "bound", "busy_ns", "kernel_class")
    frame = frame.join(ops, on="op", how="left")
    largest = pl.col("busy_ns").sum()
    by_bound = frame.group_by("name", "kind", "bound").agg(largest).sort("busy_ns", "bound", descending=True)
    by_bound = by_bound.unique(["name", "kind"], keep="first", maintain_order=True).select("name", "kind", "bound")
    by_op = frame.drop_nulls("op_name").group_by("name", "kind", "op_name").agg(largest)
    by_op = by_op.with_columns(decode_column("op_name")).sort("busy_ns", "op_name", descending=True)
    by_op = by_op.unique(["name", "kind"], keep="first", maintain_order=True).select("name", "kind", "op_name")
    rows = frame.group_by("name", "kind").agg(pl.len().alias("count"), largest.alias("kernel_ns"), pl.col("kernel_class").first())
    rows = rows.join(by_bound, on=["name", "kind"], how="left").join(by_op, on=["name", "kind"], how="left")
    rows = rows.with_columns(decode_column("name")).sort("kernel_ns", "name", descending=[True, False]).head(1_000)
    rows = rows.rename({"op_name": "op"}).select(KernelRow.__struct_fields__)
    return tuple(KernelRow(**row) for row in rows.iter_rows(named=True))


def _build_collective_rows(analysis: Analysis) -> tuple[CollectiveRow, ...]:
    recorded = pl.col("op").is_in(analysis.trace.collectives["op"].drop_nulls().implode())  # on a CPU most are calls that only enqueue
    kernels = analysis.trace.kernels.filter(pl.col("collective") & ((pl.col("kind") != "cpu") | recorded))
    if not kernels.height:
        return ()
    fields = analysis.trace.collectives.with_columns(bytes=count_message_bytes(analysis.trace.collectives)).drop("id")
    by_kernel = fields.drop_nulls("kernel").unique("kernel", keep="first").select("kernel", "name", "group", "size", "bytes")
    by_op = fields.drop_nulls("op").unique("op", keep="first").select("op", "name", "group", "size", "bytes")
    frame = kernels.select("id", "op", "busy_ns", decode_column("name").alias("kernel_name"))
    frame = frame.join(by_kernel, left_on="id", right_on="kernel", how="left").join(by_op, on="op", how="left", suffix="_op")
    frame = frame.with_columns([pl.coalesce(name, f"{name}_op").alias(name) for name in ("name", "group", "size", "bytes")])
    frame = frame.with_columns(pl.coalesce("name", "kernel_name").alias("name"))
    rows = frame.group_by("name", "group", "size", "bytes").agg(pl.len().alias("count"), pl.col("busy_ns").sum().alias("kernel_ns"))
    rows = rows.sort("kernel_ns", "name", "bytes", descending=[True, False, False])
    made = []
    for row in rows.select("name", "count", "kernel_ns", "group", "size", "bytes").iter_rows(named=True):
        total = None if row["bytes"] is None else row["bytes"] * row["count"]
        algorithm, bus = compute_bandwidths(row["name"], total, row["size"], row["kernel_ns"]) or (None, None)
        made.append(CollectiveRow(**row, algbw_byte_per_s=algorithm, busbw_byte_per_s=bus))
    return tuple(made)


MAX_IDLE_ROWS = 50
WORTH_TELLING = 0.01


def build_idle_rows(window: Window) -> tuple[IdleRow, ...]:
    """Return the idle time of the analysed steps by cause and place, the largest first."""
    rows = sum_by_call_site(window.idle, window.analysis.trace.ops).head(MAX_IDLE_ROWS)
    assert rows["cause"].is_in(IDLE_BUCKETS).all(), "an idle cause without a bucket"  # noqa: S101
    columns = ("cause", "count", "time_ns", "op", "evidence", "site", *CODED)
    return tuple(
        IdleRow(cause=cause, count=count, idle_ns=time, op=op, file=file, line=line, evidence=evidence, notice=read_evidence(*coded))
        for cause, count, time, op, evidence, site, *coded in rows.select(columns).iter_rows()
        for file, line in [split_site(site)]
    )


def build_sync_rows(analysis: Analysis) -> tuple[SyncRow, ...]:
    """Return the calls of the analysed steps that waited for the device by call, op and place; the most costly first."""
    if analysis.syncs is None:
        return ()
    ids = analysis.steps.filter("analysed")["id"]
    ops = decode_names(analysis.trace.ops["name"])
    found = analysis.syncs.filter(pl.col("step").is_in(ids.implode()) & WAITED)
    found = found.with_columns(decode_column("api"), op_name=pl.lit(ops.gather(found["op"])))
    rows = found.group_by("api", "op_name", "site").agg(
        pl.len().alias("count"),
        (pl.col("end_ns") - pl.col("start_ns")).sum().alias("wall_ns"),
        pl.col("waited_ns").sum(),
        pl.col("cost_ns").fill_null(0).sum(),
    )
    order = ["cost_ns", "wall_ns", "api", "op_name", "site"]
    rows = rows.sort(order, descending=[True, True, False, False, False], nulls_last=True).head(50)
    columns = ("api", "op_name", "count", "wall_ns", "waited_ns", "cost_ns", "site")
    return tuple(
        SyncRow(api=api, op=op, count=count, wall_ns=wall, waited_ns=waited, cost_ns=cost, file=file, line=line)
        for api, op, count, wall, waited, cost, site in rows.select(columns).iter_rows()
        for file, line in [split_site(site)]
    )


LONGEST_TEXT = 10_000
"""Characters of one text of a report; the longest kernel names of C++ templates have about 5,000."""


def cap_texts(value: Any) -> Any:
    """Return a report, or a part of it, with every text, keys of mappings included, cut at LONGEST_TEXT characters.

    It is the value itself where nothing is to be cut. Its depth is that of the report's types.
    """
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else value[: LONGEST_TEXT - 1] + "…"
    if isinstance(value, msgspec.Struct):
        fields = {name: old for name in value.__struct_fields__ if isinstance(old := getattr(value, name), _HOLDERS)}
        changed = {name: new for name, old in fields.items() if (new := cap_texts(old)) is not old}
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, dict):
        made: Any = {cap_texts(key): cap_texts(item) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        made = type(value)(cap_texts(item) for item in value)
    else:
        return value
    return value if made == value else made


_HOLDERS = (str, msgspec.Struct, dict, list, tuple)
