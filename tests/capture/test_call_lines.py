"""Where a finding points: programs whose slow statement is known, recorded by gpudiag.profile and by `gpudiag run`; and nothing of ours."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gpudiag
from gpudiag.analysis import analyse
from gpudiag.api import diagnose
from gpudiag.attribution.call_sites import CALLS_PROGRAM, RECORDER
from gpudiag.bundle.reader import open_bundle
from gpudiag.capture import call_lines, operator_lines
from gpudiag.facts.catalogue import Facts
from gpudiag.inputs import resolve_input
from gpudiag.report.labels import parse_site

HEAD = """
import time
import torch
from torch.nn import functional as F

steps = globals().get("steps", lambda loader: loader)  # gpudiag.profile; `gpudiag run` leaves the loader as it is
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False, fused=False)
data = [(torch.randn(4, 8), torch.randn(4, 1))] * 24


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * 24

    def __getitem__(self, index):
        time.sleep(0.008)
        return torch.zeros(8), torch.zeros(1)

"""
STEP = """
{i}loss = F.mse_loss(model(x), y)  # CALL
{i}optimizer.zero_grad()
{i}loss.backward()
{i}optimizer.step()
{i}loss.item()  # READ
"""
SLEEPS = STEP + "{i}time.sleep(0.03)  # SLOW\n"


def body(text: str, depth: int) -> str:
    return text.format(i="    " * depth)


PROGRAMS = {
    "a loop in a function": "def train():\n    for x, y in steps(data):" + body(SLEEPS, 2) + "\ntrain()\n",
    "a loop at module level": "for x, y in steps(data):" + body(SLEEPS, 1),
    "a loop in a method": "class Trainer:\n    def fit(self):\n        for x, y in steps(data):" + body(SLEEPS, 3) + "\nTrainer().fit()\n",
    "nested functions": "def train(epochs):\n    def epoch():\n        for x, y in steps(data):" + body(SLEEPS, 3)
    + "\n    for _ in range(epochs):\n        epoch()\n\ndef main():\n    train(1)\n\nmain()\n",
    "a closure that makes the step": "def build():\n    def step(x, y):" + body(SLEEPS, 2)
    + "\n    return step\n\ndef train(step):\n    for x, y in steps(data):\n        step(x, y)\n\ntrain(build())\n",
    "a generator that yields batches": "def batches():\n    for x, y in data:\n        time.sleep(0.03)  # SLOW\n        yield x, y\n\n"
    "def train():\n    for x, y in steps(batches()):  # WAIT" + body(STEP, 2) + "\ntrain()\n",
    "a loader in a function": "def train(loader):\n    for x, y in steps(loader):  # WAIT" + body(STEP, 2)
    + "\ntrain(torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=1))\n",
}  # fmt: skip


def write_program(folder: Path, text: str) -> tuple[Path, Callable[[str], int | None]]:
    """Return the script, and what tells the line of a mark."""
    script = folder / "program.py"
    script.write_text(HEAD + text)
    lines = {found[1]: number for number, line in enumerate((HEAD + text).splitlines(), 1) if (found := re.search(r"# ([A-Z]+)$", line))}
    return script, lines.get


def profile(script: Path, bundle: Path) -> None:
    torch.manual_seed(0)
    with gpudiag.profile(bundle, telemetry_hz=0) as prof:
        runpy.run_path(str(script), {"steps": prof.steps}, run_name="__main__")


def run(script: Path, bundle: Path) -> None:
    subprocess.run([sys.executable, "-m", "gpudiag", "run", "-o", str(bundle), str(script)], check=True, capture_output=True, timeout=120)


def check_lines(bundle: Path, line: Callable[[str], int | None]) -> None:
    report = diagnose(bundle).data
    sites = {(row.name, row.phase): parse_site(row.where) for row in report.ops}
    for name, mark in (("aten::mse_loss", "CALL"), ("aten::addmm", "CALL"), ("aten::_local_scalar_dense", "READ")):
        found = {
            site and (site.file.split("/")[-1], site.line) for (op, phase), site in sites.items() if op == name and phase != "backward"
        }
        assert found == {("program.py", line(mark))}, name
    places = [row for row in report.idle if row.file and row.file.endswith("program.py")]
    longest = max(places, key=lambda row: row.idle_ns)  # of a generator gpudiag.profile knows that it was asked for a batch
    making = "SLOW" if line("SLOW") else "WAIT"  # the line that makes the batch, where it is the program's
    rule, mark = ("INP-01", making) if longest.cause == "idle_data" else ("OVH-08", "SLOW")
    assert longest.line == line(mark)
    assert all(finding.where[0].line == line(mark) for finding in report.findings if finding.rule == rule)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_finding_points_at_the_statement(name: str, tmp_path: Path) -> None:
    script, line = write_program(tmp_path, PROGRAMS[name])
    profile(script, tmp_path / "bundle")
    check_lines(tmp_path / "bundle", line)


@pytest.mark.slow
@pytest.mark.usefixtures("known_peaks")
@pytest.mark.parametrize(
    "name", ["a loop in a function", "a loader in a function", pytest.param("nested functions", marks=pytest.mark.long)]
)
def test_so_it_does_in_a_script_that_knows_nothing_of_it(name: str, tmp_path: Path) -> None:
    script, line = write_program(tmp_path, PROGRAMS[name])
    run(script, tmp_path / "bundle")
    check_lines(tmp_path / "bundle", line)


OPERATORS = """
def weigh(left, whole=False):
    if whole:
        return torch.exp(left) / 3  # no call of exp was seen, so this did not run
    return left / 2 + left[0] + 1 / 3  # ONE

