"""Cost models and device table against measured times of single ops: `python tests/benchmarks/bench_op_costs.py` (`make bench-ops`).

Each measured row becomes the op and the kernel that torch would have recorded of it; reader, cost models, engine and device table judge it
as they judge a trace. No op can be faster than its roofline: what is shows a count of FLOP or bytes too high, or a peak too low; a count
too low shows as an efficiency that no kernel of its kind has. Writes its section of RESULTS.md.

Sources, all in ../shared/evidence/ops: NeuSight (Lee et al., ASPLOS 2025; neusight/Dataset/collect.py: torch ops between two CUDA events,
the mean of the 5 fastest of 25 calls in a row on the same tensors, so that what fits the L2 is read from there and each time holds its
launch), aiter (its tuned products) and vidur (MLP of Llama-2-7b). fp32 products ran on vector units: TF32 is off by default in torch since
1.12, and all their kernels are named sgemm.
"""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import polars as pl
from handmade import call, costed, kernel, op, steps
from realtraces import SHARED
from results import HERE, OPS_HEADING, replace_section

from gpudiag.hardware.device_peaks import resolve_device
from gpudiag.model.hardware import Device, ObservedDevice
from gpudiag.model.ops import OVER_ROOF_ABOVE

OPS = SHARED / "evidence" / "ops"


class TimedOp(NamedTuple):
    """One op that was timed alone, as torch would have recorded it."""

    kind: str
    """What the source calls it."""
    name: str
    shapes: list[Any]
    time_us: float
    kernel: str
    dtype: str = "float"
    values: list[str] | None = None
    """'Concrete Inputs'."""


def judge(ops: Iterable[TimedOp], device: Device) -> pl.DataFrame:
    """Return the kernel rows of `ops` with kind, efficiency (roofline time / measured time; null: no roofline) and what judged them."""
    events, kinds, end = [], [], 0.0
    for number, timed in enumerate(ops, 1):
        events += [
            op(timed.name, end, end + 2, timed.shapes, dtype=timed.dtype, concrete=timed.values),
            call(end + 0.5, number),
            kernel(end + 2, end + 2 + timed.time_us, number, timed.kernel),
        ]
        kinds.append(timed.kind)
        end += timed.time_us + 4
    kernels = costed(*steps(0, end), *events, device=device).kernels.sort("start_ns")
    return kernels.with_columns(pl.Series("kind", kinds))


def find_device(name: str = "", **observed: Any) -> Device | None:
    """Return the device that a recording with these properties would be judged by."""
    return resolve_device(ObservedDevice(name=name, **observed)).device


# -- NeuSight -------------------------------------------------------------------------------------------------------------------


def read_neusight() -> dict[str, list[TimedOp]]:
    """Return the ops by device name."""
    ops: dict[str, list[TimedOp]] = {}
    for row in pl.read_csv(OPS / "neusight_dev.csv.gz", infer_schema_length=None).iter_rows(named=True):
        name, shapes, values = describe_neusight_op(row)
        ops.setdefault(row["device"], []).append(
            TimedOp(row["op"], name, shapes, 1e3 * row["latency_ms"], row["kernel_name"], values=values)
        )
    return ops


def describe_neusight_op(row: dict[str, Any]) -> tuple[str, list[Any], list[str] | None]:
    """Return the operator, shapes and values of a row.

    A product of (B, M, N) and (B, N, K): N is what is summed over, as collect.py has it and the kernels' grids show (linear, M 32768,
    N 4096, K 1024: 8 x 256 blocks of 128 x 128). "addu": with a number in place of the second tensor.
    """
    kind, batch, m, n, k = (row[key] for key in ("op", "B", "M", "N", "K"))
    if kind == "bmm":
        return "aten::bmm", [[batch, m, n], [batch, n, k]], None
    if kind == "linear":
        return "aten::addmm", [[k], [batch * m, n], [n, k], [], []], ["", "", "", "1", "1"]
    x, width = [batch, row["H"]], row["H"]
    if kind == "ln":
        return "aten::native_layer_norm", [x, [], [width], [width], []], ["", f"[{width}]", "", "", "1e-05"]
    if kind == "softmax":
        return "aten::_softmax", [x, [], []], ["", "1", "False"]
    if kind in ("add", "mul", "div", "pow"):
        return f"aten::{kind}", [x, x], None
    if kind in ("addu", "mulu", "divu", "powu"):
        return f"aten::{kind[:-1]}", [x, []], ["", "0.5"]
    return f"aten::{'clamp_min' if kind == 'relu' else kind}", [x], None


