"""The op table: one row for each (name, phase, module, signature); and how much of the kernel time is linked and modelled."""

from __future__ import annotations

import polars as pl

from gpudiag.model.analysis import Coverage
from gpudiag.model.ops import BOUNDS, OVER_ROOF_ABOVE, Provenance
from gpudiag.model.trace import Trace
from gpudiag.trace.kernel_names import choose_first

BEFORE_WINDOW = "before the window"
"""Phase of work whose launch was not recorded."""

_KEYS = ("op_name", "phase", "module", "signature")

_USED = (
    "name", "kind", "launch", "op", "owner", "step", "busy_ns", "flops", "bytes_moved", "t_roof_ns", "cache_resident", "over_cause",
    "engine", "engine_by", "occupancy", "waves", "bound", "provenance",
)  # fmt: skip
"""Columns of kernels that the rows sum up."""

_PROVENANCES: tuple[Provenance, ...] = ("exact", "derived", "generic", "none")


def build_op_table(trace: Trace, steps: pl.DataFrame) -> pl.DataFrame:
    """Build the rows, longest first: work launched in the analysed steps, and unlinked work under the phase 'before the window'.

    A kernel without an op stands under its own name. flops, bytes and t_roof_ns are null where they are not known for every kernel
    (a copy or memset of unknown size beside kernels of the same row adds nothing). provenance: that of the most kernel time. A row above
    OVER_ROOF_ABOVE has no efficiency but `over_roof` (the ratio) and `over_roof_cause`.
    """
    frame, time = _select_work(trace, steps), pl.col("busy_ns").sum()
    engine = time.over(*_KEYS, "engine", "engine_by")  # kernel time of each word within its row
    frame = frame.with_columns(engine_ns=engine, engine_by_ns=engine, over_cause_ns=time.over(*_KEYS, "over_cause"))
    calls = pl.col("call").n_unique() + pl.col("call").is_null().sum() - pl.col("call").is_null().any().cast(pl.UInt32)
    rows = frame.group_by(_KEYS, maintain_order=True).agg(
        calls.alias("count"),
        pl.col("busy_ns").sum().alias("kernel_ns"),
        pl.col("busy_ns").filter("recompute").sum().alias("recompute_ns"),
        _sum_known("flops").alias("flops"),
        _sum_known("bytes_moved").alias("bytes"),
        _sum_known("t_roof_ns").alias("t_roof_ns"),
        pl.col("cache_resident").any(),
        _choose_longest("over_cause").alias("over_roof_cause"),
        _choose_longest("engine"),
        _choose_longest("engine_by"),
        _average("occupancy"),
        _average("waves"),
        *[pl.col("busy_ns").filter(pl.col("bound") == bound).sum().alias(f"{bound}_ns") for bound in BOUNDS],
        *[pl.col("busy_ns").filter(pl.col("provenance") == word).sum().alias(f"by_{word}") for word in _PROVENANCES],
    )
    rows = rows.rename({"op_name": "name"}).with_columns(pl.col(pl.Categorical).cast(pl.String))
    rows = rows.with_columns(
        bound=_choose_largest({f"{bound}_ns": bound for bound in BOUNDS}),
        provenance=_choose_largest({f"by_{word}": word for word in _PROVENANCES}),
    )
    ratio = pl.when(pl.col("kernel_ns") > 0).then(pl.col("t_roof_ns") / pl.col("kernel_ns"))
    over = (ratio > OVER_ROOF_ABOVE).fill_null(False)
    rows = rows.drop([f"by_{word}" for word in _PROVENANCES]).with_columns(
        efficiency=pl.when(~over).then(ratio),
        over_roof=pl.when(over).then(ratio),
        over_roof_cause=pl.when(over).then(pl.col("over_roof_cause")),
    )
    return rows.sort("kernel_ns", "name", descending=[True, False], maintain_order=True)


def build_op_steps(trace: Trace, steps: pl.DataFrame) -> pl.DataFrame:
    """Return (name, phase, module, signature, step, busy_ns): what each row of op_rows has in each analysed step where it has any."""
    frame = _select_work(trace, steps).filter(~pl.col("unlinked"))
    rows = frame.group_by(*_KEYS, "step", maintain_order=True).agg(pl.col("busy_ns").sum()).rename({"op_name": "name"})
    return rows.with_columns(pl.col(pl.Categorical).cast(pl.String))


def _choose_longest(name: str) -> pl.Expr:
    known = pl.col(name).is_not_null()
    return pl.col(name).filter(known).sort_by(pl.col(f"{name}_ns").filter(known), descending=True).first()


def _average(name: str) -> pl.Expr:
    """Return the mean over the kernel time of a group with a value, null where there is none.

    0 is none: no kernel runs at an occupancy of 0; libkineto writes it where it cannot compute one (large dynamic shared memory).
    """
    known = (pl.col(name) > 0).fill_null(False)
    time = pl.col("busy_ns").filter(known)
    return pl.when(time.sum() > 0).then((pl.col(name).filter(known) * time).sum() / time.sum())