for x, y in steps(data):
    left = model(x) - y  # MINUS
    loss = (left * left).mean()  # CALL
    loss = loss * weigh(left).mean()  # TWICE
    left = -left  # nothing is called
    left = -left  # between these
    if left.sum() > 1e9:  # TRUTH
        break
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_an_operator_has_a_line_where_one_line_alone_can_have_run_it(tmp_path: Path) -> None:
    script, line = write_program(tmp_path, OPERATORS)
    os.utime(script, (1, 1))
    profile(script, tmp_path / "bundle")
    rows = {row.name: parse_site(row.where) for row in diagnose(tmp_path / "bundle").data.ops if row.phase == "forward"}
    found = {name: (site.line, site.function) for name, site in rows.items() if site is not None}
    assert found["aten::sub"] == (line("MINUS"), "<module>")
    assert found["aten::gt"] == found["aten::is_nonzero"] == (line("TRUTH"), "<module>")
    assert found["aten::div"] == found["aten::select"] == found["aten::add"] == (line("ONE"), "weigh")
    assert found["aten::neg"] == (None, "<module>")  # where the profiler was switched on says nothing of it
    rows = {site.line for row in diagnose(tmp_path / "bundle").data.ops if row.name == "aten::mul" and (site := parse_site(row.where))}
    assert rows == {line("CALL"), line("TWICE")}  # told apart by the calls around them


@pytest.mark.slow
def test_an_operator_has_no_line_where_the_file_was_changed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_lines, "_BEGAN", time.time() - 1)  # whichever clock another test had when it was imported
    script, _ = write_program(tmp_path, OPERATORS)
    profile(script, tmp_path / "bundle")
    sites = {row.name: parse_site(row.where) for row in diagnose(tmp_path / "bundle").data.ops if row.phase == "forward"}
    assert (sites["aten::sub"] and sites["aten::sub"].line) is None


PAUSES = """
def weigh(rows, odd):
    values = rows.tolist()
    total = 0
    for row in values:
        for value in row:
            total = total * 3 + value % odd
    rows.sum()
    for value in values:
        low = round(value[0])
        counts[low] = counts.get(low, 0)
    chosen = set(map(int, values))
    rows.mean()
    return total


def power(base):
    product = 1
    for _ in range(1000):
        product *= base
    return product


for rows in data:
    weigh(rows, 2)
    for row in rows:
        row * 2
    power(1)
"""


