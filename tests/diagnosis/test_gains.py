"""What changes gave where they were measured: the table, and what of it stands beside an upper bound."""

from __future__ import annotations

import msgspec
import pytest

from gpudiag.diagnosis import gains, load_rules
from gpudiag.diagnosis.gains import MeasuredGain, find_measured_gain, load_gains
from gpudiag.fixes import FIX_BY_ID


def test_every_row_names_a_change_and_a_source() -> None:
    known = {*FIX_BY_ID, *(rule.id for rule in load_rules())}
    for row in load_gains():
        assert row.change in known, row
        assert 0 < row.least <= row.most, row
        assert row.source.strip(), row
        assert not row.planted or row.change not in FIX_BY_ID, row  # a sample shows the cause, not one fix


def test_published_figures_are_told_as_they_stand() -> None:
    found = find_measured_gain(["fused-optimizer"], "gpu")
    assert found is not None
    assert (found.least, found.most, found.count) == (1.00, 1.04, None)
    workers = find_measured_gain(["loader-workers", "INP-01"], "gpu")
    assert workers is not None
    assert (workers.least, workers.most, workers.count) == (1.28, 1.39, 2)


def test_what_was_measured_on_one_kind_of_device_says_nothing_of_another() -> None:
    assert find_measured_gain(["pin-memory", "INP-03"], "gpu") is not None
    assert find_measured_gain(["pin-memory", "INP-03"], "cpu") is None


def _row(change: str, least: float, most: float, count: int | None = 1, planted: bool = False) -> MeasuredGain:
    return MeasuredGain(change=change, device="cpu", least=least, most=most, count=count, planted=planted, source="a test")


def test_rows_of_one_change_are_one_and_real_programs_come_before_planted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (_row("OVH-01", 11, 12, planted=True), _row("compile", 0.9, 1.1, 2), _row("compile", 1.0, 1.3, 3), _row("bf16", 0.5, 2, None))
    monkeypatch.setattr(gains, "load_gains", lambda: rows)
    assert find_measured_gain(["OVH-01", "compile"], "cpu") == _row("compile", 0.9, 1.3, 5)
    assert find_measured_gain(["OVH-01"], "cpu") == rows[0]
    found = find_measured_gain(["bf16"], "cpu")
    assert found is not None
    assert found.count is None
    assert find_measured_gain([], "cpu") is None


def test_a_row_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"change": "bf16", "device": "cpu", "least": 1, "most": 2, "source": "s", "certain": True}, MeasuredGain)
