"""What the reader makes of events of every age, of faulty ones, and of files that are no traces."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from noticewords import format_notices
from tracecheck import check_trace

from gpudiag.errors import InputError
from gpudiag.model.trace import TRACE_TABLES, Trace
from gpudiag.trace import read_trace

Event = Callable[..., dict[str, Any]]
Writer = Callable[..., Path]


def _kernel(**fields: Any) -> dict[str, Any]:
    args = {"device": 2, "stream": 7, "correlation": 9, "grid": [8, 2, 1], "block": [128, 1, 1], "graph node id": 0}
    return {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 120, "dur": 3, "args": args} | fields


def test_kinds_by_category_of_all_ages(write: Writer, event: Event) -> None:
    categories = {
        "ops": ["cpu_op", "Operator"],
        "launches": ["cuda_runtime", "cuda_driver", "Runtime", "xpu_runtime", "privateuse1_driver", "mtia_runtime", "hpu_op"],
        "kernels": ["kernel", "Kernel", "gpu_memcpy", "Memcpy", "gpu_memset", "Memset", "mtia_ccp_events"],
        "frames": ["python_function"],
        "marks": ["user_annotation", "overhead", "cuda_sync", "xpu_sync"],
    }
    ignored = ["gpu_user_annotation", "Trace", "cuda_event"]
    every = [category for names in categories.values() for category in names] + ignored
    trace = read_trace(write([event(cat=category) for category in every]))
    check_trace(trace)
    assert {table: getattr(trace, table).height for table in categories} == {table: len(names) for table, names in categories.items()}
    # all start together: the file's order stays
    assert trace.kernels["kind"].to_list() == ["kernel", "kernel", "memcpy", "memcpy", "memset", "memset", "kernel"]
    assert trace.marks["category"].value_counts().sort("category").rows() == [("annotation", 1), ("overhead", 1), ("sync", 2)]
    assert trace.meta.dropped == {}


def test_unknown_categories_are_counted_and_tamed(write: Writer, event: Event) -> None:
    events = [event()] + [event(cat=f"a\x1b[31m\n{'x' * 100}{number}"[: 50 + number]) for number in range(3)] + [event(cat=None)]
    events += [event(cat=f"kind{number}") for number in range(20)]
    dropped = read_trace(write(events)).meta.dropped
    assert sum(dropped.values()) == 24
    assert len(dropped) == 6
    assert all(key.isprintable() and len(key) < 60 for key in dropped)
    assert next(iter(dropped)) == "unknown category a[31m" + "x" * 35


def test_numbers_and_threads_as_text(write: Writer, event: Event) -> None:
    trace = read_trace(
        write(
            [
                event(ts="100.5", dur="2", tid="5", pid="1"),
                event(ts=200, dur=1.5, tid=5, pid=1.0),
                _kernel(pid=3, tid="stream 11", args={"correlation": "77", "bytes": "4096", "grid": "8"}),
                {"ph": "M", "name": "thread_name", "pid": 1, "tid": "5", "args": {"name": "main"}},
            ]
        )
    )
    assert [(thread.pid, thread.tid, thread.name) for thread in trace.meta.threads] == [("1", "5", "main")]
    assert trace.ops.select("thread", "start_ns", "end_ns").rows() == [(0, 0, 2000), (0, 99_500, 101_000)]
    row = trace.kernels.row(0, named=True)
    assert (row["device"], row["stream"], row["correlation"], row["bytes"], row["grid"]) == (3, 11, 77, 4096, None)


def test_kernel_geometry_and_graph_node(write: Writer) -> None:
    node = _kernel(ts=130) | {"args": _kernel()["args"] | {"graph node id": 12}}
    kernels = read_trace(write([_kernel(), node])).kernels
    assert kernels.select("device", "stream", "grid", "block", "graph_node").rows() == [(2, 7, 16, 128, None), (2, 7, 16, 128, 12)]


def test_signatures_are_interned_by_text_and_an_empty_list_is_a_record(write: Writer, event: Event) -> None:
    full = {"Input Dims": [[2, 3]], "Input type": ["float"], "Input Strides": [[3, 1]], "Concrete Inputs": ["", "é"]}
    trace = read_trace(
        write(
            [
                event(ts=1, args=full),
                event(ts=2, args=full | {"External id": 5}),
                event(ts=3, args={"Input dims": [[2, 3]], "Input type": ["float"]}),
                event(ts=4, args={"Input Dims": []}),
                event(ts=5),
                event(ts=6, args=None),
            ]
        )
    )
    assert trace.ops["signature"].to_list() == [0, 0, 1, 2, None, None]
    assert trace.signatures["shapes"].to_list() == ["[[2, 3]]", "[[2, 3]]", "[]"]
    assert [json.loads(text) if text else None for text in trace.signatures["args"]] == [["", "é"], None, None]
    assert trace.signatures["dtypes"].to_list() == ['["float"]', '["float"]', None]
    assert trace.meta.record_shapes


def test_parents_stand_before_their_children(write: Writer, event: Event) -> None:
    spans = [(5, 1), (0, 4), (0, 10), (5, 5), (0, 10)]
    ops = read_trace(write([event(ts=start, dur=length, name=str(row)) for row, (start, length) in enumerate(spans)])).ops
    assert ops["name"].to_list() == ["2", "4", "1", "3", "0"]


def test_old_annotations_leave_the_ops(write: Writer, event: Event) -> None:
    names = ["ProfilerStep#3", "Optimizer.step#SGD.step", "aten::add", "enumerate(DataLoader)#_X.__next__"]
    trace = read_trace(write([event(cat="Operator", name=name, ts=row) for row, name in enumerate(names)]))
    assert trace.ops["name"].to_list() == ["aten::add"]
    assert trace.marks["name"].to_list() == [names[0], names[1], names[3]]


def test_memory_events_with_and_without_category(write: Writer, event: Event) -> None:
    def memory(**args: Any) -> dict[str, Any]:
        return {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 50.25, "args": args}

    trace = read_trace(
        write(
            [
                event(),
                memory(**{"Bytes": -512, "Device Type": 1, "Device Id": 3, "Total Allocated": 5, "Total Reserved": 6}),
                memory(**{"Bytes": 64, "Device Type": 0, "Device Id": -1, "Addr": 139_793_448_042_496}) | {"cat": "cpu_instant_event"},
                memory(**{"Device Type": 1}),
                {"ph": "i", "name": "Iteration Start: PyTorch Profiler", "pid": "Traces", "tid": "x", "ts": 1},
            ]
        )
    )
    rows = trace.allocations.drop("id", "thread", "address").rows()
    assert rows == [(0, -512, "gpu", 3, 5, 6), (0, 64, "cpu", None, None, None)]
    assert trace.allocations["address"].to_list() == [None, 139_793_448_042_496]
    assert trace.meta.base_ns == 50_250
    assert trace.meta.dropped == {"memory event without a usable time or size": 1}


def test_sync_marks_have_no_host_thread(write: Writer, event: Event) -> None:
    trace = read_trace(write([event(), event(cat="cuda_sync", pid=0, tid=7)]))
    assert trace.marks["thread"].to_list() == [None]
    assert len(trace.meta.threads) == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ts": None}, "start is no usable time"),
        ({"ts": "soon"}, "start is no usable time"),
        ({"ts": 10**40}, "start is no usable time"),
        ({"ts": 5e18}, "start is no usable time"),
        ({"dur": -1}, "negative duration"),
        ({"dur": -0.5}, "negative duration"),
        ({"dur": None}, "duration is missing or no usable time"),
        ({"dur": 10**400}, "duration is missing or no usable time"),
        ({"ts": float("nan")}, "start is no usable time"),
        ({"dur": float("inf")}, "duration is missing or no usable time"),
        ({"ts": True}, "a field with a value of an unexpected type"),
        ({"name": {"a": 1}}, "a field with a value of an unexpected type"),
        ({"args": [1]}, "a field with a value of an unexpected type"),
    ],
)
@pytest.mark.parametrize("others", [100, 100.25, 1712345678901234.5])
def test_faulty_events_are_dropped_and_counted(write: Writer, event: Event, fields: dict[str, Any], reason: str, others: float) -> None:
    trace = read_trace(write([event(ts=others, name="before"), event(**{"ts": others} | fields), event(ts=others, name="after")]))
    assert trace.ops["name"].to_list() == ["before", "after"]
    assert trace.meta.dropped == {reason: 1}
    assert trace.meta.events == 3


@pytest.mark.parametrize(
    ("header", "ts", "unix_ns"),
    [
        ({}, 1712345678901234, 1712345678901234000),
        ({"baseTimeNanoseconds": 1751410836000000000}, 1419247337047, 1751410836000000000 + 1419247337047000),
        ({"baseTimeNanoseconds": 0}, 1712345678901234, 1712345678901234000),
        ({"baseTimeNanoseconds": 0}, 1419247337047, None),
        ({}, 1419247337047, None),
    ],
)
def test_unix_time_where_the_clock_is_known(write: Writer, event: Event, header: dict[str, Any], ts: int, unix_ns: int | None) -> None:
    meta = read_trace(write([event(ts=ts), event(ts=ts + 5)], **header)).meta
    assert (meta.base_ns, meta.unix_base_ns) == (ts * 1000, unix_ns)


def test_exact_nanoseconds_through_the_whole_reader(write: Writer) -> None:
    """Doubles near 1.7e15 us are up to 125 ns off: start, end and differences must come from the text."""
    starts = ["1712345678901234.567", "1712345678901234.04", "1712345678901235", "1712345678901235.001"]
    events = ",".join(f'{{"ph":"X","cat":"cpu_op","name":"{i}","pid":1,"tid":1,"ts":{t},"dur":0.333}}' for i, t in enumerate(starts))
    trace = read_trace(write(f"[{events}]"))
    assert trace.meta.base_ns == 1712345678901234040
    assert trace.ops["start_ns"].to_list() == [0, 527, 960, 961]
    assert (trace.ops["end_ns"] - trace.ops["start_ns"]).to_list() == [333] * 4


def test_header_fields_that_cannot_be_read_are_left_out_with_a_warning(write: Writer, event: Event) -> None:
    meta = read_trace(write([event()], deviceProperties={"id": 0}, distributedInfo={"rank": "5", "world_size": 8.0}, record_shapes=0)).meta
    assert meta.devices == ()
    assert (meta.rank, meta.world_size) == (5, 8)
    assert format_notices(meta.notices) == ("the header's deviceProperties could not be read and was left out",)
    assert (meta.record_shapes, meta.with_stack, meta.profile_memory) == (False, False, False)


def test_devices_keep_unknown_as_unknown(write: Writer, event: Event) -> None:
    devices = read_trace(write([event()], deviceProperties=[{"id": 4, "name": ""}, {"numSms": 0, "totalGlobalMem": "85"}])).meta.devices
    assert [(d.index, d.name, d.sm_count, d.memory_bytes, d.compute_capability) for d in devices] == [
        (4, "", None, None, None),
        (1, "", None, 85, None),
    ]


SECRET = "hf_tokenTOKENtoken123"  # noqa: S105 -- planted


def test_nothing_but_the_columns_survives(write: Writer, event: Event) -> None:
    """Real traces hold environment variables and access tokens; the planted one stands wherever such things stand."""
    spots = {"env": {"HF_TOKEN": SECRET}, "list": [SECRET, {SECRET: SECRET}]}
    events = [
        event(args={"Call stack": SECRET, "kernel_file": SECRET, "Comment": spots, "Input Dims": [[1]]}, id=SECRET, sf=SECRET, extra=spots),
        _kernel(args=_kernel()["args"] | spots | {"kernel": SECRET}),
        event(cat="user_annotation", args=spots),
        event(cat="gpu_user_annotation", name=SECRET),
        event(ts=SECRET),
        event(args=SECRET),
        {"ph": "M", "name": "process_labels", "pid": 1, "tid": 1, "args": {"labels": SECRET, "name": SECRET}},
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": SECRET}},
        {"ph": "C", "name": SECRET, "args": spots},
        {"ph": "s", "name": SECRET, "id": SECRET, "cat": SECRET},
        {"ph": "i", "name": SECRET, "ts": 1, "args": spots},
    ]
    header = {"metadata": spots, SECRET: SECRET, "traceName": f"/home/{SECRET}", "trace_id": SECRET, "distributedInfo": {"rank": 0} | spots}
    trace = read_trace(write(events, **header))
    assert trace.ops.height == 1
    assert SECRET not in _everything(trace)


def _everything(trace: Trace) -> str:
    return repr(trace.meta) + "".join(getattr(trace, table).write_json() for table in TRACE_TABLES)


@pytest.mark.parametrize(
    "content",
    [
        SECRET,
        f'{{"{SECRET}": "{SECRET}"}}',
        f'{{"traceEvents": "{SECRET}"}}',
        f'{{"traceEvents": [{{"ph": "X", "name": "{SECRET}", "ts": "{SECRET}"}}]}}',
        f'[{{"ph": "X", "cat": "{SECRET}", "ts": 1, "dur": 1}}]',
        f'[{{"ph": "{SECRET}"',
        f'{{"a": "\xff{SECRET}',
    ],
)
def test_messages_never_show_content_and_leave_no_exception_behind_that_does(write: Writer, content: str) -> None:
    with pytest.raises(InputError) as caught:
        read_trace(write(content.encode("latin-1")))
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "\n" not in str(caught.value)


def test_a_truncated_trace_is_read_as_far_as_it_goes(write: Writer, event: Event) -> None:
    text = json.dumps({"distributedInfo": {"rank": 2}, "traceEvents": [event(ts=number) for number in range(1000)]})
    for content in (text[: len(text) // 2].encode(), gzip.compress(text.encode())[:-800]):
        trace = read_trace(write(content))
        check_trace(trace)
        assert trace.meta.truncated
        assert trace.meta.rank == 2
        assert 100 < trace.ops.height == trace.meta.events < 1000
        assert format_notices(trace.meta.notices) == (
            f"the file breaks off or is malformed after event {trace.meta.events}; what comes later is missing",
        )


def test_a_cut_inside_the_header_after_the_events_is_a_truncation_too(write: Writer, event: Event) -> None:
    trace = read_trace(write(json.dumps({"traceEvents": [event()], "deviceProperties": [{"id": 0}]})[:-5]))
    assert (trace.ops.height, trace.meta.truncated, trace.meta.devices) == (1, True, ())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04\x14\0", "zip archive.*unpack it"),
        (b"a/b.json" + b"\0" * 249 + b"ustar\0", "tar archive.*unpack it"),
        (b"\n<!doctype html>", "web page"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is not a JSON trace"),
        (b'{"foo": []}', "it has no traceEvents"),
        (b'{"traceEvents": []}', "has no complete event"),
        (b'{"traceEvents": [{"ph": "M", "name": "x"}]}', "has no complete event"),
        (b'{"traceEvents": [{"ph": "X"', "breaks off or is malformed before the first complete event"),
        (b"[1, 2, 3]", "has no complete event"),
        (b'[{"ph": "X", "cat": "browser", "ts": 1, "dur": 1}]', "none of the 1 complete events"),
        (b'[{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": -1}]', "none of the 1 complete events"),
        (b'[{"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "ts": 1, "dur": 9}]', "without any op, call or kernel"),
        (gzip.compress(gzip.compress(b"[]", mtime=0), mtime=0), "compressed twice"),
    ],
)
def test_files_that_are_no_traces_give_one_line_with_a_way_on(write: Writer, content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_trace(write(content))
    assert caught.value.exit_code == 2
    assert caught.value.hint


@pytest.mark.needs("torch")
def test_a_training_thread_that_the_profiler_did_not_see_is_named_as_the_reason(tmp_path: Path) -> None:
    import threading

    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as recorder:
        trained = threading.Thread(target=lambda: torch.ones(8).add(1))
        trained.start()
        trained.join()
    recorder.export_chrome_trace(str(tmp_path / "trace.json"))
    with pytest.raises(InputError, match="without any op, call or kernel") as caught:
        read_trace(tmp_path / "trace.json")
    assert "the thread that trains" in str(caught.value.hint)


@pytest.mark.parametrize("brackets", [b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000])
def test_depth_is_no_crash(write: Writer, event: Event, brackets: bytes) -> None:
    with pytest.raises(InputError):
        read_trace(write(brackets))
    deep = json.dumps([event(), event()]).encode().replace(b'"args": {}', b'"args": {"x": ' + brackets + b"}", 1)
    if brackets.endswith(b"]"):
        trace = read_trace(write(deep))
        assert (trace.ops.height, trace.meta.dropped) == (1, {"nested too deeply": 1})
    else:
        with pytest.raises(InputError):
            read_trace(write(deep))
    skipped = b'{"other": ' + brackets.replace(b'{"a":', b"[") + b', "traceEvents": ' + json.dumps([event()]).encode() + b"}"
    if brackets.endswith(b"]"):
        assert read_trace(write(skipped)).ops.height == 1


def test_reading_leaves_the_garbage_collector_as_it_was(write: Writer, event: Event) -> None:
    import gc

    read_trace(write([event()]))
    assert gc.isenabled()
    gc.disable()
    try:
        read_trace(write([event()]))
        assert not gc.isenabled()
    finally:
        gc.enable()


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_gives_a_trace_or_one_clear_line(write: Writer, event: Event, data: st.DataObject) -> None:
    events = [event(), _kernel(), event(cat="python_function", args={"Python id": 1}), event(cat="user_annotation", name="ProfilerStep#1")]
    args = {"Input Dims": [[1, 2], []], "Concrete Inputs": ["a\"]}, {'"]}
    text = bytearray(json.dumps({"deviceProperties": [{"id": 0}], "traceEvents": [event(args=args), *events], "with_stack": 1}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text) - 1))
        length = data.draw(st.integers(0, 6))
        text[place : place + length] = data.draw(
            st.sampled_from([b"", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b"\xff", b"nan", b"1e999", b"-"])
        )
    with suppress(InputError):
        trace = read_trace(write(bytes(text)))
        check_trace(trace)
        assert all((getattr(trace, table)["start_ns"] >= 0).all() for table in ("ops", "kernels", "frames", "marks"))
        assert trace.meta.events <= 12


def test_the_table_of_a_gz_equals_that_of_the_plain_file(write: Writer, event: Event) -> None:
    text = json.dumps([event(ts=number / 8, name=f"op{number % 7}") for number in range(5000)]).encode()
    plain, packed = read_trace(write(text)), read_trace(write(gzip.compress(text), "x.txt"))
    assert plain.ops.equals(packed.ops)
    assert plain.ops["name"].dtype == pl.Categorical()
    assert packed.meta.uncompressed_bytes == len(text)