# -- aiter, vidur -------------------------------------------------------------------------------------------------------------------

TORCH_TYPES = {"torch.int8": "signed char", "torch.float8_e4m3fn": "c10::Float8_e4m3fn", "torch.bfloat16": "c10::BFloat16"}


def read_aiter() -> dict[tuple[str, int], list[TimedOp]]:
    """Return tuned products by architecture and number of CUs: (M, K) times (N, K) transposed, into bf16."""
    ops: dict[tuple[str, int], list[TimedOp]] = {}
    for file, typed in (("aiter__a8w8_tuned_gemm", "q_dtype_w"), ("aiter__dsv4_bf16_tuned_gemm", "dtype")):
        for row in pl.read_csv(OPS / f"{file}.csv.gz", infer_schema_length=None).iter_rows(named=True):
            m, n, k, dtype = row["M"], row["N"], row["K"], TORCH_TYPES[row[typed]]
            # out_dtype 15: c10::ScalarType::BFloat16
            made = TimedOp(row[typed].removeprefix("torch."), "aten::mm", [[m, k], [k, n], []], row["us"], "k", dtype, ["", "", "15"])
            ops.setdefault((row["gfx"], row["cu_num"]), []).append(made)
    return ops


VIDUR_DEVICES = {"a100": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3"}


def read_vidur() -> dict[str, list[TimedOp]]:
    """Return the ops of Llama-2-7b's MLP and projections by device name, in fp16, each at its median time."""
    ops: dict[str, list[TimedOp]] = {}
    with tarfile.open(OPS / "vidur_a100_h100_mlp_network.tar.gz") as archive:
        for member in archive:
            if not member.name.endswith("mlp.csv") or (file := archive.extractfile(member)) is None:
                continue
            device = VIDUR_DEVICES[member.name.split("/")[1]]
            for row in pl.read_csv(file.read(), infer_schema_length=None).iter_rows(named=True):
                ops.setdefault(device, []).extend(describe_vidur_row(row))
    return ops


def describe_vidur_row(row: dict[str, Any]) -> Iterator[TimedOp]:
    """Yield the ops of one row: products split over the workers of tensor parallelism by columns (attn_pre, mlp_up) or rows."""
    tokens, workers, width, inner = (row[key] for key in ("num_tokens", "num_tensor_parallel_workers", "n_embd", "n_expanded_embd"))
    query = width // row["n_head"] * (row["n_head"] + 2 * row["n_kv_head"])
    products = {
        "attn_pre_proj": (width, query // workers),
        "attn_post_proj": (width // workers, width),
        "mlp_up_proj": (width, 2 * inner // workers),
        "mlp_down_proj": (inner // workers, width),
    }
    for kind, (k, n) in products.items():
        if (time_ms := row[f"time_stats.{kind}.median"]) is not None:
            yield TimedOp(kind, "aten::mm", [[tokens, k], [k, n]], 1e3 * time_ms, "k", "c10::Half")
    if (time_ms := row["time_stats.add.median"]) is not None:
        yield TimedOp("add", "aten::add_", [[tokens, width], [tokens, width]], 1e3 * time_ms, "k", "c10::Half")


# -- tables -------------------------------------------------------------------------------------------------------------------


def judge_all(ops: dict[str, list[TimedOp]]) -> pl.DataFrame:
    """Return the judged rows of each named device with its name in the table; a device that the table lacks raises KeyError."""
    judged = []
    for name, timed in ops.items():
        device = find_device(name)
        if device is None:
            raise KeyError(f"the device table has no {name}")
        judged.append(judge(timed, device).with_columns(device=pl.lit(device.name)))
    return pl.concat(judged)


def format_efficiencies(rows: pl.DataFrame) -> list[str]:
    """Return a Markdown table by device and op: rows, those above the roofline and why, highest, median, 10 and 90 % efficiency."""
    known = pl.col("efficiency")
    quantiles = (known.quantile(share, "linear").alias(name) for share, name in ((0.5, "median"), (0.1, "low"), (0.9, "high")))
    found = rows.group_by("device", "kind").agg(
        pl.len().alias("rows"),
        (known > 1).sum().alias("above"),
        (known > OVER_ROOF_ABOVE).sum().alias("over"),
        pl.col("over_cause").drop_nulls().unique().sort().str.join(", ").alias("cause"),
        known.max().alias("most"),
        *quantiles,
    )
    lines = [
        f"| GPU | op | rows | above 100 % | above {OVER_ROOF_ABOVE:.0%}, why | highest | median | 10 % | 90 % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found.sort("device", "kind").iter_rows(named=True):
        shares = " | ".join(f"{row[key]:.1%}" for key in ("most", "median", "low", "high"))
        over = f"{row['over']}: {row['cause']}" if row["over"] else ""
        lines.append(f"| {row['device']} | {row['kind']} | {row['rows']:,} | {row['above'] or ''} | {over} | {shares} |")
    return lines


def format_tuned_products() -> list[str]:
    """Return a Markdown table of aiter's products: the best shares of the matrix peak and of the bandwidth, and rows above the roofline."""
    lines = ["| chip | judged as | type | rows | above 100 % | of the peak, at best | of DRAM, at best |", "|---|---|---|---|---|---|---|"]
    for (gfx, units), ops in sorted(read_aiter().items()):
        device = find_device(compute_capability=gfx, sm_count=units)
        if device is None:
            lines.append(f"| {gfx}, {units} CUs | in no row of the table: refused | | {len(ops)} | | | |")
            continue
        rows = judge(ops, device).with_columns(
            peak=pl.col("flops") / pl.col("busy_ns") * 1e9 / pl.col("engine").replace_strict(device.peaks, return_dtype=pl.Float64),
            rate=pl.col("bytes_moved") / pl.col("busy_ns") * 1e9 / pl.lit(device.bandwidth_byte_per_s, dtype=pl.Float64),
        )
        for (kind,), part in sorted(rows.group_by("kind")):
            peak, rate = part["peak"].max(), part["rate"].max()
            shares = f"{peak:.1%} | {'not known' if rate is None else f'{rate:.1%}'}"
            above = (part["efficiency"] > 1).sum() or ""
            lines.append(f"| {gfx}, {units} CUs | {device.name} | {kind} | {part.height} | {above} | {shares} |")
    return lines


READING = """\
Efficiency is roofline time over measured time. The highest is {most}: three products of 0.3 to 1 s on a V100 PCIe, whose 14.0 TFLOP/s are
80 SMs x 128 x 1.38 GHz = 14.13, rounded down by the data sheet. fp32 products are judged against the vector units: all kernels are named
sgemm, TF32 was off. 1,516 rows move less than 84 MB, twice the L2 of an A100, and may have run from it in part; none is left out, for
none comes above its roofline. What low medians are made of, as far as the rows tell: layer norm of wide rows reads its input twice (3
passes where 2 are needed: 2/3 of what add reaches on each of the four), softmax three times (half); products of over 10 ms on a T4, a
board of 70 W, stay below 57 % where shorter ones reach 85 %; times of less than 0.1 ms hold the launch, and a product narrower than its
tile leaves part of it empty."""

READING_VIDUR = """\
vidur times the ops of a layer of Llama-2-7b one after the other, to 1 us: the addition finds in the L2 (40 MB on an A100, 50 on an H100)
what the product before it wrote, and reports call that `cache`. Above 37 MB (A100) and 91 MB (H100) no row is above 103 %. Assumed: SXM
boards of 80 GB, as in DGX systems."""

READING_AITER = """\
No tuned product of aiter beats the table's peak, in bf16, fp8 or int8. gfx950 with 256 CUs is an MI350X or an MI355X: judged by the
faster, as a trace without a name would be. gfx942 with 80 CUs is in no row: its peaks are rates x CUs x clock, its bandwidth is not
known."""


def main() -> None:
    """Write the section of RESULTS.md; exit with 1 where an op of NeuSight beats its roofline."""
    neusight = judge_all(read_neusight())
    most = float(neusight["efficiency"].max())  # type: ignore[arg-type]
    over = int((neusight["efficiency"] > OVER_ROOF_ABOVE).sum())
    lines = [
        OPS_HEADING,
        "",
        f"Written by `make bench-ops`: {neusight.height:,} measured ops of NeuSight (ASPLOS 2025), each judged as in a trace.",
    ]
    lines += ["", READING.format(most=f"{most:.2%}"), "", *format_efficiencies(neusight)]
    lines += ["", READING_VIDUR, "", *format_efficiencies(judge_all(read_vidur())), "", READING_AITER, "", *format_tuned_products()]
    print("\n".join(lines))
    page = (HERE / "RESULTS.md").read_text(encoding="utf-8")
    (HERE / "RESULTS.md").write_text(replace_section(page, OPS_HEADING, "\n".join(lines)), encoding="utf-8")
    if over:
        raise SystemExit(f"{over} ops are faster than their roofline by more than {OVER_ROOF_ABOVE - 1:.0%}")


if __name__ == "__main__":
    main()
