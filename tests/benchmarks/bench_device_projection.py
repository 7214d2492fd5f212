"""Projection from one device to another against real pairs: `python tests/benchmarks/bench_device_projection.py` (`make bench-devices`).

The same op was timed on several devices: its time on one is projected to the others and compared with what was measured there. Beside it
the naive projection: the time times the ratio of the rooflines by published peaks. Writes its section of RESULTS.md, and the errors that
`gpudiag whatif --device` states (gpudiag/hardware/projection_errors.yaml).

Sources in ../shared: NeuSight and vidur (see bench_op_costs.py), and models that TraceLens (MIT) recorded on an H100 and an MI300X. The
constants of attained.yaml were fitted to A100 PCIe and P4 (NeuSight), to products of one worker (vidur) and, the floor of AMD alone, to
three other models on the same H100 and MI300X, which are not in ../shared; errors are those of all other rows.
"""

from __future__ import annotations

import sys
from itertools import permutations
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import polars as pl
import yaml
from bench_op_costs import TimedOp, find_device, judge, read_neusight, read_vidur
from kept import analysis
from realtraces import SHARED
from results import DEVICES_HEADING, HERE, replace_section

from gpudiag.hardware.attained import find_named_device, find_row
from gpudiag.model.hardware import Device
from gpudiag.model.timeline import PROJECTED_KINDS, DeviceProjection
from gpudiag.model.trace import Trace
from gpudiag.roofline.device_projection import find_engine, project_kernels
from gpudiag.timeline.whatif.other_device import project_steps
from gpudiag.timeline.whatif.study import build_study

FITTED_DEVICES = {"NVIDIA A100-PCIE-40GB", "Tesla P4"}
FITTED_SHAPES = r"\[4096, (12288|4096|22016)\]\]|\[11008, 4096\]\]"
"""Weights of Llama-2-7b on one worker: the products of vidur that the knee was chosen by."""
ERRORS = HERE.parents[1] / "gpudiag" / "hardware" / "projection_errors.yaml"
STREAMS = ("add", "addu", "mul", "mulu", "div", "divu", "relu", "tanh", "gelu", "pow", "powu")
LASTING_NS = 10e6
LOW, HIGH = 0.1, 0.9
LEAST_OPS = 30
"""Fewer held-out ops of one kind than this, and no error is stated."""

HEADER = """\
# How far projections to another device were from what was measured, by kind of work: written by `make bench-devices` from the rows that
# nothing was fitted to. low, high: measured over projected time, 80 % of the ops lie between (each pair of devices counts alike).
# What has no entry was not measured.
"""
MEASURED_ON = {
    "same_maker": "fp32 products, element-wise ops, softmax and layer norm on P4, V100 PCIe, T4 and A100 PCIe (NeuSight), fp16 products "
    "and additions on A100 and H100 SXM (vidur); no convolution, no attention",
    "other_maker": "the ops of two models, qwen1.5-0.5b and timesformer, on one pair of devices, H100 SXM and MI300X (TraceLens)",
}
CAPABILITIES = {"same_maker": ["6.1", "7.0", "7.5", "8.0", "9.0"], "other_maker": ["9.0", "gfx942"]}

READING = """\
Written by `make bench-devices`. The time of an op on one device, projected to another and compared with what was measured there. naive:
times the ratio of the rooflines by published peaks. ours: what `gpudiag whatif --device` does. Error: the median of |projected -
measured| / measured. Held out: no constant of attained.yaml was fitted to the row; of NeuSight one device at least is a V100 or T4. The
steps of a model keep the host time of the machine that recorded, so what another host does to them is no error of the projection: the
device time is what it is judged by. Of two makers one pair of devices was measured, and the floor of AMD was fitted on it, to three other
models (bert-small, a ViT, owlv2).

Collectives have no error: vidur's all-reduce of 64 MB on eight GPUs takes 3.02 ms on its A100 machine and 0.34 ms on its H100 one, 8.9
times as long, where the links of such machines differ by 1.5: which links a collective took is told by no name of a device."""

TRACES = SHARED / "traces"
RECORDED = {
    "qwen1.5-0.5b": (TRACES / "h100_qwen1.5-0.5b_prefill.json.gz", TRACES / "mi300x_qwen1.5-0.5b_prefill.json.gz"),
    "timesformer": (TRACES / "h100_timesformer_video.json.gz", SHARED / "evidence" / "traces" / "mi300x_timesformer_video.json.gz"),
}
"""The same model on an H100 SXM and an MI300X. owlv2 was recorded on the MI300X alone."""

