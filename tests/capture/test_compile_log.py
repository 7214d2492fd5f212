"""What torch.compile did: read from what torch remembers, with the program's texts left out, whatever torch says."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from traceback import FrameSummary
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpudiag.bundle.layout import compile_log_name
from gpudiag.bundle.reader import open_bundle
from gpudiag.capture.compile_log import (
    LONGEST,
    MOST_COMPILATIONS,
    CompileRecords,
    choose_guards,
    collect_compile_log,
    read_break,
    read_compilation,
    read_failed_guard,
)
from gpudiag.capture.session import Session
from gpudiag.model.compilation import CodePlace, CompileLog, FailedGuard

SECRET = "hunter2-PLANTED"  # noqa: S105 - the bait

RESUMED = "torch_dynamo_resume_in_forward_at_15"
SAID = {  # by torch 2.13, but for those with L[...], which are of torch 2.4 to 2.6
    "0/0: tensor 'x' size mismatch at index 0. expected 8, actual 9": FailedGuard(kind="size", name="x", expected="8", actual="9"),
    "3/0: tensor 'L['batch']['ids']' size mismatch at index 1. expected 8, actual 9": FailedGuard(
        kind="size", name="L['batch']['ids']", expected="8", actual="9"
    ),
    "3/0: tensor '___stack0' size mismatch at index 0. expected 8, actual 12": FailedGuard(kind="size", expected="8", actual="12"),
    "1/0: tensor 'x' requires_grad mismatch. expected requires_grad=0": FailedGuard(kind="requires_grad", name="x"),
    "1/0: tensor 'x' rank mismatch. expected 2, actual 3": FailedGuard(kind="rank", name="x", expected="2", actual="3"),
    "1/0: tensor 'x' dtype mismatch. expected Float, actual BFloat16": FailedGuard(
        kind="dtype", name="x", expected="Float", actual="BFloat16"
    ),
    f"""3/1: scale == 1        # return self.blocks(x) * {SECRET}  # mp/train.py:15 in {RESUMED}
User stack trace:
  File "/app/train.py", line 15, in {RESUMED}
    return self.blocks(x) * {SECRET}""": FailedGuard(
        kind="value", name="scale", expected="1", place=CodePlace("/app/train.py", 15, "forward")
    ),
    f"0/0: L['mode'] == '{SECRET}'    # if mode == '{SECRET}':  # app/train.py:9 in run": FailedGuard(
        kind="value", name="L['mode']", place=CodePlace("app/train.py", 9, "run")
    ),
    "0/0: ___check_obj_id(self.norm, 139872)": FailedGuard(kind="identity", name="self.norm"),
    "0/0: ___check_type_id(L['xs'], 94388)": FailedGuard(kind="type", name="L['xs']"),
    "0/0: len(xs) == 3": FailedGuard(kind="value", name="len(xs)", expected="3"),
    "0/0: 16 <= x.size()[0] <= 32": FailedGuard(kind="size", name="16 <= x.size()[0]", expected="32"),
    "0/0: GLOBAL_STATE changed: grad_mode ": FailedGuard(kind="mode"),
    "0/0: BACKEND_MATCH failure: torch.compile detected different backend callables.": FailedGuard(kind="backend"),
    f"0/0: asks('{SECRET} is odd') in {{'{SECRET}': 1}}": FailedGuard(kind="other"),
}


@pytest.mark.parametrize("text", SAID)
def test_a_failed_guard_is_what_was_asked_of_what_without_texts_of_the_program(text: str) -> None:
    found = read_failed_guard(text)
    expected = SAID[text]
    assert found is not None
    if found.kind == "size" and "<=" in text:  # a range: what is compared is told as it stands
        assert found.kind == expected.kind
    else:
        assert found == expected
    assert SECRET not in repr(found)


@pytest.mark.parametrize(
    "text",
    ["", ":", "0/0: ", "tensor '", "0/0: tensor '' size mismatch", "#" * 9_000, "0/0: " + "x == " * 9_000, "0/0: " + "(" * 9_000,
     "\ud800 == \x00",
     "0/0: tensor '" + "a" * 9_000, f"0/0: x == {'9' * 9_000}", 'File "' * 9_000, "# a:1 in " * 3_000],
    ids=range(13),
)  # fmt: skip
def test_whatever_a_reason_says_it_is_read_at_once_and_short(text: str) -> None:
    found = read_failed_guard(text)
    assert found is None or all(len(part) <= LONGEST for part in (found.name, found.expected, found.actual))
    broken = read_break(SimpleNamespace(reason=text, user_stack=[SimpleNamespace(filename=text, lineno=1, name=text)] * 50))
    msgspec.json.encode([found, broken])
    assert len(broken.reason) <= LONGEST
    assert len(broken.stack) == 8
    assert all(len(frame.file) <= LONGEST and len(frame.function) <= LONGEST for frame in broken.stack)


@pytest.mark.parametrize(
    ("reason", "kept", "kind"),
    [
        (f"Unsupported Tensor.item() call with capture_scalar_outputs=False\n  Hint: {SECRET}",
         "Unsupported Tensor.item() call with capture_scalar_outputs=False", "number"),
        ("Call to `torch._dynamo.graph_break()`\n  Explanation: asked", "Call to `torch._dynamo.graph_break()`", "asked"),
        ("Data-dependent branching\n  Explanation: asked", "Data-dependent branching", "branch"),
        ("Attempted to call function marked as skipped", "Attempted to call function marked as skipped", "call"),
        (f"call_function BuiltinVariable(print) [ConstantVariable(str: '{SECRET}')] {{}}", "call_function BuiltinVariable(print)", "call"),
        ("generic_jump TensorVariable()", "generic_jump TensorVariable()", "branch"),
        (f"'{SECRET}'", "", ""),
    ],
)  # fmt: skip
def test_of_a_break_the_compilers_own_words_are_kept(reason: str, kept: str, kind: str) -> None:
    frames = [FrameSummary("train.py", 15, "forward", line=SECRET), FrameSummary("block.py", 8, "forward", line=SECRET)]
    found = read_break(SimpleNamespace(reason=reason, user_stack=frames))
    assert (found.reason, found.kind) == (kept, kind)
    assert found.stack == (CodePlace("train.py", 15, "forward"), CodePlace("block.py", 8, "forward"))
    assert SECRET not in repr(found)


def test_of_all_versions_that_do_not_fit_the_nearest_tells_why_it_was_compiled_again() -> None:
    gradient, size = (
        "tensor 'x' requires_grad mismatch. expected requires_grad=0",
        "tensor 'x' size mismatch at index 0. expected 8, actual 9",
    )
    failures = [f"1/0: {gradient}", f"1/1: {gradient}", f"1/0: {size}", f"1/2: {gradient}", f"1/1: {size}", f"1/0: {gradient}"]
    assert [guard and guard.kind for guard in choose_guards(failures)] == ["requires_grad", "size", "size"]
    assert list(choose_guards([])) == []


class Metrics(SimpleNamespace):
    """As torch's, as far as it is read."""


