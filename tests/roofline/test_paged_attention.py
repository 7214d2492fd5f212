"""Attention with paged caches: pairs and keys from the annotation of the step."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from gpudiag.analysis import analyse
from gpudiag.inputs import resolve_input
from gpudiag.model.ops import Cost, Input, Signature
from gpudiag.model.trace import Trace
from gpudiag.roofline.inferred_costs import estimate_step

EVIDENCE = Path(__file__).resolve().parents[3] / "shared" / "evidence" / "traces"


def _attention(name: str) -> tuple[Trace, pl.DataFrame]:
    path, capture = EVIDENCE / f"{name}.json.gz", EVIDENCE / f"{name}_capture.json.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there: recordings of others, which are no part of the project")
    trace = analyse(resolve_input(str(path), None)._replace(graph_capture=capture), lambda _: None).trace
    ops = trace.ops.select(pl.col("id").alias("owner"), pl.col("name").cast(pl.String).alias("op_name"))
    return trace, trace.kernels.join(ops, on="owner").filter(pl.col("op_name").str.contains("attention"))


def test_one_request_of_4_new_tokens_on_10_and_two_that_decode() -> None:
    """4 x 10 - 6 pairs of the chunk, 7 + 9 of those that decode; 26 keys are read."""
    query, cache = Input(dtype="bf16", shape=(8, 16, 64)), Input(dtype="fp8", shape=(100, 32, 2, 64))
    step = "execute_6_context_1(sq4sk10sqsq16sqsk40)_generation_2(sq2sk16sqsq2sqsk16)"
    found = estimate_step(Signature((query, cache, cache)), 0, step)
    assert found == Cost(
        matrix_flops=4 * 16 * 64 * (34 + 16), bytes=2 * 2 * 6 * 16 * 64 + 2 * 26 * 2 * 64, dtype="bf16", provenance="derived"
    )


@pytest.mark.slow
def test_decoding_of_32_requests_is_bound_by_their_cache() -> None:
    """Qwen3-8B: 36 layers, 32 heads of 128, 8 of keys; 32 requests with 32,785 keys together."""
    _, kernels = _attention("mi300x_sglang_decode")
    assert kernels["flops"].sum() == pytest.approx(36 * 4 * 32 * 128 * 32785)
    assert kernels["bytes_moved"].sum() == pytest.approx(36 * (2 * 2 * 8 * 128 * 32785 + 2 * 2 * 32 * 32 * 128))
    assert set(kernels["bound"]) == {"memory"}
    assert 0.2 < kernels["efficiency"].mean() < 1


@pytest.mark.slow
def test_layers_with_a_sliding_window_are_not_known() -> None:
    """gpt-oss cuts every other layer to a window that no argument tells: 133 and 297 us for calls of one shape."""
    _, kernels = _attention("mi300x_vllm_piecewise")
    attention = kernels.filter(pl.col("op_name").str.contains("unified_attention"))
    assert attention.height == 24
    assert set(attention["provenance"]) == {"none"}
