"""`gpudiag mcp` over stdio, asked by the client of the SDK: what it offers, answers, pages, refuses, and does not let out of its folder."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from agentproject import HOSTILE, INJECTION, write_hostile, write_project
from mcpclient import Agent, serve

from gpudiag.agents.pages import MOST_BYTES
from gpudiag.agents.questions import QUESTIONS, name_tool
from gpudiag.agents.server import Analyst
from gpudiag.diagnosis.config import Config
from gpudiag.errors import InputError

pytestmark = [pytest.mark.slow, pytest.mark.needs("mcp")]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with made-up recordings, a link that leads out of it, and a secret beside it."""
    folder = tmp_path_factory.mktemp("agents") / "project"
    write_project(folder)
    secret = write_hostile(folder.parent / "secret.json")
    (folder / "out.json").symlink_to(secret)
    return folder


@pytest.fixture(scope="module")
def agent(project: Path) -> Iterator[Agent]:
    """A client of one server for all of these tests."""
    with serve(project) as found:
        yield found


def test_it_offers_the_tools_and_says_how_to_read_them(agent: Agent) -> None:
    assert list(agent.tools) == [name_tool(kind) for kind in QUESTIONS]
    assert {"report", "findings", "ops", "idle", "whatif", "compare", "memory", "sql"} <= set(agent.tools)
    for name, tool in agent.tools.items():
        assert tool.description, name
        assert tool.annotations is not None
        assert tool.annotations.read_only_hint
        assert all(part.get("description") for part in tool.input_schema["properties"].values()), name
    assert "What not to conclude" in agent.instructions
    assert len(agent.instructions.encode()) <= 2_000  # what clients show of it


def test_starting_programs_is_off(agent: Agent, project: Path) -> None:
    for tool in ("run", "ab", "job"):
        assert tool not in agent.tools
        reply = agent.ask(tool, script="train.py")
        assert reply.failed
        assert "--allow-run" in reply.text
    assert not (project / "runs" / "bundle").exists()


@pytest.mark.parametrize("tool", [name_tool(kind) for kind in QUESTIONS if name_tool(kind) not in ("experiments", "memory")])
def test_every_answer_is_at_most_a_page_and_says_where_the_next_is(agent: Agent, tool: str) -> None:
    places = {"compare": {"a": "runs/slow.json", "b": "runs/fast.json"}, "recordings": {}}.get(tool, {"path": "runs/slow.json"})
    reply = agent.ask(tool, **places)
    assert not reply.failed, reply.text
    assert len(reply.text.encode()) <= MOST_BYTES
    assert re.match(r"Page 1 of \d+(; the next one: page=2)?\. ", reply.text)
    assert "Not known" not in reply.data or "record" in reply.data


def test_pages_follow_each_other_to_the_last(agent: Agent) -> None:
    whole = agent.read("report", path="runs/slow.json", part="whole")
    assert len(whole.encode()) > MOST_BYTES
    titles = [line for line in whole.splitlines() if line.startswith("## ")]
    assert titles.index("## Findings") < titles.index("## Data quality") < titles.index("## Rules")
    beyond = agent.ask("report", path="runs/slow.json", part="whole", page=99)
    assert beyond.failed
    assert "the last one is page=" in beyond.text


