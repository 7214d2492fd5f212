"""What a message between ranks does, by the names that libraries give it. Public: kind_of, kernel_kind, KINDS.

One ordered table for each sort of name, the first pattern that matches wins; a name that does not tell is null, never a guess.
"""

from __future__ import annotations

import polars as pl

KINDS = (
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter", "point_to_point", "barrier",
)  # fmt: skip
"""Kinds of messages, as torch.distributed names its collectives; point_to_point: send, recv."""

# Letters of 'Collective name', of an operator or of the annotation around it ('_allgather_base', 'c10d::reduce_scatter_tensor_coalesced',
# 'nccl:all_to_all'): torch/csrc/distributed/c10d/ProcessGroup*.cpp. The long before the short that they hold.
_WORDS = (
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("sendrecv", "point_to_point"),
    ("send", "point_to_point"),
    ("recv", "point_to_point"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
)

# Kernels, by the name in front of template arguments and parameters. NCCL and RCCL write the function they run into it (Generic tells
# nothing; all-to-all, gather and scatter run as SendRecv); DeepEP, MORI, pplx and TensorRT-LLM exchange tokens of experts in dispatch and
# combine; the custom all-reduces of vLLM, SGLang and AITER are called cross_device_reduce; torch's symmetric memory and NVSHMEM, MSCCL++,
# TensorRT-LLM, FlashInfer and quickreduce write the words.
_KERNELS = (
    (r"(?i)reduce_?scatter", "reduce_scatter"),
    (r"(?i)all_?reduce|cross_device_reduce|lamport.*reduce", "all_reduce"),
    (r"(?i)all_?gather", "all_gather"),
    (r"(?i)all_?to_?all", "all_to_all"),
    (r"(?i)(?:internode|intranode|internode_ll|hybrid_ep|pplx|mori)::(?:\w+::)*\w*(?:dispatch|combine)", "all_to_all"),
    (r"\bEp(?:Dispatch|Combine)", "all_to_all"),
    (r"(?i)a2a_?(?:dispatch|combine)", "all_to_all"),
    (r"(?i)send_?recv", "point_to_point"),
    (r"(?i)(?:nccl|rccl)\w*broadcast|nvshmem\w*broadcast", "broadcast"),
    (r"(?i)(?:nccl|rccl)(?:sym\w*|dev)?kernel_reduce_|ncclReduce(?:Ring|Tree)", "reduce"),
    (r"(?i)\bbarrier_kernel|nvshmem\w*barrier", "barrier"),
)  # fmt: skip


def kind_of(name: pl.Expr) -> pl.Expr:
    """Return the kind of message that a name of a collective, operator or annotation tells; null where it tells none."""
    letters = name.str.to_lowercase().str.replace_all(r"[^a-z0-9]", "")
    found = pl.lit(None, dtype=pl.String)
    for word, kind in reversed(_WORDS):
        found = pl.when(letters.str.contains(word, literal=True)).then(pl.lit(kind)).otherwise(found)
    return found


def kernel_kind(name: pl.Expr) -> pl.Expr:
    """Return the kind of message that the name of a collective's kernel tells; null where it tells none."""
    own = name.str.replace_all("(anonymous namespace)", "", literal=True).str.replace(r"[<(].*$", "")
    found = pl.lit(None, dtype=pl.String)
    for pattern, kind in reversed(_KERNELS):
        found = pl.when(own.str.contains(pattern)).then(pl.lit(kind)).otherwise(found)
    return found
