"""The questions of an agent, each a tool: its arguments with their words, and the document that answers it.

A description is the docstring: nothing of a recording reaches it. The documents are those of the commands.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from gpudiag.errors import InputError, UsageError, suggest_nearest
from gpudiag.report.answers import Part

if TYPE_CHECKING:
    from gpudiag.agents.desk import Desk
    from gpudiag.report.blocks import Document

Asked = TypeVar("Asked", bound=msgspec.Struct)
Natural = Annotated[int, Meta(ge=0)]
Short = Annotated[str, Meta(max_length=40)]
Path = Annotated[
    str, Meta(description="A recording as the tool recordings lists it: a bundle, a trace, or a folder with one trace a rank.")
]
Rank = Annotated[Natural | None, Meta(description="One rank of a job; without it all are compared, and the one of median pace is shown.")]
LowestRank = Annotated[Natural | None, Meta(description="One rank of a job; without it the lowest.")]
Window = Annotated[Natural | None, Meta(description="Window of a bundle; without it the first complete timing window.")]
Page = Annotated[int, Meta(ge=1, description="Page of the answer; each says how many there are.")]


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all questions take."""

    page: Page = 1

    def answer(self, desk: Desk) -> Document:
        """Return the answer. Raises GpudiagError where there is none."""
        raise TypeError(f"{type(self).__name__} answers nothing")


class Recordings(Question, frozen=True, kw_only=True):
    """List the recordings in the folder of this server, the newest first: what the other tools take as a path."""

    def answer(self, desk: Desk) -> Document:
        """Return path, kind, status, steps, device and program of each."""
        from gpudiag.report.blocks import Column, Document, Table, build_row, say_all
        from gpudiag.report.findings import hide_secrets

        rows = [
            build_row(
                one.name, one.kind, one.status, "" if one.steps is None else f"{one.steps:,}", one.device or "", str(one.ranks),
                hide_secrets(one.program), one.note,
            )
            for one in desk.list_entries()
        ]  # fmt: skip
        titles = (("path", "name"), ("kind", "text"), ("status", "text"), ("steps", "number"), ("device", "text"), ("ranks", "number"))
        columns = tuple(Column(title, kind) for title, kind in (*titles, ("program", "name"), ("note", "text")))  # type: ignore[arg-type]
        nothing = "" if rows else "No recording lies here. gpudiag run train.py makes one; torch.profiler's traces are read as they are."
        return Document("Recordings", nothing, leads=(Table(columns, tuple(rows)), *say_all([f"{len(rows)} in all, newest first."])))


class Report(Question, frozen=True, kw_only=True):
    """Start here: one page on how long a step takes and where it goes, what to change first and how much that can give at most, what is
    not known, and how sure the figures are. Other parts: the ranks and their straggler, all steps of the run (history), clocks and power
    (telemetry), data quality, what it was recorded with (environment), every rule with its reason."""

    path: Path
    part: Annotated[Part, Meta(description="brief: one page; whole: everything; else one section of the whole.")] = "brief"
    rank: Rank = None
    window: Window = None

    def answer(self, desk: Desk) -> Document:
        """Return the part that is asked for, or why there is none."""
        from gpudiag.report.answers import build_part

        report = desk.open_report(self.path, self.rank, self.window)
        return build_part(self.part, report.data, report.script)


class Findings(Question, frozen=True, kw_only=True):
    """List what costs time and what to change, the most important first: evidence, upper bound of the gain, confidence, lines of the
    program, and the command that measures a change. With an id all of one rule, also where it found nothing: passed, suppressed, or not
    applicable and what to record."""

    path: Path
    id: Annotated[Short | None, Meta(description="Id of one finding or rule, such as INP-01.")] = None
    rank: Rank = None
    window: Window = None

    def answer(self, desk: Desk) -> Document:
        """Return the findings, or the one rule."""
        from gpudiag.report.answers import build_findings_answer, build_rule_answer

        report = desk.open_report(self.path, self.rank, self.window)
        if self.id is None:
            return build_findings_answer(report.data, report.script)
        known = desk.find_rules()
        rule = known.get(self.id.upper())
        if rule is None:
            raise InputError(
                f"no rule is called {self.id!r}{suggest_nearest(self.id, known)}", "findings without an id lists what was found"
            )
        return build_rule_answer(report.data, rule.id, rule.file.title, rule.file.why, report.script)


