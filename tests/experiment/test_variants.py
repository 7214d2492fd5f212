"""Variants: what is written after --variant, and the command, environment and folder that it starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpudiag.errors import InputError
from gpudiag.experiment.design import Arm
from gpudiag.experiment.variant import Change, Variant, apply_variant, describe_variant, find_script, parse_variant, parse_variants


def arm(*command: str) -> Arm:
    return Arm(name="as it is", command=command, environ={"KEPT": "1"})


@pytest.mark.parametrize(
    ("text", "variant"),
    [
        ("big=args:--batch 64", Variant(label="big", changes=(Change("args", "--batch 64"),))),
        ("same:rounding=args:", Variant(label="same", changes=(Change("args", ""),), parity="rounding")),
        ("env=env:OMP_NUM_THREADS=4=5", Variant(label="env", changes=(Change("env", "OMP_NUM_THREADS=4=5"),))),
        ("a:exact=script:other.py", Variant(label="a", changes=(Change("script", "other.py"),), parity="exact")),
        ("old=git:HEAD~1:x", Variant(label="old", changes=(Change("git", "HEAD~1:x"),))),
    ],
)
def test_a_variant_is_a_name_a_kind_and_a_value(text: str, variant: Variant) -> None:
    assert parse_variant(text) == variant


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no variant"),
        ("big", "no variant"),
        ("=args:--x", "no variant"),
        ("big=speed:9", "no variant"),
        ("big=env:", "no variant"),
        ("big=env:=1", "no variable"),
        ("big=script: ", "no variant"),
        ("big:nearly=args:--x", "no parity class 'nearly'"),
        ("big=args:--name 'open", "cannot be read"),
    ],
)
def test_what_is_no_variant_is_said_so(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as found:
        parse_variant(text)
    assert found.value.hint


def test_changes_of_one_name_are_one_variant() -> None:
    (one, other) = parse_variants(["a=args:--x 1", "b=env:K=1", "a:rounding=env:K=2"])
    assert one == Variant(label="a", changes=(Change("args", "--x 1"), Change("env", "K=2")), parity="rounding")
    assert other.name == "b"


def test_arguments_come_after_the_program_s_own_and_variables_on_top(tmp_path: Path) -> None:
    made = apply_variant(parse_variants(["a=args:--x 'two words'", "a=env:K=V=W"])[0], arm("python", "train.py", "--x", "1"), tmp_path)
    assert made.command == ("python", "train.py", "--x", "1", "--x", "two words")
    assert dict(made.environ) == {"KEPT": "1", "K": "V=W"}
    assert made.name == "a"


def test_the_script_is_found_behind_python_and_behind_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "odd").touch()
    assert find_script(["/usr/bin/python3.11", "odd", "train.py"]) == 1
    assert find_script(["/usr/bin/torchrun", "--nproc-per-node", "2", "train.py", "other.py"]) == 3
    assert find_script(["python", "-m", "train", "train.py"]) is None
    assert find_script(["/bin/echo"]) is None


def test_another_script_takes_the_place_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "faster.py"):
        (tmp_path / name).write_text(f"print('{name}')\n")
    made = apply_variant(parse_variant("f=script:faster.py"), arm("torchrun", "--nnodes", "1", "train.py", "--lr", "1"), tmp_path)
    assert made.command == ("torchrun", "--nnodes", "1", str(tmp_path / "faster.py"), "--lr", "1")
    difference = describe_variant(parse_variant("f=script:faster.py"), ["torchrun", "--nnodes", "1", "train.py"])
    assert "-print('train.py')" in difference.splitlines()
    assert "+print('faster.py')" in difference.splitlines()
    with pytest.raises(InputError, match=r"nowhere\.py: no such file"):
        apply_variant(parse_variant("f=script:nowhere.py"), arm("python", "train.py"), tmp_path)
    with pytest.raises(InputError, match="no script that it could replace"):
        apply_variant(parse_variant("f=script:faster.py"), arm("python", "-m", "train"), tmp_path)


# -- revisions -----------------------------------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    top = tmp_path / "project"
    (top / "src").mkdir(parents=True)
    git(top, "init")
    for version in ("one", "two"):
        (top / "src" / "train.py").write_text(f"print({version!r})\n")
        (top / "src" / "helper.py").write_text(f"word = {version!r}\n")
        git(top, "add", "-A")
        git(top, "commit", "-m", version)
    (top / "src" / "train.py").write_text("print('not committed')\n")
    return top


def printed(made: Arm) -> str:
    return subprocess.run(made.command, cwd=made.cwd, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("script", ["src/train.py", "train.py", "absolute"])
def test_a_revision_is_laid_out_elsewhere_and_the_repository_is_left_as_it_was(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.chdir(repository / "src" if script == "train.py" else repository)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = git(repository, "status", "--porcelain"), sorted(os.listdir(repository / ".git")), git(repository, "stash", "list")
    index = (repository / ".git" / "index").read_bytes()
    name = str(repository / "src" / "train.py") if script == "absolute" else script
    made = apply_variant(parse_variant("old=git:HEAD~1"), arm(sys.executable, name), scratch)
    assert printed(made) == "one"
    assert made.cwd is not None
    assert scratch in made.cwd.parents
    assert (git(repository, "status", "--porcelain"), sorted(os.listdir(repository / ".git")), git(repository, "stash", "list")) == before
    assert (repository / ".git" / "index").read_bytes() == index
    assert (repository / "src" / "train.py").read_text() == "print('not committed')\n"


def test_two_revisions_do_not_meet(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    base = arm(sys.executable, "src/train.py")
    found = [printed(apply_variant(parse_variant(f"r=git:{revision}"), base, scratch)) for revision in ("HEAD~1", "HEAD")]
    assert found == ["one", "two"]


def test_a_revision_that_is_none_is_said_so(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    for revision in ("no-such-branch", "--all", "HEAD~9"):
        with pytest.raises(InputError, match="no such revision"):
            apply_variant(parse_variant(f"r=git:{revision}"), arm(sys.executable, "src/train.py"), tmp_path)
    (repository / "new.py").touch()
    with pytest.raises(InputError, match=r"new\.py is not in that revision"):
        apply_variant(parse_variant("r=git:HEAD"), arm(sys.executable, "new.py"), tmp_path)
    (tmp_path / "alone.py").touch()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(InputError, match="in no git repository"):
        apply_variant(parse_variant("r=git:HEAD"), arm(sys.executable, str(tmp_path / "alone.py")), tmp_path)
