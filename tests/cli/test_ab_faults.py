"""What goes wrong with `gpudiag ab`: each ends as a verdict with its reason, nothing is left running, the user's folder is as it was."""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from abplace import Place, over, tree, until, variants

from gpudiag.experiment.store import BaselineRow, ComparisonRow, PairRow, ParityRow

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("scipy", reason="scipy is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")]

AWKWARD, TARGETS = (Path(__file__).parents[1] / name for name in ("awkward", "benchmarks/targets"))
ONE = ("--pairs", "1", "--no-parity")
SAME = ("--variant=same:exact=env:A=B",)
TORCHRUN = ("--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29511", "train.py")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    left = made.left()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(made.temporary, ignore_errors=True)
    assert left == {}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no small disk here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, left_bytes: int) -> Path:
    """Fill a disk but for so many bytes."""
    target = folder / "filler"
    state = os.statvfs(folder)
    target.write_bytes(bytes(state.f_bavail * state.f_frsize - left_bytes))
    return target


# -- the changed arm ------------------------------------------------------------------------------------------------------------


WRONG = {
    "early": ("--do fail --at -1", "crash", "RuntimeError: planted failure"),
    "late": ("--do fail --at 60", "crash", "RuntimeError: planted failure"),
    "killed": ("--do kill --at 60", "crash", "signal 9"),
    "lock": ("--do lock --at 60", "hang", "in lock"),
    "worker": ("--hanging-worker 60", "hang", "in __getitem__"),
    "leak": ("--do leak --at 60", "oom", "more than the limit of"),
}
"""Name of a change: what it does, the reason that is told, what its note says."""


@pytest.mark.parametrize("names", [("late", "lock", "leak"), pytest.param(("early", "killed", "worker"), marks=pytest.mark.long)])
def test_a_change_that_goes_wrong_is_told_from_the_program_which_goes_on(place: Place, names: tuple[str, ...]) -> None:
    wrong = {name: WRONG[name] for name in names}
    done = place.run(*ONE, *variants(**{name: words for name, (words, _, _) in wrong.items()}), "train.py", memory_limit_bytes=700 << 20)
    assert done.code == 5, done.err
    for name, (_, reason, said) in wrong.items():
        one = place.outcome(name)
        assert (one.verdict, one.reason) == ("failed", reason), one
        assert said in "\n".join(one.notes)
        assert "the program fails without any change" not in one.notes
    assert place.data.baseline is not None
    place.check_clean()


@pytest.mark.long
def test_children_that_hide_and_a_script_that_catches_all_are_ended_in_time(place: Place) -> None:
    words = (*ONE, *SAME, "train.py", "--do", "children_and_chdir", "--catch")
    begun = time.monotonic()
    done = place.run(*words)
    assert done.code == 0, done.err
    one = place.outcome("same")
    assert (one.pairs, one.verdict in ("failed", "not_applied")) == (1, False), one
    assert time.monotonic() - begun < 120
    place.check_clean()


# -- the program itself ---------------------------------------------------------------------------------------------------------

