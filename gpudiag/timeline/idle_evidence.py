"""The evidence of the idle table: thread, op and call site that held most of each piece, from its own window or from a site window."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.attribution import intervals
from gpudiag.attribution.call_sites import Sites
from gpudiag.attribution.intervals import FoldedTime, cut_by_layer, find_most_held, find_outermost, select_rows
from gpudiag.attribution.names import decode_column, decode_names, match_column
from gpudiag.attribution.nesting import find_innermost, nest, null_missing
from gpudiag.model import trace as trace_module
from gpudiag.model.notices import NoticeCode
from gpudiag.model.trace import Trace
from gpudiag.timeline.host_events import CODED, EVENT_CAUSES, EVENT_SCHEMA, find_host_events, find_own_frames, format_ms
from gpudiag.timeline.host_threads import NOBODY, HostActivity
from gpudiag.trace import kernel_names
from gpudiag.trace.table_store import release_memory

_PAIRS = {
    "start_ns": pl.Int64(), "end_ns": pl.Int64(), "from_ns": pl.Int64(), "rest_ns": pl.Int64(), "view": pl.Int64(), "twin": pl.Int64(),
    "twin_ns": pl.Int64(), "cause": pl.String(), "evidence": pl.String(), "site": pl.String(), **dict.fromkeys(CODED, pl.String()),
}  # fmt: skip
_PAUSE_WORDS = {"piece": pl.UInt32(), "evidence": pl.String(), "site": pl.String()}

MOST_STRETCH = 4
"""A twin in the site window explains a pause up to this many times its own length (other programs on the machine stretch pauses; stacks
make the twin longer, not shorter). What is beyond it the site window does not show."""


class SiteWindowPauses:
    """The pauses of the main thread, each named by the op before it: the n-th call of its name in its step, in both windows.

    `known`: the events of the window itself. What they hold of a pause is taken out of it, and what the same causes hold of its twin is
    taken out there; so a loader's frames do not name what the loop did before or after it. The rest is matched by the place within it.
    """

    def __init__(
        self, trace: Trace, steps: pl.DataFrame, site_window: tuple[Trace, pl.DataFrame] | None, host: HostActivity, known: pl.DataFrame,
        host_marks: pl.DataFrame | None, *, on_cpu: bool,
    ) -> None:  # fmt: skip
        self.events = pl.DataFrame(schema=EVENT_SCHEMA)
        self.sites: dict[str, str] = {}
        """Cause, alone and with the line that an event notes -> the user's line that holds most of that time in the site window."""
        self.pairs = pl.DataFrame(schema=_PAIRS)
        self._views: list[_PauseView] = []
        self._rest = FoldedTime(intervals.NO_SPANS)
        if site_window is None or not site_window[0].frames.height:
            return
        twin = _SiteWindow(*site_window, host_marks, on_cpu=on_cpu)
        first, last = twin.leaves[0][:1, 0].sum(), twin.leaves[0][-1:, 1].sum()  # marks of the whole run are there; frames are not
        events = twin.events.filter(pl.col("thread").is_not_null() & (pl.col("start_ns") >= first) & (pl.col("end_ns") <= last))
        keys = (pl.col("cause"), pl.format("{} {}", "cause", "site"))
        events = pl.concat([events.with_columns(key=key) for key in keys]).drop_nulls("key")
        names = twin.host.words()
        found = {}
        for (key,), rows in events.sort("key").group_by("key", maintain_order=True):
            spans = intervals.build_spans(rows)
            site = pl.Series("code", twin.host.held_frames(twin.host.crew[0], spans[:, 0], spans[:, 1])[1])
            held = pl.DataFrame({"code": site, "time": spans[:, 1] - spans[:, 0]}).group_by("code").agg(pl.col("time").sum())
            named = held.join(names, on="code", how="inner").sort("time", "code")
            if named.height:
                found[str(key)] = str(named["text"][-1])
        self.sites = found
        pauses = _find_pauses(trace, steps, host.crew[0]).join(twin.pauses, on=["name", "number"], how="inner", maintain_order="left")
        own = known.filter(pl.col("thread").is_null() | (pl.col("thread") == host.crew[0]))
        # A view for each distinct set of causes of `own` that meet a pause
        start, end = pauses["start_ns"].to_numpy(), pauses["end_ns"].to_numpy()
        of_cause = [intervals.build_spans(own.filter(pl.col("cause") == cause)) for cause in EVENT_CAUSES]
        meets = [np.where(intervals.measure_covered(spans, start, end) > 0, 1 << bit, 0) for bit, spans in enumerate(of_cause)]
        distinct, number = np.unique(np.sum(meets, axis=0, dtype=np.int64), return_inverse=True)
        sets = (tuple(cause for bit, cause in enumerate(EVENT_CAUSES) if code >> bit & 1) for code in distinct.tolist())
        self._views, view = [_PauseView(twin, causes) for causes in sets], pl.Series("view", number, dtype=pl.Int64)
        self._rest = FoldedTime(intervals.subtract_spans(intervals.build_spans(pauses), intervals.build_spans(own)))
        self.pairs = self._match_twins(pauses.with_columns(view=view))
        # The events that the twins show: what the window itself does not explain of each pause whose twin has a cause
        told = self.pairs.filter(pl.col("cause").is_in(EVENT_CAUSES) & (pl.col("end_ns") > pl.col("start_ns")))
        cut = cut_by_layer(told.select("start_ns", "end_ns").to_numpy().astype(np.int64), [self._rest.kept])
        left = cut.layer == 0
        parts = told.select("cause", "evidence", "site", *CODED)[cut.row[left]]
        parts = parts.with_columns(pl.Series("start_ns", cut.start[left]), pl.Series("end_ns", cut.end[left]))
        self.events = parts.with_columns(thread=pl.lit(host.crew[0], dtype=pl.Int64)).select(list(EVENT_SCHEMA))

    def of_pieces(self, start: Ints, end: Ints) -> pl.DataFrame:
        """Return (evidence, site): the frame and the user's line that the site window shows at the place of [start, end), null for none.

        Of a piece that an event of the window itself explains: the line under which the same cause stood in the site window.
        """
        spans = self.pairs.select("start_ns", "end_ns").to_numpy().astype(np.int64)
        row = null_missing(find_most_held(start, end, spans, np.arange(len(spans)))[0])
        known = select_rows(self.pairs, row)
        since = (pl.Series(self._rest.fold(moment)) - known["from_ns"] for moment in (start, end))
        place = [(moment / pl.max_horizontal("rest_ns", 1)).clip(0, 1) * pl.col("twin_ns") for moment in map(pl.lit, since)]
        asked = known.select("view", "twin", first=place[0].cast(pl.Int64), last=place[1].cast(pl.Int64)).with_row_index("piece")
        told = pl.concat([pl.DataFrame(schema=_PAUSE_WORDS), *(view.words(rows) for view, rows in self._by_view(asked))])
        found: pl.DataFrame = asked.select("piece").join(told, on="piece", how="left", maintain_order="left").select("evidence", "site")
        return found

    def _by_view(self, rows: pl.DataFrame) -> list[tuple[_PauseView, pl.DataFrame]]:
        return [(self._views[int(view)], found) for (view,), found in rows.drop_nulls("view").group_by("view", maintain_order=True)]

    def _match_twins(self, pauses: pl.DataFrame) -> pl.DataFrame:
        """Return the pauses with their place and length without what is explained; what is beyond MOST_STRETCH twins is cut off."""
        first, last = (self._rest.fold(pauses[name].to_numpy()) for name in ("start_ns", "end_ns"))
        pauses = pauses.with_columns(pl.Series("from_ns", first), pl.Series("rest_ns", last - first))
        told = [rows.join(view.twins, on="twin", how="left", maintain_order="left") for view, rows in self._by_view(pauses)]
        empty = pl.DataFrame(schema=_PAIRS)
        pairs = pl.concat([empty, *(rows.select(list(_PAIRS)) for rows in told)]).sort("start_ns")
        rest, most = pairs["rest_ns"].to_numpy(), MOST_STRETCH * pairs["twin_ns"].to_numpy()
        reached = self._rest.unfold(pairs["from_ns"].to_numpy() + most)
        cut = pl.Series("end_ns", np.where(rest > most, np.maximum(reached, pairs["start_ns"].to_numpy()), pairs["end_ns"].to_numpy()))
        return pairs.with_columns(cut, rest_ns=pl.min_horizontal("rest_ns", MOST_STRETCH * pl.col("twin_ns")))