@pytest.mark.parametrize(
    ("function", "before", "after", "line"),
    [
        ("weigh", 3, 8, 7),  # the only loop between two calls, and what it consists of
        ("weigh", 10, 11, 10),
        ("weigh", 11, 10, 11),  # it began anew
        ("weigh", 11, 13, 12),  # types are not noted
        ("weigh", 13, 0, 13),
        ("weigh", 3, 13, None),  # two loops
        ("power", 0, 0, 20),  # it called nothing
        ("<module>", 25, 28, 27),
        ("<module>", 28, 25, 28),
    ],
)
def test_python_between_two_calls_has_the_line_that_can_have_run(
    function: str, before: int, after: int, line: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_lines, "_BEGAN", float("inf"))
    script = tmp_path / "pauses.py"
    script.write_text(PAUSES)
    scope = (str(script), {"weigh": 2, "power": 17, "<module>": 1}[function], function)
    assert operator_lines.find_pause_line(scope, before, after) == line


def test_calls_have_lines_where_there_are_too_many_to_come_to_the_marks_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_lines, "MAX_EVENTS", 3)
    keys = [Node("PyCall", "train.py(7): <lambda>", at, at + 1, ("train.py", 7, "<lambda>")) for at in range(10, 20)]
    made = [
        Node("PyCCall", "<built-in sorted>", 5, 30, ("train.py", 7, "train"), keys),
        Node("PyCall", "torch/optim/optimizer.py(3): step", 40, 50, ("train.py", 9, "train"), [Node("TorchOp", "ProfilerStep#1", 41, 49)]),
    ]
    assert [call.line for call in call_lines.find_call_lines(made)][:2] == [7, 9]


def test_a_pause_has_the_line_of_the_call_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {("train", 0, 40): 39, ("train", 40, 42): 40, ("train", 42, 0): 43, ("power", 0, 0): 61}
    monkeypatch.setattr(call_lines, "find_pause_line", lambda scope, before, after: lines[scope[2], before, after])
    leaf = Node("PyCall", "train.py(60): power", 206_000, 238_000, ("train.py", 60, "power"))  # calls nothing
    leaf.extra_fields.caller = Node("PyCall", "", 0, 0, ("train.py", 42, "train")).extra_fields.caller
    inside = [
        Node("PyCCall", "<built-in a>", 105_000, 106_000, ("train.py", 40, "train")),
        leaf,
    ]
    made = [
        Node("PyCall", "train.py(38): train", 5_000, 408_000, ("train.py", 38, "train"), inside),
        Node("TorchOp", "ProfilerStep#1", 1_000, 2_000),
    ]
    made[0].extra_fields.caller = Node("PyCall", "", 0, 0, ("train.py", 50, "<module>")).extra_fields.caller
    head = b'{"baseTimeNanoseconds": 0,\n"traceEvents": ['
    old, new = call_lines.add_call_lines(head, call_lines.find_call_lines(made), 7, 8)
    events = json.loads(b"{" + new.rstrip(b",\n").replace(old, b'"traceEvents": [') + b"]}")["traceEvents"]
    found = sorted((round(event["ts"]), round(event["ts"] + event["dur"]), event["name"].split("(")[1].split(")")[0]) for event in events)
    assert found == [(5, 105, "39"), (5, 408, "50"), (105, 206, "40"), (206, 238, "42"), (206, 238, "61"), (238, 408, "43")]


MANY_OPS = """
for x, y in steps(data):
    loss = F.mse_loss(model(x), y)
    for weight in [*model.parameters()] * 30:
        loss = loss + weight.norm()  # MANY
    optimizer.zero_grad()
    loss.backward()  # BACK
    optimizer.step()
"""


@pytest.mark.slow
def test_host_overhead_stands_at_the_line_that_makes_the_ops_and_not_where_backward_is_called(tmp_path: Path) -> None:
    script, line = write_program(tmp_path, MANY_OPS)
    os.utime(script, (1, 1))
    profile(script, tmp_path / "bundle")
    analysis = analyse(resolve_input(str(tmp_path / "bundle"), None), lambda _: None)
    assert Facts(analysis).places("late_ops")[0].line == line("MANY")


def read_frames(bundle: Path) -> list[dict[str, Any]]:
    """Return the Python frames of the site window that lie in its steps, outer ones first."""
    with gzip.open(open_bundle(bundle).windows()[1]) as file:
        events = json.load(file)["traceEvents"]
    marks = [event for event in events if event["name"].startswith("ProfilerStep#")]
    first, last = min(event["ts"] for event in marks), max(event["ts"] + event["dur"] for event in marks)
    frames = [event for event in events if event.get("cat") == "python_function" and first <= event["ts"] <= last]
    return sorted(frames, key=lambda event: (event["tid"], event["ts"], -event["dur"]))


