"""What the Python frames of a site window tell about the pauses between the ops of a window that was recorded without stacks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.names import text
from gpudiag.attribution.nesting import nulled
from gpudiag.model.trace import Trace
from gpudiag.timeline.host_events import CAUSES, host_events, own_frames
from gpudiag.timeline.host_threads import Host
from gpudiag.timeline.segments import Folded, layered, most_held, outermost, rows_of

Ints = npt.NDArray[np.int64]

_EVENTS = {
    "thread": pl.Int64(), "start_ns": pl.Int64(), "end_ns": pl.Int64(), "cause": pl.String(), "evidence": pl.String(), "site": pl.String(),
}  # fmt: skip
_PAIRS = {
    "start_ns": pl.Int64(), "end_ns": pl.Int64(), "from_ns": pl.Int64(), "rest_ns": pl.Int64(), "view": pl.Int64(), "twin": pl.Int64(),
    "twin_ns": pl.Int64(), "cause": pl.String(), "evidence": pl.String(), "site": pl.String(),
}  # fmt: skip
_WORDS = {"piece": pl.UInt32(), "evidence": pl.String(), "site": pl.String()}

LIKE = 4
"""A twin in the site window explains a pause up to this many times its own length (other programs on the machine stretch pauses; stacks
make the twin longer, not shorter). What is beyond it the site window does not show."""


class Carried:
    """The pauses of the main thread, each named by the op before it: the n-th call of its name in its step, in both windows.

    `known`: the events of the window itself. What they hold of a pause is taken out of it, and what the same causes hold of its twin is
    taken out there; so a loader's frames do not name what the loop did before or after it. The rest is matched by the place within it.
    """

    def __init__(
        self, trace: Trace, steps: pl.DataFrame, site_window: tuple[Trace, pl.DataFrame] | None, host: Host, known: pl.DataFrame,
        host_marks: pl.DataFrame | None, *, on_cpu: bool,
    ) -> None:  # fmt: skip
        self.events = pl.DataFrame(schema=_EVENTS)
        self.sites: dict[str, str] = {}
        """Cause -> the user's line that holds most of its time in the site window."""
        self._pairs = pl.DataFrame(schema=_PAIRS)
        self._views: list[_View] = []
        self._rest = Folded(intervals.NONE)
        if site_window is None or not site_window[0].frames.height:
            return
        twin = _Twin(*site_window, host_marks, on_cpu=on_cpu)
        self.sites = _site_of_causes(twin.events.filter(pl.col("thread").is_not_null()), twin.host)
        pauses = _pauses(trace, steps, host.crew[0]).join(twin.pauses, on=["name", "number"], how="inner", maintain_order="left")
        own = known.filter(pl.col("thread").is_null() | (pl.col("thread") == host.crew[0]))
        causes, view = _explained(pauses, own)
        self._views = [_View(twin, of_view) for of_view in causes]
        self._rest = Folded(intervals.subtract(intervals.of(pauses), intervals.of(own)))
        self._pairs = self._paired(pauses.with_columns(view=view))
        self.events = self._events(host.crew[0])

    def of_pieces(self, start: Ints, end: Ints) -> pl.DataFrame:
        """Return (evidence, site): the frame and the user's line that the site window shows at the place of [start, end), null for none.

        Of a piece that an event of the window itself explains: the line under which the same cause stood in the site window.
        """
        spans = self._pairs.select("start_ns", "end_ns").to_numpy().astype(np.int64)
        row = nulled(most_held(start, end, spans, np.arange(len(spans)))[0])
        known = rows_of(self._pairs, row)
        since = (pl.Series(self._rest.at(moment)) - known["from_ns"] for moment in (start, end))
        place = [(moment / pl.max_horizontal("rest_ns", 1)).clip(0, 1) * pl.col("twin_ns") for moment in map(pl.lit, since)]
        asked = known.select("view", "twin", first=place[0].cast(pl.Int64), last=place[1].cast(pl.Int64)).with_row_index("piece")
        told = pl.concat([pl.DataFrame(schema=_WORDS), *(view.words(rows) for view, rows in self._by_view(asked))])
        found: pl.DataFrame = asked.select("piece").join(told, on="piece", how="left", maintain_order="left").select("evidence", "site")
        return found

    def spans(self) -> intervals.Spans:
        """Return the pauses that the site window knows."""
        return intervals.of(self._pairs)

    def _by_view(self, rows: pl.DataFrame) -> list[tuple[_View, pl.DataFrame]]:
        return [(self._views[int(view)], found) for (view,), found in rows.drop_nulls("view").group_by("view", maintain_order=True)]

    def _paired(self, pauses: pl.DataFrame) -> pl.DataFrame:
        """Return the pauses with their place and length without what is explained; what is beyond LIKE twins is cut off."""
        first, last = (self._rest.at(pauses[name].to_numpy()) for name in ("start_ns", "end_ns"))
        pauses = pauses.with_columns(pl.Series("from_ns", first), pl.Series("rest_ns", last - first))
        told = [rows.join(view.twins, on="twin", how="left", maintain_order="left") for view, rows in self._by_view(pauses)]
        empty = pl.DataFrame(schema=_PAIRS)
        pairs = pl.concat([empty, *(rows.select(list(_PAIRS)) for rows in told)]).sort("start_ns")
        rest, most = pairs["rest_ns"].to_numpy(), LIKE * pairs["twin_ns"].to_numpy()
        reached = self._rest.moments(pairs["from_ns"].to_numpy() + most)
        cut = pl.Series("end_ns", np.where(rest > most, np.maximum(reached, pairs["start_ns"].to_numpy()), pairs["end_ns"].to_numpy()))
        return pairs.with_columns(cut, rest_ns=pl.min_horizontal("rest_ns", LIKE * pl.col("twin_ns")))

    def _events(self, main: int) -> pl.DataFrame:
        """Return the events that the twins show: what the window itself does not explain of each pause whose twin has a cause."""
        told = self._pairs.filter(pl.col("cause").is_in(CAUSES) & (pl.col("end_ns") > pl.col("start_ns")))
        cut = layered(told.select("start_ns", "end_ns").to_numpy().astype(np.int64), [self._rest.kept])
        left = cut.layer == 0
        parts: pl.DataFrame = told.select("cause", "evidence", "site")[cut.row[left]]
        parts = parts.with_columns(pl.Series("start_ns", cut.start[left]), pl.Series("end_ns", cut.end[left]))
        return parts.with_columns(thread=pl.lit(main, dtype=pl.Int64)).select(list(_EVENTS))


