"""The lines of calls and operators of the program's functions, of which torch.profiler writes none: added to a trace as frames.

Kineto names a frame by the line that ran when it was entered: of a function the `def`, of a generator the `yield`, of what was open when
stacks began whatever stood there. Beside each call it keeps the line of the caller (torch/csrc/profiler/collection.h,
PyExtraFieldsBase). Operators are no calls: see operator_lines.py.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable
from typing import Any

from gpudiag.capture.operator_lines import Scope, find_operator_line

MAX_EVENTS = 200_000
"""Events that are looked at, outer ones first: about 4 us each, as writing the trace takes, and in the same step."""

_FOREIGN = re.compile(r"(^|/)(torch|gpudiag/(capture|integrations))/|^<")
_BASE = re.compile(rb'"baseTimeNanoseconds":\s*(\d+)')
_EVENTS = b'"traceEvents": ['
_NOWHERE: Scope = ("", 0, "")

Call = tuple[int, int, Scope, int, str]
"""Start and end in ns of Unix time, the function, the line of the call in it (0: unknown) and, of an operator, the op that it made."""


def find_call_lines(roots: Iterable[Any]) -> list[Call]:
    """Return the program's calls and operators on the thread of the step marks; `roots`: kineto_results.experimental_event_tree()."""
    from torch._C._profiler import _EventType

    found: dict[int, list[Call]] = {}
    thread, todo = 0, deque((root, _NOWHERE) for root in roots)
    for _ in range(MAX_EVENTS):
        if not todo:
            break
        event, scope = todo.popleft()  # the program's function that runs, where no call of it is known to have made the event
        kind = event.tag
        if kind in (_EventType.PyCall, _EventType.PyCCall):
            fields = event.extra_fields
            caller = fields.caller
            if not _FOREIGN.search(caller.file_name):
                at = scope if scope[2] == caller.function_name else (caller.file_name, caller.line_number, caller.function_name)
                found.setdefault(event.start_tid, []).append((event.start_time_ns, event.end_time_ns, at, caller.line_number, ""))
            own = fields.callsite if kind == _EventType.PyCall else None
            own = None if own is None or _FOREIGN.search(own.file_name) else own
            scope = _NOWHERE if own is None else (own.file_name, own.line_number, own.function_name)
        elif kind == _EventType.TorchOp:
            if event.name.startswith("aten::"):
                if scope is not _NOWHERE:
                    found.setdefault(event.start_tid, []).append((event.start_time_ns, event.end_time_ns, scope, 0, event.name))
                continue  # no Python in there
            thread = event.start_tid if event.name.startswith("ProfilerStep#") else thread
        todo.extend((child, scope) for child in event.children)
    return [call for call in found.get(thread, []) if not (todo and call[4])]  # which statements ran is known where all calls are


def add_call_lines(head: bytes, calls: Iterable[Call], pid: int, tid: int) -> tuple[bytes, bytes]:
    """Return what to replace in a plain trace that begins with `head`, and by what, so that a frame stands around each of these calls."""
    base, events = int(found[1]) if (found := _BASE.search(head)) else 0, []
    called: dict[Scope, set[int]] = {}
    for _, _, scope, line, _ in calls:
        called.setdefault(scope, set()).add(line)
    operators = {(scope, op): find_operator_line(scope, op, called[scope]) for scope, op in {(call[2], call[4]) for call in calls} if op}
    for start_ns, end_ns, scope, line, op in calls:  # a nanosecond longer at each end: it stands around the frame of the call
        file, _, function = scope
        line = line or operators[scope, op] or 0
        if not line:
            continue
        start, took = start_ns - base - 1, end_ns - start_ns + 2
        times = f'"ts":{start // 1000}.{start % 1000:03d},"dur":{took // 1000}.{took % 1000:03d}'
        place = f'"name":{json.dumps(f"{file}({line}): {function}")},"pid":{pid},"tid":{tid}'
        events.append(f'{{"ph":"X","cat":"python_function",{place},{times},"args":{{}}}},\n')
    return _EVENTS, _EVENTS + "".join(events).encode()
