"""The longest idle gaps of the evidence recordings against labels made without gpudiag (longest_gaps.yaml): agreement by time."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import kept
import polars as pl
import pytest
import yaml
from answers import EVIDENCE

from gpudiag.model.timeline import IDLE_BUCKETS

LABELS: dict[str, list[dict[str, Any]]] = yaml.safe_load(Path(__file__).with_name("longest_gaps.yaml").read_text())
CAUSES = {"outside_recording", *(bucket.removeprefix("idle_") for bucket in IDLE_BUCKETS)}
WHOLE = 0.99
"""A gap is judged where the analysed steps hold this much of it: what a label tells of its parts is no place in time."""

FLOOR = 0.96
LOWER = {
    "a100_sam_c9_fast.json.gz": 0.86,  # host time charged to a wait of long before: up to its length, while the host does not get ahead
    "a100_sam_final.json.gz": 0.89,  # the same, and a conversion on the CPU after a wait
    "mi300x_owlv2_detection.json.gz": 0.93,  # the same: post-processing on the CPU
    "v100_resnet50_2021a_workers4.json.gz": 0.68,  # of 36 ms before the first copy half is taken for its staging
}
"""Agreement by time, two points below what was reached at most."""


def measure_agreement(name: str) -> tuple[int, int, str]:
    """Return the ns of the labelled gaps that lie in the analysed steps, those on which both agree, and a line for each disagreement."""
    folder = EVIDENCE / ("nsys" if name.endswith(".sqlite") else "traces")
    if not (folder / name).exists():
        pytest.skip(f"{folder / name} is not here: the recordings are not part of the project")
    idle = kept.analysis(folder / name).idle
    judged = agreed = 0
    lines = []
    for gap in LABELS[name]:
        start, end = gap["start_ns"], gap["end_ns"]
        inside = idle.filter((pl.col("start_ns") < end) & (pl.col("end_ns") > start))
        ns = pl.min_horizontal("end_ns", pl.lit(end)) - pl.max_horizontal("start_ns", pl.lit(start))
        found = {cause.removeprefix("idle_"): int(held) for cause, held in inside.group_by("cause").agg(ns.sum()).iter_rows()}
        if sum(found.values()) < WHOLE * (end - start):
            continue
        same = match_parts(gap["us"], found)
        judged, agreed = judged + end - start, agreed + same
        if same < 0.99 * (end - start):
            lines.append(f"  [{start}, {end}] {gap['us']}, found {found}: {gap['note']}")
    return judged, agreed, "\n".join(lines)


def match_parts(parts: dict[str, float], found: dict[str, int]) -> int:
    """Return the ns of `found` that `parts` (us by cause; 'a|b': either) explain, those with fewest readings first."""
    left, same = dict(found), 0
    for readings, us in sorted(parts.items(), key=lambda part: part[0].count("|")):
        open_ns = round(us * 1000)
        for cause in readings.split("|"):
            taken = min(open_ns, left.get(cause, 0))
            left[cause] = left.get(cause, 0) - taken
            open_ns, same = open_ns - taken, same + taken
    return same


@pytest.mark.slow
@pytest.mark.parametrize("name", LABELS)
def test_causes_of_the_longest_gaps_agree_by_time(name: str) -> None:
    judged, agreed, lines = measure_agreement(name)
    if not judged:
        pytest.skip("none of these gaps lies in the analysed steps")
    sys.stdout.write(f"\n{name}: {agreed / judged:.3f} of {judged / 1e6:.3f} ms\n{lines}\n")
    assert agreed >= LOWER.get(name, FLOOR) * judged, lines


def test_labels_of_the_longest_gaps_are_whole() -> None:
    for name, gaps in LABELS.items():
        assert all(one["end_ns"] <= other["start_ns"] for one, other in pairwise(gaps)), name
        for gap in gaps:
            assert {cause for readings in gap["us"] for cause in readings.split("|")} <= CAUSES, gap
            assert abs(sum(gap["us"].values()) - (gap["end_ns"] - gap["start_ns"]) / 1000) <= 1, gap


def test_what_either_reading_explains_is_matched_once() -> None:
    assert match_parts({"launch": 5, "launch|sync": 5}, {"launch": 6000, "sync": 4000}) == 10_000
