"""What-ifs of an analysis: the steps that a replayed one stands for, the batch size that was recorded."""

from __future__ import annotations

from unittest import mock

import factories as f
import msgspec
import polars as pl
import pytest
import smallgraphs as small

from gpudiag.timeline.replay import steady_step_ns
from gpudiag.timeline.whatif.registry import parse_settings
from gpudiag.timeline.whatif.study import build_study, run_what_ifs


def test_without_graphs_there_is_no_study() -> None:
    assert build_study(f.analysis(steps=2)) is None


def test_a_rare_slow_step_counts_for_itself_alone() -> None:
    """Nine steps of 230 us and one of 330 that waits 100 us for the loader: 10 us of the mean step."""
    spans = [(230.0 * row, 230.0 * (row + 1)) for row in range(9)] + [(2070.0, 2400.0)]
    slow = msgspec.structs.replace(small.launch_bound(), step=9)
    fast = msgspec.structs.replace(small.launch_bound(), step=0, duration_ns=small.launch_bound().duration_ns.copy())
    fast.duration_ns[1] = 0
    made = f.analysis(steps=spans, wall=2400, buckets={"idle_data": 100})
    study = build_study(msgspec.structs.replace(made, trace=small.launch_bound_trace(), graphs=(fast, slow)))
    assert study is not None
    assert study.weights == (9, 1)
    found = study.what_if(parse_settings(["loader=0"]))
    assert found.step_ns == pytest.approx(240_000)
    assert found.share == pytest.approx(10 / 240)


def test_the_batch_size_is_the_one_that_most_steps_had() -> None:
    records = pl.DataFrame({"samples": [10, 10, None, 7]}, schema={"samples": pl.Int64})
    made = msgspec.structs.replace(f.analysis(), graphs=(small.launch_bound(),), step_records=records)
    study = build_study(made)
    assert study is not None
    assert study.context.samples == 10


def test_what_rules_name_is_replayed_once_before_they_are_judged() -> None:
    made = f.analysis(steps=1, buckets={"idle_launch": 100})
    made = msgspec.structs.replace(made, trace=small.launch_bound_trace(), graphs=(small.launch_bound(),), profiler_slowdown=1.1)
    what_ifs = run_what_ifs(made, [("host=0",), ("host=0", "fused"), ("gc=0", "io=0")])
    assert what_ifs.study is not None
    assert not {"work", "chains"} & what_ifs.study.context.__dict__.keys(), "tables that are larger than the trace are let go"
    with mock.patch("gpudiag.timeline.whatif.study.steady_step_ns", mock.Mock(side_effect=steady_step_ns)) as replayed:
        assert what_ifs.saved_share("host=0") == pytest.approx(0.1)  # no more than the breakdown gives to it
        assert what_ifs.saved_share("gc=0", "io=0") is None
        assert {one.name for one in what_ifs.standard} >= {"host=0.5", "launch=0", "loader=0"}
        assert replayed.call_count == 0
