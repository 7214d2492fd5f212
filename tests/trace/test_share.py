"""Two processes find in a trace exactly what one finds; where they cannot, one reads it."""

from __future__ import annotations

import gzip
import io
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracecheck import check_trace

from gpudiag.errors import InputError
from gpudiag.model.trace import TRACE_TABLES, Trace
from gpudiag.trace import kineto, two_process_reader
from gpudiag.trace.decompression import GZIP_MAGIC
from gpudiag.trace.json_framing import CutShortError, NotATraceError, NotSharedError
from gpudiag.trace.two_process_reader import send_share

BLOCK = 2_000
"""Bytes: makes a few dozen chunks of a small file."""


def _events(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Events of all tables. Names, threads and signatures appear all along, some of them for the first time late in the file."""
    random.seed(seed)
    found: list[dict[str, Any]] = [{"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "first"}}]
    for number in range(count):
        recent = max(0, number - random.choice((0, 5, 500)))
        at = {"ph": "X", "pid": 1, "tid": recent // 40, "ts": random.randrange(10**6) / 8, "dur": random.choice((1, 2.5, 1000))}
        found.append(
            random.choice(
                (
                    at | {"cat": "cpu_op", "name": f"aten::op{recent // 7}", "args": {"Input Dims": [[recent // 9]], "Sequence number": 3}},
                    at | {"cat": "cpu_op", "name": "record_param_comms", "args": {"Collective name": "allreduce", "Seq": number}},
                    at | {"cat": "user_annotation", "name": "gloo:all_reduce", "args": {"Input Dims": [[4, recent]]}},
                    at | {"cat": "python_function", "name": f"file.py({recent // 11}): f", "args": {"Python id": number}},
                    at | {"cat": "cuda_runtime", "name": "hipLaunchKernel", "args": {"correlation": number, "kernel": f"k{recent // 13}"}},
                    at | {"cat": "kernel", "name": f"gemm{recent // 3}", "args": {"device": 0, "stream": 7, "Collective name": "x"}},
                    at | {"cat": "user_annotation", "name": f"ProfilerStep#{recent}"},
                    at | {"cat": f"new{recent % 7}", "name": "strange"},
                    at | {"cat": "cpu_op", "name": "late", "dur": -1},
                    at | {"ph": "i", "name": "[memory]", "args": {"Bytes": number, "Device Type": 1, "Device Id": 0, "Addr": recent}},
                    {"ph": "M", "name": "thread_name", "pid": 1, "tid": recent // 40, "args": {"name": f"worker {number}"}},
                    {"ph": "s", "cat": "ac2g", "id": number},
                )
            )
        )
    return found


def _text(events: list[dict[str, Any]]) -> bytes:
    rows = b",\n".join(json.dumps(event).encode() for event in events)
    header = b'{"record_shapes": 1, "distributedInfo": {"rank": 3, "pg_count": 1, "world_size": 4}, "traceEvents": [\n'
    return header + rows + b'], "traceName": "x", "baseTimeNanoseconds": 17}'


def _same(left: Trace, right: Trace) -> None:
    """Threads are numbered as they come up in a chunk, so that chunks of another size may number them otherwise: then by name."""
    if {(thread.pid, thread.tid) for thread in left.meta.threads} == {(thread.pid, thread.tid) for thread in right.meta.threads}:
        left, right = _by_name(left), _by_name(right)
    assert msgspec.to_builtins(left.meta) == msgspec.to_builtins(right.meta)
    for table in TRACE_TABLES:
        assert getattr(left, table).equals(getattr(right, table)), table


def _by_name(trace: Trace) -> Trace:
    """Return `trace` with the threads in the order of their names, and the rows of each thread together, in their order."""
    order = sorted(range(len(trace.meta.threads)), key=lambda row: (trace.meta.threads[row].pid, trace.meta.threads[row].tid))
    number = {old: new for new, old in enumerate(order)}
    tables = {name: getattr(trace, name) for name in TRACE_TABLES}
    renumbered = {
        name: table.with_columns(pl.col("thread").replace_strict(number, return_dtype=pl.Int64)).sort("thread", maintain_order=True)
        for name, table in tables.items()
        if "thread" in table.columns
    }
    meta = msgspec.structs.replace(trace.meta, threads=tuple(trace.meta.threads[row] for row in order))
    return msgspec.structs.replace(trace, meta=meta, **renumbered)


@contextmanager
def _in_this_process(path: str, block_bytes: int) -> Iterator[IO[bytes]]:
    """The second process without the process; one that fails sends no more."""
    messages = io.BytesIO()
    with suppress(InputError, CutShortError, NotATraceError, NotSharedError):
        send_share(path, block_bytes, messages)
    messages.seek(0)
    yield messages


@pytest.fixture
def by_two(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Trace | None]:
    """Read a file by two, or return None where it has to be read by one."""

    def read(path: Path) -> Trace | None:
        found = kineto._read_in_two_processes(str(path), BLOCK)
        with monkeypatch.context() as patch:
            patch.setattr(two_process_reader, "is_worth_two_processes", lambda path: False)
            if found is None:
                return None
            patch.setattr(kineto, "_read_in_one_process", lambda path: found)
            return kineto.read_kineto(path)

    return read


@pytest.mark.slow
def test_tables_of_two_processes_are_those_of_one(tmp_path: Path, by_two: Callable[[Path], Trace | None]) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(_text(_events(2_000))))
    alone = kineto.read_kineto(path)
    check_trace(alone)
    both = by_two(path)
    assert both is not None
    _same(alone, both)
    heights = {table: getattr(alone, table).height for table in TRACE_TABLES}
    assert min(heights.values()) > 100, heights
    assert len(alone.meta.threads) > 40
    assert len(alone.meta.dropped) > 4


_DAMAGES = st.sampled_from(
    [b'"dur": inf', b'"dur": [1]', b'"dur": "}, {"', b'"dur": 1 2', b'"dur": "7.5"', b'"args": nan, "dur": 1', b'"dur"']
)


@given(
    st.integers(0, 120),
    st.integers(0, 10**6),
    st.lists(st.tuples(st.integers(0, 10**6), _DAMAGES), max_size=3),
    st.none() | st.integers(0, 30_000),
    st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_whatever_the_text_two_find_what_one_finds(
    tmp_path_factory: pytest.TempPathFactory, count: int, seed: int, damages: list[tuple[int, bytes]], cut: int | None, nested: bool
) -> None:
    text = _text(_events(count, seed))
    for place, damage in damages:
        at = text.find(b'"dur": 1', place % len(text))
        text = text[:at] + damage + text[at + len(b'"dur": 1') :] if at >= 0 else text
    text = text.replace(b'"args": {', b'"args": {"x": [{"a": 1}, {"b": 2}], ') if nested else text
    path = tmp_path_factory.mktemp("share") / "trace.json"
    path.write_bytes(text[:cut])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_process_reader, "start_second_process", _in_this_process)
        found, error = _outcome(lambda: kineto._read_in_two_processes(str(path), BLOCK))
        alone, complaint = _outcome(lambda: kineto.read_kineto(path))
        if found is None:
            assert error in ("", complaint)
            return  # it is read by one
        patch.setattr(kineto, "_read_in_one_process", lambda path: found)
        both, error = _outcome(lambda: kineto.read_kineto(path))
    assert error == complaint
    if alone:
        _same(alone, both)


def _outcome(call: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return call(), ""
    except InputError as error:
        return None, str(error)


def test_events_that_need_repair_cost_no_second_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(_text(_events(400)).replace(b'"dur": 2.5', b'"dur": inf'))
    monkeypatch.setattr(two_process_reader, "start_second_process", _in_this_process)
    assert kineto._read_in_two_processes(str(path), BLOCK) is not None


def test_text_that_cannot_be_cut_alike_is_read_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [event | {"list": [{"a": 1}] * 40} for event in _events(200)]
    path = tmp_path / "trace.json"
    path.write_bytes(_text(events))
    monkeypatch.setattr(two_process_reader, "start_second_process", _in_this_process)
    assert kineto._read_in_two_processes(str(path), BLOCK) is None


@pytest.mark.parametrize(
    "start",
    ["raise SystemExit(1)", "print('x' * 100)", "import os; os.kill(os.getpid(), 9)", "import sys; sys.stdout.buffer.write(b'\\xff' * 8)"],
)
def test_a_second_process_that_fails_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(_text(_events(300)))
    alone = kineto.read_kineto(path)
    monkeypatch.setattr(two_process_reader, "_START", start)
    monkeypatch.setattr(two_process_reader, "is_worth_two_processes", lambda path: True)
    assert kineto._read_in_two_processes(str(path), BLOCK) is None
    _same(alone, kineto.read_kineto(path))


def test_no_interpreter_to_start_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(NotSharedError), two_process_reader.start_second_process("trace.json", BLOCK):
        pass


def test_a_second_process_that_lost_chunks_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def of_a_shorter_file(path: str, block_bytes: int) -> Iterator[IO[bytes]]:
        shorter = tmp_path / "shorter.json"
        shorter.write_bytes(Path(path).read_bytes()[:20_000])
        with _in_this_process(str(shorter), block_bytes) as messages:
            yield messages

    path = tmp_path / "trace.json"
    path.write_bytes(_text(_events(400)))
    monkeypatch.setattr(two_process_reader, "start_second_process", of_a_shorter_file)
    assert kineto._read_in_two_processes(str(path), BLOCK) is None


def test_the_second_process_takes_no_module_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_two: Callable[[Path], Trace | None]
) -> None:
    for module in ("json", "msgspec", "polars", "gpudiag"):
        (tmp_path / f"{module}.py").write_text("import pathlib; pathlib.Path('ran').touch(); raise SystemExit")
    path = tmp_path / "trace.json"
    path.write_bytes(_text(_events(300)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert by_two(path) is not None
    assert not (tmp_path / "ran").exists()


def test_it_is_for_large_files_of_this_machine_where_a_core_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_process_reader, "count_usable_cores", lambda: 2)
    path = tmp_path / "trace"
    path.write_bytes(GZIP_MAGIC)
    assert not two_process_reader.is_worth_two_processes(str(path))
    with path.open("r+b") as file:
        file.truncate(two_process_reader.PAYS_FROM_BYTES)
    assert two_process_reader.is_worth_two_processes(str(path))
    path.write_bytes(b"{")
    with path.open("r+b") as file:
        file.truncate(two_process_reader.PAYS_FROM_BYTES)
    assert not two_process_reader.is_worth_two_processes(str(path))  # of text it takes more
    with path.open("r+b") as file:
        file.truncate(two_process_reader.PAYS_FROM_BYTES * 12)
    assert two_process_reader.is_worth_two_processes(str(path))
    assert not two_process_reader.is_worth_two_processes(str(tmp_path))
    assert not two_process_reader.is_worth_two_processes(str(tmp_path / "none"))
    assert not two_process_reader.is_worth_two_processes(f"file://{path}")
    with monkeypatch.context() as patch:
        patch.setattr(two_process_reader, "parent_process", object)
        assert not two_process_reader.is_worth_two_processes(str(path))
    monkeypatch.setattr(two_process_reader, "count_usable_cores", lambda: 1)
    assert not two_process_reader.is_worth_two_processes(str(path))
