"""The lines from which the program's functions made their calls, which torch.profiler knows and does not write: added to a trace as frames.

Kineto names a frame by the line that ran when it was entered: of a function the `def`, of a generator the `yield`, of what was open when
stacks began whatever stood there. Beside each call it keeps the line of the caller (torch/csrc/profiler/collection.h, PyExtraFieldsBase).
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable
from typing import Any

MAX_EVENTS = 200_000
"""Events that are looked at, outer ones first: about 4 us each, as writing the trace takes, and in the same step."""

_FOREIGN = re.compile(r"(^|/)(torch|gpudiag/(capture|integrations))/|^<")
_BASE = re.compile(rb'"baseTimeNanoseconds":\s*(\d+)')
_EVENTS = b'"traceEvents": ['

Call = tuple[int, int, str]
"""Start and end of a call in ns of Unix time, and the frame of its caller with the line of the call."""


def find_call_lines(roots: Iterable[Any]) -> list[Call]:
    """Return the program's calls on the thread of the step marks; `roots`: kineto_results.experimental_event_tree() of a recording."""
    from torch._C._profiler import _EventType

    found: dict[int, list[Call]] = {}
    thread, todo = 0, deque(roots)
    for _ in range(MAX_EVENTS):
        if not todo:
            break
        event = todo.popleft()
        if event.tag in (_EventType.PyCall, _EventType.PyCCall):
            caller = event.extra_fields.caller
            if not _FOREIGN.search(caller.file_name):
                frame = f"{caller.file_name}({caller.line_number}): {caller.function_name}"
                found.setdefault(event.start_tid, []).append((event.start_time_ns, event.end_time_ns, frame))
        elif event.tag == _EventType.TorchOp:
            if event.name.startswith("aten::"):
                continue  # no Python in there
            thread = event.start_tid if event.name.startswith("ProfilerStep#") else thread
        todo.extend(event.children)
    return found.get(thread, [])


def add_call_lines(head: bytes, calls: Iterable[Call], pid: int, tid: int) -> tuple[bytes, bytes]:
    """Return what to replace in a plain trace that begins with `head`, and by what, so that a frame stands around each of these calls."""
    base, events = int(found[1]) if (found := _BASE.search(head)) else 0, []
    for start_ns, end_ns, frame in calls:  # a nanosecond longer at each end: it stands around the frame of the call
        start, took = start_ns - base - 1, end_ns - start_ns + 2
        times = f'"ts":{start // 1000}.{start % 1000:03d},"dur":{took // 1000}.{took % 1000:03d}'
        place = f'"name":{json.dumps(frame)},"pid":{pid},"tid":{tid}'
        events.append(f'{{"ph":"X","cat":"python_function",{place},{times},"args":{{}}}},\n')
    return _EVENTS, _EVENTS + "".join(events).encode()
