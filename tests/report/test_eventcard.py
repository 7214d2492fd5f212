"""What is told of one event of the time line."""

from __future__ import annotations

from typing import Any

import factories
import msgspec
import polars as pl
import pytest
import report_sample as sample
from factories import US, gap, kernel, mark

from gpudiag.model.analysis import Analysis
from gpudiag.report import event_card
from gpudiag.report.event_card import Card
from gpudiag.timeline.lanes import STYLES


def told(analysis: Analysis, table: str, row: int) -> Card:
    return event_card.build_card(analysis, sample.report(), table, row)


def lines(card: Card) -> dict[str, str]:
    return dict(card.lines)


def made(**changes: Any) -> Analysis:
    known: dict[str, Any] = {"shapes": [[64, 32], [32, 16]], "bound": "compute", "t_roof": 5.0, "flops": 2e6, "bytes_moved": 8e3}
    return factories.analysis([kernel("aten::mm", 10, 20, **{**known, **changes})], idle=[gap(20, 1000, cause="idle_data")])


def test_a_kernel_tells_bound_efficiency_rates_and_inputs() -> None:
    said = lines(told(made(), "kernels", 0))
    assert said["bound"] == "compute-bound"
    assert said["efficiency"] == "50 % of roofline (roofline time 5.00 us)"  # 5 of 10 us
    assert said["computes"] == "2.00 MFLOP, 200 GFLOP/s"  # 2 MFLOP in 10 us
    assert said["moves"] == "8.00 kB, 800 MB/s (compulsory bytes)"
    assert said["inputs"] == "[64, 32] [32, 16] fp32"
    assert said["phase"] == "forward"


def test_a_kernel_over_its_roof_has_no_efficiency() -> None:
    assert lines(told(made(t_roof=15.0), "kernels", 0))["efficiency"] == "above roofline: its roofline time is 15.0 us"


def test_what_is_not_known_is_left_out_and_never_zero() -> None:
    card = told(made(shapes=None, flops=None, bytes_moved=None, t_roof=None, bound="unknown", provenance="none"), "kernels", 0)
    said = lines(card)
    assert said["bound"] == "unknown"
    assert not {"efficiency", "computes", "moves", "inputs", "cost model", "called at"} & set(said)


def test_work_launched_before_the_recording_is_said() -> None:
    analysis = factories.analysis([kernel(None, 10, 20, name="gemm")])
    card = told(analysis, "kernels", 0)
    assert lines(card)["launched"].startswith("before the recording")
    assert (card.op, card.related) == ("gemm", ())


def test_an_idle_piece_tells_cause_event_and_line() -> None:
    coded = {"evidence_code": "call_waited", "evidence_name": "gemm<float>", "evidence_detail": "cudaStreamSynchronize"}
    idle = gap(
        20, 1000, cause="idle_sync", evidence="cudaStreamSynchronize waited for gemm<float>", **coded, site="/home/me/train.py(41): step"
    )
    card = told(factories.analysis([kernel("aten::mm", 10, 20)], idle=[idle]), "idle", 0)
    assert card.title.startswith("idle: ")
    assert lines(card)["cause"] == "cudaStreamSynchronize waited for gemm"
    assert lines(card)["call site"] == "me/train.py:41 step"
    assert lines(card)["duration"] == "980 us"


def test_the_site_of_an_op_is_its_file_and_line() -> None:
    analysis = msgspec.structs.replace(made(), sites=pl.Series(["/home/me/models/net.py(12): forward"]))
    card = told(analysis, "kernels", 0)
    assert lines(card)["call site"] == "models/net.py:12 forward"


def test_steps_marks_and_calls_have_cards() -> None:
    analysis = factories.analysis([kernel("aten::mm", 10, 20)], marks=[mark("Optimizer.step#SGD.step", 0, 500)])
    steps = analysis.steps.with_columns(analysed=pl.lit(False))
    assert "left out" in lines(told(msgspec.structs.replace(analysis, steps=steps), "steps", 0))["analysed"]
    assert told(analysis, "marks", 0).title == "Optimizer.step#SGD.step"
    sync = {"launch": 0, "thread": 0, "start_ns": 0, "end_ns": 9, "waited_ns": 7 * US, "cost_ns": 4 * US, "site": "t.py(3): f"}
    said = lines(told(msgspec.structs.replace(analysis, syncs=factories.table("syncs", [sync])), "launches", 0))
    assert said["waited"] == "7.00 us for work that still ran"
    assert said["costs"] == "4.00 us of exposed sync time"
    assert said["call site"] == "t.py:3 f"


def test_an_op_of_a_cpu_tells_its_own_time() -> None:
    analysis = factories.analysis([kernel("aten::mm", 10, 20, bound="memory")], device=factories.CPU)
    for table in ("ops", "kernels"):
        said = lines(told(analysis, table, 0))
        assert said["self time"] == "10.0 us, without child ops"
        assert said["bound"] == "memory-bound"
        assert "launched" not in said


@pytest.mark.parametrize("name", [name for name in sample.HOSTILE if "\ud800" not in name])
def test_hostile_names_are_cleaned(name: str) -> None:
    analysis = factories.analysis([kernel(name, 10, 20, name=name)], marks=[mark(name, 0, 5)])
    shown = [told(analysis, table, 0) for table in ("kernels", "ops", "marks")]
    for text in [text for card in shown for text in (card.title, *(value for _, value in card.lines))]:
        assert len(text) <= 300
        assert not set(text) & {"\x1b", "\u202e", "\x07", "\n"}
    assert len(event_card.format_event_name(name, kernel=True)) <= 80


def test_every_style_has_words() -> None:
    words = event_card.name_styles(sample.report())
    assert set(words) == set(STYLES)
    assert len(set(words.values())) == len(words)  # a legend tells them apart


@pytest.mark.parametrize("row", [-1, 1, 10**12])
def test_a_row_that_is_not_there_is_an_index_error(row: int) -> None:
    with pytest.raises(IndexError):
        told(made(), "kernels", row)
