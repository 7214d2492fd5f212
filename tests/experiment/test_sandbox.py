"""A sandbox that cannot work says why, and what is kept instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpudiag.errors import InputError
from gpudiag.experiment import isolation
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.isolation import HELD_BACK, wrap_in_sandbox

COMMAND = ("python", "train.py")


def wrapped(mode: str, folder: Path, scratch: Path, command: tuple[str, ...] = COMMAND) -> tuple[tuple[str, ...], str]:
    arm, note = wrap_in_sandbox(Arm(name="a", command=command, cwd=folder), Design(sandbox=mode), scratch)  # type: ignore[arg-type]
    return arm.command, note


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    folder, scratch = tmp_path / "project", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    return folder, scratch


def test_off_and_block_change_no_command(places: tuple[Path, Path]) -> None:
    assert wrapped("off", *places) == (COMMAND, "")
    assert wrapped("block", *places) == (COMMAND, HELD_BACK)


def test_a_mode_that_is_not_known_is_named_with_the_nearest(places: tuple[Path, Path]) -> None:
    with pytest.raises(InputError, match="no sandbox is named 'overlays'; did you mean 'overlay'"):
        wrapped("overlays", *places)


def test_where_no_way_works_auto_holds_saves_back_and_overlay_refuses(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_find_fault", lambda *_: "unshare: Operation not permitted")
    command, note = wrapped("auto", *places)
    assert command == COMMAND
    assert note.startswith(HELD_BACK)
    assert "Operation not permitted" in note
    with pytest.raises(InputError, match=r"no overlay of .*: unshare: Operation not permitted"):
        wrapped("overlay", *places)


def test_an_overlay_is_refused_where_it_would_hide_something(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, scratch = places
    assert isolation._explain_unsuitable(folder, scratch) is None
    assert "temporary files" in (isolation._explain_unsuitable(tmp_path, scratch) or "")
    (odd := tmp_path / "a,b").mkdir()
    assert "characters" in (isolation._explain_unsuitable(odd, scratch) or "")
    mounts = "".join(f"36 35 98:0 / {place} rw\n" for place in ("/", folder, folder / "data"))
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: mounts)
    assert str(folder / "data") in (isolation._explain_unsuitable(folder, scratch) or "")


def test_a_working_overlay_shows_the_folder_and_keeps_what_is_written(places: tuple[Path, Path]) -> None:
    import subprocess

    folder, scratch = places
    (folder / "data.txt").write_text("mine\n", encoding="utf-8")
    code = ("sh", "-c", "cat data.txt; echo other > data.txt; echo new > new.txt; cat data.txt")
    command, note = wrapped("auto", folder, scratch, code)
    if command == code:
        pytest.skip(note)
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["mine", "other"]
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == {"data.txt": "mine\n"}
    assert set(isolation.list_layer_files(scratch)) <= {"data.txt", "new.txt"}  # nothing where the layer is in memory
