"""Collectives: their kind by the names that libraries use, who takes part, their bandwidth, and calls of CPU back ends as rows.

Kinds: one ordered table for each sort of name, the first pattern that matches wins; a name that does not tell is null, never a guess.

Members, source, target and splits: torch writes them as text (torch/csrc/profiler/util.cpp, saveNcclMeta): 'Process Group Ranks' "[0, 1,
2]", cut after 30 ranks with an ellipsis, 'Global rank start' and 'Global rank stride' where the ranks are evenly spaced, 'Src Rank' or
'Dst Rank' of recv and send in ranks of the job, 'Rank' (for broadcast, scatter, reduce and gather that of the root in its group), 'In
split size', 'Out split size'.

Bandwidth (op_costs section 14; NVIDIA nccl-tests doc/PERFORMANCE.md): algbw = S / t; busbw = algbw x factor compares with the rate of the
link in one direction whatever the number of ranks. S is the whole tensor: of all ranks' parts for all_gather (its output) and
reduce_scatter (its input). A kernel's time holds the wait for the slowest rank, so a bandwidth from one rank is a lower bound; below about
1 MiB latency decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod

import msgspec
import polars as pl
from msgspec import Raw

from gpudiag.trace.columns import read_integer
from gpudiag.trace.events import ABSENT, JSON_ERRORS, CompleteArgs
from gpudiag.trace.kernel_names import choose_first

MESSAGE_KINDS = (
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter", "point_to_point", "barrier",
)  # fmt: skip
"""Kinds of messages, as torch.distributed names its collectives; point_to_point: send, recv."""

# Letters of 'Collective name', of an operator or of the annotation around it ('_allgather_base', 'c10d::reduce_scatter_tensor_coalesced',
# 'nccl:all_to_all'): torch/csrc/distributed/c10d/ProcessGroup*.cpp. The long before the short that they hold.
_KIND_WORDS = (
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
_KERNEL_PATTERNS = (
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


def match_message_kind(name: pl.Expr) -> pl.Expr:
    """Find the kind of message that a name of a collective, operator or annotation tells; null where it tells none."""
    letters = name.str.to_lowercase().str.replace_all(r"[^a-z0-9]", "")
    return choose_first([(letters.str.contains(word, literal=True), kind) for word, kind in _KIND_WORDS], None)


def match_kernel_message_kind(name: pl.Expr) -> pl.Expr:
    """Find the kind of message that the name of a collective's kernel tells; null where it tells none."""
    own = name.str.replace_all("(anonymous namespace)", "", literal=True).str.replace(r"[<(].*$", "")
    return choose_first([(own.str.contains(pattern), kind) for pattern, kind in _KERNEL_PATTERNS], None)


_ROOTED = ("broadcast", "scatter", "reduce", "gather")
"""Collectives whose 'Rank' is their root's; torch writes 'broadcast', '_broadcast_oop', 'reduce', '_reduce_oop', 'gather', 'scatter'."""

_INTEGERS = re.compile(r"\s*-?\d+(?:\s*,\s*-?\d+)*\s*")
_MAX_RANKS = 2**20
"""More than any run has: a damaged record."""


def build_group_columns(names: Sequence[str | None], args: Sequence[CompleteArgs]) -> dict[str, pl.Series]:
    """Build the columns members, source, target, in_splits and out_splits of collectives called `names`, one for each of `args`.

    members: '0,1,2', ranks of the job; source: also the root of a rooted collective.
    """
    members: list[str | None] = []
    sources: list[int | None] = []
    for name, item in zip(names, args, strict=True):
        listed = _parse_number_list(item.members)
        if listed is None:  # not told, or cut off: known all the same where the ranks are evenly spaced
            start, stride, size = (read_integer(field) for field in (item.rank_start, item.rank_stride, item.group_size))
            if start is not None and stride is not None and size is not None and start >= 0 and stride >= 1 and 0 < size <= _MAX_RANKS:
                listed = _join_ranks(range(start, start + stride * size, stride))
        source = _read_rank(item.source)
        if source is None and listed is not None and name is not None and name.strip("_").removesuffix("_oop") in _ROOTED:
            ranks, place = listed.split(","), _read_rank(item.root)
            source = int(ranks[place]) if place is not None and place < len(ranks) else None
        members.append(listed)
        sources.append(source)
    return {
        "members": pl.Series(members, dtype=pl.String),
        "source": pl.Series(sources, dtype=pl.Int64),
        "target": pl.Series([_read_rank(item.target) for item in args], dtype=pl.Int64),
        "in_splits": pl.Series([_parse_number_list(item.in_splits) for item in args], dtype=pl.String),
        "out_splits": pl.Series([_parse_number_list(item.out_splits) for item in args], dtype=pl.String),
    }


