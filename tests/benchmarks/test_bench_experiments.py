"""The bench of experiments: its naive peers are what they are said to be, and its rows hold figures of the recordings."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import recorded_ab

from gpudiag.model.experiment import FixCall, Pair

pytest.importorskip("scipy", reason="scipy is not installed")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_experiments", Path(__file__).with_name("bench_experiments.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def pairs(*ratios: float) -> list[Pair]:
    return [Pair((1.0,), (ratio,), "steps") for ratio in ratios]


def test_peeking_stops_where_five_percent_are_reached(bench: ModuleType) -> None:
    clear = pairs(*[1.05, 1.06, 1.04, 1.055] * 3)
    assert bench.peeking(clear)[2] == 4
    low, high, used = bench.peeking(pairs(*[1.05, 0.95] * 6))
    assert used == 12
    assert low < 0 < high


def test_the_bootstrap_is_narrower_than_the_range_of_its_pairs(bench: ModuleType) -> None:
    low, high, used = bench.bootstrap(pairs(*[0.98, 1.0, 1.02, 1.04] * 2))
    assert math.log(0.98) < low < high < math.log(1.04)
    assert used == 8


def test_naive_searches_do_what_people_do(bench: ModuleType) -> None:
    one, two, three = FixCall("a"), FixCall("b"), FixCall("c")
    values = {
        frozenset((one,)): 0.1,
        frozenset((two,)): 0.2,
        frozenset((three,)): -0.1,
        frozenset((one, two)): 0.05,
        frozenset((one, three)): 0.15,
    }
    tried = recorded_ab.CachedMeasure(lambda calls: values[frozenset(calls)])
    assert bench.singles((one, two, three), tried) == (one, two)
    assert len(tried.results) - 1 == 3
    assert bench.one_pass((one, two, three), tried) == (one, three)
    assert bench.everything((one, two, three), tried) == (one, two, three)


def test_a_row_for_each_rule_and_each_search(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DRAWN", 20)
    table = bench.claims("b2_token", recorded_ab.token_pairs("b2_token"))
    assert len(table) == len(bench.RULES)
    assert "of 5 [" in table[0]
    product = bench.products("conv")
    assert "x2.4" in product
    assert "x1.86" in product


def test_steps_as_the_unit_call_most_equal_processes_different(bench: ModuleType) -> None:
    share = float(bench.steps_as_unit("busy_single").split("|")[3].strip().rstrip("%"))
    assert share > 50
