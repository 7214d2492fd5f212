"""Runs whose usual step is not the whole story: rare slow steps, time between steps, steps that become slower (EFF-05, EFF-06)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from factories import CPU, analysis, kernel, table

from gpudiag.diagnosis import judge, load_rules
from gpudiag.model.finding import Finding, Where

MS = 1_000_000


def judge_run(
    walls: Sequence[float],
    *,
    gaps: Mapping[int, float] = {},
    seen: Sequence[tuple[str, str, int | None]] = (),
    inside: Sequence[tuple[int, str, str]] = (),
    saves: Mapping[int, float] = {},
    **phases: Sequence[float],
) -> dict[str, Finding]:
    """Return the findings on a run with steps of `walls` ms. `gaps`: ms that follow a step; `seen`: (function, site, step) of samples;
    `inside`: (number of the sample, function, site) of packages; `saves`: ms of torch.save in a step; `phases`: ms of a column in
    each step."""
    rows, at = [], 0
    for step, wall in enumerate(walls):
        more = {name: round(values[step] * MS) for name, values in phases.items()}
        rows.append({"step": step, "start_unix_ns": at, "wall_ns": round(wall * MS), "window": "plain", **more})
        at += round((wall + gaps.get(step, 0)) * MS)
    marks = []
    for number, (name, site, step) in enumerate(seen):
        mark = {"step": step, "start_unix_ns": number, "duration_ns": 0}
        below = [("inside", *of) for sample, *of in inside if sample == number]
        marks += [{"kind": kind, "name": name, "site": site, **mark} for kind, name, site in (("slow", name, site), *below)]
    marks += [
        {"kind": "save", "name": "torch.save", "step": step, "start_unix_ns": 0, "duration_ns": round(ms * MS)}
        for step, ms in saves.items()
    ]
    made = analysis([kernel("aten::mm", 0, 1000)], device=CPU)
    made = msgspec.structs.replace(made, step_records=table("step_records", rows), host_marks=table("host_marks", marks))
    judgement = judge(made, load_rules())
    assert judgement.fact_errors == {}
    return {finding.rule: finding for finding in judgement.findings}


def walls_with(slow: float, every: int, steps: int = 200) -> list[float]:
    return [slow if step % every == every - 1 else 10.0 for step in range(steps)]


def test_evaluations_in_rare_steps_are_found_with_their_lines() -> None:
    # 4 of 198 steps take 400 ms: 4 x 390 of 3,540 ms beyond the median
    seen = [("evaluate", "train.py:31", 49), ("evaluate", "train.py:31", 99), ("evaluate", "train.py:30", 149), ("log", "train.py:50", 149)]
    found = judge_run(walls_with(400, 50), seen=seen)["EFF-05"]
    assert found.severity == "info"
    assert found.ceiling is None
    assert found.message.startswith(
        "Much of the run is not spent in usual steps. 4 unprofiled steps (2.0 % of them) take more than 1.5 times the median; "
        "what they take beyond it is 44 % of the time."
    )
    assert found.where == (Where("evaluate(), 75 % of the samples", "train.py", 31), Where("log(), 25 % of the samples", "train.py", 50))


def test_a_packages_line_that_holds_half_of_the_samples_stands_after_the_programs() -> None:
    seen = [("<module>", "train.py:16", step) for step in (49, 99, 149, 199)]
    called = [(number, "learn", "algorithm.py:324") for number in range(4)]
    called += [(0, "collect", "algorithm.py:202"), (1, "collect", "algorithm.py:202"), (2, "collect", "algorithm.py:247")]
    called += [(0, "forward", "policies.py:656")]  # a quarter of them
    found = judge_run(walls_with(400, 50), seen=seen, inside=called)["EFF-05"]
    assert found.where[0] == Where("<module>, 100 % of the samples", "train.py", 16)
    assert found.where[1] == Where("collect(), 50 % of the samples", "algorithm.py", 202)


def test_validation_between_epochs_is_found_with_its_line() -> None:
    gaps = dict.fromkeys(range(19, 200, 20), 100.0)  # 9 x 100 ms after 20 steps of 10 ms, between the steps 2 and 199
    found = judge_run([10.0] * 200, gaps=gaps, seen=[("validate", "train.py:12", None)])["EFF-05"]
    assert found.message == "Much of the run is not spent in usual steps. 31 % of the time passes between steps."
    assert found.where == (Where("validate(), 100 % of the samples", "train.py", 12),)


def test_a_rollout_in_each_fourth_step_is_found() -> None:
    assert "EFF-05" in judge_run(walls_with(80, 4))


def test_one_slow_step_need_not_come_again() -> None:
    assert "EFF-05" not in judge_run([10.0] * 50 + [900.0] + [10.0] * 50)


def test_batches_of_varied_length_are_no_slow_steps() -> None:
    for sigma in (0.2, 0.5, 1.0):
        lengths = np.random.default_rng(0).lognormal(0, sigma, 2_000)
        assert "EFF-05" not in judge_run((10 * lengths).tolist())


def test_checkpoints_are_those_of_the_rule_on_file_writes() -> None:
    found = judge_run(walls_with(400, 50), saves=dict.fromkeys(range(49, 200, 50), 390.0))
    assert "OVH-06" in found
    assert "EFF-05" not in found


def test_a_loss_that_keeps_its_graph_is_a_drift_of_the_backward_pass() -> None:
    grown = [10 + 0.02 * step for step in range(400)]
    found = judge_run(grown, forward_ns=[4.0] * 400, backward_ns=[wall - 4 for wall in grown])["EFF-06"]
    # the medians of the quarters: 11 and 17 ms
    assert found.message == (
        "An unprofiled step takes 54 % longer in the last quarter of the run than in the first. "
        "Of that growth, 5.98 ms of 5.98 ms is the backward pass."
    )
    assert (found.severity, found.ceiling) == ("info", None)


def test_an_even_run_has_neither() -> None:
    scattered = np.random.default_rng(1).normal(10, 0.5, 400)
    found = judge_run(scattered.tolist())
    assert not {"EFF-05", "EFF-06"} & found.keys()