class _Twin:
    """The site window: its pauses (name, number, twin, start_ns, end_ns: the first of each name and number), its frames and events."""

    def __init__(self, other: Trace, steps: pl.DataFrame, host_marks: pl.DataFrame | None, *, on_cpu: bool) -> None:
        frames = own_frames(other)
        self.host = Host(other, frames)
        main = self.host.crew[0]
        events = host_events(other, frames, host_marks, on_cpu=on_cpu)
        self.events = events.filter(pl.col("thread").is_null() | (pl.col("thread") == main))
        pauses = _pauses(other, steps, main).unique(["name", "number"], keep="first", maintain_order=True).sort("start_ns")
        self.bounds = pauses.select("start_ns", "end_ns").to_numpy().astype(np.int64)
        self.pauses = pauses.select("name", "number", twin=pl.int_range(pl.len()))
        spans, leaves = self.host.leaves_of(main)
        user, codes = self.host.user[leaves], self.host.codes
        self.leaves = spans, codes(leaves)
        self.users = spans[user >= 0], codes(user[user >= 0])


class _View:
    """The pauses of the site window without what events of some causes hold of them."""

    def __init__(self, twin: _Twin, without: tuple[str, ...]) -> None:
        self._twin = twin
        taken = intervals.of(twin.events.filter(pl.col("cause").is_in(list(without))))
        self._taken, self._rest = Folded(taken), Folded(intervals.subtract(intervals.union(twin.bounds), taken))
        self._first, self._last = (self._rest.at(twin.bounds[:, column]) for column in (0, 1))
        self._leaves, self._users = self._rest.held(*twin.leaves), self._rest.held(*twin.users)
        self.twins = self._causes()
        """(twin, twin_ns, cause, evidence, site): the length of what is left; the cause that holds more than half, else idle_launch."""

    def words(self, asked: pl.DataFrame) -> pl.DataFrame:
        """Return (piece, evidence, site) of [first, last) of each twin; where that is nothing, the site of what was taken out of it."""
        twin = asked["twin"].to_numpy()
        first, last = (self._first[twin] + asked[name].to_numpy() for name in ("first", "last"))
        leaf, site = (most_held(first, last, *held)[0] for held in (self._leaves, self._users))
        begin, end = (self._taken.at(self._twin.bounds[twin, column]) for column in (0, 1))
        taken = most_held(begin, end, *self._taken.held(*self._twin.users))[0]
        found = asked.select("piece").with_columns(pl.Series("leaf", leaf), pl.Series("user", np.where(last > first, site, taken)))
        words = self._twin.host.words()
        found = found.join(words.select(leaf="code", evidence="told"), on="leaf", how="left", maintain_order="left")
        found = found.join(words.select(user="code", site="text"), on="user", how="left", maintain_order="left")
        return found.select([pl.col(name).cast(dtype) for name, dtype in _WORDS.items()])

    def _causes(self) -> pl.DataFrame:
        times = {name: pl.Series(self._rest.at(self._twin.events[name].to_numpy())) for name in ("start_ns", "end_ns")}
        cause, event = _held_causes(self._first, self._last, self._twin.events.with_columns(**times))
        twins = self._twin.pauses.select("twin", twin_ns=pl.Series(self._last - self._first))
        words = self.words(twins.select("twin", first=0, last="twin_ns").with_row_index("piece"))
        evidence, site = (pl.coalesce(self._twin.events[name].gather(event), words[name]) for name in ("evidence", "site"))
        # without a line of the user's a pause tells nothing that the ops around it do not
        told = pl.when(words["site"].is_not_null()).then(pl.lit(cause))
        return twins.with_columns(cause=told, evidence=evidence, site=site)


