"""The commit of a folder, from real repositories; git is asked in a way that changes nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from gpudiag.capture.environment import git as module
from gpudiag.capture.environment.git import code, script_folder

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "secret-client" / "src"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text("print(1)\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=folder.parent, check=True)
    return folder


def head(folder: Path) -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@needs_git
def test_commit_and_dirty(repository: Path) -> None:
    assert code(repository) == module.Code(head(repository), dirty=False)
    (repository / "notes.txt").write_text("not tracked: not part of the program's commit")
    assert code(repository) == module.Code(head(repository), dirty=False)
    (repository / "train.py").write_text("print(2)\n")
    assert code(repository) == module.Code(head(repository), dirty=True)


@needs_git
def test_a_touched_file_with_the_same_content_is_clean_and_the_index_is_not_written(repository: Path) -> None:
    time.sleep(0.01)
    (repository / "train.py").touch()
    index = repository.parent / ".git" / "index"
    before = index.read_bytes(), index.stat().st_mtime_ns
    found = code(repository)
    assert found is not None
    assert found.dirty is False
    assert (index.read_bytes(), index.stat().st_mtime_ns) == before


@needs_git
def test_a_repository_without_a_commit_and_a_folder_without_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert code(tmp_path) is None
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert code(tmp_path) is None
    assert code(tmp_path / "absent") is None


@needs_git
def test_variables_of_a_hook_do_not_name_another_repository(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere.git"))
    found = code(repository)
    assert found is not None


@needs_git
def test_programs_that_the_repository_names_are_not_started(repository: Path, tmp_path: Path) -> None:
    spy = tmp_path / "spy"
    spy.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    spy.chmod(0o755)
    subprocess.run(["git", "config", "core.fsmonitor", str(spy)], cwd=repository, check=True)
    assert code(repository) is not None
    assert not (tmp_path / "started").exists()


def fake_git(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "git").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.mark.parametrize("script", ["exit 1", "echo hf_PLANTEDPLANTED", "echo /home/someone", "printf '\\377\\376'"])
def test_answers_that_are_no_commit_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    fake_git(tmp_path / "bin", monkeypatch, script)
    assert code(tmp_path) is None


def test_a_git_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.3)
    fake_git(tmp_path / "bin", monkeypatch, 'case "$*" in *rev-parse*) echo ' + "a" * 40 + ";; *) exec sleep 30;; esac")
    begun = time.monotonic()
    assert code(tmp_path) == module.Code("a" * 40, dirty=None)
    assert time.monotonic() - begun < 15


def test_no_git_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code(tmp_path) is None


def test_the_folder_is_that_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert script_folder() == tmp_path
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    assert script_folder() == Path.cwd()
