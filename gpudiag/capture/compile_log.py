"""What torch.compile did in this process, from what torch itself remembers of it: compilations, failed guards, graph breaks.

The same facts stand in the log that TORCH_TRACE writes (torch/_logging, read by tlparse). That log also holds every graph and all generated
code, which torch formats while it compiles, and the program's source; here nothing is switched on, nothing is written before the loop
ends, and no line of the source is read. `torch._dynamo.utils` has the records: CompilationMetrics (fields by version: a failed guard since
torch 2.7, the id of the compilation since 2.6) and GraphCompileReason. What a version does not have stays unknown.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from gpudiag.bundle.layout import compile_log_name
from gpudiag.capture.hooks import Context, Hooks
from gpudiag.capture.schedule import WindowKind
from gpudiag.model.compilation import BreakKind, CodePlace, Compilation, CompileLog, FailedGuard, GraphBreak, GuardKind

MOST_COMPILATIONS, MOST_BREAKS, MOST_FRAMES, LONGEST = 500, 500, 8, 300
"""What is kept of a run: compilations (torch remembers 64 unless it is told otherwise), breaks, frames of each, characters of a text."""

_HOME = "torch._dynamo.utils"

_BREAKS: dict[BreakKind, str] = {
    "asked": r"graph_break\(\)",
    "branch": r"(?i)data.dependent (branching|jump|assert)|generic_jump",
    "number": r"(?i)\.item\(\)|\.tolist\(\)|data.dependent|tensor\.item|scalar",
    "call": r"(?i)skip|builtin|call_function|disallowed|forbidden|disabled?\b|not.traceable|C/C\+\+|untraceable",
}
"""Words of torch's reasons (torch/_dynamo/graph_break_registry.json; before 2.7 the names of its variables)."""

_RESUMED = re.compile(r"torch_dynamo_resume_in_(.{1,200})_at_(\d{1,9})", re.DOTALL)
"""Name of the rest of a function after a graph break (torch/_dynamo/resume_execution.py)."""

_PLAIN_REASON = re.compile(r"(?:[\w .,:;/=+*<>-]|\(\w*\)|`[\w.()]*`)+")
"""How far the first line of a reason says nothing but names: older versions of torch go on with the arguments of a call."""

_SOURCE_LINE = re.compile(r"#[^#\n]*?\s([^\s#]{1,400}):(\d{1,9}) in (\S{1,200})")
"""Where a guard says which line of the program made it: `x == 1  # y = x * 2  # app/train.py:12 in forward`."""

_STACK_LINE = re.compile(r'File "([^"\n]{1,400})", line (\d{1,9}), in (\S{1,200})')
"""The same in the frames below a reason, with the whole path."""

_TENSOR = re.compile(
    r"tensor '(.{0,300}?)' (size|stride|rank|dtype|requires_grad|device index|dispatch key set) mismatch[^.]{0,40}\.? ?(.*)", re.DOTALL
)
"""torch/csrc/dynamo/guards.cpp: tensor 'x' size mismatch at index 0. expected 8, actual 9."""
_SAID = re.compile(r"[Ee]xpected ([^,]{1,100}?)(?:,| but got| and got) (?:actual |got )?([^,]{1,100})")
_COMPARED = re.compile(r"(.{1,300}?) (?:==|is|<=|>=|<|>|!=) (.{1,100})", re.DOTALL)
_CHECKED = re.compile(r"_+(check_[a-z_]+|dict_[a-z_]+|key_to_id|tuple_iterator_[a-z]+)\(([^,()]{1,300})[,)]")
_VALUE = re.compile(
    r"-?\d{1,19}(?:\.\d{1,19})?(?:e[+-]?\d{1,4})?|True|False|None|(?:torch|c10)(?:\.|::)?[A-Za-z]\w{0,30}|Float|Double|Half|BFloat16|Int|Long|Bool"
)
_NAME = re.compile(r"[\w.\[\]'\"()*+ /-]{1,200}")

_KINDS: dict[str, GuardKind] = {
    "size": "size", "stride": "stride", "rank": "rank", "dtype": "dtype", "requires_grad": "requires_grad", "device index": "device",
    "dispatch key set": "type", "check_obj_id": "identity", "check_type_id": "type",
}  # fmt: skip
_MARKS: tuple[tuple[str, GuardKind], ...] = (
    ("BACKEND_MATCH", "backend"), ("GLOBAL_STATE", "mode"), ("grad_mode", "mode"), ("torch_function", "mode"),
    ("Duplicate tensor", "aliasing"), (".size()", "size"), (".stride()", "stride"),
)  # fmt: skip


