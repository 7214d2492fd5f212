"""`gpudiag ab --patch` and `gpudiag apply`: what is offered, what is refused, and that nothing else of the user's changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from abplace import Place
from fakeab import Machine

from gpudiag.experiment.trial import patched_script
from gpudiag.model.experiment import Comparison

pytest.importorskip("scipy", reason="scipy is not installed")
pytest.importorskip("libcst", reason="libcst is not installed")

FUSED, COPY = "fused-optimizer", "patched copy"

SCRIPT = """\
import torch
model = torch.nn.Linear(8, 1)  # small
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(1000):
    optimizer.zero_grad(set_to_none=False)
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
"""
FASTER = SCRIPT.replace("lr=1e-3)", "lr=1e-3, fused=True)")

Command = Callable[..., Any]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine({FUSED: 1.2, "fused-optimizer+zero-grad-none": 1.3, COPY: 1.2})
    made.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "A person")
        monkeypatch.setenv(f"{name}_EMAIL", "person@example.org")
    Path("train.py").write_text(SCRIPT)
    git("init", "-q")
    git("add", "train.py")
    git("commit", "-qm", "first")
    return made


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def prove(command: Command, *words: str) -> Any:
    done = command("ab", "--fix", FUSED, "-o", "b", *words, "train.py", "--lr", "1")
    assert done.code == ("--patch" in words and not Path("change.diff").exists()), done.err
    return done


def test_what_is_proved_is_offered_as_a_diff_once_the_copy_has_run(command: Command, machine: Machine) -> None:
    done = prove(command, "--patch", "change.diff")
    assert Path("train.py").read_text() == SCRIPT
    arm = machine.arms[COPY]
    assert arm.command[1] == patched_script.__file__
    assert arm.command[3:] == ("train.py", "--lr", "1")  # the same command, but that another text stands in the place of the script
    assert (COPY, "rounding") in machine.checked
    text = Path("change.diff").read_text()
    for said in ("1.2", "95 % CI", "process pairs", "the first 12 losses and gradients are those of the injected fix", "measured on cpu"):
        assert said in text, text
    assert "The patch makes fused-optimizer in train.py." in done.out
    git("apply", "change.diff")
    assert Path("train.py").read_text() == FASTER


def test_what_was_run_is_not_run_again(command: Command, machine: Machine) -> None:
    prove(command, "--patch", "change.diff")
    before = len(machine.compared)
    done = command("apply", "b/recipe.toml", "train.py")
    assert (done.code, done.out, len(machine.compared)) == (0, Path("change.diff").read_text(), before)
    Path("train.py").write_text(SCRIPT + "print(loss)\n")  # another file than the one that was run
    assert command("apply", "b/recipe.toml", "train.py").code == 0
    assert len(machine.compared) == before + 1


def test_a_commit_for_each_fix_on_a_branch_that_is_not_checked_out(command: Command, machine: Machine) -> None:
    done = command("ab", "--fix", FUSED, "--fix", "zero-grad-none", "--combine", "-o", "b", "train.py")
    assert done.code == 0, done.err
    recipe = Path("b/recipe.toml").read_text()
    assert recipe.count("[[fix]]") == 2, recipe
    machine.ratios[COPY] = 1.5
    head, branch = git("rev-parse", "HEAD"), git("branch", "--show-current")
    done = command("apply", "b/recipe.toml", "train.py", "--commit")
    assert done.code == 0, done.err
    name = next(line.strip() for line in git("branch", "--list", "gpudiag/*").splitlines())
    assert name in done.err
    assert (git("rev-parse", "HEAD"), git("branch", "--show-current"), git("status", "--porcelain", "-uno")) == (head, branch, "")
    assert Path("train.py").read_text() == SCRIPT
    assert len(git("rev-list", f"{head.strip()}..{name}").split()) == 2
    assert "fused=True" in git("show", f"{name}:train.py")
    assert "set_to_none=True" in git("show", f"{name}:train.py")
    assert "process pairs" in git("log", "-1", "--format=%B", name)
    assert command("apply", "b/recipe.toml", "train.py", "--commit").code == 2  # there is such a branch


def test_write_makes_the_change(command: Command, machine: Machine) -> None:
    prove(command)
    assert command("apply", "b/recipe.toml", "train.py", "--write").code == 0
    assert Path("train.py").read_text() == FASTER


def test_a_dirty_tree_is_refused(command: Command, machine: Machine) -> None:
    prove(command)
    Path("other.py").write_text("")
    git("add", "other.py")
    done = command("apply", "b/recipe.toml", "train.py", "--commit")
    assert done.code == 2
    assert "not committed" in done.err
    assert git("branch", "--list", "gpudiag/*") == ""


def test_a_copy_that_trains_otherwise_is_refused(command: Command, machine: Machine) -> None:
    machine.differs.add(COPY)
    done = prove(command, "--patch", "change.diff")
    assert "its first losses are not those of the injected fix" in " ".join(done.out.split())
    assert not Path("change.diff").exists()
    done = command("apply", "b/recipe.toml", "train.py", "--write")
    assert (done.code, done.out, Path("train.py").read_text()) == (1, "", SCRIPT)


@pytest.mark.parametrize(("ratio", "why"), [(1.0, "not proved faster"), (1.1, "keeps a part of the gain only")])
def test_a_copy_that_loses_the_gain_is_refused(command: Command, machine: Machine, ratio: float, why: str) -> None:
    machine.ratios[COPY] = ratio
    done = prove(command, "--patch", "change.diff")
    assert why in " ".join(done.out.split())
    assert not Path("change.diff").exists()


def test_a_copy_that_had_no_time_for_a_proof_says_how_many_pairs_it_lacks(command: Command, machine: Machine) -> None:
    machine.verdicts[COPY] = Comparison(verdict="faster", ratio=1.28, interval=(1.03, 1.95), over="blocks", pairs=3)
    said = " ".join(prove(command, "--patch", "change.diff").out.split())
    assert "not proved faster (x1.28 [1.03, 1.95] over the blocks of 3 process pairs, where 4 are needed: give it more time)" in said


def test_where_the_place_is_not_certain_the_line_is_named(command: Command, machine: Machine) -> None:
    unsure = SCRIPT.replace("lr=1e-3)", "**options)")
    Path("train.py").write_text(unsure)
    done = prove(command, "--patch", "change.diff")
    assert "train.py:3: it takes arguments from **options" in " ".join(done.out.split())
    assert COPY not in machine.arms
    done = command("apply", "b/recipe.toml", "train.py", "--write")
    assert (done.code, done.out, Path("train.py").read_text()) == (1, "", unsure)
    assert "train.py:3: it takes arguments from **options" in done.err


def test_what_was_not_run_says_so_and_is_not_written(command: Command, machine: Machine) -> None:
    prove(command)
    done = command("apply", "b/recipe.toml", "train.py", "--no-run")
    assert done.code == 0
    assert "was not run" in done.out
    assert command("apply", "b/recipe.toml", "train.py", "--no-run", "--write").code == 2
    assert Path("train.py").read_text() == SCRIPT


def test_nothing_proved_is_nothing_to_apply(command: Command, machine: Machine) -> None:
    machine.ratios[FUSED] = 1.0
    assert "no patch: no fix is proved" in prove(command, "--patch", "change.diff").err
    Path("recipe.toml").write_text("schema = 1\n")
    done = command("apply", "recipe.toml", "train.py")
    assert (done.code, done.err.count("\n")) == (2, 1)


def test_another_file_than_the_command_runs_is_refused(command: Command, machine: Machine) -> None:
    prove(command)
    shutil.copy("train.py", "copy.py")
    done = command("apply", "b/recipe.toml", "copy.py")
    assert done.code == 2
    assert "the command runs" in done.err


def test_a_patched_text_runs_under_the_name_of_its_script(tmp_path: Path) -> None:
    lines = [
        "import sys, os, inspect, beside",
        "def f(): return VALUE",
        "print(sys.argv, os.path.abspath(__file__), __name__, sys.path[0])",
    ]
    script, text = tmp_path / "train.py", tmp_path / "text"
    (tmp_path / "beside.py").write_text("")
    for path, value in ((script, "1"), (text, "2")):
        path.write_text("\n".join([*lines, "print(inspect.getsource(f), f(), sys.modules['__main__'].f is f)"]).replace("VALUE", value))

    def run(*words: str) -> str:
        return subprocess.run([sys.executable, *words, "a"], capture_output=True, text=True, check=True, cwd=tmp_path).stdout

    assert run(patched_script.__file__, str(text), "train.py") == run("train.py").replace("return 1", "return 2").replace(
        " 1 True", " 2 True"
    )


SLOW_ROWS = """\
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, row):
        time.sleep(0.02)
        return torch.full((8,), row % 7.0)

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for rows in DataLoader(Rows(), batch_size=4):  # one process
    loss = model(rows).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    shutil.rmtree(made.temporary, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_real_copy_keeps_losses_and_gain(place: Place) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    (place.project / "train.py").write_text(SLOW_ROWS)
    diff = place.folder / "change.diff"
    words = ("--fix", "loader-workers=2", "--pairs", "4", "--no-parity", "--patch", str(diff), "--shared-ok", "train.py")
    done = place.run(*words, blocks=2, warm_limit_s=30.0)
    assert done.code == 0, done.err
    assert diff.exists(), done.out + done.err
    assert "+for rows in DataLoader(Rows(), batch_size=4, num_workers=2):  # one process" in diff.read_text().splitlines(), done.out
    assert (place.project / "train.py").read_text() == SLOW_ROWS