def _sum_known(name: str) -> pl.Expr:
    """Return the sum of a column over a group, null where it is not known for every kernel that is more than a copy or memset."""
    moves = pl.col("kind").is_in(["memcpy", "memset"])
    unknown = (pl.col(name).is_null() & ~(moves & (~moves).any())).any()
    return pl.when(unknown).then(None).otherwise(pl.col(name).sum())


def _choose_largest(words: dict[str, str]) -> pl.Expr:
    names = dict(enumerate(words.values()))
    return pl.concat_list(list(words)).list.arg_max().replace_strict(names, return_dtype=pl.String)


def build_op_keys(trace: Trace) -> pl.DataFrame:
    """Return (name, phase, module, signature) of each row of kernels, as in the rows of the op table; null where it has none."""
    called = trace.kernels.select(pl.coalesce("owner", "op").alias("call"), "name", unlinked=_UNLINKED)
    ops = {column: trace.ops[column].gather(called["call"]) for column in ("phase", "module", "signature")}
    frame = called.with_columns(trace.ops["name"].gather(called["call"]).alias("op_name"), *ops.values())
    frame = frame.with_columns(pl.col(pl.Categorical).cast(pl.String))
    return frame.select(
        pl.coalesce("op_name", "name").alias("name"),
        pl.when("unlinked").then(pl.lit(BEFORE_WINDOW)).otherwise("phase").alias("phase"),
        "module",
        "signature",
    )


_UNLINKED = (pl.col("kind") != "cpu") & pl.col("launch").is_null()


def _select_work(trace: Trace, steps: pl.DataFrame) -> pl.DataFrame:
    analysed = steps.filter(pl.col("analysed"))["id"].implode()
    frame = trace.kernels.select(_USED).filter(pl.col("step").is_in(analysed) | _UNLINKED)
    frame = frame.with_columns(pl.coalesce("owner", "op").alias("call"), unlinked=_UNLINKED).drop("launch", "op", "owner")
    called = {column: trace.ops[column].gather(frame["call"]) for column in ("name", "phase", "module", "signature", "recompute")}
    frame = frame.with_columns(called.pop("name").alias("op_name"), *called.values())  # an op's id is its row
    frame = frame.with_columns(pl.col(pl.String).cast(pl.Categorical))  # a quarter of the memory, and faster to group by
    return frame.with_columns(
        pl.coalesce("op_name", "name").alias("op_name"), pl.when("unlinked").then(pl.lit(BEFORE_WINDOW)).otherwise("phase").alias("phase")
    ).drop("name")


_WHERE = ("copy", "collective", "without_launch", "attributable", "replay", "outside_ops", "without_shapes")
"""Where a kernel stands on its way to a cost; exactly one for each, so that the shares sum to 1."""


def measure_coverage(trace: Trace) -> Coverage:
    """Measure the coverage of the kernels of `trace` (stage 'cost'). Shares are of summed kernel time, None where there is none."""
    chain = (
        (pl.col("kind").is_in(["memcpy", "memset"]), "copy"),
        (pl.col("collective"), "collective"),
        (pl.col("owner").is_not_null(), "attributable"),
        ((pl.col("kind") != "cpu") & pl.col("launch").is_null(), "without_launch"),
        (pl.col("replay") & ~pl.col("mapped"), "replay"),
        (pl.col("op").is_null(), "outside_ops"),
    )
    where = choose_first(chain, "without_shapes")
    kernels = trace.kernels.select("busy_ns", "provenance", "op", "mapped", where=where)
    chosen = {word: pl.col("where") == word for word in _WHERE} | {
        "modelled": (pl.col("where") == "attributable") & pl.col("provenance").is_in(["exact", "derived"]),
        "generic": (pl.col("where") == "attributable") & (pl.col("provenance") == "generic"),
        "linked": pl.col("op").is_not_null(),
        "mapped": pl.col("mapped"),
        "all": pl.lit(True),
    }
    time = kernels.select(pl.col("busy_ns").filter(rows).sum().alias(name) for name, rows in chosen.items()).row(0, named=True)
    unknown = time["attributable"] - time["modelled"] - time["generic"]
    of_all = {name: time[name] / time["all"] if time["all"] else None for name in chosen}
    return Coverage(
        kernels=kernels.height,
        kernel_ns=time["all"],
        attributable_ns=time["attributable"],
        linked_share=of_all["linked"],
        modelled_share=time["modelled"] / time["attributable"] if time["attributable"] else None,
        generic_share=time["generic"] / time["attributable"] if time["attributable"] else None,
        unknown_share=unknown / time["attributable"] if time["attributable"] else None,
        modelled_share_of_all=of_all["modelled"],
        mapped_replay_share=of_all["mapped"],
        **{f"{word}_share": of_all[word] for word in _WHERE},
    )
