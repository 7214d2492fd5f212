"""Why an arm ended is told from what it left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpudiag.experiment.arm import NotAppliedArmError, explain_end, find_refusal, read_stacks, read_tail
from gpudiag.experiment.design import Design
from gpudiag.experiment.trial.protocol import Died, Evidence, Over, Warmed


@pytest.mark.parametrize(
    ("code", "rows", "tail", "reason", "said"),
    [
        (1, [Died("crash", "ValueError: planted")], "", "crash", "exit code 1: ValueError: planted"),
        (1, [Died("oom", "OutOfMemoryError: CUDA"), Died("crash", "ChildFailedError")], "", "oom", "OutOfMemoryError"),
        (1, [], "torch.OutOfMemoryError: CUDA out of memory", "oom", "exit code 1"),
        (-9, [], "", "crash", "signal 9"),
        # a warm-up that may take twice as long, and two blocks: 3 + 2 x 10 + 2 x (2 + 6); six of 12 steps: 3 + 10 + 6 x (2 + 12)
        (0, [Warmed(10, 0, steady=True), Over(20, None)], "", "ended", "for about 23 steps; a trial takes 39 at least, 97 with blocks"),
        (0, [Over(40, None, 10**7)], "", "ended", "a trial takes 99 at least, 955 "),  # its warm-up took all 40; 1.5 s: 6 x (2 + 150)
        (0, [Warmed(10, 10**7, steady=True, prefetched=100), Over(40, None)], "", "ended", "427 at least, 1,225 "),  # of twice the queue
        (0, [Over(3, "no steps were found")], "", "no_steps", "no steps were found"),
        (0, [], "", "no_steps", "no training was seen"),
    ],
)
def test_each_end_has_its_reason(code: int, rows: list[object], tail: str, reason: str, said: str) -> None:
    error = explain_end("a", code, rows, tail, Design())  # type: ignore[arg-type]
    assert error.reason == reason
    assert said in error.message
    assert error.crowded == (reason == "oom")


def test_a_refusal_inside_the_program_is_no_crash() -> None:
    row = explain_end("a", 1, [Died("not_applied", "no module has a convolution"), Died("crash", "ChildFailedError")], "", Design())
    assert isinstance(row, NotAppliedArmError)
    assert row.message == "no module has a convolution"
    printed = "Traceback ...\n  boom()\ngpudiag.fixes.fix.NotAppliedError: needs a GPU\n[rank0] agent failed"
    late = explain_end("a", 1, [], printed, Design())
    assert isinstance(late, NotAppliedArmError)
    assert late.message == "needs a GPU"


def test_a_fix_without_evidence_is_refused() -> None:
    assert find_refusal([Evidence("bf16", "bfloat16 inside the model")]) is None
    error = find_refusal([Evidence("bf16", "x"), Evidence("tf32", "", "no float32 product")])
    assert error is not None
    assert error.message == "tf32: no float32 product"


def test_the_tail_of_a_log_and_the_places_of_a_hang(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * 10_000 + "\nthe end\n", encoding="utf-8")
    assert read_tail(log).endswith("the end")
    assert len(read_tail(log)) <= 4000
    assert read_tail(tmp_path / "none") == ""
    for pid, place in ((7, "train"), (8, "wait")):
        text = f'Thread 0x1 (most recent call first):\n  other\nCurrent thread 0x{pid}:\n  File "loop.py", line 3 in {place}\n'
        (tmp_path / f"stack-{pid}").write_text(text, encoding="utf-8")
    frames = ["Current thread 0x7:", '  File "loop.py", line 3 in train', "Current thread 0x8:", '  File "loop.py", line 3 in wait']
    assert read_stacks(tmp_path).splitlines() == frames
    assert read_stacks(tmp_path / "none") == ""
