"""Warnings: the first error aloud, all of them in the manifest, and at the line of the program."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from gpudiag.capture.recording import Recording
from gpudiag.capture.session import Session


def test_only_the_first_error_is_said_aloud_and_what_informs_always(tmp_path: Path) -> None:
    recording = Recording(tmp_path, 0, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recording.note("moved", None)
        recording.note("a was switched off", OSError("/home/alice"))
        recording.note("b was switched off", ValueError("follows from it"))
        recording.note("b was switched off", ValueError("follows from it"))
        recording.note("another note", None)
    assert [str(item.message) for item in caught] == [
        "gpudiag: moved", "gpudiag: a was switched off (OSError: /home/alice)", "gpudiag: another note",
    ]  # fmt: skip
    assert recording.warnings == ["moved", "a was switched off: OSError", "b was switched off: ValueError", "another note"]


def test_a_warning_points_at_the_line_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Session(tmp_path / "file" / "run"):
            pass
    assert [item.filename for item in caught] == [__file__]


class _Mute(Exception):  # noqa: N818 - a name as programs have them
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [OSError("full"), _Mute()])
@pytest.mark.parametrize("failure", [ValueError("I/O operation on closed file"), _Mute()])
def test_a_warning_that_cannot_be_said_reaches_the_manifest_and_not_the_training(
    tmp_path: Path, error: Exception, failure: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    recording = Recording(tmp_path, 0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = fail
        recording.note("a was switched off", error)
    assert recording.warnings == [f"a was switched off: {type(error).__name__}"]
