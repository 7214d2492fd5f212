"""The lines of calls and operators of the program's functions, of which torch.profiler writes none: added to a trace as frames.

Kineto names a frame by the line that ran when it was entered: of a function the `def`, of a generator the `yield`, of what was open when
stacks began whatever stood there. Beside each call it keeps the line of the caller (torch/csrc/profiler/collection.h,
PyExtraFieldsBase). Operators are no calls: see operator_lines.py.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gpudiag.capture.operator_lines import Scope, find_operator_line, find_pause_line

MAX_EVENTS = 200_000
"""Events that are looked at, outer ones first: about 4 us each, as writing the trace takes, and in the same step."""

PAUSE_NS = 20_000
"""From which on the Python between two calls is worth a frame of its own."""

_FOREIGN = re.compile(r"(^|/)(torch|gpudiag/(capture|integrations))/|^<")
_BASE = re.compile(rb'"baseTimeNanoseconds":\s*(\d+)')
_EVENTS = b'"traceEvents": ['
_NOWHERE: Scope = ("", 0, "")


class Call(NamedTuple):
    """A call or an operator of a function of the program's, or the function's begin."""

    start_ns: int
    """In ns of Unix time, as the ends; 0: unknown."""
    end_ns: int
    scope: Scope
    """The function."""
    line: int
    """Of the call in it; 0: unknown, or no call."""
    op: str = ""
    """Of an operator: the op that it made."""
    until_ns: int = 0
    """When the function made its next call or op, or ended; 0: unknown."""
    before: int = 0
    after: int = 0
    """The line of its last call up to here and that of its next one; 0: its begin, its end, or unknown."""


def find_call_lines(roots: Iterable[Any]) -> list[Call]:
    """Return the program's calls and operators on the thread of the step marks; `roots`: kineto_results.experimental_event_tree()."""
    from torch._C._profiler import _EventType

    found: dict[int, list[Call]] = {}
    thread, looked = 0, 0
    todo: deque[tuple[Iterable[Any], Call, int, int]] = deque([(roots, Call(0, 0, _NOWHERE, 0), 0, 0)])
    while todo and looked < MAX_EVENTS:
        # what ran in one function, of the program's where no call of it is known to have made the events; its end and thread
        events, begin, end_ns, tid = todo.popleft()
        noted, within = [begin] if begin.start_ns else [], begin._replace(start_ns=0)
        for event in events:
            looked, kind, tid, inner = looked + 1, event.tag, event.start_tid, within
            if kind in (_EventType.PyCall, _EventType.PyCCall):
                call, inner = _read_call(event, begin.scope, event.extra_fields.callsite if kind == _EventType.PyCall else None)
                if call is not None:
                    (noted if call.scope is begin.scope else found.setdefault(tid, [])).append(call)
            elif kind == _EventType.TorchOp:
                if event.name.startswith("aten::"):
                    if begin.scope is not _NOWHERE:
                        noted.append(Call(event.start_time_ns, event.end_time_ns, begin.scope, 0, event.name))
                    continue  # no Python in there
                thread = tid if event.name.startswith("ProfilerStep#") else thread
            if event.children or inner.start_ns:
                todo.append((event.children, inner, event.end_time_ns if inner.start_ns else 0, tid))
        found.setdefault(tid, []).extend(_add_neighbours(noted, end_ns))
    return found.get(thread) or max(found.values(), key=len, default=[])  # marks of steps may stand deeper than is looked


def _read_call(event: Any, scope: Scope, own: Any) -> tuple[Call | None, Call]:
    """Return the call that an event is where the program made it, and the begin of the function that was called, `own`."""
    caller = event.extra_fields.caller
    call, inner = None, Call(0, 0, _NOWHERE, 0)
    if not _FOREIGN.search(caller.file_name):
        at = scope if scope[2] == caller.function_name else (caller.file_name, caller.line_number, caller.function_name)
        call = Call(event.start_time_ns, event.end_time_ns, at, caller.line_number)
    if own is not None and not _FOREIGN.search(own.file_name):
        inner = Call(event.start_time_ns, event.start_time_ns, (own.file_name, own.line_number, own.function_name), 0)
    return call, inner


def _take_known(last: int, line: int) -> int:
    return line or last


def _add_neighbours(noted: list[Call], end_ns: int) -> Iterator[Call]:
    """Return the calls of one function, one after the other, with what came next in it."""
    lines, starts = [call.line for call in noted], [call.start_ns for call in noted]
    before = list(itertools.accumulate(lines, _take_known, initial=0))[1:]
    after = list(itertools.accumulate(lines[:0:-1], _take_known, initial=0))
    for call, last, following, until_ns in zip(noted, before, reversed(after), [*starts[1:], end_ns], strict=False):
        if call.end_ns > call.start_ns or until_ns - call.end_ns >= PAUSE_NS:
            yield call._replace(until_ns=until_ns, before=last, after=following)


def add_call_lines(head: bytes, calls: Iterable[Call], pid: int, tid: int) -> tuple[bytes, bytes]:
    """Return what to replace in a plain trace that begins with `head`, and by what, so that a frame stands around each of these calls,
    and around what the function did until the next one."""
    base, events = int(found[1]) if (found := _BASE.search(head)) else 0, []
    lines: dict[Scope, set[int]] = {}
    for call in calls:
        lines.setdefault(call.scope, set()).add(call.line)
    called = {scope: frozenset(of) for scope, of in lines.items()}
    for call in calls:
        between = (call.scope, call.before, call.after)
        line = find_operator_line(*between, call.op, called[call.scope]) if call.op else call.line
        pause = find_pause_line(*between) if call.until_ns > call.end_ns else None
        frames = [(line, call.start_ns, call.end_ns)]
        if line and line == pause:
            frames = [(line, call.start_ns, max(call.end_ns, call.until_ns - 4))]
        elif call.until_ns - call.end_ns >= PAUSE_NS:
            frames.append((pause, call.end_ns + 4, call.until_ns - 4))
        for number, start_ns, end_ns in frames:  # a nanosecond longer at each end: it stands around the frame of the call
            if number:
                start, took = start_ns - base - 1, end_ns - start_ns + 2
                times = f'"ts":{start // 1000}.{start % 1000:03d},"dur":{took // 1000}.{took % 1000:03d}'
                place = f'"name":{json.dumps(f"{call.scope[0]}({number}): {call.scope[2]}")},"pid":{pid},"tid":{tid}'
                events.append(f'{{"ph":"X","cat":"python_function",{place},{times},"args":{{}}}},\n')
    return _EVENTS, _EVENTS + "".join(events).encode()
