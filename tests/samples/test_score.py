"""The score of a sample: what counts as right, what as a false alarm, and how much a ceiling may promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from suite.expected import Expected, Sample
from suite.gain import Gain, of
from suite.gains import add_experiments, update_gains
from suite.judged import Judged, judge
from suite.needs import lacking
from suite.scoring import keep, score_recorded
from suite.table import Row, section, text_table, totals, with_section

from gpudiag.errors import GpudiagError
from gpudiag.model.experiment import Comparison, Outcome
from gpudiag.model.finding import Ceiling, Finding, Severity

SCORE = Path(__file__).resolve().parents[2] / "samples" / "score.py"


def finding(rule: str, severity: Severity = "warning", share: float | None = None, folded: tuple[str, ...] = ()) -> Finding:
    ceiling = None if share is None else Ceiling(1, share, "formula", "gone")
    return Finding(rule, "title", severity, "overhead", "message", ceiling=ceiling, folded=folded)


def test_the_first_finding_above_info_counts() -> None:
    found = [finding("EFF-03", "info"), finding("INP-01", "critical", 0.6, ("SYN-01",)), finding("EFF-01")]
    expected = Expected(title="a", first="INP-01", must=("SYN-*",), may=("EFF-*",), never=("MEM-*",))
    assert judge(found, expected) == Judged("INP-01", True, ceiling_share=0.6)
    assert judge(found, expected).fine


@pytest.mark.parametrize(
    ("found", "judged"),
    [
        ([], Judged("", False, missing=("SYN-01",))),
        ([finding("INP-01", "info"), finding("SYN-01", "info")], Judged("", False)),
        ([finding("SYN-01"), finding("INP-01")], Judged("SYN-01", False)),
        ([finding("INP-01"), finding("OVH-01"), finding("SYN-01")], Judged("INP-01", True, ("OVH-01",))),
        ([finding("INP-01"), finding("SYN-01"), finding("MEM-08", "info")], Judged("INP-01", True, forbidden=("MEM-08",))),
        ([finding("INP-01", folded=("MEM-02",)), finding("SYN-01")], Judged("INP-01", True, forbidden=("MEM-02",))),
    ],
)
def test_what_is_wrong_is_said(found: list[Finding], judged: Judged) -> None:
    assert judge(found, Expected(title="a", first="INP-01", must=("SYN-01",), never=("MEM-*",))) == judged
    assert not judged.fine


def test_a_control_may_have_notes_and_no_warnings() -> None:
    control = Expected(title="healthy")
    assert judge([finding("EFF-01", "info")], control).fine
    assert judge([finding("EFF-01")], control) == Judged("EFF-01", False, ("EFF-01",))


def row(share: float | None, gain: float | None, low: float = 0.0, name: str = "a") -> Row:
    measured = None if gain is None else Gain(gain, low, min(1.0, 2 * gain - low), "samples", "blocks", 2)
    return Row(name=name, wanted="OVH-01", runs=(Judged("OVH-01", True, ceiling_share=share),), gain=measured)


@pytest.mark.parametrize(
    ("rows", "fine"),
    [
        ([row(0.5, 0.5, 0.45)], True),
        ([row(0.42, 0.5, 0.4)], True),  # below, but within the noise
        ([row(0.35, 0.5, 0.4)], False),
        ([row(0.9, 0.5, 0.4)], False),  # the median promises 1.8 times what there is
        ([row(0.5, 0.5, 0.4), row(0.5, 0.5, 0.4), row(0.9, 0.4, 0.3)], True),
        ([row(0.5, 0.5, 0.4), row(0.5, 0.5, 0.4), row(0.9, 0.2, 0.1)], False),  # the worst 4.5 times
        ([row(None, 0.5, 0.4), row(0.5, None)], True),
        ([], False),
        ([msgspec.structs.replace(row(0.5, 0.5, 0.4), failed="planted")], False),
        ([msgspec.structs.replace(row(0.5, 0.5, 0.4), runs=(Judged("OVH-01", True), Judged("EFF-01", False, ("EFF-01",))))], False),
    ],
)
def test_ceilings_are_kept_promises(rows: list[Row], fine: bool) -> None:
    assert totals(rows).fine is fine


def test_the_ceiling_is_the_median_of_the_runs_that_were_right() -> None:
    runs = (Judged("OVH-01", True, ceiling_share=0.4), Judged("X", False, ceiling_share=0.9), Judged("OVH-01", True, ceiling_share=0.5))
    assert Row(name="a", wanted="OVH-01", runs=runs).ceiling == pytest.approx(0.45)


def test_the_gain_is_a_share_of_the_planted_time() -> None:
    found = of(Comparison(verdict="faster", ratio=2.0, interval=(1.6, 2.5), over="blocks", pairs=2))
    assert isinstance(found, Gain)
    assert (found.share, found.low, found.high) == pytest.approx((0.5, 0.375, 0.6))
    assert of(Comparison(verdict="failed", reason="crash", notes=("fixed ended with exit code 1", "Traceback"))) == (
        "fixed ended with exit code 1; Traceback"
    )


def test_the_table_and_its_last_lines() -> None:
    wrong = Row(name="b", wanted="INP-01", runs=(Judged("EFF-01", False, ("EFF-01",), ("MEM-08",)),), seconds=12.4)
    lines = text_table([row(0.5, 0.4, 0.35), wrong]).splitlines()
    assert lines[0].split() == ["sample", "first", "finding", "false", "alarms", "bound", "gain", "bound/gain", "seconds"]
    assert lines[1].split() == ["a", "OVH-01", "ok", "none", "50%", "40%", "[35%,", "45%]", "1.25", "0"]
    assert "INP-01 WRONG: got EFF-01; MISSING MEM-08" in lines[2]
    assert totals([row(0.5, 0.4, 0.35), wrong]).lines()[-2:] == [
        "bound/gain: median 1.25, worst 1.25; bounds below the gain: 0",
        "first finding right: 1 of 2; false alarms: 1",
    ]


def test_sections_of_other_devices_are_kept() -> None:
    first = with_section("", "CPU: a", section("CPU: a", "today", [row(0.5, 0.4, 0.35)], [("gpu_only", "needs a CUDA GPU")]))
    assert "* gpu_only: not scored, needs a CUDA GPU" in first
    both = with_section(first, "B200", section("B200", "today", [row(0.7, 0.6, 0.5)], []))
    again = with_section(both, "CPU: a", section("CPU: a", "tomorrow", [row(0.3, 0.3, 0.2)], []))
    assert again.count("\n## ") == 2
    assert "tomorrow" in again
    assert "| 70% |" in again
    assert "| 50% |" not in again
    assert again == with_section(again, "CPU: a", section("CPU: a", "tomorrow", [row(0.3, 0.3, 0.2)], []))


def test_what_this_machine_lacks_is_said() -> None:
    import torch

    assert lacking(()) is None
    if not torch.cuda.is_available():
        assert lacking(("cpu",)) is None
        assert lacking(("cpu", "cuda")) == "needs a CUDA GPU"
        assert lacking(("cuda:2",)) == "needs two CUDA GPUs"


def test_a_bundle_that_is_too_large_is_not_kept(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    with open(bundle / "trace", "wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(GpudiagError, match="18 MB, at most 17 MB"):
        keep(tmp_path / "kept", bundle, None)
    assert not (tmp_path / "kept").exists()


TRAIN = """
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(args.steps):
    x = torch.randn(512, 512)  # long enough steps for 5,000 of them to fill the blocks of a fast machine
    for _ in range(1 if args.fixed else 9):
        loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("known_peaks")
