"""The lines of calls and operators of the program's functions, of which torch.profiler writes none: added to a trace as frames.

Kineto names a frame by the line that ran when it was entered: of a function the `def`, of a generator the `yield`, of what was open when
stacks began whatever stood there. Beside each call it keeps the line of the caller (torch/csrc/profiler/collection.h,
PyExtraFieldsBase). Operators are no calls: see operator_lines.py.
"""

from __future__ import annotations

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
    # what ran in one function, of the program's where no call of it is known to have made the events; its begin, its end, and the thread
    todo: deque[tuple[Iterable[Any], Scope, int, int, int]] = deque([(roots, _NOWHERE, 0, 0, 0)])
    while todo and looked < MAX_EVENTS:
        events, scope, start_ns, end_ns, tid = todo.popleft()
        noted = [(start_ns, start_ns, 0, "")] if start_ns else []
        for event in events:
            looked, kind, tid, inner, begin_ns, until_ns = looked + 1, event.tag, event.start_tid, scope, 0, 0
            if kind in (_EventType.PyCall, _EventType.PyCCall):
                fields, begin_ns, until_ns = event.extra_fields, event.start_time_ns, event.end_time_ns
                caller = fields.caller
                if scope[2] == caller.function_name:
                    noted.append((begin_ns, until_ns, caller.line_number, ""))
                elif not _FOREIGN.search(caller.file_name):
                    at = (caller.file_name, caller.line_number, caller.function_name)
                    found.setdefault(tid, []).append(Call(begin_ns, until_ns, at, at[1]))
                inner = _read_scope(fields.callsite) if kind == _EventType.PyCall else _NOWHERE
                begin_ns = 0 if inner is _NOWHERE else begin_ns
            elif kind == _EventType.TorchOp:
                if event.name.startswith("aten::"):
                    if scope is not _NOWHERE:
                        noted.append((event.start_time_ns, event.end_time_ns, 0, event.name))
                    continue  # no Python in there
                thread = tid if event.name.startswith("ProfilerStep#") else thread
            if event.children or (begin_ns and until_ns - begin_ns >= PAUSE_NS):
                todo.append((event.children, inner, begin_ns, until_ns, tid))
        found.setdefault(tid, []).extend(_add_neighbours(noted, scope, end_ns))
    return found.get(thread) or max(found.values(), key=len, default=[])  # marks of steps may stand deeper than is looked


def _read_scope(own: Any) -> Scope:
    return _NOWHERE if _FOREIGN.search(own.file_name) else (own.file_name, own.line_number, own.function_name)


def _add_neighbours(noted: list[tuple[int, int, int, str]], scope: Scope, until_ns: int) -> Iterator[Call]:
    """Return the calls of one function, one after the other, with what came next in it."""
    before, after, following = 0, 0, []
    for start_ns, _, line, _ in reversed(noted):
        following.append((until_ns, after))
        until_ns, after = start_ns, line or after
    for (start_ns, end_ns, line, op), (until_ns, after) in zip(noted, reversed(following), strict=True):
        before = line or before
        if end_ns > start_ns or until_ns - end_ns >= PAUSE_NS:
            yield Call(start_ns, end_ns, scope, line, op, until_ns, before, after)


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
        pause = line if line and line == call.after else find_pause_line(*between) if call.until_ns > call.end_ns else None
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
