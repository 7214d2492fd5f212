"""`gpudiag sql`: a table in the terminal, CSV for programs, one clear line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpudiag.cli import app
from gpudiag.errors import InputError

EVENTS = [
    {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": 10, "args": {"Input Dims": [[4]]}}
    for start, name in ((0, "aten::cos"), (20, "aten::cos"), (40, "aten::[bold]"))
]
QUERY = "select name, count(*) as n from ops group by name order by n desc"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": EVENTS}))
    return str(path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["sql", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_a_table_and_csv(trace: str) -> None:
    shown = run(trace, QUERY)
    assert [line.split() for line in shown.splitlines() if line][-4:] == [
        ["name", "n"],
        ["aten::cos", "2"],
        ["aten::[bold]", "1"],
        ["2", "rows"],
    ]
    assert run(trace, QUERY, "--csv").endswith("name,n\naten::cos,2\naten::[bold],1\n")


@pytest.mark.parametrize(("query", "rows"), [("select name from ops where false", 0), ("select '' as nothing from ops", 3)])
def test_texts_that_say_nothing_are_no_table(trace: str, query: str, rows: int) -> None:
    assert run(trace, query).split() == [str(rows), "rows"]


def test_csv_is_text_that_neither_a_spreadsheet_nor_a_terminal_obeys(trace: str) -> None:
    odd = "select '=1+1' as a, '\x1b[31m@x\x9b' as b, array_agg(name) as c, interval '1 day' as d, 'l\nm' as e from ops"
    assert run(trace, odd, "--csv") == 'a,b,c,d,e\n\'=1+1,[31m@x,"[""aten::cos"",""aten::cos"",""aten::[bold]""]",P1D,"l\nm"\n'


def test_a_mistake_is_found_before_anything_is_read() -> None:
    with pytest.raises(InputError, match=r"the query: no column is named 'nam'; did you mean 'name'\?"):
        run("no/such/file", "select nam from ops")
    with pytest.raises(InputError, match="read_csv is not allowed"):
        run("no/such/file", "select * from read_csv('/etc/passwd')")