def fill_members(collectives: pl.DataFrame, groups: Mapping[str, Sequence[int]], world_size: int | None) -> pl.DataFrame:
    """Return `collectives` (stage 'read') with the members that the header tells where the record does not.

    By the group's name, or because a group as large as the job holds all of its ranks (where torch writes an empty list).
    """
    known = {name: _join_ranks(ranks) for name, ranks in groups.items() if ranks}
    named = pl.col("group").replace_strict(known, default=None, return_dtype=pl.String) if known else pl.lit(None, dtype=pl.String)
    if world_size is None or not 0 < world_size <= _MAX_RANKS:
        everyone = pl.lit(None, dtype=pl.String)
    else:
        everyone = pl.when(pl.col("size") == world_size).then(pl.lit(_join_ranks(range(world_size))))
    told = pl.coalesce("members", named, everyone)
    fits = pl.col("size").is_null() | (told.str.count_matches(",", literal=True) + 1 == pl.col("size"))
    return collectives.with_columns(pl.when(fits).then(told).alias("members"))


def _read_rank(field: Raw) -> int | None:
    found = None if field is ABSENT else read_integer(field)
    return found if found is not None and 0 <= found <= _MAX_RANKS else None


def _parse_number_list(field: Raw) -> str | None:
    """Parse the numbers of a list, given as JSON or as text, joined by commas; None where it is absent, empty or cut off ('...')."""
    if field is ABSENT:
        return None
    inner = bytes(field).decode("utf-8", "replace").strip().strip('"').strip().removeprefix("[").removesuffix("]")
    return "".join(inner.split()) if _INTEGERS.fullmatch(inner) else None


def _join_ranks(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))


_SAME_SIZE = ("all_reduce", "allreduce", "broadcast", "reduce", "send", "recv", "all_to_all", "alltoall")
_GATHERS = ("all_gather", "allgather", "gather")
_LARGEST = 2**63 - 1
_MAX_GATHERED_RANKS = 2**20
"""More than any run has: a damaged header."""

# "Input type" -> what record_param_comms calls it ("dtype" of a collective); c10/core/ScalarType.h
_TYPES = {
    "float": "Float", "double": "Double", "long": "Long", "long int": "Long", "int": "Int", "short": "Short", "short int": "Short",
    "unsigned char": "Byte", "signed char": "Char", "bool": "Bool", "c10::complex<float>": "ComplexFloat",
}  # fmt: skip


def build_backend_collectives(rows: Sequence[int], names: Sequence[str], args: Sequence[CompleteArgs]) -> dict[str, pl.Series]:
    """Build the columns of the collectives of the ops `rows`: their recorded tensors are what they are given.

    What they result in is as large for those that change nothing but values; group and its size are not recorded with the call.
    """
    given, dtypes = zip(*(_read_tensors(item.dims, item.dtypes) for item in args), strict=True) if args else ((), ())
    result = [count if name in _SAME_SIZE else None for name, count in zip(names, given, strict=True)]
    no_text, no_number = pl.Series([None] * len(rows), dtype=pl.String), pl.Series([None] * len(rows), dtype=pl.Int64)
    return {
        "kernel": no_number,
        "op": pl.Series(rows, dtype=pl.Int64),
        "name": pl.Series(names, dtype=pl.String),
        "group": no_text,
        "size": no_number,
        "in_elements": pl.Series(given, dtype=pl.Int64),
        "out_elements": pl.Series(result, dtype=pl.Int64),
        "dtype": pl.Series(dtypes, dtype=pl.String),
        "seq": no_number,
        "members": no_text,
        "source": no_number,
        "target": no_number,
        "in_splits": no_text,
        "out_splits": no_text,
    }


