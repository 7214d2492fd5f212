"""Knobs: where their values come from, what fixes make of them, and that one which nobody reads is told."""

from __future__ import annotations

from typing import Any

import pytest

from gpudiag.capture.hooks import Patches
from gpudiag.errors import InputError
from gpudiag.fixes import knobs
from gpudiag.fixes.fix import NotAppliedError, Site
from gpudiag.fixes.knobs import AccumulationKnob, BatchSizeKnob, Knobs, KnobState, call_build

SITE = Site(Patches())


class _Loop:
    def __init__(self, samples: int | None, parts: int = 1, refused: str = "", accumulation: int = 1) -> None:
        self.samples, self.parts, self.refused, self.accumulation = samples, parts, refused, accumulation


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> KnobState:
    fresh = KnobState()
    monkeypatch.setattr(knobs, "KNOB_STATE", fresh)
    return fresh


def test_a_value_comes_from_the_arm_then_from_build_then_from_the_reading() -> None:
    cfg = Knobs({"width": 7}, {"depth": 3}, {})
    assert cfg.get("width", 512) == cfg.width == 7
    assert cfg.get("depth", 9) == cfg.depth == 3
    assert cfg.get("heads", 4) == 4
    assert (cfg.accum, cfg.amp, cfg.compile) == (1, None, False)


def test_a_knob_without_any_default_says_what_to_write() -> None:
    cfg = Knobs({}, {}, {})
    with pytest.raises(AttributeError, match=r'cfg\.get\("width", DEFAULT\), or def build\(cfg, width=DEFAULT\)'):
        _ = cfg.width
    assert not hasattr(cfg, "width")


def test_a_turn_starts_from_the_value_that_the_arm_has() -> None:
    cfg = Knobs({"batch_size": 48}, {"batch_size": 32}, {"batch_size": lambda before: before * 2})
    assert cfg.batch_size == 96
    assert cfg.read["batch_size"] == (48, 96)


def test_knobs_that_were_set_and_not_read() -> None:
    cfg = Knobs({"width": 1, "widht": 2}, {}, {})
    cfg.get("width")
    with pytest.raises(NotAppliedError, match="nothing reads the knob 'widht'; did you mean 'width'"):
        cfg.check_all_read()
    cfg.get("widht")
    cfg.check_all_read()


def _made(**values: Any) -> Any:
    return lambda defaults: Knobs(values, defaults, {})


def test_keyword_parameters_of_build_are_knobs() -> None:
    def build(cfg: Any, width: int = 4, *, depth: int = 2) -> Any:
        return cfg.width, width, depth, cfg.get("heads", 8)

    assert call_build(build, _made(width=16))[0] == (16, 16, 2, 8)
    assert call_build(lambda width=4: width, _made(width=5))[0] == 5
    assert call_build(lambda cfg: cfg.get("x", 1), _made())[0] == 1


def test_parameters_that_nobody_gives_are_one_clear_line() -> None:
    with pytest.raises(InputError, match=r"build\(cfg, data\)"):
        call_build(lambda cfg, data: None, _made())


# -- fixes that turn one ------------------------------------------------------------------------------------------------


def _applied(fix: Any, here: KnobState, read: Any, loop: _Loop) -> str:
    fix.install(SITE)
    here.knobs = Knobs({}, {}, here.turns)
    read(here.knobs)
    here.loop = loop  # type: ignore[assignment]
    return str(fix.evidence(SITE))


@pytest.mark.parametrize(("value", "after"), [(None, 64), ("x2", 64), ("x0.5", 16), ("x1.5", 48), ("40", 40)])
def test_batch_size_is_what_was_asked_for(here: KnobState, value: str | None, after: int) -> None:
    found = _applied(BatchSizeKnob(value), here, lambda cfg: cfg.get("batch_size", 32), _Loop(after))
    assert found == f"cfg.batch_size 32 -> {after}, batches of {after} samples"


def test_a_batch_size_that_changed_nothing_is_not_applied(here: KnobState) -> None:
    with pytest.raises(NotAppliedError, match=r"build does not read the knob batch_size: write cfg\.get"):
        _applied(BatchSizeKnob(), here, lambda cfg: None, _Loop(32))
    with pytest.raises(NotAppliedError, match="batches have 32 samples still"):
        _applied(BatchSizeKnob(), here, lambda cfg: cfg.get("batch_size", 32), _Loop(32))
    with pytest.raises(NotAppliedError, match="is 32 as it is"):
        _applied(BatchSizeKnob("32"), here, lambda cfg: cfg.get("batch_size", 32), _Loop(32))
    with pytest.raises(NotAppliedError, match="is 'auto' as it is"):
        _applied(BatchSizeKnob(), here, lambda cfg: cfg.get("batch_size", "auto"), _Loop(32))


def test_accumulation_tells_who_does_it(here: KnobState) -> None:
    fix = AccumulationKnob("4")
    by_loop = _applied(fix, here, lambda cfg: None, _Loop(32, parts=4, accumulation=4))
    assert by_loop == "4 micro-batches in each step of 32 samples"
    by_build = _applied(fix, here, lambda cfg: cfg.accum, _Loop(8))
    assert by_build == "cfg.accum 1 -> 4, read by build"


def test_accumulation_of_batches_that_cannot_be_split_is_not_applied(here: KnobState) -> None:
    with pytest.raises(NotAppliedError, match="one sample"):
        _applied(
            AccumulationKnob(), here, lambda cfg: None, _Loop(1, refused="batches cannot be split: they have one sample", accumulation=2)
        )


@pytest.mark.parametrize(("fix", "value"), [(BatchSizeKnob, "big"), (BatchSizeKnob, "0"), (AccumulationKnob, "1"), (AccumulationKnob, "x")])
def test_values_that_are_none(fix: Any, value: str) -> None:
    with pytest.raises(InputError, match=value):
        fix(value)