def make_metrics(number: str = "0/0", **fields: Any) -> Metrics:
    places = {"co_name": "forward", "co_filename": "train.py", "co_firstlineno": 6, "recompile_reason": None}
    return Metrics(compile_id=number, **places | fields)


def test_a_compilation_tells_when_it_was_and_what_it_continues() -> None:
    found = read_compilation(
        make_metrics("2/1", co_name="torch_dynamo_resume_in_forward_at_8", start_time_us=5, duration_us=7, guard_count=3)
    )
    assert found is not None
    assert (found.id, found.place.function, found.resumes_at) == ("2/1", "forward", 8)
    assert (found.begun_unix_ns, found.duration_ns, found.guards) == (5_000, 7_000, 3)


def test_an_older_torch_leaves_unknown_what_it_does_not_have() -> None:
    found = read_compilation(SimpleNamespace(co_name="f", co_filename="a.py", co_firstlineno=1, entire_frame_compile_time_s=0.5))
    assert found is not None
    assert (found.id, found.begun_unix_ns, found.duration_ns, found.guard) == ("", None, 500_000_000, None)
    empty = read_compilation(SimpleNamespace())
    assert empty is not None
    assert empty.place == CodePlace("")
    assert read_compilation(SimpleNamespace(is_runtime=True)) is None


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Stand in for the module with torch's records."""
    from collections import deque

    home: Any = types.ModuleType("torch._dynamo.utils")
    home._compilation_metrics, home.graph_break_reasons, home.guard_failures = deque(maxlen=64), [], {}
    home.get_compilation_metrics = lambda: list(home._compilation_metrics)

    def limit(size: int) -> None:
        home._compilation_metrics = deque(home._compilation_metrics, maxlen=size)

    home.set_compilation_metrics_limit = limit
    monkeypatch.setitem(sys.modules, home.__name__, home)
    return home


def test_records_of_another_format_are_left_out_and_counted(remembered: Any) -> None:
    remembered._compilation_metrics += [make_metrics(), make_metrics(co_filename=property), object()]

    class Raising:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    remembered._compilation_metrics.append(Raising())
    remembered.graph_break_reasons += [None, 7, SimpleNamespace(reason=7, user_stack=3)]
    found = collect_compile_log()
    assert found is not None
    assert found.dropped == 1
    assert len(found.compilations) == 3


