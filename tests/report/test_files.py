"""Files of reports: whole or not at all, with the permissions that a user expects."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpudiag.errors import InputError
from gpudiag.report import files


@pytest.fixture
def mask() -> Iterator[None]:
    """Set a file mode mask that is not the usual one."""
    before = os.umask(0o027)
    yield
    os.umask(before)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_writing_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "r.json"
    target.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match="No space left on device"):
        files.write_file(target, b"new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_killed_process_left_is_removed_once_it_is_old_and_nothing_else(tmp_path: Path) -> None:
    dead, alive = (tmp_path / f".r.json.{letter * 16}" for letter in "ab")
    others = [tmp_path / name for name in (".r.json.bak", f".r.html.{'a' * 16}", f".r.json.{'a' * 17}", f"r.json.{'a' * 16}")]
    for path in (dead, alive, *others):
        path.touch()
        os.utime(path, (0, 0))
    os.utime(alive)
    files.write_file(tmp_path / "r.json", b"new")
    assert sorted(tmp_path.iterdir()) == sorted((tmp_path / "r.json", alive, *others))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_file_stays_where_it_is(tmp_path: Path) -> None:
    """A rename onto a link to a device would put a file in the place of the device."""
    pipe, link = tmp_path / "pipe", tmp_path / "r.md"
    os.mkfifo(pipe)
    for leads_to in ("pipe", "missing/r.md", "r.md", "."):
        link.symlink_to(leads_to)
        with pytest.raises(InputError, match="cannot write"):
            files.write_file(link, b"x")
        link.unlink()
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_new_file_has_the_usual_permissions(tmp_path: Path, mask: None) -> None:
    files.write_file(tmp_path / "r.md", b"x")
    assert _mode(tmp_path / "r.md") == 0o640


def test_a_file_that_exists_keeps_its_permissions(tmp_path: Path, mask: None) -> None:
    target = tmp_path / "r.md"
    target.write_text("old")
    target.chmod(0o664)
    files.write_file(target, b"new")
    assert (target.read_bytes(), _mode(target)) == (b"new", 0o664)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    real, link = tmp_path / "elsewhere" / "r.md", tmp_path / "r.md"
    real.write_text("old")
    link.symlink_to(real)
    files.write_file(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert len(list(real.parent.iterdir())) == 1


def test_a_name_of_the_greatest_length_can_be_written(tmp_path: Path) -> None:
    target = tmp_path / f"{'r' * 250}.md"
    files.write_file(target, b"x")
    assert target.read_bytes() == b"x"


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write .*nowhere/r\.md: No such file or directory"):
        files.write_file(tmp_path / "nowhere" / "r.md", b"x")
