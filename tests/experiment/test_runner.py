"""Comparisons of real processes: planted effects, arms that fail, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from gpudiag.errors import InputError
from gpudiag.experiment import guard
from gpudiag.experiment.compare import compare_arms
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.stats import compute_mean_interval
from gpudiag.model.experiment import FixCall, compute_log_ratios

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("scipy", reason="scipy is not installed")
pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")

LOOP = Path(__file__).with_name("loop.py")
QUICK = Design(looks=(2,), blocks=4, block_s=0.1, warm_limit_s=3.0)
ONE = Design(looks=(1,), blocks=4, block_s=0.1, warm_limit_s=3.0)


def arm(name: str, *arguments: str) -> Arm:
    return Arm(name=name, command=(sys.executable, str(LOOP), *arguments))


def script(name: str, code: str) -> Arm:
    return Arm(name=name, command=(sys.executable, "-c", code))


def ours() -> set[int]:
    """Living processes of experiments that this process began: others may run on the same machine."""
    return {pid for pid in guard.Family("").members() if _ancestor(pid) == os.getpid()}


def _ancestor(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return -1


@pytest.mark.slow
def test_an_arm_against_itself_and_against_double_work() -> None:
    same = compare_arms(arm("a", "--work", "4"), arm("b", "--work", "4"), QUICK)
    values = [ratio for pair in same.measured for ratio in compute_log_ratios(pair)]
    _, low, high, _ = compute_mean_interval(values, 0.001)
    assert low <= 0 <= high
    assert (same.pairs, same.unit, same.over) == (2, "samples", "blocks")
    assert not ours()


@pytest.mark.slow
@pytest.mark.long  # test_experiment_live.py finds a planted effect
def test_double_work_is_found() -> None:
    found = compare_arms(arm("double", "--work", "20"), arm("single", "--work", "8"), ONE)
    assert found.ratio is not None
    assert found.interval is not None
    assert 1.3 < found.ratio < 3.5, found  # (20 + 2) / (8 + 2) forward passes, a backward pass being two
    assert found.interval[0] > 1
    assert all(pair.first_step_ns > 0 and len(pair.first) == len(pair.second) == 4 for pair in found.measured)


CROWDED = """
import os
import numpy, torch
from torch.utils.data import DataLoader, Dataset
from gpudiag.fixes.dataloader import find_thread_functions

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])