SCHEMA = {"source": pl.String, "target": pl.String, "set": pl.String, "kind": pl.String, "op": pl.String, "fitted": pl.Boolean,
          "source_ns": pl.Float64, "naive_ns": pl.Float64, "projected_ns": pl.Float64, "measured_ns": pl.Float64}  # fmt: skip


def pair_timed_ops(name: str, ops: dict[str, list[TimedOp]], every: int = 1) -> pl.DataFrame:
    """Return one row for each op and ordered pair of devices (SCHEMA); of those timed twice the first counts, and every `every`-th op."""
    judged, devices = {}, {}
    for device_name, timed in ops.items():
        devices[device_name] = device = find_device(device_name)
        distinct = {f"{one.kind} {one.name} {one.shapes}": one for one in reversed(timed)}
        chosen = {key: one for key, one in distinct.items() if crc32(key.encode()) % every == 0}
        judged[device_name] = judge(chosen.values(), device).with_columns(key=pl.Series(list(chosen)))
    pairs = []
    for source, target in permutations(ops, 2):
        fitted = pl.col("key").str.contains(FITTED_SHAPES) | pl.lit({source, target} <= FITTED_DEVICES)
        measured = judged[target].select("key", measured_ns=pl.col("busy_ns").cast(pl.Float64))
        rows = project(judged[source], devices[source], devices[target]).join(measured, on="key")
        names = {"source": devices[source].name, "target": devices[target].name, "set": name}
        pairs.append(rows.with_columns(*(pl.lit(text).alias(column) for column, text in names.items()), op="kind", fitted=fitted))
    return pl.concat(
        [rows.with_columns(kind="work").select(pl.col(column).cast(dtype) for column, dtype in SCHEMA.items()) for rows in pairs]
    )


def project(kernels: pl.DataFrame, source: Device, target: Device) -> pl.DataFrame:
    """Return `kernels` with their kind of work, and their time on `target` by the naive projection and by ours."""
    projected = project_kernels(kernels, source, target)
    time = kernels["busy_ns"].to_numpy().astype(float)
    return kernels.with_columns(
        work=pl.Series([PROJECTED_KINDS[number] for number in projected.kind.tolist()], dtype=pl.String),
        source_ns=pl.Series(time),
        naive_ns=pl.Series(time * _naive_factor(kernels, source, target)),
        projected_ns=pl.Series(time * projected.factor),
    )


def _naive_factor(kernels: pl.DataFrame, source: Device, target: Device) -> np.ndarray:
    rooflines = []
    for device in (target, source):
        engines = {key: device.peaks.get((key if device is source else find_engine(key, device)) or "") for key in source.peaks}
        rate = kernels["engine"].cast(pl.String).replace_strict(engines, default=None, return_dtype=pl.Float64)
        matrix = kernels["matrix_flops"].fill_null(0)
        parts = (matrix / rate, (kernels["flops"] - matrix) / device.vector_peak, kernels["bytes_moved"] / device.bandwidth_byte_per_s)
        rooflines.append(pl.select(pl.max_horizontal(*parts)).to_series().fill_null(0).to_numpy())
    return np.divide(*rooflines, out=np.ones(kernels.height), where=(rooflines[0] > 0) & (rooflines[1] > 0))


def pair_recordings(name: str, first: Path, second: Path) -> pl.DataFrame:
    """Return one row for each op with the same shapes in both recordings, both ways (SCHEMA): the mean time of a call."""
    found, rows = [analysis(path) for path in (first, second)], []
    for source, target in permutations(found, 2):
        assert source.device is not None
        assert target.device is not None
        theirs = _mean_calls(_name_ops(target.trace, target.trace.kernels.with_columns(measured_ns=pl.col("busy_ns"))), "measured_ns")
        ours = _name_ops(source.trace, project(source.trace.kernels, source.device, target.device))
        pairs = _mean_calls(ours, "source_ns", "naive_ns", "projected_ns").join(theirs.drop("kind", strict=False), on=("op", "shapes"))
        names = {"source": source.device.name, "target": target.device.name, "set": name}
        rows.append(pairs.with_columns(*(pl.lit(text).alias(column) for column, text in names.items()), fitted=pl.lit(False)))
    return pl.concat([row.select(pl.col(column).cast(dtype) for column, dtype in SCHEMA.items()) for row in rows])