def read_failed_guard(text: str) -> FailedGuard | None:
    """Return what a reason to compile again says ('0/0: tensor 'x' size mismatch at index 0. expected 8, actual 9'); None: it says nothing.

    Values that are no numbers, truth values or names of torch are left out: they are the program's.
    """
    text = text[:2_000]
    body = text.partition(": ")[2] or text
    if not body or body.startswith("Unable to find"):
        return None
    line = next(reversed(list(_STACK_LINE.finditer(body))), None) or _SOURCE_LINE.search(body)
    place = None if line is None else _name_original(CodePlace(_cut(line[1]), int(line[2]), _cut(line[3].rstrip("("))))
    asked = re.split(r"\s{2,}#|\nUser stack", body, maxsplit=1)[0].strip()
    if tensor := _TENSOR.match(asked):
        values = _SAID.search(tensor[3])
        pair = (values[1], values[2]) if values else ("", "")
        return FailedGuard(
            kind=_KINDS[tensor[2]], name=_keep_name(tensor[1]), expected=_keep_value(pair[0]), actual=_keep_value(pair[1]), place=place
        )
    if checked := _CHECKED.match(asked):
        return FailedGuard(kind=_KINDS.get(checked[1], "other"), name=_keep_name(checked[2]), place=place)
    mark = next((kind for words, kind in _MARKS if words in asked), None)
    compared = _COMPARED.fullmatch(asked)
    if compared and mark in (None, "size", "stride"):
        name, expected = _keep_name(compared[1]), _keep_value(compared[2])
        return FailedGuard(kind=mark or ("value" if name else "other"), name=name, expected=expected if name else "", place=place)
    return FailedGuard(kind=mark or "other", place=place)


def _keep_value(text: str) -> str:
    text = text.strip().removesuffix(".").rpartition("=")[2]
    return text if _VALUE.fullmatch(text) else ""


def _keep_name(text: str) -> str:
    """Return the expression that names something in the program; '' for what holds more than names, numbers and keys of mappings."""
    text = text.strip()
    if text.startswith("___stack"):  # a value that was held across a graph break
        return ""
    quoted = re.sub(r"\[['\"]\w{1,100}['\"]\]", "", text)
    return text if _NAME.fullmatch(text) and "'" not in quoted and '"' not in quoted else ""


def _cut(text: str) -> str:
    text = text[: LONGEST + 1].encode("utf-8", "replace").decode()  # half a character of UTF-16 cannot be written
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _read_frame(filename: object, line: object, function: object) -> CodePlace:
    return CodePlace(_cut(str(filename or "")), line if type(line) is int and line > 0 else 0, _cut(str(function or "")))


def _read_time(record: object, micro: str, seconds: str) -> int | None:
    for name, scale in ((micro, 10**3), (seconds, 10**9)):
        value = getattr(record, name, None)
        if isinstance(value, int | float) and value >= 0:
            return int(value * scale)
    return None


def _read_count(record: object, name: str) -> int | None:
    value = getattr(record, name, None)
    return value if type(value) is int and value >= 0 else None


def _name_original(place: CodePlace) -> CodePlace:
    resumed = _RESUMED.fullmatch(place.function)
    return msgspec.structs.replace(place, function=resumed[1]) if resumed else place


def read_compilation(record: Any) -> Compilation | None:
    """Return what one record of torch (CompilationMetrics) says; None where it is of no compilation but of one call of what was compiled.

    Fields that this version of torch does not have stay unknown.
    """
    if getattr(record, "is_runtime", False):
        return None
    place = _read_frame(getattr(record, "co_filename", None), getattr(record, "co_firstlineno", None), getattr(record, "co_name", None))
    resumed = _RESUMED.fullmatch(place.function)
    number, reason = getattr(record, "compile_id", None), getattr(record, "recompile_reason", None)
    return Compilation(
        id=_cut(str(number or "")),
        place=_name_original(place),
        resumes_at=int(resumed[2]) if resumed else None,
        begun_unix_ns=_read_time(record, "start_time_us", "start_time"),
        duration_ns=_read_time(record, "duration_us", "entire_frame_compile_time_s"),
        backward=getattr(record, "is_forward", None) is False,
        graph_ops=_read_count(record, "graph_op_count"),
        guards=_read_count(record, "guard_count"),
        guard=read_failed_guard(reason) if isinstance(reason, str) else None,
        failed=_cut(str(getattr(record, "fail_type", None) or "")),
    )


def read_break(record: Any) -> GraphBreak:
    """Return what one record of torch (GraphCompileReason) says: its first line as far as it holds names, and the frames."""
    first = str(getattr(record, "reason", "")).strip().partition("\n")[0]
    plain = _PLAIN_REASON.match(first)
    frames = [_read_frame(frame.filename, frame.lineno, frame.name) for frame in list(getattr(record, "user_stack", None) or ())]
    kind: BreakKind = next((kind for kind, words in _BREAKS.items() if re.search(words, first[:LONGEST])), "")
    return GraphBreak(reason=_cut(plain[0].strip()) if plain else "", kind=kind, stack=(*frames[:1], *frames[1:][1 - MOST_FRAMES :]))


_NEARNESS: tuple[GuardKind, ...] = (
    "value", "size", "stride", "rank", "requires_grad", "device", "dtype", "aliasing", "identity", "type", "mode", "backend", "other",
)  # fmt: skip
"""The guards of a tensor are asked in the order type, element type, device, gradient, dimensions, sizes, strides: the version of a function
that failed at one of the first here came nearest to fitting."""