def fill_group_size(collectives: pl.DataFrame, size: int | None) -> pl.DataFrame:
    """Return `collectives` (stage 'read') with the size of the only process group where none was recorded with the call.

    A gathering call then results in that many times what it was given. `size`: None where there are several groups, or it is not known.
    """
    if size is None or size > _MAX_GATHERED_RANKS:
        return collectives
    silent = pl.col("size").is_null() & pl.col("group").is_null() & pl.col("op").is_not_null()
    gathered = (
        silent
        & pl.col("name").is_in(_GATHERS)
        & pl.col("out_elements").is_null()
        & (pl.col("in_elements") < _LARGEST // _MAX_GATHERED_RANKS)
    )
    ranks = pl.lit(size, dtype=pl.Int64)
    return collectives.with_columns(
        pl.when(silent).then(ranks).otherwise("size").alias("size"),
        pl.when(gathered).then(pl.col("in_elements") * ranks).otherwise("out_elements").alias("out_elements"),
    )


def _read_tensors(dims: Raw, dtypes: Raw) -> tuple[int | None, str | None]:
    """Read 'Input Dims' ('[[524800]]') and 'Input type': the elements of all tensors, None where a size is not known; their one type."""
    elements = dtype = None
    with suppress(*JSON_ERRORS):
        shapes = msgspec.json.decode(dims, type=list[list[int]]) if dims is not ABSENT else []
        if shapes and all(size >= 0 for shape in shapes for size in shape):
            total = sum(prod(shape) for shape in shapes)
            elements = total if total <= _LARGEST else None
    with suppress(*JSON_ERRORS):
        found = set(msgspec.json.decode(dtypes, type=list[str])) if dtypes is not ABSENT else set()
        if len(found) == 1:
            name = found.pop()
            dtype = _TYPES.get(name, name.removeprefix("c10::"))
    return elements, dtype


# c10::ScalarType as record_param_comms writes it -> bytes an element.
_ELEMENT = {
    "Half": 2, "BFloat16": 2, "Float": 4, "Double": 8, "Long": 8, "Int": 4, "Byte": 1, "Char": 1, "Bool": 1, "Short": 2,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip


def count_message_bytes(table: pl.DataFrame) -> pl.Series:
    """Return S of each row of `collectives` in bytes (the larger message), null where elements or dtype were not recorded."""
    item = table["dtype"].replace_strict(_ELEMENT, default=None, return_dtype=pl.Int64)
    frame = table.select(pl.max_horizontal("in_elements", "out_elements").alias("elements")).with_columns(item.alias("item"))
    return frame.select((pl.col("elements") * pl.col("item")).alias("bytes"))["bytes"]


def find_bus_factor(name: str, ranks: int) -> float | None:
    """Return busbw / algbw of a collective: 2(n-1)/n for all_reduce, (n-1)/n where each rank keeps its part, 1 for one-to-all.

    None for a name that is no collective (a barrier, an unknown kernel) or fewer than one rank. Reductions in the network (NVLS, SHARP)
    move less; a trace does not name them reliably, so their figure is not derated.
    """
    kind = next((kind for word, kind in _KIND_WORDS if word in re.sub(r"[^a-z0-9]", "", name.lower())), None)
    if kind in (None, "barrier") or ranks < 1:
        return None
    part = (ranks - 1) / ranks
    return {"all_reduce": 2 * part, "reduce_scatter": part, "all_gather": part, "all_to_all": part}.get(str(kind), 1.0)


def compute_bandwidths(name: str, moved_bytes: int | None, ranks: int | None, time_ns: int) -> tuple[float, float] | None:
    """Return (algbw, busbw) in byte/s of collectives that moved `moved_bytes` (S) in `time_ns`; None where one of them is not known."""
    factor = find_bus_factor(name, ranks) if ranks is not None else None
    if factor is None or moved_bytes is None or time_ns <= 0:
        return None
    algorithm = moved_bytes / time_ns * 1e9
    return algorithm, algorithm * factor
