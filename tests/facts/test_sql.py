"""SQL over the tables of an analysis: what it may see, what counts as known."""

from __future__ import annotations

import itertools

import polars as pl
import pytest
from factories import analysis, kernel

from gpudiag.facts import Facts, sql
from gpudiag.facts.registry import NotKnownError, Unit
from gpudiag.model import trace
from gpudiag.model.finding import Missing

MADE = analysis([kernel("aten::cos", 0, 10), kernel("aten::mm", 10, 40)], wall=50)
TABLES = sql.list_analysis_tables(MADE)


NEWER = pytest.mark.skipif(tuple(map(int, pl.__version__.split(".")[:2])) < (1, 44), reason="the SQL of this polars lacks it, and says so")


@pytest.mark.parametrize(
    ("query", "unit", "value"),
    [
        ("select sum(busy_ns) from kernels", "ns", 40_000),
        ("SELECT count(*) FROM kernels WHERE name LIKE '%cos%'", "count", 1),
        ("-- the longest\nwith k as (select busy_ns from kernels) select max(busy_ns) > 20000 from k", "bool", True),
        pytest.param("select 1.0 * min(busy_ns) / (select sum(busy_ns) from kernels) from kernels", "share", 0.25, marks=NEWER),
        (
            'select /* a\nb */ "kernels".busy_ns as "longest one" from kernels where name is distinct from \'a\' order by 1 desc limit 1',
            "ns",
            30_000,
        ),
        pytest.param(
            "select count(*) from (select k.* from kernels k, (select id as other from ops) o where k.op = o.other)",
            "count",
            2,
            marks=NEWER,
        ),
        ("select count(*) from kernels where name like '%read_csv(/*%' or name = 'it''s'", "count", 0),
        ("select o.name from kernels k join ops o on k.op = o.id order by k.busy_ns desc limit 1", "text", "aten::mm"),
    ],
)
def test_one_value_comes_out(query: str, unit: Unit, value: object) -> None:
    sql.check_query(query, unit)
    assert sql.measure_query(query, unit, TABLES) == value


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("select count(*) from frames", "no rows in the table 'frames'"),
        ("select count(*) from telemetry", "no rows in the table 'telemetry'"),
        ("select max(flops) from kernels where name = 'gone'", "yields no value"),
        ("select busy_ns from kernels where busy_ns > 1000000", "yields no value"),
        ("select busy_ns from kernels", "yields 2 rows, a fact is one"),
    ],
)
def test_what_is_not_there_is_not_known_and_no_zero(query: str, why: str) -> None:
    with pytest.raises(NotKnownError) as caught:
        sql.measure_query(query, "count", TABLES)
    assert why in caught.value.reason


DOUBLED = ", ".join(f"{new} as (select x.id from {old} x, {old} y)" for old, new in itertools.pairwise(["a", *"bcdefghijk"]))  # noqa: S608


@pytest.mark.parametrize(
    "query",
    [
        "select a from read_csv('/etc/passwd')",
        "select a from READ_PARQUET ('x')",
        "select a from \"read_ipc\"('x')",
        "select a from read_json/* */('x')",
        "select a from read_csv /* a */ ('x')",
        "select a from read_csv --a\n ('x')",
        "select a from kernels, read_csv /* a */ ('x')",
        "select a from kernels join (select a from \"read_csv\" ('x')) on true",
        "with a as (from read_csv('x')) select a from a",
        "select trim(select a from other) from kernels",
        "select extract(year from (select a from other)) from kernels",
        "select a is distinct from read_csv('x') from kernels",
        "select 'a\\' as a, ' from read_csv(''x'') as b",
        "select $$a$$ from kernels",
        "select a from 'x.csv'",
        'select a from "x.csv"',
        "select count(*) from range(1, 1000000000000)",
        "select a from unnest(array[1])",
        "with recursive t as (select 1 as a union all select a from t) select a from t",
        "select 1" + "+1" * 900,
        f"with a as (select id from kernels), {DOUBLED} select count(*) from k",  # noqa: S608
        "select * from generate_series(1, 1000000000000)",
        "create table x as select 1",
        "drop table kernels",
        "delete from kernels",
        "show tables",
        "explain select 1 from kernels",
        "select 1 from kernels; select 2 from ops",
        "",
        "select " + "1," * 3000 + "1 from kernels",
    ],
)
def test_nothing_but_a_select_over_the_tables_is_run(query: str) -> None:
    with pytest.raises(sql.QueryError):
        sql.run_query(query, TABLES)


def test_an_unknown_name_is_told_with_those_that_there_are() -> None:
    with pytest.raises(sql.QueryError) as caught:
        sql.run_query("select bsy_ns from kernels", TABLES)
    assert (caught.value.name, "busy_ns" in caught.value.known) == ("bsy_ns", True)
    with pytest.raises(sql.QueryError) as caught:
        sql.run_query("select id from kernel", TABLES)
    assert (caught.value.name, "kernels" in caught.value.known) == ("kernel", True)


def test_every_table_that_a_query_can_name_has_a_schema_and_is_found_by_its_name() -> None:
    for name in sql.QUERY_TABLES:
        query = f"select count(*) from {name}"  # noqa: S608 - a name of ours
        assert sql.run_query(query, {}).item() == 0
        assert sql.find_query_tables(query.upper()) == (name,)
        assert name in trace.TABLES


def test_a_query_is_asked_once_and_a_fact_that_fails_costs_only_itself() -> None:
    facts = Facts(MADE)
    query = "select sum(busy_ns) from kernels"
    assert facts.query("X.total", query, "ns") == 40_000
    facts.window.tables["kernels"] = pl.DataFrame()
    assert facts.query("X.total", query, "ns") == 40_000
    assert isinstance(facts.query("X.other", "select max(busy_ns) from kernels", "ns"), Missing)