def _name_ops(trace: Trace, kernels: pl.DataFrame) -> pl.DataFrame:
    ops = trace.ops.select(owner="id", op=pl.col("name").cast(pl.String), signature="signature")
    shapes = trace.signatures.select(signature="id", shapes="shapes")
    return kernels.drop_nulls("owner").drop("op").join(ops, on="owner").join(shapes, on="signature")


def _mean_calls(kernels: pl.DataFrame, *times: str) -> pl.DataFrame:
    kind = [pl.col("work").sort_by("busy_ns").last().alias("kind")] if "work" in kernels.columns else []
    calls = pl.col("owner").n_unique()
    return kernels.group_by("op", "shapes").agg(*((pl.col(time).sum() / calls).alias(time) for time in times), *kind)


class PredictedStep(NamedTuple):
    """A recording's step on the device of another recording of the same model, and what was measured there."""

    model: str
    source: str
    target: str
    found: DeviceProjection
    naive_ns: float
    """Device time of a step there by the naive projection."""
    work_ns: float
    """The same as measured there."""
    step_ns: float
    """Step on the target, as measured: with the host of that machine."""


def predict_steps(name: str, first: Path, second: Path) -> list[PredictedStep]:
    """Return the steps of each of two recordings of one model on the device of the other."""
    predicted = []
    for source, target in permutations([analysis(path) for path in (first, second)], 2):
        assert source.device is not None
        assert target.device is not None
        there, study = build_study(target), build_study(source)
        assert there is not None
        assert study is not None
        kernels = target.trace.kernels.height
        _, work_ns = there.scale_kernels(np.ones(kernels), np.zeros(kernels, dtype=np.int64), 1)
        naive = project(source.trace.kernels, source.device, target.device)
        factor = (naive["naive_ns"] / naive["source_ns"]).fill_nan(1).to_numpy()
        _, naive_ns = study.scale_kernels(factor, np.zeros(naive.height, dtype=np.int64), 1)
        found = project_steps(study, source, find_named_device(target.device.id))
        predicted.append(PredictedStep(name, found.source, found.target, found, float(naive_ns[0]), float(work_ns[0]), there.mean_ns))
    return predicted


# -- errors and tables ----------------------------------------------------------------------------------------------------------


def fit_constants() -> dict[str, float]:
    """Return the constants of attained.yaml that NeuSight gives, from FITTED_DEVICES alone (see there)."""
    shares, energies = {}, []
    for name, kind in (("NVIDIA A100-PCIE-40GB", "hbm"), ("Tesla P4", "gddr_server")):
        device = find_device(name)
        assert device is not None
        row = find_row(device)
        assert row is not None
        ops = judge(read_neusight()[name], device)
        shares[kind] = float(ops.filter(pl.col("kind").is_in(STREAMS))["efficiency"].median())  # type: ignore[arg-type]
        bound = ops.filter((pl.col("matrix_flops") > 0) & (pl.col("bound") == "compute") & (pl.col("busy_ns") > LASTING_NS))
        energies.append((row.chip.tdp_w or 0) / (device.peaks["fp32"] * float(bound["efficiency"].median())) * 1e12)  # type: ignore[arg-type]
    return {**shares, "fp32_picojoule_per_flop": sum(energies) / len(energies)}