FAULTS = {
    "no such tool": ("reports", {}, "did you mean 'report'"),
    "no path": ("report", {}, "missing required field `path`"),
    "an unknown argument": ("ops", {"path": "runs/slow.json", "sortby": "time"}, "unknown field `sortby`"),
    "a wrong value": ("ops", {"path": "runs/slow.json", "sort": "size"}, "in `sort`"),
    "no number": ("report", {"path": "runs/slow.json", "rank": "three"}, "in `rank`"),
    "no such file": ("report", {"path": "runs/gone.json"}, "no such file or folder"),
    "no recording": ("report", {"path": "runs/notes.txt"}, "notes.txt"),
    "no such rule": ("findings", {"path": "runs/slow.json", "id": "INP-1"}, "did you mean 'INP-01'"),
    "no such setting": ("whatif", {"path": "runs/slow.json", "settings": ["lunch=0"]}, "did you mean 'launch'"),
    "no memory": ("memory", {"path": "runs/slow.json"}, "no memory was recorded (record with"),
    "no such rank": ("report", {"path": "runs/slow.json", "rank": 3}, "this is one trace"),
    "a query that opens a file": ("sql", {"path": "runs/slow.json", "query": "select * from read_csv('/etc/passwd')"}, "not allowed"),
    "a query that writes": ("sql", {"path": "runs/slow.json", "query": "drop table kernels"}, "only SELECT"),
    "a column that is none": ("sql", {"path": "runs/slow.json", "query": "select nam from kernels"}, "did you mean 'name'"),
    "outside": ("report", {"path": "../secret.json"}, "outside of the folder"),
    "outside, absolute": ("report", {"path": "/etc/passwd"}, "outside of the folder"),
    "outside by a link": ("compare", {"a": "runs/slow.json", "b": "out.json"}, "outside of the folder"),
    "a URL": ("report", {"path": "s3://bucket/trace.json"}, "no path in the folder"),
    "no results": ("experiments", {"path": "runs"}, "no results of experiments"),
}


@pytest.mark.parametrize(("tool", "arguments", "words"), FAULTS.values(), ids=FAULTS)
def test_a_failure_is_a_tool_error_in_one_line(agent: Agent, tool: str, arguments: dict[str, object], words: str) -> None:
    reply = agent.ask(tool, **arguments)
    assert reply.failed
    assert words in reply.text
    assert "\n" not in reply.text
    assert len(reply.text.encode()) < MOST_BYTES


def test_names_of_a_recording_reach_no_description_and_are_data_in_answers(agent: Agent) -> None:
    before = agent.list_again()
    answers = [agent.read(tool, path="runs/hostile.json") for tool in ("report", "findings", "ops", "idle")]
    answers.append(agent.read("ops", path="runs/hostile.json", group="kernel"))
    answers.append(agent.read("sql", path="runs/hostile.json", query="select name from kernels"))
    shown = "\n".join(answers)
    assert INJECTION in shown  # as a name, between the marks
    odd = {character for character in shown if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}} - {"\n"}
    assert odd == set()
    prose = re.sub(r"`+[^`\n]+`+", "", shown)
    for dangerous in ("](", "<img", "</recording"):
        assert re.search(rf"(?<!\\){re.escape(dangerous)}", prose) is None
    assert max(map(len, shown.splitlines())) < MOST_BYTES
    assert agent.list_again() == before
    assert not any(name in before for name in HOSTILE)
    refused = agent.ask("report", path=f"{INJECTION}\n# heading")
    assert refused.failed
    assert "\n" not in refused.text


def test_a_recording_that_changes_is_read_anew(agent: Agent, project: Path) -> None:
    path = project / "runs" / "copy.json"
    path.write_bytes((project / "runs" / "slow.json").read_bytes())
    first = agent.ask("report", path="runs/copy.json").data
    assert agent.ask("report", path="runs/copy.json").data == first
    path.write_bytes((project / "runs" / "fast.json").read_bytes())
    assert agent.ask("report", path="runs/copy.json").data != first
    path.unlink()


