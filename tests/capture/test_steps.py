"""The count of written bytes, also where the program closes files that it does not know of."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpudiag.capture.steps import WRITTEN, ProcCounter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/io")


def test_written_bytes_grow_by_what_is_written(tmp_path: Path) -> None:
    written = ProcCounter(*WRITTEN)
    before = written.read()
    (tmp_path / "x").write_bytes(b"x" * 10_000)
    after = written.read()
    assert before is not None
    assert after is not None
    assert 10_000 <= after - before < 20_000
    written.close()
    assert written.read() is None


def test_a_file_closed_by_the_program_is_no_fault() -> None:
    written = ProcCounter(*WRITTEN)
    os.close(written._file)
    assert written.read() is None
    written.close()


def test_a_number_that_belongs_to_another_file_by_now_stays_open(tmp_path: Path) -> None:
    written = ProcCounter(*WRITTEN)
    number = written._file
    theirs = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT)
    os.dup2(theirs, number)
    assert written.read() is None
    written.close()
    assert os.write(number, b"still open") == 10
    os.close(number)
    os.close(theirs)
