"""FLOPs and bytes against the reference rows beside the real traces (made by another tool; conventions in its README).

The rows' arguments (stride, padding, is_causal, output_mask) come from the traces themselves.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpudiag.model.ops import Cost, Signature, parse_signature
from gpudiag.roofline.costs import estimate_cost

Row = dict[str, Any]
FAMILIES = ("GEMM", "CONV_fwd", "CONV_bwd", "SDPA_fwd")
NAMES = (
    "a100-80g_sam_fast_compiled_cudagraph",
    "a100_dlrm_train_cudagraph_triton_rank0of16",
    "h100_bert-small",
    "h100_qwen1.5-0.5b_prefill",
    "h100_timesformer_video",
    "mi300x_flux1_xdit_compiled",
    "mi300x_qwen1.5-0.5b_prefill",
    "mi300x_resnet18_ddp8_actckpt_train_rank0",
    "mi300x_torch_compile_triton_micro",
    "mi300x_vllm_gptoss_decode_fullgraph",
    "mi300x_vllm_gptoss_decode_fullgraph_capture",
    *(f"v100_dlrm_train_8ranks/rank{rank}" for rank in range(8)),
)


@cache
def _calls(path: Path) -> dict[tuple[str, str, str], list[Signature]]:
    """Return the distinct calls of a trace by (op, dims, types)."""
    document = msgspec.json.decode(gzip.decompress(path.read_bytes()))
    found: dict[tuple[str, str, str], dict[str, Signature]] = {}
    for event in document["traceEvents"]:
        args = event.get("args") or {}
        if "Input Dims" in args and event.get("cat", "").lower() in ("cpu_op", "operator"):
            texts = [
                json.dumps(args[key]) if key in args else None for key in ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
            ]
            calls = found.setdefault((event["name"], str(texts[0]), str(texts[1])), {})
            if repr(texts) not in calls:
                calls[repr(texts)] = parse_signature(str(texts[0]), *texts[1:])
    return {key: list(calls.values()) for key, calls in found.items()}


def _rows(traces: Path, name: str) -> list[tuple[str, Row]]:
    document = json.loads((traces / "reference" / f"{name.replace('/', '__')}.json").read_text())
    return [(family, row) for family in FAMILIES for row in document["tracelens"].get(family, [])]


def _matching(row: Row, calls: dict[tuple[str, str, str], list[Signature]]) -> list[Signature]:
    """Return the calls with the row's dims and types, and with its stride and padding where it names them."""
    found = calls.get((row["op"], json.dumps(row["input_dims"]), json.dumps(row["input_type"])), [])
    if "stride" in row["param"] and "CONV" not in row["op"]:
        at = 4 if row["op"].endswith("backward") else 3
        wanted = (tuple(row["param"]["stride"]), tuple(row["param"]["padding"]))
        found = [item for item in found if (item.value(at), item.value(at + 1)) == wanted]
    if "input_strides" in row:
        strides = [tuple(item) for item in row["input_strides"]]
        found = [
            item for item in found if all(i.strides is None or i.strides == s for i, s in zip(item.inputs, strides, strict=True))
        ] or found
    return found


def _from_row(family: str, row: Row) -> list[Signature]:
    """Return the row's own inputs: some ran inside a graph replay or compiled region, and a matrix product needs no further argument."""
    assert family == "GEMM", f"{row['op']} {row['input_dims']} is not in the trace"
    return [parse_signature(json.dumps(row["input_dims"]), json.dumps(row["input_type"]), json.dumps(row.get("input_strides")), None)]


def _expected_flops(family: str, row: Row, signature: Signature) -> int:
    flops, param = row["flops_per_call"], row["param"]
    if family == "GEMM" and param["bias"]:
        flops -= param["B"] * param["M"] * param["N"]  # the reference adds the bias, we do not
    if family == "CONV_bwd":
        mask = signature.value(10)
        assert isinstance(mask, tuple)
        return int(flops) * sum(mask[:2]) // 2  # the reference always counts both gradients
    return int(flops)


def _expected_bytes(family: str, row: Row, signature: Signature) -> float:
    moved = row["bytes_per_call"]
    if family == "CONV_bwd":
        mask = signature.value(10)
        assert isinstance(mask, tuple)
        return float(moved * sum(mask[:2]) / 2)
    if family == "SDPA_fwd":  # we add the fp32 log-sum-exp where it is written, and the bias that is read
        heads = row["param"]
        bias = signature.tensor(3)
        flash = "flash" in row["op"] or signature.value(4) is True
        return float(moved + (4 * heads["B"] * heads["H_Q"] * heads["N_Q"] if flash else 0) + (bias.distinct_bytes if bias else 0))
    return float(moved)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_rows(name: str, traces: Path) -> None:
    calls = _calls(traces / f"{name}.json.gz")
    rows = _rows(traces, name)
    assert rows
    for family, row in rows:
        for signature in _matching(row, calls) or _from_row(family, row):
            found = estimate_cost(row["op"], signature)
            where = f"{row['op']} {row['input_dims']}"
            assert isinstance(found, Cost), f"{where}: {found}"
            assert found.provenance == "exact", where
            assert found.matrix_flops == _expected_flops(family, row, signature), where
            assert found.bytes == pytest.approx(_expected_bytes(family, row, signature), rel=0.02), where