def measure_errors(pairs: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Return ops, median_share, low and high (measured over projected time) by kind of work; each pair of devices counts alike."""
    errors = {}
    rows = pairs.filter(~pl.col("fitted")).with_columns(weight=1 / pl.len().over("source", "target", "set", "kind"))
    for kind in PROJECTED_KINDS:
        of_kind = rows.filter(pl.col("kind") == kind)
        if of_kind.height < LEAST_OPS:
            continue
        ratio, weight = (of_kind["measured_ns"] / of_kind["projected_ns"]).to_numpy(), of_kind["weight"].to_numpy()
        low, high = (weigh_quantile(ratio, weight, share) for share in (LOW, HIGH))
        median = weigh_quantile(np.abs(1 / ratio - 1), weight, 0.5)
        errors[kind] = {"ops": of_kind.height, "median_share": round(median, 3), "low": round(low, 3), "high": round(high, 3)}
    return errors


def weigh_quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    """Return the value below which `share` of the weight lies."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(np.searchsorted(reached, share), len(values) - 1)])


def format_pairs(pairs: pl.DataFrame) -> list[str]:
    """Return a Markdown table by pair of devices and kind of work: median error naive and ours, bias, 80 % of the ops."""
    ratio = pl.col("projected_ns") / pl.col("measured_ns")
    found = pairs.group_by("set", "source", "target", "kind", "fitted").agg(
        pl.len().alias("ops"),
        (pl.col("naive_ns") / pl.col("measured_ns") - 1).abs().median().alias("naive"),
        (ratio - 1).abs().median().alias("ours"),
        ratio.median().alias("bias"),
        ratio.quantile(LOW).alias("low"),
        ratio.quantile(HIGH).alias("high"),
    )
    lines = ["| rows | from | to | work | ops | naive | ours | projected / measured | 8 of 10 |", "|---|---|---|---|---|---|---|---|---|"]
    for row in found.sort("set", "kind", "source", "target").iter_rows(named=True):
        name = f"{row['set']}{' (fitted)' if row['fitted'] else ''}"
        figures = f"{row['ops']:,} | {row['naive']:.1%} | **{row['ours']:.1%}** | {row['bias']:.2f} | {row['low']:.2f} to {row['high']:.2f}"
        lines.append(f"| {name} | {row['source']} | {row['target']} | {row['kind']} | {figures} |")
    return lines


def format_summary(pairs: pl.DataFrame) -> list[str]:
    """Return a Markdown table of the held-out rows by kind of work and makers."""
    held = pairs.filter(~pl.col("fitted")).with_columns(
        other=pl.col("source").str.contains("Instinct") != pl.col("target").str.contains("Instinct")
    )
    lines = ["| makers | work | ops held out | naive | ours |", "|---|---|---|---|---|"]
    for (other, kind), rows in held.sort("other", "kind").group_by("other", "kind", maintain_order=True):
        naive, ours = (float((rows[name] / rows["measured_ns"] - 1).abs().median()) for name in ("naive_ns", "projected_ns"))  # type: ignore[arg-type]
        lines.append(f"| {'two' if other else 'one'} | {kind} | {rows.height:,} | {naive:.1%} | **{ours:.1%}** |")
    return lines


def format_steps(steps: list[PredictedStep]) -> list[str]:
    """Return a Markdown table: device time and step, predicted and measured."""
    lines = [
        "| model | from | to | device time: now | naive | predicted | measured | error | step: predicted, between | measured |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in steps:
        now, then = (sum(getattr(work, name) for work in one.found.works) for name in ("now_ns", "then_ns"))
        between = f"{one.found.then_ns / 1e6:.2f}, {one.found.low_ns / 1e6:.2f} to {one.found.high_ns / 1e6:.2f} ms"
        found = f"{then / 1e6:.2f} | {one.work_ns / 1e6:.2f} | **{then / one.work_ns - 1:+.0%}**"
        figures = f"{now / 1e6:.2f} ms | {one.naive_ns / 1e6:.2f} | {found}"
        lines.append(f"| {one.model} | {one.source} | {one.target} | {figures} | {between} | {one.step_ns / 1e6:.2f} ms |")
    return lines


def read_pairs(every: int = 1) -> pl.DataFrame:
    """Return all pairs (SCHEMA): of single ops every `every`-th."""
    single = [pair_timed_ops("NeuSight", read_neusight(), every), pair_timed_ops("vidur", read_vidur(), every)]
    return pl.concat([*single, *(pair_recordings(name, *paths) for name, paths in RECORDED.items())])


def main() -> None:
    """Write the section of RESULTS.md and projection_errors.yaml."""
    pairs = read_pairs()
    other = pl.col("set").is_in(list(RECORDED))
    held = {"same_maker": pairs.filter(~other), "other_maker": pairs.filter(other)}
    errors = {
        name: {"measured_on": MEASURED_ON[name], "compute_capabilities": CAPABILITIES[name], "errors": measure_errors(rows)}
        for name, rows in held.items()
    }
    ERRORS.write_text(HEADER + yaml.safe_dump(errors, sort_keys=False, width=140), encoding="utf-8")
    steps = [step for name, paths in RECORDED.items() for step in predict_steps(name, *paths)]
    fitted = ", ".join(f"{name} {value:.3g}" for name, value in fit_constants().items())
    lines = [
        DEVICES_HEADING,
        "",
        READING,
        "",
        *format_summary(pairs),
        "",
        f"Fitted anew: {fitted}.",
        "",
        *format_steps(steps),
        "",
        *format_pairs(pairs),
    ]
    print("\n".join(lines))
    page = (HERE / "RESULTS.md").read_text(encoding="utf-8")
    (HERE / "RESULTS.md").write_text(replace_section(page, DEVICES_HEADING, "\n".join(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
