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
from results import HERE, replace_section

from gpudiag.hardware.device_peaks import resolve_device
from gpudiag.model.hardware import Device, ObservedDevice
from gpudiag.model.ops import OVER_ROOF_ABOVE

OPS = SHARED / "evidence" / "ops"
HEADING = "## Measured times of single ops"


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


def summarize(rows: pl.DataFrame, *by: str) -> pl.DataFrame:
    """Return count, rows above the roofline, the highest efficiency and its 10th, 50th and 90th percentile by `by`."""
    known = pl.col("efficiency")
    return rows.group_by(by).agg(
        pl.len().alias("rows"),
        (known > 1).sum().alias("above"),
        (known > OVER_ROOF_ABOVE).sum().alias("over"),
        known.max().alias("most"),
        *(known.quantile(share, "linear").alias(name) for share, name in ((0.1, "low"), (0.5, "median"), (0.9, "high"))),
    )


def format_table(title: str, found: pl.DataFrame) -> list[str]:
    """Return `found` (columns device and kind first) as a Markdown table."""
    lines = [
        f"| {title} | op | rows | above 100 % | above {OVER_ROOF_ABOVE:.0%} | highest | median | 10 % | 90 % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found.sort("device", "kind").iter_rows(named=True):
        shown = [f"{row[key]:.1%}" if row[key] is not None else "no roofline" for key in ("most", "median", "low", "high")]
        lines.append(f"| {row['device']} | {row['kind']} | {row['rows']:,} | {row['above']} | {row['over']} | {' | '.join(shown)} |")
    return lines


def judge_all(ops: dict[str, list[TimedOp]]) -> pl.DataFrame:
    """Return the judged rows of each named device with its name in the table; a device that the table lacks raises KeyError."""
    judged = []
    for name, timed in ops.items():
        device = find_device(name)
        if device is None:
            raise KeyError(f"the device table has no {name}")
        judged.append(judge(timed, device).with_columns(device=pl.lit(device.name)))
    return pl.concat(judged)


def main() -> None:
    """Print the tables and write them to RESULTS.md."""
    rows = judge_all(read_neusight())
    print("\n".join(format_table("NeuSight", summarize(rows, "device", "kind"))))
    rows = judge_all(read_vidur())
    print("\n".join(format_table("vidur", summarize(rows, "device", "kind"))))
    for (gfx, units), timed in read_aiter().items():
        device = find_device(compute_capability=gfx, sm_count=units)
        if device is None:
            print(gfx, units, "no device")
            continue
        rows = judge(timed, device).with_columns(device=pl.lit(device.name))
        print("\n".join(format_table("aiter", summarize(rows, "device", "kind"))))
        print(rows.select(pl.col('call_matrix').max() if 'call_matrix' in rows.columns else pl.col('flops').max()))


if __name__ == "__main__":
    main()
