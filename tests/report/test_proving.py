"""The command that measures what the findings suggest."""

from __future__ import annotations

import report_sample as sample
from rendered import render_text

from gpudiag.model.finding import Where
from gpudiag.report import findings


def test_the_first_fix_that_a_running_program_takes_of_each_finding() -> None:
    first = sample.finding(rule="A-01", fixes=("accumulation", "fuse-region", "bf16", "tf32"))  # a loop's own; needs a value
    second = sample.finding(rule="A-02", fixes=("loader-workers",))
    report = sample.report(findings=(first, second))
    assert findings.build_ab_command(report, "-m train --lr 1") == "gpudiag ab --fix bf16 --fix loader-workers -m train --lr 1"


def test_nothing_to_try_no_command() -> None:
    report = sample.report(findings=(sample.finding(fixes=("accumulation", "of-a-rule-of-ones-own"), where=()),))
    assert findings.build_ab_command(report) == ""


def test_a_first_finding_that_no_fix_treats_is_tried_by_a_changed_copy() -> None:
    own = sample.finding(rule="CMP-12", fixes=(), where=(Where("aten::mm", "train.py", 7, 1_000),))
    second = sample.finding(rule="A-02", fixes=("loader-workers",))
    command = "gpudiag ab --variant changed=script:CHANGED.py{} train.py  # CHANGED.py: a copy with the change of finding 1"
    for found, expected in (
        ((own, second), command.format(" --fix loader-workers")),
        ((own,), command.format("")),
        ((second, own), "gpudiag ab --fix loader-workers train.py"),
    ):
        assert findings.build_ab_command(sample.report(findings=found), "train.py") == expected


def test_the_command_of_the_report_names_the_recorded_script_or_what_stands_for_it() -> None:
    report = sample.report(findings=(sample.finding(fixes=("bf16",)),))
    assert "gpudiag ab --fix bf16 train.py ARGS" in render_text(report)
    assert "gpudiag ab --fix bf16 finetune.py --lr 1\n" in render_text(report, script="finetune.py --lr 1")
    assert "gpudiag ab" not in render_text(report, script=None)
