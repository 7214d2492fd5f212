"""Fixes of the user: where an arm finds them, and what stands in for one that it does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpudiag.capture.hooks import Patches
from gpudiag.errors import InputError
from gpudiag.experiment.trial.protocol import TrialPlan
from gpudiag.fixes import FIX_BY_ID, are_conflicting, make_applier
from gpudiag.fixes import registry as module
from gpudiag.fixes.code_location import CodeLocation
from gpudiag.fixes.fix import Applier, Fix, NotAppliedError, Site
from gpudiag.fixes.knobs import KNOB_FIXES, AccumulationKnob
from gpudiag.fixes.registry import RegisteredFix, adopt_fixes, list_registered, register_fix, replace_appliers
from gpudiag.model.experiment import FixCall

OWN = Fix("some-fix", "A fix of the user", "exact", "some change", ("bf16",))

FILE = """
import gpudiag

class Own(gpudiag.Applier):
    def install(self, site):
        site.compiles = self.value == "yes"

    def evidence(self, site):
        return f"value {self.value}"

class NoFix:
    pass
"""


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    kept = [(known, dict(known)) for known in (module.REGISTERED, module._LOCATIONS, FIX_BY_ID)]
    yield
    for known, before in kept:
        known.clear()
        known.update(before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some_fixes.py"
    path.write_text(FILE)
    return path


def _told(ids: list[str]) -> tuple[RegisteredFix, ...]:
    """What an arm is told, after the way through its plan."""
    plan = TrialPlan("", 1, 1.0, 1, registered=list_registered(ids))
    return msgspec.json.decode(msgspec.json.encode(plan), type=TrialPlan).registered


def test_an_arm_finds_the_fix_in_its_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(file.parent))
    import some_fixes  # type: ignore[import-not-found]

    register_fix(some_fixes.Own, OWN)
    told = _told(["bf16", "some-fix"])
    assert [(one.fix, one.place.target) for one in told] == [(OWN, f"{file}:Own")]
    module.REGISTERED.clear()
    FIX_BY_ID.pop("some-fix")
    adopt_fixes(told)
    found, site = make_applier(FixCall("some-fix", "yes")), Site(Patches())
    found.install(site)
    assert site.compiles
    assert found.evidence(site) == "value yes"
    assert FIX_BY_ID[found.id] == OWN
    sys.modules.pop("some_fixes", None)


@pytest.mark.parametrize(
    ("target", "why"),
    [("{file}:Missing", "no function 'Missing'"), ("{file}:NoFix", "NoFix is no fix"), ("/nowhere/some.py:Own", "no such file")],
)
def test_a_fix_that_an_arm_does_not_find_is_not_applied_and_says_why(file: Path, target: str, why: str) -> None:
    adopt_fixes((RegisteredFix(OWN, CodeLocation(target.format(file=file))),))
    with pytest.raises(NotAppliedError, match=why):
        make_applier(FixCall("some-fix")).install(Site(Patches()))


class Own(Applier):
    """At the top level of a file, but registered under names that cannot be."""


@pytest.mark.parametrize(
    ("make", "fix", "said"),
    [
        (Own, Fix("bf16", "", "exact", ""), "taken by a built-in fix"),
        (Own, Fix("a=b", "", "exact", ""), "cannot be the id of a fix"),
        (int, OWN, "no subclass of gpudiag.Applier"),
        (type("Inner", (Applier,), {"__qualname__": "f.<locals>.Inner"}), OWN, "defined inside another one"),
    ],
)
def test_what_cannot_be_registered(make: type[Applier], fix: Fix, said: str) -> None:
    with pytest.raises(InputError, match=said):
        register_fix(make, fix)
    assert not module.REGISTERED


def test_conflicts_of_a_registered_fix_are_known_to_a_search() -> None:
    module_of_this = sys.modules.get(Own.__module__)
    if module_of_this is None or getattr(module_of_this, "Own", None) is not Own:
        pytest.skip("the test runner does not keep this module under its name")
    register_fix(Own, OWN)
    assert are_conflicting(FixCall("some-fix"), FixCall("bf16"))
    assert not are_conflicting(FixCall("some-fix"), FixCall("fp16"))


def test_a_factory_applies_some_fixes_in_its_own_way_while_it_lasts() -> None:
    with pytest.raises(InputError, match="accumulation"):
        make_applier(FixCall("accumulation", "2"))
    with replace_appliers(KNOB_FIXES):
        assert isinstance(make_applier(FixCall("accumulation", "2")), AccumulationKnob)
        (told,) = _told(["accumulation"])
    with pytest.raises(InputError, match="accumulation"):
        make_applier(FixCall("accumulation", "2"))
    assert not _told(["accumulation"])
    adopt_fixes((told,))
    assert type(make_applier(FixCall("accumulation", "2"))) is AccumulationKnob