SPAWNED = """
import torch
data = torch.utils.data.DataLoader(torch.ones(800, 4), 8, num_workers=1, multiprocessing_context="spawn")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for x in data:
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("words", "reason", "said"),
    [
        ("--do fail --at -1", "crashed", "RuntimeError: planted failure"),
        ("--do memory", "out of memory", "can't allocate memory"),
        ("--steps 5", "over", "it must train for longer"),
        pytest.param("--steps 0", "no steps", "no training was seen", marks=pytest.mark.long),
        ("--no-updates --steps 300", "no steps", "no steps were found (300 backward passes, 0 optimizer steps)"),
        ("--do lock --at -1", "hang", "gave no sign of life for 5 s"),
        pytest.param("--do stdin --at -1", "crashed", "EOFError", marks=pytest.mark.long),
        pytest.param("spawned", "crashed", "An attempt has been made to start a new process", marks=pytest.mark.long),
    ],
)
def test_a_program_that_does_not_train_is_exit_code_5_and_says_why(place: Place, words: str, reason: str, said: str) -> None:
    if words == "spawned":
        (place.folder / "spawned.py").write_text(SPAWNED)
        place.take(place.folder / "spawned.py")
        words = ""
    limits = {"start_limit_s": 5.0} if "lock" in words else {}
    done = place.run(*ONE, *SAME, "train.py", "--pause-ms", "0", *words.split(), **limits)
    assert done.code == 5, (done.out, done.err)
    assert said in " ".join(done.out.split()), done.out
    assert "Traceback" not in done.err
    assert place.data.baseline is None
    place.check_clean()


# -- what it writes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_overlay_keeps_whatever_a_script_writes_from_the_project(place: Place) -> None:
    place.take(AWKWARD / "saving.py")
    done = place.run(*ONE, *SAME, "--sandbox", "overlay", "train.py", "--files")
    if done.code == 2 and "no overlay" in done.err:
        pytest.skip(done.err.strip())
    assert done.code == 0, done.err
    assert place.data.baseline is not None
    told = " ".join(place.data.baseline.side_effects)
    assert all(name in told for name in ("torch.save (", "writes runs.db", "writes log.csv", "writes model.best")), told
    place.check_clean()


def test_held_back_saves_leave_every_file_as_it_was(place: Place) -> None:
    place.take(AWKWARD / "saving.py")
    done = place.run(*ONE, *SAME, "--sandbox", "block", "train.py")
    assert done.code == 0, done.err
    assert place.data.baseline is not None
    saved = place.data.baseline.side_effects
    assert [text.partition(" (")[0] for text in saved] == ["safetensors.torch.serialize_file", "torch.save"]
    assert all("held back" in text for text in saved)
    place.check_clean()


@pytest.mark.long
@pytest.mark.parametrize(
    ("library", "script", "saves", "steps"),
    [
        ("transformers", "huggingface.py", "Trainer._save_checkpoint", 40),
        ("lightning", "lightning_fit.py", "Trainer.save_checkpoint", 170),
    ],
)
def test_a_trainer_that_saves_leaves_every_file_as_it_was(place: Place, library: str, script: str, saves: str, steps: int) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    place.take(TARGETS / script)
    done = place.run(*ONE, "--fix", "cuda-graphs", "--sandbox", "block", "train.py", block_steps=steps, blocks=2)
    assert place.data.baseline is not None, (done.out, done.err)
    told = place.data.baseline.side_effects
    assert any(saves in text and "held back" in text for text in told), told
    assert files(tree(place.project)) == files(place.before)  # folders without anything in them are what it may leave
    place.before = tree(place.project)
    place.check_clean()


def files(found: dict[str, tuple[int, int, str]]) -> dict[str, tuple[int, int, str]]:
    return {name: state for name, state in found.items() if stat.S_ISREG(state[0])}


# -- ranks ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.long  # test_safety.py has an arm whose rank is killed
def test_a_rank_that_dies_or_hangs_in_a_block_ends_the_arm_with_all_its_ranks(place: Place) -> None:
    wrong = variants(killed="--do kill --at 60 --rank 1", hung="--do lock --at 60 --rank 1")
    done = place.run(*ONE, *wrong, *TORCHRUN)
    assert done.code == 5, done.err
    killed, hung = place.outcome("killed"), place.outcome("hung")
    assert (killed.verdict, killed.reason) == ("failed", "crash"), killed
    assert (hung.verdict, hung.reason) == ("failed", "hang"), hung
    assert "in lock" in "\n".join(hung.notes)
    place.check_clean()


# -- full disks -----------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_bundle_on_a_full_disk_shows_what_was_measured_and_goes_on_later(place: Place, small_disk: Path) -> None:
    place.bundle = small_disk / "bundle"
    place.bundle.mkdir()
    (place.bundle / "experiments").mkdir()
    filler = fill(small_disk, 4096)  # for the plan, the probe, and a pair or two
    words = ("--pairs", "3", "--no-parity", *SAME)
    done = place.run(*words, "train.py")
    assert done.code == 2, (done.out, done.err)
    last = done.err.strip().splitlines()[-1]
    assert "No space left on device" in last
    assert f"gpudiag ab --resume {place.bundle}" in last
    assert "variant same" in done.out
    kept = place.pairs()
    assert 0 < kept < 3
    filler.unlink()
    again = over(place.start("--resume", str(place.bundle)))
    assert again.code == 0, again.err
    assert (place.pairs(), place.outcome("same").pairs) == (3, 3)
    place.check_clean()


@pytest.mark.long
def test_a_full_temporary_folder_is_a_failure_of_the_arm(place: Place, small_disk: Path) -> None:
    place.temporary.rmdir()
    place.temporary = small_disk
    filler = fill(small_disk, 3 * 4096)
    done = place.run(*ONE, *SAME, "train.py")
    assert done.code == 5, (done.out, done.err)
    assert "No space left on device" in done.out
    filler.unlink()
    place.check_clean()


@pytest.mark.long
def test_a_script_on_a_full_disk_has_crashed(place: Place, small_disk: Path) -> None:
    done = place.run(*ONE, *variants(full="--do fill --at 60"), "train.py", env={"FULL": str(small_disk)})
    assert done.code == 5, done.err
    one = place.outcome("full")
    assert (one.verdict, one.reason) == ("failed", "crash")
    assert "OSError: [Errno 28] No space left on device" in one.notes[0]
    place.check_clean()


# -- stopped from outside -------------------------------------------------------------------------------------------------------


def stopped(place: Place, process: subprocess.Popen[str], number: int) -> str:
    """Send the signal; return what the command printed, once it has ended as it should."""
    process.send_signal(number)
    done = over(process)
    assert done.code == 128 + number, (done.out, done.err)
    assert "Traceback" not in done.err
    assert f"gpudiag ab --resume {place.bundle}` goes on" in done.err.splitlines()[-1]
    place.check_clean()
    return done.out


@pytest.mark.long
def test_each_signal_ends_it_in_order_and_nothing_is_measured_twice(place: Place) -> None:
    process = place.start("-o", str(place.bundle), "--pairs", "2", *SAME, "train.py")
    assert until(lambda: bool(place.arms()))
    assert "Nothing was measured" in stopped(place, process, signal.SIGINT)
    process = place.start("--resume", str(place.bundle))
    assert until(lambda: place.pairs() == 1)
    assert "broken off after 1 pair" in stopped(place, process, signal.SIGTERM)
    assert place.outcome("same").pairs == 1
    first = place.rows()
    process = place.start("--resume", str(place.bundle))
    assert until(lambda: any(isinstance(row, ComparisonRow) for row in place.rows()) and bool(place.arms()))
    assert "variant same" in stopped(place, process, signal.SIGHUP)
    done = over(place.start("--resume", str(place.bundle)))
    assert done.code == 0, done.err
    rows = place.rows()
    assert rows[: len(first)] == first
    assert [sum(isinstance(row, kind) for row in rows) for kind in (BaselineRow, PairRow, ComparisonRow, ParityRow)] == [1, 2, 1, 1]
    one = place.outcome("same")
    assert one.pairs == 2
    assert one.parity is not None
    assert one.parity.verdict == "same"
    place.check_clean()


def killed(place: Place, process: subprocess.Popen[str], *, after_a_pair: bool, wait_s: float) -> bytes:
    """Kill the command after some time, or some time after its first pair; return its rows once nothing of it is left."""
    if after_a_pair:
        until(lambda: place.pairs() > 0 or process.poll() is not None)
    time.sleep(wait_s)
    process.kill()
    process.communicate()
    place.check_clean()
    files = sorted((place.bundle / "experiments").glob("*.jsonl"))
    return files[-1].read_bytes() if files else b""


@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=pytest.mark.long)])
def test_it_goes_on_after_being_killed_at_any_moment(place: Place, kills: int) -> None:
    seed = int(os.environ.get("GPUDIAG_SEED", time.time_ns() % 10_000))
    chance = random.Random(seed)
    begin = ("-o", str(place.bundle), "--pairs", "2", "--no-parity", *SAME, "train.py")
    whole = b""
    for kill in range(kills):
        process = place.start(*(begin if not place.rows() else ("--resume", str(place.bundle))))
        now = killed(place, process, after_a_pair=kill == 1, wait_s=chance.uniform(0, 1) if kill == 1 else chance.uniform(0.5, 8))
        assert now.startswith(whole), seed
        whole = now[: now.rfind(b"\n") + 1]
    done = over(place.start("--resume", str(place.bundle)))
    complete = done.code == 2 and "all experiments in it are complete" in done.err  # it was killed when the result stood
    assert done.code == 0 or complete, (seed, done.err)
    assert (place.pairs(), place.outcome("same").pairs, place.data.complete) == (2, 2, True), seed
    assert sum(isinstance(row, BaselineRow) for row in place.rows()) == 1, seed
    place.check_clean()


def test_a_reader_that_has_gone_costs_no_file(place: Place) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    target = place.folder / "result.json"
    words = place.command("-o", str(place.bundle), *ONE, *SAME, "--json", str(target), "train.py", "--steps", "5")
    done = subprocess.run(words, cwd=place.project, env=place.environment(), stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert done.returncode == 141  # 128 + SIGPIPE
    assert b"Traceback" not in done.stderr
    assert target.exists()
    assert (place.bundle / "experiments.html").exists()
    place.check_clean()
