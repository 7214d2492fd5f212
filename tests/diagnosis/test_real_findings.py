"""What the rules say of real traces: whole sentences, places that are parts of the figure, fixes that fit."""

from __future__ import annotations

import functools
from pathlib import Path

import kept
import pytest
from examples import sample

from gpudiag.attribution.steps import WHOLE_TRACE
from gpudiag.diagnosis import Judgement, judge, load_rules
from gpudiag.diagnosis.engine import decide_verdict
from gpudiag.facts import Facts
from gpudiag.model.analysis import Analysis

TRACES = (
    "h100_bert-small",
    "a100_dlrm_train_rank3of8",
    "a100-80g_sam_fast_compiled_cudagraph",
    "h100_qwen1.5-0.5b_prefill",
    "mi300x_norm_layers_fwd_bwd",
    "mi300x_vllm_gptoss_decode_fullgraph",
    "rtx2080ti_resnet18_train_noshapes",
    "v100_resnet50_train_2021_memory_callstack",
)
"""Marked and unmarked, eager and compiled, with and without shapes, NVIDIA and AMD, training and inference."""


@functools.cache
def judged(traces: Path, name: str) -> tuple[Analysis, Judgement]:
    analysis = kept.analysis(traces / f"{name}.json.gz")
    return analysis, judge(analysis, load_rules())


@pytest.mark.parametrize("name", sample(TRACES))
def test_findings_are_sentences_over_known_numbers(traces: Path, name: str) -> None:
    analysis, judgement = judged(traces, name)
    assert judgement.fact_errors == {}
    for finding in judgement.findings:
        assert finding.message.endswith(".")
        assert finding.message[0].isupper() or finding.message[0].isdigit()
        assert "unknown" not in finding.message.replace("kind 'unknown'", "")
        assert "  " not in finding.message
        if analysis.steps_source == WHOLE_TRACE:
            assert " a step" not in finding.message
            assert "ach step" not in finding.message
    for outcome in judgement.outcomes:
        assert outcome.status in ("passed", "fired") or outcome.reason


@pytest.mark.parametrize("name", sample(TRACES))
def test_the_places_of_starved_time_sum_to_no_more_than_it(traces: Path, name: str) -> None:
    analysis, _ = judged(traces, name)
    facts = Facts(analysis)
    starved = facts.value("idle_launch_ns")
    assert isinstance(starved, int)
    assert 0 <= sum(where.time_ns or 0 for where in facts.places("late_ops")) <= starved


def test_what_is_told_of_a_run_that_waits_for_its_loader(traces: Path) -> None:
    _, judgement = judged(traces, "rtx2080ti_resnet18_train_noshapes")
    first = judgement.findings[0]
    assert first.rule == "INP-01"
    assert first.message == (
        "For 48 % of the time of the analysed steps the loop waits for its next batch. Its worker processes do not keep up: more of "
        "them, a longer queue where batches differ, or less work per sample (decoding, transforms, storage)."
    )


def test_faster_kernels_are_no_finding_while_the_loader_limits_the_step(traces: Path) -> None:
    _, judgement = judged(traces, "v100_resnet50_train_2021_memory_callstack")
    outcome = next(outcome for outcome in judgement.outcomes if outcome.id == "CMP-02")
    assert outcome.status == "suppressed"
    assert outcome.reason.startswith("holds, but would save 0.0 % of the step at most at the recorded pace: 100 % of the")


@pytest.mark.slow
def test_fixes_fit_the_run(traces: Path) -> None:
    fixes = {name: {f.rule: f.fixes for f in judged(traces, name)[1].findings} for name in TRACES}
    v100 = Facts(judged(traces, "v100_resnet50_train_2021_memory_callstack")[0])
    assert decide_verdict(next(rule for rule in load_rules() if rule.id == "CMP-02"), v100.value).fixes == ("fp16",)  # no bf16 units
    # compiled inference whose steps differ and wait for sizes
    assert fixes["a100-80g_sam_fast_compiled_cudagraph"]["OVH-01"] == ("fuse-region", "batch-requests")
    assert fixes["a100-80g_sam_fast_compiled_cudagraph"]["OVH-08"] == ()  # masks are made into lists of runs: no compiler sees that
    # most of its idle time has no recorded cause: nothing is said of the host
    assert "OVH-01" not in fixes["mi300x_vllm_gptoss_decode_fullgraph"]
