"""Files of unknown origin: nothing is waited for, and nothing larger than expected is read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpudiag.files import open_file, read_file

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


def test_a_file_is_read_up_to_what_was_expected(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    assert read_file(str(path), 6) == b"12345"
    with pytest.raises(OSError, match="larger than 0 MiB") as raised:
        read_file(path, 4)
    assert raised.value.errno == errno.EFBIG
    (tmp_path / "link").symlink_to(path)
    with open_file(tmp_path / "link") as file:
        assert file.read(2) == b"12"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/null")):
        with pytest.raises(OSError, match="a pipe, socket or device, no file"):
            open_file(path)
    with pytest.raises(IsADirectoryError):
        open_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "missing")
    with pytest.raises(ValueError, match="null"):
        open_file("a\0b")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_refused_file_is_closed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="no file"):
            open_file(tmp_path / "pipe")
    assert len(os.listdir("/proc/self/fd")) == before