def _explained(pauses: pl.DataFrame, events: pl.DataFrame) -> tuple[list[tuple[str, ...]], pl.Series]:
    """Return the distinct sets of causes of `events` that meet a pause, and for each pause the number of its set."""
    start, end = pauses["start_ns"].to_numpy(), pauses["end_ns"].to_numpy()
    spans = [(cause, intervals.of(events.filter(pl.col("cause") == cause))) for cause in CAUSES]
    meets = [np.where(intervals.covered(held, start, end) > 0, 1 << bit, 0) for bit, (_, held) in enumerate(spans)]
    distinct, number = np.unique(np.sum(meets, axis=0, dtype=np.int64), return_inverse=True)
    causes = [tuple(cause for bit, cause in enumerate(CAUSES) if code >> bit & 1) for code in distinct.tolist()]
    return causes, pl.Series("view", number, dtype=pl.Int64)


def _pauses(trace: Trace, steps: pl.DataFrame, main: int) -> pl.DataFrame:
    """Return the pauses of thread `main` within steps: (name, number) of the outermost op before each, start_ns, end_ns."""
    ops = trace.ops.filter((pl.col("thread") == main) & pl.col("parent").is_null()).sort("start_ns", "id")
    ops = ops.with_columns(text("name"), following=pl.col("start_ns").shift(-1)).filter(pl.col("step").is_not_null())
    ops = ops.with_columns(pl.col("following").fill_null(pl.lit(steps["end_ns"].gather(ops["step"]))))
    ops = ops.with_columns(number=pl.int_range(pl.len()).over("step", "name"))
    pauses = ops.select("name", "number", start_ns="end_ns", end_ns="following")
    return pauses.filter(pl.col("end_ns") > pl.col("start_ns"))


def _held_causes(start: Ints, end: Ints, events: pl.DataFrame) -> tuple[pl.Series, pl.Series]:
    """Return for each [start, end) the cause that holds more than half of it (else idle_launch), and its longest event (else null)."""
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
    return causes, nulled(event)


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