class Correlations(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        rows = numpy.random.default_rng(index).standard_normal((192, 192))
        return torch.from_numpy((rows @ rows.T)[0] / 192).float()

def start(_):
    for _, set_threads in find_thread_functions():
        set_threads(4)

model = torch.nn.Linear(192, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for x in DataLoader(Correlations(), 2, num_workers=2, worker_init_fn=start):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_workers_that_crowd_two_cores_are_faster_with_one_thread_each() -> None:
    changed = msgspec.structs.replace(script("changed", CROWDED), fixes=(FixCall("worker-threads"),))
    found = compare_arms(script("plain", CROWDED), changed, Design(looks=(1,), blocks=2, block_s=0.1, block_steps=4, warm_steps=5))
    assert found.evidence == ("worker-threads: 1 thread instead of 4 in each of 2 loader workers",)
    assert found.ratio is not None
    assert found.ratio > 1.2, found


@pytest.mark.slow
def test_throughput_counts_samples_not_steps_and_leaves_validation_out() -> None:
    small = arm("small", "--batch", "8", "--loader", "--workers", "1", "--validate")
    found = compare_arms(small, arm("large", "--batch", "64"), ONE)
    assert found.unit == "samples"
    (pair,) = found.measured
    # steps of a small batch are no slower; eight times the rows in about the same time. Counted as steps the ratio would be below 2
    assert found.ratio > 3, found  # type: ignore[operator]
    assert all(rate * pair.first_step_ns / 1e9 < 80 for rate in pair.first), "rows of validation batches were counted"


def test_an_arm_that_cannot_start_is_an_error() -> None:
    with pytest.raises(InputError, match="cannot start no-such-program"):
        compare_arms(Arm(name="a", command=("no-such-program",)), arm("b"), QUICK)


@pytest.mark.parametrize(
    ("code", "reason", "said"),
    [
        ("import sys; print('before'); sys.exit('planted')", "crash", "planted"),
        ("raise ValueError('torch.OutOfMemoryError: CUDA out of memory')", "oom", "out of memory"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "crash", "signal 9"),
        ("print('no training here')", "no_steps", "no training"),
    ],
)
def test_an_arm_that_ends_says_why(code: str, reason: str, said: str) -> None:
    found = compare_arms(script("arm one", code), arm("b"), QUICK)
    assert (found.verdict, found.reason, found.ratio, found.pairs) == ("failed", reason, None, 0)
    assert said in "\n".join(found.notes)
    assert found.notes[0].startswith("arm one")
    assert not ours()


@pytest.mark.slow
def test_a_hang_before_the_first_step_is_ended_with_its_tree() -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']).wait()"
    begun = time.monotonic()
    found = compare_arms(script("a", child), arm("b"), Design(start_limit_s=1.0))
    assert (found.verdict, found.reason) == ("failed", "hang")
    assert time.monotonic() - begun < 30
    assert not ours()


BACKWARD_ONLY = """
import json, time
from gpudiag.experiment.trial.protocol import Control
entries = open("/proc/self/environ").read().split(chr(0))  # os.environ hides the plan from scripts
plan = next(entry for entry in entries if entry.startswith("GPUDIAG_RUN=")).partition("=")[2]
control = Control.open(json.loads(plan)["folder"])
while True:
    control.beat(0)  # a backward pass, and never a step
    time.sleep(0.0001)
"""


@pytest.mark.slow
def test_backward_passes_without_end_and_without_a_step_are_no_sign_of_life_for_ever() -> None:
    begun = time.monotonic()
    found = compare_arms(script("a", BACKWARD_ONLY), arm("b"), Design(start_limit_s=2.0))
    assert (found.verdict, found.reason) == ("failed", "no_steps"), found
    assert "backward passes in" in found.notes[0]
    assert "and no step that could be told; gpudiag.step() in the loop marks the steps by hand" in found.notes[0]
    assert time.monotonic() - begun < 60
    assert not ours()


@pytest.mark.slow
def test_a_script_that_ends_before_its_trial_is_told_from_one_that_crashes() -> None:
    found = compare_arms(arm("a", "--steps", "40"), arm("b"), Design(looks=(1,), warm_steps=60))
    assert (found.verdict, found.reason) == ("failed", "ended")
    assert found.notes[0].startswith("a: the script trains for about ")
    assert not ours()


@pytest.mark.slow
def test_a_hang_in_a_block_is_ended_and_its_place_is_told() -> None:
    found = compare_arms(
        arm("a", "--hang", "30"), arm("b"), Design(looks=(1,), blocks=4, block_s=0.0, warm_limit_s=0.0, silent_limit_s=3.0)
    )
    assert (found.verdict, found.reason) == ("failed", "hang")
    innermost = found.notes[1].splitlines()[1]
    assert "loop.py" in innermost, found.notes
    assert " in train" in innermost
    assert not ours()


MAIN = """
import json, sys
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.compare import compare_arms
arm = Arm(name="a", command=json.loads(sys.argv[1]))
compare_arms(arm, arm, Design(looks=(1,), blocks=1000, block_s=0.05))
"""
TRAINING = [sys.executable, str(LOOP), "--loader", "--workers", "1"]
SLEEPING = [sys.executable, "-c", "import time; time.sleep(99)"]


def marks_below(pid: int) -> set[str]:
    """The marks of living processes whose parent is `pid`."""
    found = set()
    for child in guard.Family("").members():
        if _ancestor(child) == pid:
            entries = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found.update(entry.decode().partition("=")[2] for entry in entries if entry.startswith(guard.MARK.encode()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("number", "command", "arms"), [(signal.SIGINT, SLEEPING, 1), (signal.SIGKILL, TRAINING, 2)])
def test_nothing_is_left_when_the_experiment_is_broken_off(number: signal.Signals, command: list[str], arms: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", MAIN, json.dumps(command)], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 90
    while len(marks := marks_below(process.pid)) < arms and time.monotonic() < end:  # where there are two, the first is frozen
        time.sleep(0.1)
    assert len(marks) == arms
    experiment = marks.pop().split(".")[0]
    process.send_signal(number)
    assert process.wait(30) != 0
    while guard.Family(experiment).members() and time.monotonic() < end:
        time.sleep(0.05)
    assert not guard.Family(experiment).members()
