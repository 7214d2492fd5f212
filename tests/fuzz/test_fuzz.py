"""Whatever is done to a trace: a report, or one clear error. The parts of the report still sum to the whole."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from examples import sample
from fuzz.documents import SHAPES
from fuzz.mutations import break_bytes, break_structure
from fuzz.survival import survives
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TEST = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SEEDS = st.integers(0, 2**32)


@pytest.mark.parametrize("shape", sample(SHAPES))
def test_the_unbroken_shapes_give_reports(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(SHAPES[shape]()))
    assert survives(path)


@pytest.mark.parametrize("shape", [pytest.param(shape, marks=[] if shape == "gpu_training" else [pytest.mark.slow]) for shape in SHAPES])
@TEST
@given(seed=SEEDS, times=st.integers(1, 40))
def test_broken_structure(tmp_path: Path, shape: str, seed: int, times: int) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(break_structure(SHAPES[shape](), random.Random(seed), times)))
    survives(path)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@TEST
@given(shape=st.sampled_from(sorted(SHAPES)), seed=SEEDS, times=st.integers(1, 8))
def test_broken_bytes(tmp_path: Path, packed: bool, shape: str, seed: int, times: int) -> None:
    path, text = tmp_path / "trace.json", json.dumps(SHAPES[shape]()).encode()
    path.write_bytes(break_bytes(gzip.compress(text, 1) if packed else text, random.Random(seed), times))
    survives(path)