def choose_guards(failures: Iterable[str]) -> Iterator[FailedGuard | None]:
    """Yield for each compilation after the first of one function the guard of the version that came nearest to fitting.

    `failures`: all reasons of the function in their order; each time those of all versions, the newest first ('1/1: ...', '1/0: ...').
    """
    group: list[FailedGuard] = []
    last = -1
    for text in failures:
        number = re.match(r"\S*/(\d{1,9}): ", text)
        version = int(number[1]) if number else 0
        if last >= 0 and version >= last:
            yield min(group, key=lambda guard: _NEARNESS.index(guard.kind), default=None)
            group = []
        last = version
        group += [guard] if (guard := read_failed_guard(text)) else []
    if last >= 0:
        yield min(group, key=lambda guard: _NEARNESS.index(guard.kind), default=None)


def _add_nearest_guards(compilations: list[Compilation], failures: Any) -> list[Compilation]:
    """Return the compilations with the guard that came nearest, where torch remembers those of all versions (guard_failures)."""
    chosen: dict[CodePlace, list[FailedGuard | None]] = {}
    for code, texts in failures.items() if isinstance(failures, dict) else ():
        with suppress(Exception):  # another format
            chosen[_read_frame(code.co_filename, code.co_firstlineno, code.co_name)] = list(choose_guards(map(str, texts)))
    again: dict[tuple[CodePlace, int | None], list[int]] = {}
    for index, one in enumerate(compilations):
        if one.guard is not None:
            again.setdefault((one.place, one.resumes_at), []).append(index)
    for (place, resumes_at), members in again.items():
        name = place.function if resumes_at is None else f"torch_dynamo_resume_in_{place.function}_at_{resumes_at}"
        found = chosen.get(msgspec.structs.replace(place, function=name), [])
        if len(found) == len(members):  # else some are forgotten, and which belong together is not known
            for index, guard in zip(members, found, strict=True):
                compilations[index] = msgspec.structs.replace(compilations[index], guard=guard or compilations[index].guard)
    return compilations


def _name_backward(compilations: list[Compilation]) -> list[Compilation]:
    """Return the compilations, each backward graph with the function of its forward: torch names it by the id alone."""
    forward = {one.id: one for one in compilations if one.place.file}
    return [
        msgspec.structs.replace(one, place=forward[one.id].place, resumes_at=forward[one.id].resumes_at)
        if one.backward and one.id in forward
        else one
        for one in compilations
    ]


def _read_all(records: Iterable[Any], read: Callable[[Any], Any]) -> Iterator[Any]:
    for record in records:
        with suppress(Exception):  # another format
            yield read(record)


def collect_compile_log() -> CompileLog | None:
    """Return what torch remembers of its compilations in this process; None where nothing was compiled."""
    utils = sys.modules.get(_HOME)
    if utils is None:
        return None
    records: Sequence[Any] = utils.get_compilation_metrics() if hasattr(utils, "get_compilation_metrics") else ()
    reasons: Sequence[Any] = list(getattr(utils, "graph_break_reasons", ()))
    compilations = list(_read_all(records[-MOST_COMPILATIONS:], read_compilation))
    unread = len(records) - len(compilations)
    compilations = [one for one in compilations if one is not None]
    compilations = _name_backward(_add_nearest_guards(compilations, getattr(utils, "guard_failures", None)))
    breaks = Counter(_read_all(reasons[-20 * MOST_BREAKS :], read_break))
    if not compilations and not breaks:
        return None
    kept = tuple(msgspec.structs.replace(one, count=count) for one, count in breaks.most_common(MOST_BREAKS))
    dropped = unread + max(0, len(breaks) - MOST_BREAKS)
    return CompileLog(compilations=tuple(compilations), breaks=kept, dropped=dropped)


class CompileRecords(Hooks):
    """Has torch remember more compilations than its last 64 while the session lasts, and writes down what it remembers at the end."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._context: Context | None = None

    def start(self, context: Context) -> None:
        """Raise the number, where torch.compile is in use already."""
        self._context = context
        self._remember_more()

    def window_began(self, index: int, kind: WindowKind) -> None:
        """Raise it now, where torch.compile was first used since."""
        self._remember_more()

    def _remember_more(self) -> None:
        utils = sys.modules.get(_HOME)
        held = getattr(utils, "_compilation_metrics", None)
        if self._before is None and held is not None and (held.maxlen or MOST_COMPILATIONS) < MOST_COMPILATIONS:
            self._before = held.maxlen
            utils.set_compilation_metrics_limit(MOST_COMPILATIONS)  # type: ignore[union-attr]

    def close(self) -> None:
        """Write what torch remembers."""
        found = collect_compile_log()
        if self._context is not None and found is not None:
            target = self._context.path / compile_log_name(self._context.rank)
            target.parent.mkdir(exist_ok=True)
            self._context.submit(target, lambda: msgspec.json.encode(found) + b"\n")

    def drop(self) -> None:
        """Have torch remember as many as before."""
        utils, before = sys.modules.get(_HOME), self._before
        self._before = None
        if utils is not None and before is not None:
            utils.set_compilation_metrics_limit(before)