def test_nothing_compiled_leaves_no_file(remembered: Any, tmp_path: Path) -> None:
    assert collect_compile_log() is None
    with Session(tmp_path / "run", parts=[CompileRecords()], gives_way=True):
        pass
    assert not (tmp_path / "run" / compile_log_name(0)).exists()


def test_torch_remembers_more_only_while_it_is_recorded(remembered: Any, tmp_path: Path) -> None:
    with Session(tmp_path / "run", parts=[CompileRecords()], gives_way=True) as session:
        assert remembered._compilation_metrics.maxlen == MOST_COMPILATIONS
        remembered._compilation_metrics.append(make_metrics())
    assert remembered._compilation_metrics.maxlen == 64
    log = open_bundle(session.path).compile_log
    assert log is not None
    assert [one.id for one in log.compilations] == ["0/0"]


@pytest.mark.parametrize("text", [b"{", b'{"version":99}', b'{"compilations":[{"place":7}]}', b"[" * 5_000, b""])
def test_a_damaged_log_is_a_notice_and_the_bundle_is_whole(remembered: Any, tmp_path: Path, text: bytes) -> None:
    remembered._compilation_metrics.append(make_metrics())
    with Session(tmp_path / "run", parts=[CompileRecords()], gives_way=True) as session:
        pass
    (session.path / compile_log_name(0)).write_bytes(text)
    opened = open_bundle(session.path)
    assert opened.compile_log is None
    assert any("rank0-compilations.json could not be read" in str(notice.params) for notice in opened.notices)


PLANTED = f'''
import torch

SECRET = "{SECRET}"

def fribble_grumph(x, factor, note):
    y = x * factor
    if y.detach().amax().item() > 1e9:
        y = y * 0.5
    return y.relu() if note == SECRET else y

weight = torch.randn(16, 16, requires_grad=True)
compiled = torch.compile(lambda x, factor, note: fribble_grumph(x @ weight, factor, note), backend="aot_eager", dynamic=False)
optimizer = torch.optim.SGD([weight], lr=1e-3)
for step in range(32):
    rows = 8 if step < 20 else 8 + step % 3
    loss = compiled(torch.randn(rows, 16), 2, SECRET).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
'''


@pytest.mark.slow
def test_a_planted_break_and_planted_recompilations_are_named_with_line_and_cure(tmp_path: Path) -> None:
    """A real torch.compile: two new sizes of x fall into the profiled steps, and every step reads a number in the middle."""
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(PLANTED)
    command = [sys.executable, "-m", "gpudiag", "run", "--skip", "10", "--record", "12", "--sites", "0", "-o", str(out), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    report = json.loads((out / "report.json").read_bytes())
    lines = PLANTED.splitlines()
    asked = next(number for number, line in enumerate(lines, 1) if ".item()" in line)
    found = report["compilation"]
    assert found["in_steps"] >= 2
    assert 0 < found["idle_ns"] <= report["breakdown"]["wall_ns"]
    broken = found["breaks"][0]
    assert (broken["place"]["file"], broken["place"]["line"]) == (str(script), asked)
    assert broken["kind"] == "number"
    assert broken["crossed"] == report["steps"]["count"]
    assert broken["between_ns"] > 0
    again = [row for row in found["recompiles"] if row["in_steps"]]
    assert {(row["kind"], row["cure"]) for row in again} == {("size", "dynamic")}
    assert sum(row["idle_ns"] for row in again) <= found["idle_ns"]
    fired = {finding["rule"]: finding for finding in report["findings"]}
    assert "the size of " in fired["OVH-05"]["message"]
    assert "mark_dynamic" in fired["OVH-05"]["message"]
    assert f"train.py:{asked}" in done.stderr
    log = msgspec.json.decode((out / compile_log_name(0)).read_bytes(), type=CompileLog)
    assert log.breaks[0].stack[-1] == CodePlace(str(script), asked, "fribble_grumph")
    for path in (path for path in (out / "inductor").rglob("*") if path.is_file()):
        assert SECRET.encode() not in path.read_bytes()
        assert b"relu" not in path.read_bytes()  # a line of the source
    copy = tmp_path / "shared"
    subprocess.run([sys.executable, "-m", "gpudiag", "scrub", str(out), "-o", str(copy)], check=True, capture_output=True, cwd=tmp_path)
    assert b"fribble_grumph" not in (copy / compile_log_name(0)).read_bytes()
    assert open_bundle(copy).compile_log is not None