class _SiteWindow:
    """The site window: its pauses (name, number, twin, start_ns, end_ns: the first of each name and number), its frames and events."""

    def __init__(self, other: Trace, steps: pl.DataFrame, host_marks: pl.DataFrame | None, *, on_cpu: bool) -> None:
        frames = find_own_frames(other)
        events = find_host_events(other, frames, host_marks, on_cpu=on_cpu)
        self.host = HostActivity(other, frames)
        main = self.host.crew[0]
        self.events = events.filter(pl.col("thread").is_null() | (pl.col("thread") == main))
        pauses = _find_pauses(other, steps, main).unique(["name", "number"], keep="first", maintain_order=True).sort("start_ns")
        self.bounds = pauses.select("start_ns", "end_ns").to_numpy().astype(np.int64)
        self.pauses = pauses.select("name", "number", twin=pl.int_range(pl.len()))
        spans, leaves = self.host.leaves[main]
        user, codes = self.host.user[leaves], self.host.codes
        self.leaves = spans, codes(leaves)
        self.users = spans[user >= 0], codes(user[user >= 0])


class _PauseView:
    """The pauses of the site window without what events of some causes hold of them."""

    def __init__(self, twin: _SiteWindow, without: tuple[str, ...]) -> None:
        self._twin = twin
        taken = intervals.build_spans(twin.events.filter(pl.col("cause").is_in(list(without))))
        self._taken, self._rest = FoldedTime(taken), FoldedTime(intervals.subtract_spans(intervals.merge_spans(twin.bounds), taken))
        self._first, self._last = (self._rest.fold(twin.bounds[:, column]) for column in (0, 1))
        self._leaves, self._users = self._rest.fold_spans(*twin.leaves), self._rest.fold_spans(*twin.users)
        times = {name: pl.Series(self._rest.fold(twin.events[name].to_numpy())) for name in ("start_ns", "end_ns")}
        # The cause that holds more than half of each pause (else idle_launch), and its longest event
        events = twin.events.with_columns(**times).with_row_index("row")
        of_cause = [events.filter(pl.col("cause") == cause) for cause in EVENT_CAUSES]
        spans = np.stack((self._first, self._last), axis=1).astype(np.int64)
        cut = cut_by_layer(spans, [intervals.build_spans(rows) for rows in of_cause])
        layer, held = find_most_held(self._first, self._last, np.stack((cut.start, cut.end), axis=1), cut.layer)
        layer = np.where((layer < len(EVENT_CAUSES)) & (2 * held > self._last - self._first), layer, -1)
        longest = np.full(len(layer), -1, dtype=np.int64)
        for index, rows in enumerate(of_cause):
            chosen = layer == index
            outer, numbers = find_outermost(rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy())
            keys = rows["row"].to_numpy().astype(np.int64)[numbers]
            longest[chosen] = find_most_held(self._first[chosen], self._last[chosen], outer, keys)[0]
        cause = pl.Series([*EVENT_CAUSES, "idle_launch"]).gather(pl.Series(layer % (len(EVENT_CAUSES) + 1)))
        event = null_missing(longest)
        twins = twin.pauses.select("twin", twin_ns=pl.Series(self._last - self._first))
        words = self.words(twins.select("twin", first=0, last="twin_ns").with_row_index("piece"))
        evidence, site = (pl.coalesce(twin.events[name].gather(event), words[name]) for name in ("evidence", "site"))
        coded = {name: twin.events[name].gather(event) for name in CODED}
        # without a line of the user's a pause tells nothing that the ops around it do not
        told = pl.when(words["site"].is_not_null()).then(pl.lit(cause))
        self.twins = twins.with_columns(cause=told, evidence=evidence, site=site, **coded)
        """(twin, twin_ns, cause, evidence, site): the length of what is left; the cause that holds more than half, else idle_launch."""

    def words(self, asked: pl.DataFrame) -> pl.DataFrame:
        """Return (piece, evidence, site) of [first, last) of each twin; where that is nothing, the site of what was taken out of it."""
        twin = asked["twin"].to_numpy()
        first, last = (self._first[twin] + asked[name].to_numpy() for name in ("first", "last"))
        leaf, site = (find_most_held(first, last, *held)[0] for held in (self._leaves, self._users))
        begin, end = (self._taken.fold(self._twin.bounds[twin, column]) for column in (0, 1))
        taken = find_most_held(begin, end, *self._taken.fold_spans(*self._twin.users))[0]
        found = asked.select("piece").with_columns(pl.Series("leaf", leaf), pl.Series("user", np.where(last > first, site, taken)))
        words = self._twin.host.words()
        found = found.join(words.select(leaf="code", evidence="told"), on="leaf", how="left", maintain_order="left")
        found = found.join(words.select(user="code", site="text"), on="user", how="left", maintain_order="left")
        return found.select([pl.col(name).cast(dtype) for name, dtype in _PAUSE_WORDS.items()])