class Ops(Question, frozen=True, kw_only=True):
    """List the ops by time: what bounds each, its share of roofline, achieved rates, and where its work comes from (cost: exact, derived,
    generic, none). Grouped by signature: with shapes, phase and the line that calls it."""

    path: Path
    group: Annotated[Literal["op", "signature", "module", "phase", "kernel"], Meta(description="What a row stands for.")] = "op"
    sort: Annotated[
        Literal["time", "calls", "flops", "bytes", "efficiency", "ai"],
        Meta(description="Largest first; efficiency: lowest first; ai: FLOP/byte."),
    ] = "time"
    name: Annotated[str, Meta(description="Only rows whose name holds this.", max_length=200)] = ""
    phase: Annotated[Short | None, Meta(description="Only ops of this phase: forward, backward, optimizer, data.")] = None
    bound: Annotated[
        Literal["compute", "memory", "overhead", "communication", "copy", "unknown"] | None, Meta(description="Only rows with this bound.")
    ] = None
    rank: Rank = None
    window: Window = None

    def answer(self, desk: Desk) -> Document:
        """Return the table of ops."""
        from gpudiag.report.answers import build_ops_answer, build_signatures_answer
        from gpudiag.report.op_table import build_op_table, select_ops

        report = desk.open_report(self.path, self.rank, self.window, modules=self.group == "module").data
        if (self.group, self.sort) == ("signature", "time"):
            return build_signatures_answer(report, select_ops(report, self.phase, self.bound), self.name)
        table = build_op_table(report, grouping=self.group, sorting=self.sort, phase=self.phase, bound=self.bound)
        return build_ops_answer(report, table, self.name)


class Idle(Question, frozen=True, kw_only=True):
    """Tell why the device was idle: each cause (data loading, host overhead, syncs, ...) with the lines of the program, the calls that
    synchronise, how far the host is ahead, and the critical path."""

    path: Path
    rank: Rank = None
    window: Window = None

    def answer(self, desk: Desk) -> Document:
        """Return the causes of idle time."""
        from gpudiag.report.answers import build_idle_answer

        return build_idle_answer(desk.open_report(self.path, self.rank, self.window).data)


class WhatIf(Question, frozen=True, kw_only=True):
    """Estimate the step with a cost changed or gone, by replay of its dependency graph: an upper bound, with the error of the replay.
    Without settings each of the standard ones alone. With a device: a prediction of the step there, with its measured error."""

    path: Path
    settings: Annotated[
        list[str], Meta(description="NAME=VALUE, applied together, such as launch=0, batch=2, roof=0.8, kernel:NAME=0.5.", max_length=20)
    ] = []
    device: Annotated[Short | None, Meta(description="Another device of the device table, such as H200 or a100-pcie-80gb.")] = None
    known: Annotated[bool, Meta(description="List what settings there are instead.")] = False
    rank: Rank = None

    def answer(self, desk: Desk) -> Document:
        """Return the what-ifs, or what can be asked."""
        from gpudiag.queries import list_what_ifs, whatif
        from gpudiag.report.query_result import build_rows_document

        if self.known:
            return build_rows_document(list_what_ifs(), name="gpudiag whatif: settings")
        place, rank = desk.find(self.path), desk.choose_rank(self.path, self.rank)
        found = whatif(place, self.settings, device=self.device, rank=rank)
        above = (place, *([] if rank is None else [f"rank {rank}"]))
        return msgspec.structs.replace(found.build_document(), above=above)


class Compare(Question, frozen=True, kw_only=True):
    """Tell what changed from recording a to recording b: the step with its interval, its parts, the ops that became faster, slower, new or
    gone beside their variance, and the findings that came and went."""

    a: Path
    b: Path
    rank: LowestRank = None

    def answer(self, desk: Desk) -> Document:
        """Return the comparison."""
        from gpudiag.comparison.recordings import compare
        from gpudiag.report.comparison import build_comparison

        found = compare(desk.find(self.a), desk.find(self.b), rank=self.rank, config=desk.config)
        return build_comparison(found.data, _MOST_CHANGES)


class Memory(Question, frozen=True, kw_only=True):
    """Tell what used the memory at its peak: by category, call site, module and op, and what the allocator held beyond that."""

    path: Path
    rank: LowestRank = None
    device: Annotated[Natural | None, Meta(description="Index of the GPU; without it the one with most in use.")] = None

    def answer(self, desk: Desk) -> Document:
        """Return the memory at its peak."""
        from gpudiag.memory_report import memory
        from gpudiag.report.memory import build_memory_document

        place = desk.find(self.path)
        found = memory(place, rank=self.rank, device=self.device)
        return msgspec.structs.replace(build_memory_document(found.memory, _MOST_PLACES), above=(place,))


