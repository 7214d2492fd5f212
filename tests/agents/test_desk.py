"""Questions answered in this process: a report is made once, secrets stay, what cannot be known says what to record."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from agentproject import write_project

from gpudiag import api
from gpudiag.agents.desk import Desk
from gpudiag.agents.questions import QUESTIONS, build_schema, describe_tool, name_tool, read_question
from gpudiag.diagnosis.config import Config
from gpudiag.errors import UsageError


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with made-up recordings, one of them a bundle whose program was given a secret."""
    folder = tmp_path_factory.mktemp("desk").resolve()
    write_project(folder)
    window = {"rank": 0, "index": 0, "kind": "timing", "file": "", "first_step": 0, "steps": 6, "record_shapes": True, "with_stack": False}
    bundle = folder / "runs" / "bundle"
    (bundle / "trace").mkdir(parents=True)
    command = ["train.py", "--lr", "0.1", "--api-token", "hunter2"]
    manifest = {"finished": True, "device_kind": "gpu", "windows": [window], "steps": 20, "command": command}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    (bundle / "trace" / "rank0-w0.json.gz").write_bytes(gzip.compress((folder / "runs" / "slow.json").read_bytes()))
    return folder


@pytest.fixture(scope="module")
def desk(project: Path) -> Iterator[Desk]:
    """Where these recordings are asked about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        yield Desk(project, Config())


def ask(desk: Desk, tool: str, **arguments: object) -> str:
    return desk.answer(read_question(tool, arguments))


def test_a_report_is_made_once_and_anew_where_its_files_changed(desk: Desk, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, diagnose = [], api.diagnose
    monkeypatch.setattr(api, "diagnose", lambda *given, **more: made.append(given) or diagnose(*given, **more))
    path = project / "runs" / "own.json"
    path.write_bytes((project / "runs" / "slow.json").read_bytes())
    for tool in ("report", "findings", "idle", "ops"):
        ask(desk, tool, path="runs/own.json")
    assert len(made) == 1
    path.write_bytes((project / "runs" / "fast.json").read_bytes())
    assert "data loading" not in ask(desk, "idle", path="runs/own.json")
    assert len(made) == 2
    path.unlink()


def test_the_command_that_tries_a_fix_names_the_recorded_program_without_its_secrets(desk: Desk) -> None:
    told = ask(desk, "report", path="runs/bundle") + ask(desk, "findings", path="runs/bundle") + ask(desk, "recordings")
    assert "gpudiag ab --fix loader-workers train.py --lr 0.1 --api-token ..." in told
    assert "hunter2" not in told


def test_a_rule_that_found_nothing_says_why_and_what_to_record(desk: Desk) -> None:
    unseen = ask(desk, "findings", path="runs/slow.json", id="hw-01")
    assert "status: not applicable" in unseen
    assert "reason: no telemetry: record with gpudiag.profile" in unseen
    assert "status: passed" in ask(desk, "findings", path="runs/slow.json", id="OVH-01")


@pytest.mark.parametrize("part", ["ranks", "experiments", "history", "telemetry", "memory", "environment"])
def test_a_part_that_a_trace_does_not_have_is_not_known(desk: Desk, part: str) -> None:
    said = ask(desk, "report", path="runs/slow.json", part=part)
    assert "Not known: " in said
    assert "Basis: 6 steps analysed" in said


def test_ops_are_filtered_and_signatures_name_the_line_and_the_origin_of_the_cost(desk: Desk) -> None:
    assert "`aten::mm`" not in ask(desk, "ops", path="runs/slow.json", name="ADD")
    assert "No op passes these filters" in ask(desk, "ops", path="runs/slow.json", name="conv")
    signatures = ask(desk, "ops", path="runs/slow.json", group="signature")
    assert "train.py:5 train" in signatures
    assert "| cost |" in signatures
    assert "exact" in signatures


def test_sql_tells_tables_then_columns_then_rows(desk: Desk) -> None:
    assert "kernels: `id, name, kind" in ask(desk, "sql", path="runs/slow.json")
    assert "| `busy_ns` | `ns` |" in ask(desk, "sql", path="runs/slow.json", table="kernels")
    assert "| `sm80_xmma_gemm` | 6 |" in ask(
        desk, "sql", path="runs/slow.json", query="select name, count(*) as n from kernels group by name order by name"
    )
    many = ask(desk, "sql", path="runs/slow.json", query="select a.id from kernels a cross join kernels b cross join launches c")
    assert "Page 1 of " in many


def test_every_tool_describes_itself_and_its_arguments() -> None:
    for kind in QUESTIONS:
        schema = build_schema(kind)
        assert 40 < len(describe_tool(kind)) < 600, name_tool(kind)
        assert schema["additionalProperties"] is False
        assert all(part.get("description") for part in schema["properties"].values()), name_tool(kind)
        assert msgspec.json.decode(msgspec.json.encode(schema)) == schema


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("idles", {}, "no tool is called 'idles'; did you mean 'idle'?"),
        ("idle", {}, "missing required field `path`"),
        ("idle", {"path": 3}, "in `path`"),
        ("idle", {"path": "x", "page": 0}, "in `page`"),
        ("sql", {"path": "x", "query": "x" * 5_000}, "in `query`"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(tool: str, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as error:
        read_question(tool, arguments)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
