"""The catalogue, and how facts fail."""

from __future__ import annotations

from types import ModuleType

import pytest
from factories import CPU, analysis, kernel

from gpudiag.facts import CATALOGUE, Facts, catalogue
from gpudiag.facts.call_sites import CALL_SITE_PROVIDERS
from gpudiag.facts.catalogue import collect_facts
from gpudiag.facts.registry import UNITS, fact, fact_of
from gpudiag.model.finding import Missing


def test_every_fact_has_a_unit_and_a_sentence() -> None:
    assert len(CATALOGUE) > 50
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert entry.unit in UNITS
        assert entry.doc.endswith(".")
        assert not name.endswith("_ns") or entry.unit == "ns"
        assert not name.endswith("_share") or entry.unit == "share"


def test_two_facts_of_one_name_are_refused() -> None:
    module = ModuleType("more")
    module.FACTS = (fact("wall_ns", "ns", "Another wall time.", lambda window: 1),)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="two facts are named wall_ns"):
        collect_facts((*catalogue.MODULES, module))


def test_a_fact_needs_a_known_unit_and_words() -> None:
    with pytest.raises(ValueError, match="no such unit"):
        fact("x", "furlongs", "How far it is.", lambda window: 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="says nothing of itself"):
        fact("x", "ns", "", lambda window: 1)


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_an_empty_window_gives_reasons_and_no_error(device: str) -> None:
    facts = Facts(analysis(kind=device, device=None))
    found = {name: facts.value(name) for name in CATALOGUE}
    assert facts.errors == {}
    assert all(value.reason for value in found.values() if isinstance(value, Missing))
    assert isinstance(found["mfu"], Missing)
    for provider in CALL_SITE_PROVIDERS:
        assert facts.places(provider) == ()
    assert facts.errors == {}


def test_facts_of_an_accelerator_say_so_on_a_cpu() -> None:
    facts = Facts(analysis([kernel("aten::mm", 0, 10)], device=CPU))
    for name in ("slow_matrix_share", "misaligned_product_share", "pageable_copy_exposed_ns", "collective_link_share"):
        value = facts.value(name)
        assert isinstance(value, Missing)
        assert value.reason.startswith("no accelerator")


def test_a_failing_fact_is_missing_by_name_and_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def broken(window: object) -> int:
        """Always fails."""
        calls.append(window)
        raise KeyError("gone")

    monkeypatch.setitem(CATALOGUE, "broken", fact_of(broken, "ns"))
    facts = Facts(analysis())
    assert facts.value("broken") == Missing("fact broken failed: KeyError")
    assert facts.value("broken") == Missing("fact broken failed: KeyError")
    assert facts.errors == {"broken": "KeyError: 'gone'"}
    assert len(calls) == 1
    with pytest.raises(KeyError):
        facts.value("no such fact")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_finite_number_is_not_known(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setitem(CATALOGUE, "odd", fact("odd", "ratio", "No finite number.", lambda window: value))
    facts = Facts(analysis([kernel("aten::mm", 0, 10)]))
    assert facts.value("odd") == Missing("the recording yields no finite number for this")
    found = facts.query("X.odd", f"select cast('{value}' as double) as x from kernels limit 1", "ratio")  # noqa: S608 - a value of ours
    assert isinstance(found, Missing)
    assert "no finite number" in found.reason
    assert facts.errors == {}


def test_facts_that_are_asked_after_the_shared_tables_went_say_the_same() -> None:
    made = analysis([kernel("gemm", 0, 40), kernel("copy", 50, 60)])
    whole, let_go = Facts(made), Facts(made)
    for name in ("wall_ns", "idle_share"):
        let_go.value(name)
    before = let_go.window
    let_go.forget_tables()
    assert let_go.window is not before
    assert let_go.window.what_ifs is before.what_ifs
    names = [name for name in CATALOGUE if not isinstance(whole.value(name), Missing)]
    assert len(names) > 10
    assert {name: let_go.value(name) for name in names} == {name: whole.value(name) for name in names}