@pytest.mark.slow
def test_nothing_of_ours_that_can_wait_runs_inside_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpudiag.capture.session.SEGMENT_NS", 1)  # segments are due at each mark
    script, _ = write_program(tmp_path, PROGRAMS["a loop in a function"])
    profile(script, tmp_path / "bundle")
    names = {frame["name"] for frame in read_frames(tmp_path / "bundle")}
    assert any("loop.py" in name and name.endswith(": _mark") for name in names)  # the marks of the steps themselves
    late = r"manifest\.py\(\d+\): encode$|: (?:_build|_flush|_work_out|read_packages|read_code|look_slowly)$"
    late += r"|importlib/metadata|^email/|^subprocess\.py"
    assert not [name for name in names if re.search(late, name)]


@pytest.mark.slow
def test_our_own_frames_and_all_below_them_are_the_profilers(tmp_path: Path) -> None:
    script, _ = write_program(tmp_path, PROGRAMS["a loop in a function"])
    profile(script, tmp_path / "bundle")
    report = diagnose(tmp_path / "bundle").data
    blamed = [row for row in report.idle if row.cause != "idle_profiler" and row.idle_ns >= 100_000 * report.steps.count]
    assert blamed  # the sleep
    assert not [row for row in blamed if "gpudiag" in f"{row.file} {row.evidence}"]


def test_each_wrapper_that_calls_the_original_is_known_to() -> None:
    root, unknown, known = Path(gpudiag.__file__).parent, [], 0
    for path in [*root.glob("capture/**/*.py"), *root.glob("integrations/*.py")]:
        if path.name == "sitecustomize.py" or path.parent.name == "estimate":  # before torch is imported; not beside a training
            continue
        for function in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)):
            own = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            inner = [
                node
                for child in ast.walk(function)
                if isinstance(child, ast.FunctionDef) and child is not function
                for node in ast.walk(child)
            ]
            if any(isinstance(call.func, ast.Name) and call.func.id == "original" and call not in inner for call in own):
                name = f"gpudiag/{path.relative_to(root)}({function.lineno}): {function.name}"
                assert re.search(RECORDER, name)
                known += 1
                unknown += [] if re.search(CALLS_PROGRAM, name) else [name]
    assert known > 10
    assert not unknown


class Node:
    """What torch gives of an event of its tree."""

    def __init__(self, tag: str, name: str, start: int, end: int, caller: tuple[str, int, str] | None = None, children: Any = ()) -> None:
        from torch._C._profiler import _EventType

        self.tag, self.name, self.start_time_ns, self.end_time_ns, self.start_tid = getattr(_EventType, tag), name, start, end, 1
        place = (
            None if caller is None else type("Caller", (), dict(zip(("file_name", "line_number", "function_name"), caller, strict=True)))
        )
        self.extra_fields, self.children = type("Fields", (), {"caller": place, "callsite": place}), children


def test_the_frames_that_are_added_stand_around_the_calls() -> None:
    inner = Node("PyCCall", "<built-in sleep>", 5_000, 9_001, ("torch/nn/functional.py", 7, "relu"))
    made = [
        Node("PyCall", "torch/nn/functional.py(3): relu", 4_000, 9_500, ("train.py", 40, "train"), [inner]),
        Node("TorchOp", "ProfilerStep#3", 1_000, 20_000),
        Node("TorchOp", "aten::add", 9_600, 9_700, children=[Node("PyCCall", "<x>", 9_610, 9_620, ("train.py", 41, "train"))]),
    ]
    assert call_lines.find_call_lines(made) == [call_lines.Call(4_000, 9_500, ("train.py", 40, "train"), 40)]
    old, new = call_lines.add_call_lines(b'{"baseTimeNanoseconds": 1000,\n"traceEvents": [', call_lines.find_call_lines(made), 7, 8)
    (event,) = json.loads(b"{" + new.rstrip(b",\n").replace(old, b'"traceEvents": [') + b"]}")["traceEvents"]
    assert {key: event[key] for key in ("name", "pid", "tid", "ts", "dur")} == {
        "name": "train.py(40): train", "pid": 7, "tid": 8, "ts": 2.999, "dur": 5.502,
    }  # fmt: skip