def _find_pauses(trace: Trace, steps: pl.DataFrame, main: int) -> pl.DataFrame:
    """Return the pauses of thread `main` within steps: (name, number) of the outermost op before each, start_ns, end_ns."""
    ops = trace.ops.filter((pl.col("thread") == main) & pl.col("parent").is_null()).sort("start_ns", "id")
    ops = ops.with_columns(decode_column("name"), following=pl.col("start_ns").shift(-1)).filter(pl.col("step").is_not_null())
    ops = ops.with_columns(pl.col("following").fill_null(pl.lit(steps["end_ns"].gather(ops["step"]))))
    ops = ops.with_columns(number=pl.int_range(pl.len()).over("step", "name"))
    pauses = ops.select("name", "number", start_ns="end_ns", end_ns="following")
    return pauses.filter(pl.col("end_ns") > pl.col("start_ns"))


LONG_CALL_NS = 1_000_000
"""A launch call of more than this is itself what is told of a piece: launches cost some microseconds."""

HOST_CAUSES = ("idle_launch", *EVENT_CAUSES)


def label_pieces(
    pieces: pl.DataFrame,
    bounds: pl.DataFrame,
    trace: Trace,
    host: HostActivity,
    events: pl.DataFrame,
    carried: SiteWindowPauses,
    syncs: pl.DataFrame | None,
    sites: Sites | None,
) -> pl.DataFrame:
    """Return the `idle` table of `pieces` (in time order)."""
    known = bounds.unique("gap", keep="first").select("gap", "kind", "kernel", "op", pl.col("end_ns").alias("begins_ns"))
    # of a CPU the op itself ends the gap
    ops = trace.ops.filter(pl.col("parent").is_null() & (pl.col("thread") == host.crew[0]))
    ops = ops.select(following="id", begins_ns="start_ns").unique("begins_ns", keep="first", maintain_order=True)
    known = known.join(ops, on="begins_ns", how="left").select("gap", "kind", "kernel", gap_op=pl.coalesce("op", "following"))
    frame = pieces.join(known, on="gap", how="left", maintain_order="left")
    held = _find_holders(frame, host)
    release_memory()  # what held most is the largest question
    rows = frame["event"]
    coded = {"event_code": "evidence_code", "event_name": "evidence_name", "event_detail": "evidence_detail"}
    charged = (
        select_rows(events.select(event_words="evidence", event_site="site", event_thread="thread", **coded), rows),
        _label_from_syncs(frame["sync"], syncs, trace),
    )
    # The innermost of the user's ranges around each piece
    thread = np.where(np.isin(frame["lead"].to_numpy(), [*host.crew, NOBODY]), host.crew[0], frame["lead"].to_numpy())
    inner = null_missing(find_innermost(nest(host.ranges), thread, frame["start_ns"].to_numpy()))
    ranges = select_rows(host.ranges.select(range_name=decode_column("name").str.slice(0, 60)), inner)
    frame = pl.concat([frame, held, *charged, ranges, _label_from_calls(frame, trace)], how="horizontal")
    del held, charged, ranges
    release_memory()  # the words that follow need the memory
    # What the site window shows of the pieces in which no op was open
    told = carried.of_pieces(frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy())
    told = told.with_columns(pl.when(pl.lit(frame["held_op"].is_null())).then(pl.all()))
    told = told.select(pause_words=pl.format("{} (by the site window)", "evidence"), pause_name="evidence", pause_site="site")
    frame = pl.concat([frame, told], how="horizontal").with_columns(
        op=pl.coalesce("held_op", "gap_op"), own=pl.col("evidence").is_null(), on_host=pl.col("cause").is_in(HOST_CAUSES)
    )
    site_of_op = pl.lit(None, dtype=pl.String) if sites is None else pl.lit(sites.site.gather(frame["op"]))
    keys = (pl.format("{} {}", "cause", "event_site"), pl.col("cause"))
    within, of_cause = (key.replace_strict(carried.sites, default=None, return_dtype=pl.String) for key in keys)
    found = pl.coalesce(within, "event_site", "sync_site", "frame_site", "pause_site", of_cause, site_of_op)
    lead = pl.when(pl.col("lead") == NOBODY).then(None).otherwise("lead")
    frame = frame.with_columns(
        id=pl.int_range(frame.height, dtype=pl.Int64),
        site=pl.when("on_host").then(found),
        thread=pl.when("on_host").then(pl.coalesce("event_thread", "held_thread", lead)),
        **_build_evidence(trace, frame),
    )
    return frame.select([pl.col(name).cast(dtype) for name, dtype in trace_module.build_table_schema("idle").items()])


