"""The causes of idle gaps against a person's judgement of the same gaps (labelled_gaps.yaml): agreement and confusion table per trace."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import kept
import numpy as np
import polars as pl
import pytest
import yaml

from gpudiag.model.timeline import IDLE_BUCKETS

LABELS: dict[str, list[dict[str, Any]]] = yaml.safe_load(Path(__file__).with_name("labelled_gaps.yaml").read_text())
CAUSES = {bucket.removeprefix("idle_") for bucket in IDLE_BUCKETS}
PRECISION = 0.9
ANALYSED = 0.8
"""At least this share of the labelled gaps lies in the steps that are analysed: how steps without marks are found may change."""

FOLLOWING = {"mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz": 0.3}
"""Less where the host runs further and further ahead: gaps before the device began with the first step's work lie in no step."""
TIE = 0.5
"""A label with this share and a `second`: both readings are right."""


class Judged(NamedTuple):
    """A labelled gap and the ns of it that the pipeline gave to each cause."""

    label: dict[str, Any]
    found: dict[str, int]

    @property
    def cause(self) -> str | None:
        """The cause with most of the gap; None where no piece of the analysed steps lies in it."""
        return max(self.found, key=lambda cause: self.found[cause]) if self.found else None

    @property
    def agrees(self) -> bool:
        tied = {self.label["second"]} if self.label["share"] == TIE else set()
        return self.cause in {self.label["label"]} | tied


@cache
def judged(traces: Path, name: str) -> tuple[Judged, ...]:
    idle = kept.analysis(traces / name).idle
    return tuple(Judged(label, _found(idle, label["start_ns"], label["end_ns"])) for label in LABELS[name])


def _found(idle: pl.DataFrame, start: int, end: int) -> dict[str, int]:
    inside = idle.filter((pl.col("start_ns") < end) & (pl.col("end_ns") > start))
    ns = pl.min_horizontal("end_ns", pl.lit(end)) - pl.max_horizontal("start_ns", pl.lit(start))
    return {cause.removeprefix("idle_"): int(held) for cause, held in inside.group_by("cause").agg(ns.sum()).iter_rows()}


def _confusion(gaps: tuple[Judged, ...]) -> str:
    counts = Counter((gap.label["label"], "right" if gap.agrees else str(gap.cause)) for gap in gaps)
    rows = [f"  {label:12} -> {found:12} {count:3}" for (label, found), count in sorted(counts.items())]
    return "\n".join([*rows, *(f"  {line}" for line in _disagreements(gaps))])


def _disagreements(gaps: tuple[Judged, ...]) -> Iterator[str]:
    for gap in gaps:
        if not gap.agrees:
            parts = {cause: round(ns / 1000, 1) for cause, ns in gap.found.items()}
            yield f"[{gap.label['start_ns']}, {gap.label['end_ns']}] {gap.label['label']}, found us {parts}: {gap.label['note']}"


@pytest.mark.slow
@pytest.mark.parametrize("name", LABELS)
def test_causes_agree_with_a_persons(name: str, traces: Path) -> None:
    gaps = judged(traces, name)
    analysed = tuple(gap for gap in gaps if gap.found)
    precision = float(np.mean([gap.agrees for gap in analysed]))
    sys.stdout.write(f"\n{name}: {precision:.2f} of {len(analysed)} gaps\n{_confusion(analysed)}\n")
    assert len(analysed) >= FOLLOWING.get(name, ANALYSED) * len(gaps), "too few of the labelled gaps lie in the analysed steps"
    assert precision >= PRECISION, _confusion(analysed)


@pytest.mark.slow
@pytest.mark.parametrize("name", LABELS)
def test_labelled_gaps_are_filled_by_pieces_of_one_cause_each(name: str, traces: Path) -> None:
    analysed = kept.analysis(traces / name).steps.filter("analysed")
    for gap in judged(traces, name):
        # as far as it lies within the analysed steps: one may reach into a last step that is left out
        length = min(gap.label["end_ns"], analysed["end_ns"][-1]) - max(gap.label["start_ns"], analysed["start_ns"][0])
        assert not gap.found or sum(gap.found.values()) == length, f"{gap.label}: found {gap.found}"


def test_labels_are_whole() -> None:
    for name, labels in LABELS.items():
        starts = np.array([label["start_ns"] for label in labels])
        ends = np.array([label["end_ns"] for label in labels])
        assert (starts[1:] >= ends[:-1]).all(), name
        assert (ends > starts).all(), name
        for label in labels:
            assert {label["label"], label.get("second", label["label"])} <= CAUSES, label
            assert TIE <= label["share"] <= 1, label
            assert label["share"] > TIE or "second" in label, label