TWELVE = {
    "which line waits longest?": ("idle", {"path": "runs/eager.json"}, [
        r"\*\*host overhead \(Python, framework, launches\)\*\* \| \*\*1\.02 ms", r"train\.py:9: augment",
    ]),
    "is it data loading?": ("findings", {"id": "INP-01"}, [r"INP-01, critical", r"loader_wait_share` = 70\.9 %"]),
    "what should I change first, and how much can it give at most?": ("report", {}, [
        r"### 1\. The loop waits for its next batch \(INP-01", r"up to 3\.00 ms of the 4\.23 ms of a step \(71 %; an upper bound",
        r"--fix loader-workers", r"An upper bound is what a change cannot exceed, not what it will give",
    ]),
    "would a bigger batch help?": ("whatif", {"settings": ["batch=2"]}, [
        r"`batch=2` \| .* \u00b1 ", r"gain per sample", r"a training then differs",
    ]),
    "what would it take on an H100?": ("whatif", {"device": "H100"}, [
        r"Predicted for the H100 SXM5 80 GB: 3\.\d\d ms, between", r"A prediction, no bound", r"What it cannot know",
    ]),
    "is the GPU busy?": ("report", {"part": "breakdown"}, [r"compute-bound kernels \| 900 us \| 21", r"idle: data loading \| 3\.00 ms"]),
    "what is the MFU, and what is unknown?": ("report", {}, [
        r"MFU\): \d\d\.\d % of 19\.5 TFLOP/s \(fp32 dense", r"## Not known", r"peak memory: not recorded: record with",
        r"rules: \d+ could not be judged, which is no all-clear",
    ]),
    "which op takes longest, and why is it bound?": ("ops", {}, [r"\| `aten::mm`.*\| 5\.40 ms \| 74\.9 % \| compute \| 98 %.*\| exact"]),
    "what used the memory at its peak?": ("report", {"part": "memory"}, [r"Not known: no memory was recorded: record with gpudiag"]),
    "is rank 3 slow?": ("report", {"part": "ranks"}, [r"Not known: one rank alone was read"]),
    "how sure are the figures?": ("report", {"part": "quality"}, [
        r"profiler: Slow-down unavailable", r"peak rates from its data sheet", r"Replayed with",
    ]),
    "may I conclude that the sync costs the 1.2 ms that it takes?": ("idle", {}, [
        r"`aten::item`.*\| 1\.20 ms \| 1\.19 ms \| 2\d\.\d us", r"exposed: exposed sync time: idle time of the device that the calls cause",
    ]),
}  # fmt: skip


@pytest.mark.parametrize("question", TWELVE)
def test_the_answer_to_a_diagnosis_stands_in_the_reply(agent: Agent, question: str) -> None:
    tool, arguments, wanted = TWELVE[question]
    text = agent.read(tool, **{"path": "runs/slow.json", **arguments})
    for pattern in wanted:
        assert re.search(pattern, text), f"{question}: {pattern} is not in\n{text}"


def test_what_changed_stands_in_the_reply(agent: Agent) -> None:
    text = agent.read("compare", a="runs/slow.json", b="runs/fast.json")
    assert re.search(r"idle: data loading \| 3\.00 ms \| 0 ns \| -3\.00 ms", text)
    assert re.search(r"interval -70\.9 % to -70\.9 %", text)
    assert "INP-01" in text


def test_a_question_that_takes_too_long_is_ended_and_the_next_is_answered(tmp_path: Path) -> None:
    with closing(Analyst(tmp_path, Config(), 4, "slowanswers:answer")) as analyst:
        with pytest.raises(InputError, match=r"sql took more than 4 s and was ended \(gpudiag mcp --time-limit"):
            analyst.ask("sql", {"seconds": 60})
        assert analyst.ask("sql", {}) == "answered, holding 0"


def test_a_question_that_takes_the_memory_of_the_machine_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpudiag.agents.server.measure_spare_bytes", lambda: 0)
    monkeypatch.setattr("gpudiag.agents.server._MUCH_BYTES", 100 << 20)
    with closing(Analyst(tmp_path, Config(), 60, "slowanswers:answer")) as analyst:
        with pytest.raises(InputError, match="little memory left"):
            analyst.ask("sql", {"seconds": 50, "bytes": 200 << 20})
        assert analyst.ask("sql", {"bytes": 10}) == "answered, holding 10"  # of little others are to blame
