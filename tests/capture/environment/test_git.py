"""The commit of a folder, from real repositories; git is asked in a way that changes nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from gpudiag.capture.environment import inventory as module
from gpudiag.capture.environment.inventory import find_script, read_code

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
    assert read_code(repository) == module.Code(head(repository), dirty=False)
    (repository / "notes.txt").write_text("not tracked: not part of the program's commit")
    assert read_code(repository) == module.Code(head(repository), dirty=False)
    (repository / "train.py").write_text("print(2)\n")
    assert read_code(repository) == module.Code(head(repository), dirty=True)


@needs_git
def test_a_touched_file_with_the_same_content_is_clean_and_the_index_is_not_written(repository: Path) -> None:
    time.sleep(0.01)
    (repository / "train.py").touch()
    index = repository.parent / ".git" / "index"
    before = index.read_bytes(), index.stat().st_mtime_ns
    found = read_code(repository)
    assert found is not None
    assert found.dirty is False
    assert (index.read_bytes(), index.stat().st_mtime_ns) == before


@needs_git
def test_a_repository_without_a_commit_and_a_folder_without_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert read_code(tmp_path) is None
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert read_code(tmp_path) is None
    assert read_code(tmp_path / "absent") is None


@needs_git
def test_variables_of_a_hook_do_not_name_another_repository(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere.git"))
    found = read_code(repository)
    assert found is not None


@needs_git
def test_programs_that_the_repository_names_are_not_started(repository: Path, tmp_path: Path) -> None:
    spy = tmp_path / "spy"
    spy.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    spy.chmod(0o755)
    subprocess.run(["git", "config", "core.fsmonitor", str(spy)], cwd=repository, check=True)
    assert read_code(repository) is not None
    assert not (tmp_path / "started").exists()


def fake_git(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "git").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.mark.parametrize("script", ["exit 1", "echo hf_PLANTEDPLANTED", "echo /home/someone", "printf '\\377\\376'"])
def test_answers_that_are_no_commit_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    fake_git(tmp_path / "bin", monkeypatch, script)
    assert read_code(tmp_path) is None


def test_a_git_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.3)
    fake_git(tmp_path / "bin", monkeypatch, 'case "$*" in *rev-parse*) echo ' + "a" * 40 + ";; *) exec sleep 30;; esac")
    begun = time.monotonic()
    assert read_code(tmp_path) == module.Code("a" * 40, dirty=None)
    assert time.monotonic() - begun < 15


def test_no_git_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_code(tmp_path) is None


def test_the_script_is_that_of_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert find_script() == tmp_path / "train.py"
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    assert find_script() is None


@needs_git
def test_whether_the_script_is_in_the_repository(repository: Path, tmp_path: Path) -> None:
    (repository / "new.py").write_text("print(1)")
    (tmp_path / "outside.py").write_text("print(1)")
    for file, tracked in ((repository / "train.py", True), (repository / "new.py", False), (tmp_path / "outside.py", False), (None, None)):
        found = read_code(repository, file)
        assert found is not None
        assert (found.dirty, found.script_tracked) == (False, tracked)


def with_a_filter(repository: Path, tmp_path: Path, kind: str) -> Path:
    """Return a file that is made when the filter of the repository for .bin files runs."""
    spy, ran = tmp_path / "spy", tmp_path / "ran"
    spy.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    spy.chmod(0o755)
    (repository / ".gitattributes").write_text("*.bin filter=own\n")
    (repository / "data.bin").write_text("1")
    words = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "add", "."], cwd=repository, check=True)
    subprocess.run(["git", *words, "commit", "-qm", "two"], cwd=repository, check=True)
    for key, value in ((kind, str(spy)), ("required", "true")):
        subprocess.run(["git", "config", f"filter.own.{key}", value], cwd=repository, check=True)
    return ran


@needs_git
@pytest.mark.parametrize("kind", ["clean", "process"])
def test_no_filter_runs_and_what_only_it_could_tell_is_unknown(repository: Path, tmp_path: Path, kind: str) -> None:
    ran = with_a_filter(repository, tmp_path, kind)
    time.sleep(0.01)
    (repository / "data.bin").touch()
    assert read_code(repository) == module.Code(head(repository), dirty=False)  # as it was committed: the filter changes nothing
    (repository / "data.bin").write_text("22")
    assert read_code(repository) == module.Code(head(repository), dirty=None)
    (repository / "train.py").write_text("print(2)\n")
    assert read_code(repository) == module.Code(head(repository), dirty=True)
    assert not ran.exists()


@needs_git
def test_what_was_added_to_the_index_under_a_filter_is_a_change(repository: Path, tmp_path: Path) -> None:
    ran = with_a_filter(repository, tmp_path, "clean")
    (repository / "data.bin").write_text("22")
    subprocess.run(["git", "add", "data.bin"], cwd=repository, check=True)
    ran.unlink()
    assert read_code(repository) == module.Code(head(repository), dirty=True)
    assert not ran.exists()


@needs_git
def test_filters_that_cannot_be_switched_off_leave_the_changes_unknown(repository: Path) -> None:
    subprocess.run(["git", "config", "filter.a=b.clean", "false"], cwd=repository, check=True)
    assert read_code(repository) == module.Code(head(repository), dirty=None)


def test_a_long_answer_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe holds."""
    script = 'case "$*" in *rev-parse*) echo ' + "a" * 40 + ";; *status*) head -c 300000 /dev/zero;; *) exit 1;; esac"
    fake_git(tmp_path / "bin", monkeypatch, script)
    assert read_code(tmp_path) == module.Code("a" * 40, dirty=True)
