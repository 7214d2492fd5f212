"""The command that a bundle holds: every word the program's own, and shown only where all of it can be seen."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpudiag.errors import InputError
from gpudiag.model.bundle import Manifest
from gpudiag.recordings.recorded_command import find_recorded_words, read_recorded_script


def recorded(*words: str) -> Manifest:
    return Manifest(command=words)


def test_a_script_a_module_and_a_program_are_taken_as_they_were_given() -> None:
    for words in (
        ("train.py", "--lr", "1e-3", "--", "-x"),
        ("-m", "pkg.train", "--output", "x"),
        ("torchrun", "--nproc-per-node", "2", "t.py"),
    ):
        assert find_recorded_words(recorded(*words)) == words
    assert find_recorded_words(Manifest()) == ()


@pytest.mark.parametrize(
    "words",
    [
        ("--output", "/etc", "train.py"),
        ("-o", "x"),
        ("",),
        ("-m",),
        ("-m", "--output"),
        ("-m", "pkg;rm"),
        ("-mpkg", "x"),
        ("train.py", "a\nb"),
        ("train.py", "a\x00b"),
        ("train.py", "x\u202egnp.exe"),
        ("train.py", "\x1b[2J"),
        ("train.py", "\ud800"),
        ("train.py", "x" * 9_000),
        ("train.py", *["x"] * 600),
    ],
)
def test_what_is_no_program_with_arguments_that_can_be_seen_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="not run from here"):
        find_recorded_words(recorded(*words))


def test_the_words_of_a_bundle_can_be_typed_into_a_shell(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(msgspec.json.encode(recorded("train.py", "--name", "two words")))
    assert read_recorded_script([str(tmp_path)]) == "train.py --name 'two words'"
    assert read_recorded_script([str(tmp_path), str(tmp_path)]) == ""  # several ranks, each a recording of its own


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"command": ["--output", "/etc"]}', b'{"command": null}', b'{"command": 1}'])
def test_what_tells_no_command_is_not_shown(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(text)
    assert read_recorded_script([str(tmp_path)]) == ""


@pytest.mark.parametrize("path", ["nowhere", "a\0b", "s3://bucket/run", ""])
def test_what_is_no_folder_tells_no_command(path: str) -> None:
    assert read_recorded_script([path]) == ""