def _build_evidence(trace: Trace, frame: pl.DataFrame) -> dict[str, pl.Expr]:
    """Return the evidence of each piece, null for unexplained, and CODED, by the same order as the words are taken."""
    held, following = (pl.lit(decode_names(trace.ops["name"].gather(frame[column]))) for column in ("held_op", "gap_op"))
    launch = pl.coalesce(
        "call_words",
        "frame_words",
        "pause_words",
        pl.format("in {}", held),
        pl.format("between ops in range {}", "range_name"),
        pl.format("between ops, before {}", following),
        pl.lit("between ops"),
    )
    launching, explained = pl.col("cause") == "idle_launch", pl.col("cause") != "idle_unexplained"
    others = pl.coalesce("evidence", "event_words", "sync_words")
    called = pl.col("call_words").is_not_null()
    paused = pl.col("pause_words").is_not_null() & pl.col("frame_words").is_null()
    waited = pl.col("event_words").is_null() & pl.col("sync_words").is_not_null()
    slow, of_pause = pl.lit(NoticeCode.LAUNCH_CALL_SLOW.value), pl.lit(NoticeCode.OF_SITE_WINDOW.value)
    of_launch = {
        "evidence_code": pl.when(called).then(slow).when(paused).then(of_pause),
        "evidence_name": pl.when(~called & paused).then("pause_name"),
        "evidence_detail": pl.when(called).then("call_took"),
    }
    of_others = {
        "evidence_code": pl.when(waited).then(pl.lit(NoticeCode.CALL_WAITED.value)).otherwise("event_code"),
        "evidence_name": pl.when(waited).then("sync_kernel").otherwise("event_name"),
        "evidence_detail": pl.when(waited).then("sync_api").otherwise("event_detail"),
    }
    codes = {name: pl.when(launching).then(of_launch[name]).when(explained & pl.col("own")).then(of_others[name]) for name in CODED}
    return {"evidence": pl.when(explained).then(pl.when(launching).then(launch).otherwise(others)), **codes}