def test_a_sample_from_recording_to_score_and_back_from_its_bundle(tmp_path: Path) -> None:
    samples, kept = tmp_path / "samples", tmp_path / "samples" / "recorded"
    for name, text in (
        ("work_twice", 'title = "nine forward passes"\nfirst = "NO-01"'),
        ("gpu", 'title = "a"\nfirst = "X"\nrequires = ["cuda:2"]'),
    ):
        (samples / name).mkdir(parents=True)
        (samples / name / "expected.toml").write_text(text)
        (samples / name / "train.py").write_text(TRAIN)
    arguments = ["--samples", samples, "--pairs", "1", "--record", kept]
    done = subprocess.run([sys.executable, SCORE, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("first finding right: 0 of 1; false alarms: ")
    gain = msgspec.json.decode((kept / "work_twice" / "gain.json").read_bytes(), type=Gain)
    assert 0.2 < gain.share < 0.9
    assert gain.unit == "samples"
    written = (samples / "SCORE.md").read_text()
    assert "NO-01 WRONG" in written
    assert "not scored: 1" in lines
    sample = Sample("work_twice", samples / "work_twice", Expected(title="a", first="NO-01"))
    again = score_recorded(sample, kept / "work_twice")
    assert again is not None
    assert again.gain == gain
    assert not again.right
    assert again.note.startswith("scored from its recording on ")
    assert score_recorded(sample, kept / "nothing") is None


@pytest.mark.parametrize(("ceiling", "share"), [(0.8, -0.05), (0.8, None), (None, 0.4)])
def test_a_twin_that_shows_nothing_and_a_finding_without_a_ceiling_are_not_fine(ceiling: float | None, share: float | None) -> None:
    measured = None if share is None else Gain(share, share - 0.1, share + 0.1, "samples", "blocks", 2)
    row = Row(name="a", wanted="OVH-01", runs=(Judged("OVH-01", True, ceiling_share=ceiling),), gain=measured, proof_wanted=True)
    assert not totals([row]).fine
    assert "showed no gain: 1" in "".join(totals([row]).lines())
    assert totals([msgspec.structs.replace(row, proof_wanted=False)]).unproved == 0


def test_measured_gains_stand_once_for_each_device_and_rule() -> None:
    rows = [
        Row(name="a", wanted="OVH-06", gain=Gain(0.5, 0.4, 0.6, "samples", "pairs", 1)),
        Row(name="b", wanted="OVH-06", gain=Gain(0.75, 0.7, 0.8, "samples", "pairs", 1)),
        Row(name="c", wanted="CMP-0[25]", gain=Gain(0.2, 0.1, 0.3, "samples", "pairs", 1)),
        Row(name="d", wanted="INP-01"),
    ]
    other = "- {change: bf16, device: gpu, least: 1.00, most: 2.00, count: 1, source: elsewhere}\n"
    once = update_gains(other, "CPU: X", rows)
    assert once == (
        other + '- {change: OVH-06, device: cpu, least: 2.00, most: 4.00, count: 2, planted: true, source: "samples/SCORE.md, CPU: X"}\n'
    )
    assert update_gains(once, "CPU: X", rows) == once
    assert update_gains(once, "CPU: X", rows[:1]).count("OVH-06") == 1


def test_experiments_add_single_fixes_that_were_measured_to_the_end() -> None:
    made = [
        Outcome(fix="bf16", verdict="faster", ratio=1.5),
        Outcome(fix="batch-size=x2", verdict="slower", ratio=0.9),
        Outcome(fix="bf16+compile", verdict="faster", ratio=1.8),
        Outcome(fix="compile", verdict="faster", ratio=1.2, screening=True),
        Outcome(fix="sdpa", verdict="failed"),
        Outcome(fix="tf32", verdict="not_applied", ratio=1.0),
    ]
    assert add_experiments("", "a GPT", "cpu", made).splitlines() == [
        '- {change: batch-size, device: cpu, least: 0.90, most: 0.90, count: 1, source: "gpudiag ab, a GPT"}',
        '- {change: bf16, device: cpu, least: 1.50, most: 1.50, count: 1, source: "gpudiag ab, a GPT"}',
    ]