class Sql(Question, frozen=True, kw_only=True):
    """Query the tables of a recording (ops, kernels, steps, idle, syncs, launches, ...) with one SELECT; without a query list the tables,
    or the columns of one table. Units stand in the names of columns: _ns, _bytes, _share."""

    path: Path
    query: Annotated[str, Meta(description="Such as: select name, sum(busy_ns) as ns from kernels group by name.", max_length=4_000)] = ""
    table: Annotated[str, Meta(description="Without a query: this table's columns, with unit and meaning.", max_length=40)] = ""
    rank: Rank = None
    window: Window = None

    def answer(self, desk: Desk) -> Document:
        """Return rows, tables or columns."""
        from gpudiag.queries import list_columns, run_query
        from gpudiag.report.blocks import Document, Paragraph, Topics
        from gpudiag.report.query_result import build_rows_document, join_columns

        if self.query:
            rank = desk.choose_rank(self.path, self.rank)
            found = run_query(desk.find(self.path), self.query, rank=rank, window=self.window)
            return build_rows_document(found, _MOST_ROWS, "limit, where and group by ask for fewer", "name")
        columns = list_columns()
        if not self.table:
            rows = tuple((table, names) for table, names in join_columns(columns).iter_rows())
            more = Paragraph("Columns with unit and meaning: table=NAME.")
            return Document("gpudiag sql: tables and their columns", "", leads=(Topics(rows, code=tuple(name for name, _ in rows)), more))
        chosen = columns.filter(columns["table"] == self.table)
        if chosen.is_empty():
            nearest = suggest_nearest(self.table, columns["table"].unique())
            raise InputError(f"no table is called {self.table!r}{nearest}", "sql without a query lists them")
        return build_rows_document(chosen.drop("table"), _MOST_ROWS, texts="name")


class Experiments(Question, frozen=True, kw_only=True):
    """Tell what the A/B experiments in a bundle have measured: verdicts, throughput with its interval, parity of the training, recipe."""

    path: Path

    def answer(self, desk: Desk) -> Document:
        """Return the last results, and of how many."""
        from gpudiag.report.blocks import DOCUMENT
        from gpudiag.report.experiment.results import read_results
        from gpudiag.report.experiment.summary import build_experiments_document
        from gpudiag.report.findings import hide_secrets

        place = desk.find(self.path)
        found, _ = read_results(desk.root / place)
        if not found:
            raise InputError(f"{place} holds no results of experiments", f"gpudiag ab -o {shlex.quote(place)} keeps them there")
        last = found[-1]
        if last.baseline is not None:
            command = shlex.split(hide_secrets(shlex.join(last.baseline.command)))
            last = msgspec.structs.replace(last, baseline=msgspec.structs.replace(last.baseline, command=tuple(command)))
        return build_experiments_document(last, DOCUMENT, place)


QUESTIONS: tuple[type[Question], ...] = (Recordings, Report, Findings, Ops, Idle, WhatIf, Compare, Memory, Sql, Experiments)
_MOST_CHANGES, _MOST_PLACES, _MOST_ROWS = 40, 10, 400


def name_tool(kind: type[msgspec.Struct]) -> str:
    """Return what the tool of a question is called."""
    return kind.__name__.lower()


def describe_tool(kind: type[msgspec.Struct]) -> str:
    """Return what a tool does, as an agent reads it."""
    return " ".join((kind.__doc__ or "").split())


def build_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema of the arguments of a tool."""
    _, parts = msgspec.json.schema_components([kind])
    schema: dict[str, Any] = parts[kind.__name__]
    schema.pop("description", None)  # the tool has it
    return schema


def read_arguments(kind: type[Asked], arguments: dict[str, Any]) -> Asked:
    """Return the arguments of a tool. Raises UsageError in one line for some that are missing, unknown or wrong."""
    try:
        return msgspec.convert(arguments, kind)
    except msgspec.ValidationError as error:
        said = str(error).replace("Object ", "the call ").replace(" - at `$.", ", in `")
        raise UsageError(f"{name_tool(kind)}: {said[:1].lower()}{said[1:]}", f"it takes {', '.join(kind.__struct_fields__)}") from None


def read_question(tool: str, arguments: dict[str, Any]) -> Question:
    """Return the question that `arguments` of `tool` ask. Raises UsageError in one line for a tool or arguments that do not exist."""
    known = {name_tool(kind): kind for kind in QUESTIONS}
    if tool not in known:
        raise UsageError(f"no tool is called {tool[:100]!r}{suggest_nearest(tool[:100], known)}", f"tools: {', '.join(known)}")
    return read_arguments(known[tool], arguments)