def _label_from_syncs(rows: pl.Series, syncs: pl.DataFrame | None, trace: Trace) -> pl.DataFrame:
    """Return (sync_words, sync_api, sync_kernel, sync_site) of the calls that are charged."""
    if syncs is None or not syncs.height:
        empty = pl.repeat(None, len(rows), dtype=pl.String, eager=True)
        return pl.DataFrame(dict.fromkeys(("sync_words", "sync_api", "sync_kernel", "sync_site"), empty))
    order = syncs.sort("id")
    name = decode_names(trace.kernels["name"]).gather(order["kernel"]).str.slice(0, 60)
    words = order.select(
        sync_words=pl.format("{} waited for {}", "api", pl.lit(name)),
        sync_api=pl.col("api").cast(pl.String),
        sync_kernel=pl.lit(name),
        sync_site="site",
    )
    found = np.searchsorted(order["id"].to_numpy(), rows.fill_null(-1).to_numpy())
    return select_rows(words, null_missing(np.where(rows.is_null().to_numpy(), -1, found)))


def _label_from_calls(frame: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """Return (call_words, call_took): of pieces that lie for the most part in one long launch call of the responsible thread."""
    long = (pl.col("end_ns") - pl.col("start_ns") > LONG_CALL_NS) & match_column("api", kernel_names.KERNEL_LAUNCH)
    calls = trace.launches.filter(long).select(
        "start_ns", "end_ns", "thread", words=pl.format("the launch call itself took {}", format_ms()), took=format_ms()
    )
    spans, rows = find_outermost(calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy())
    start, end = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
    call, held = find_most_held(start, end, spans, rows)
    found = select_rows(
        calls.select("thread", call_words="words", call_took="took"),
        pl.Series(np.where(2 * held > end - start, call, -1)).replace(-1, None),
    )
    return found.select(pl.when(pl.col("thread") == pl.lit(frame["lead"])).then(name).alias(name) for name in ("call_words", "call_took"))


def _find_holders(frame: pl.DataFrame, host: HostActivity) -> pl.DataFrame:
    """Return (held_op, held_thread, frame_words, frame_site): what held most of each piece among the threads that are responsible."""
    start, end, lead = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy(), frame["lead"].to_numpy()
    op, thread, leaf, site = (np.full(frame.height, -1, dtype=np.int64) for _ in range(4))
    held = np.zeros(frame.height, dtype=np.int64)
    shared = np.isin(lead, [*host.crew, NOBODY])
    for number in dict.fromkeys((*host.crew, *np.unique(lead[~shared]).tolist())):
        rows = np.flatnonzero(shared if number in host.crew else lead == number)
        found, time = find_most_held(start[rows], end[rows], *host.ops[number])
        better = (found >= 0) & (time > held[rows])
        op[rows[better]], held[rows[better]], thread[rows[better]] = found[better], time[better], number
        frames = host.held_frames(number, start[rows], end[rows])
        new = (leaf[rows] < 0) | better
        leaf[rows[new]], site[rows[new]] = frames[0][new], frames[1][new]
    host.forget()  # the words that follow need the memory
    words = host.words()
    asked = pl.DataFrame({"leaf": leaf, "user": site})
    asked = asked.join(words.select(leaf="code", frame_words="told"), on="leaf", how="left", maintain_order="left")
    asked = asked.join(words.select(user="code", frame_site="text"), on="user", how="left", maintain_order="left")
    nulled = [pl.Series(name, rows).replace(-1, None) for name, rows in (("held_op", op), ("held_thread", thread))]
    return asked.select("frame_words", "frame_site").with_columns(nulled)
