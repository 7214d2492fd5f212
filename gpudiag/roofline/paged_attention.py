"""Attention with paged caches in inference servers: how many keys it reads stands in the annotation of the step, not in its arguments.

vLLM and SGLang, as AMD's TraceLens instruments them, annotate each step with sums over its requests, with new tokens sq and all keys sk:
'execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)'. A causal request has sq * sk - sq (sq - 1) / 2 pairs.
"""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from gpudiag.attribution.names import decode_names
from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost, Signature
from gpudiag.model.trace import Trace
from gpudiag.roofline.attributed_ops import AttributedOps
from gpudiag.roofline.costs.arguments import size_of
from gpudiag.roofline.costs.attention import read_query_key_value
from gpudiag.roofline.costs.gemm import build_matrix_cost
from gpudiag.roofline.costs.registry import attempt, require

_STEP = r"^execute_\d+_context_\d+\(sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)\)_generation_\d+\(sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)\)$"

_OPS = {r"vllm::unified_attention(_with_output)?": 0, r"sglang_profiler::attention_paged_attention_ragged(_\d+)?": 2}
"""Pattern of an op's name -> position of its query; keys and values (new ones, or the caches) follow."""

_ALIKE = 1.5
"""Calls of one shape in one step do the same work, unless a sliding window, which no argument tells, cuts some of them: where their times
differ by more (noise and the order of requests stay below), their work is not known (heuristic)."""

SLIDING = Missing("calls of one shape take different times in one step: a sliding window, which is no argument, cuts some of them")


def estimate_paged_attention(trace: Trace, owners: AttributedOps) -> AttributedOps:
    """Return `owners` with a `derived` cost for the paged attention of annotated steps, as if it had no sliding window."""
    first = {call: at for call, name in enumerate(owners.names) for pattern, at in _OPS.items() if re.fullmatch(pattern, name)}
    chosen = pl.Series("call", owners.call).is_in(list(first)) & trace.kernels["launch"].is_not_null()
    steps = trace.marks.select("start_ns", "end_ns", name=decode_names(trace.marks["name"])).filter(pl.col("name").str.contains(_STEP))
    if not chosen.any() or not steps.height:
        return owners
    rows = np.flatnonzero(chosen.to_numpy())
    launched = trace.launches["start_ns"].gather(trace.kernels["launch"].gather(rows))
    frame = pl.DataFrame({"row": rows, "owner": owners.owner[rows], "call": owners.call[rows], "launched": launched})
    frame = frame.with_columns(signature=trace.ops["signature"].gather(frame["owner"]), busy_ns=trace.kernels["busy_ns"].gather(rows))
    frame = frame.join_where(steps, pl.col("launched") >= pl.col("start_ns"), pl.col("launched") < pl.col("end_ns")).drop_nulls("signature")
    calls = frame.group_by("name", "call", "signature", "owner").agg(pl.col("busy_ns").sum())
    alike = calls.group_by("name", "call", "signature", maintain_order=True).agg(
        (pl.col("busy_ns").max() <= _ALIKE * pl.col("busy_ns").min()).alias("alike")
    )
    costs, names, found = list(owners.costs), list(owners.names), list[tuple[str, int, int, int]]()
    for name, call, signature, same in alike.sort("name", "call", "signature").iter_rows():
        cost = attempt(estimate_step, owners.parsed[signature], first[call], name) if same else SLIDING
        found.append((name, call, signature, len(costs)))
        costs.append(cost)
        names.append(owners.names[call])
    table = pl.DataFrame(found, schema={"name": pl.String, "call": pl.Int64, "signature": pl.Int64, "told": pl.Int64}, orient="row")
    told = frame.join(table, on=["name", "call", "signature"], how="inner")
    of_kernel = owners.call.copy()
    of_kernel[told["row"].to_numpy()] = told["told"].to_numpy()
    return owners._replace(call=of_kernel, costs=tuple(costs), names=tuple(names))


def estimate_step(signature: Signature, first: int, name: str) -> Cost:
    """Estimate the cost of one layer in the step `name`: the cache is taken to hold the type that is recorded of keys and values."""
    query, key, value = read_query_key_value(signature, first)
    sums = [int(number) for number in re.match(_STEP, name).groups()]  # type: ignore[union-attr]
    tokens, keys = sums[0] + sums[4], sums[1] + sums[5]
    pairs = sum(sums[at + 3] - (sums[at + 2] - sums[at]) // 2 for at in (0, 4))
    require(len(query.shape) == 3 and len(key.shape) >= 3 and len(value.shape) >= 3, "query, key and value have no heads")
    require(0 < tokens <= query.shape[0] and pairs > 0, "the step's annotation does not fit the query")
    heads, width, value_width = query.shape[1], query.shape[2], value.shape[-1]
    moved = size_of(tokens * heads * (width + value_width), query.dtype)
    moved += size_of(keys * key.shape[-2] * width, key.dtype) + size_of(keys * value.shape[-2] * value_width, value.dtype)
    return build_matrix_cost(heads * pairs * (width + value_width), query.dtype, moved, "derived")
