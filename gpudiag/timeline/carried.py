"""What the Python frames of a site window tell about the pauses between the ops of a window that was recorded without stacks."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.model.trace import Trace
from gpudiag.timeline.host_events import CAUSES, host_events, own_frames
from gpudiag.timeline.host_threads import Host
from gpudiag.timeline.segments import layered, most_held, outermost, rows_of

_EVENTS = {
    "thread": pl.Int64(), "start_ns": pl.Int64(), "end_ns": pl.Int64(), "cause": pl.String(), "evidence": pl.String(), "site": pl.String(),
}  # fmt: skip


LIKE = 4
"""A twin in the site window explains a pause up to this many times its own length (other programs on the machine stretch pauses; stacks
make the twin longer, not shorter). What is beyond it the site window does not show."""


class Carried:
    """The pauses of the main thread, each named by the op before it: the n-th call of its name in its step, in both windows.

    `known`: the events of the window itself; a pause that one of the same cause holds for the most part needs no twin.
    """

    def __init__(
        self, trace: Trace, steps: pl.DataFrame, site_window: tuple[Trace, pl.DataFrame] | None, host: Host, known: pl.DataFrame,
        *, on_cpu: bool,
    ) -> None:  # fmt: skip
        self.events = pl.DataFrame(schema=_EVENTS)
        self.sites: dict[str, str] = {}
        """Cause -> the user's line that holds most of its time in the site window."""
        self._pauses = pl.DataFrame(schema=_EVENTS)
        if site_window is None or not site_window[0].frames.height:
            return
        told = self._told(*site_window, on_cpu=on_cpu)
        pauses = _pauses(trace, steps, host.crew[0]).join(told, on=["name", "number"], how="inner", maintain_order="left")
        pauses = pauses.with_columns(end_ns=pl.min_horizontal("end_ns", pl.col("start_ns") + LIKE * pl.col("told_ns")))
        self._pauses = pauses.with_columns(thread=pl.lit(host.crew[0], dtype=pl.Int64)).select(list(_EVENTS))
        seen = [_mostly_seen(self._pauses, known, cause) for cause in CAUSES]
        self.events = self._pauses.filter(pl.col("cause").is_in(CAUSES) & ~pl.any_horizontal(*seen))

    def of_pieces(self, start: np.ndarray, end: np.ndarray) -> pl.DataFrame:
        """Return (evidence, site) of the pause that holds most of each [start, end), null where none does."""
        spans = self._pauses.select("start_ns", "end_ns").to_numpy().astype(np.int64)
        row = most_held(start, end, spans, np.arange(len(spans)))[0]
        return rows_of(self._pauses.select("evidence", "site"), pl.Series(row, dtype=pl.Int64).replace(-1, None))

    def spans(self) -> intervals.Spans:
        """Return the pauses that the site window knows."""
        return intervals.of(self._pauses)

    def _told(self, other: Trace, steps: pl.DataFrame, *, on_cpu: bool) -> pl.DataFrame:
        """Return (name, number, cause, evidence, site, told_ns) of the site window's pauses that lie under a line of the user's.

        The cause is the one that holds more than half of a pause, else launch.
        """
        frames = own_frames(other)
        host = Host(other, frames)
        pauses = _pauses(other, steps, host.crew[0])
        events = host_events(other, frames, None, on_cpu=on_cpu).filter(pl.col("thread") == host.crew[0])
        self.sites = _site_of_causes(events, host)
        cause, event = _held_causes(pauses, events)
        leaf, site = host.held_frames(host.crew[0], pauses["start_ns"].to_numpy(), pauses["end_ns"].to_numpy())
        words = host.words()
        found = pauses.with_columns(cause=cause, event_words=events["evidence"].gather(event), leaf=leaf, user=site)
        found = found.join(words.select(leaf="code", told="told"), on="leaf", how="left", maintain_order="left")
        found = found.join(words.select(user="code", site="text"), on="user", how="left", maintain_order="left")
        found = found.drop_nulls("site").unique(["name", "number"], keep="first", maintain_order=True)
        told_ns = pl.col("end_ns") - pl.col("start_ns")
        return found.select("name", "number", "cause", "site", evidence=pl.coalesce("event_words", "told"), told_ns=told_ns)


def _mostly_seen(pauses: pl.DataFrame, known: pl.DataFrame, cause: str) -> pl.Expr:
    """Return which pauses have this cause, and an event of their own window that says so for more than half of them."""
    spans = intervals.of(known.filter(pl.col("cause") == cause))
    held = pl.Series(intervals.covered(spans, pauses["start_ns"].to_numpy(), pauses["end_ns"].to_numpy()), dtype=pl.Int64)
    return (pl.col("cause") == cause) & (2 * pl.lit(held) > pl.col("end_ns") - pl.col("start_ns"))


def _pauses(trace: Trace, steps: pl.DataFrame, main: int) -> pl.DataFrame:
    """Return the pauses of thread `main` within steps: (name, number) of the outermost op before each, start_ns, end_ns."""
    ops = trace.ops.filter((pl.col("thread") == main) & pl.col("parent").is_null()).sort("start_ns", "id")
    ops = ops.with_columns(pl.col("name").cast(pl.String), following=pl.col("start_ns").shift(-1)).filter(pl.col("step").is_not_null())
    ops = ops.with_columns(pl.col("following").fill_null(pl.lit(steps["end_ns"].gather(ops["step"]))))
    ops = ops.with_columns(number=pl.int_range(pl.len()).over("step", "name"))
    pauses = ops.select("name", "number", start_ns="end_ns", end_ns="following")
    return pauses.filter(pl.col("end_ns") > pl.col("start_ns"))


def _held_causes(pauses: pl.DataFrame, events: pl.DataFrame) -> tuple[pl.Series, pl.Series]:
    """Return for each pause the cause that holds more than half of it (else idle_launch), and its longest event (else null)."""
    start, end = pauses["start_ns"].to_numpy(), pauses["end_ns"].to_numpy()
    of_cause = [events.with_row_index("row").filter(pl.col("cause") == cause) for cause in CAUSES]
    cut = layered(np.stack((start, end), axis=1).astype(np.int64), [intervals.of(rows) for rows in of_cause])
    layer, held = most_held(start, end, np.stack((cut.start, cut.end), axis=1), cut.layer)
    layer = np.where((layer < len(CAUSES)) & (2 * held > end - start), layer, -1)
    event = np.full(len(start), -1, dtype=np.int64)
    for index, rows in enumerate(of_cause):
        chosen = layer == index
        spans, numbers = outermost(rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy())
        event[chosen] = most_held(start[chosen], end[chosen], spans, rows["row"].to_numpy().astype(np.int64)[numbers])[0]
    causes: pl.Series = pl.Series([*CAUSES, "idle_launch"]).gather(pl.Series(layer % (len(CAUSES) + 1)))
    return causes, pl.Series(event, dtype=pl.Int64).replace(-1, None)


def _site_of_causes(events: pl.DataFrame, host: Host) -> dict[str, str]:
    """Return for each cause the user's line that holds most of its time in the site window."""
    names = host.words()
    found = {}
    for cause in events["cause"].unique().sort().to_list():
        spans = intervals.of(events.filter(pl.col("cause") == cause))
        site = pl.Series("code", host.held_frames(host.crew[0], spans[:, 0], spans[:, 1])[1])
        held = pl.DataFrame({"code": site, "time": spans[:, 1] - spans[:, 0]}).group_by("code").agg(pl.col("time").sum())
        named = held.join(names, on="code", how="inner").sort("time", "code")
        if named.height:
            found[str(cause)] = str(named["text"][-1])
    return found
