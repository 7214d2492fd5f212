"""Files appear whole or not at all; traces lose what does not belong in them."""

from __future__ import annotations

import errno
import gzip
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpudiag.bundle import writer
from gpudiag.bundle.writer import compress_trace, write_atomic
from gpudiag.capture.recording import BackgroundWriter


def test_a_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("offset", [-20, -3, 0, 5, writer.CHUNK_BYTES - 40])
def test_replacements_also_across_chunks(tmp_path: Path, offset: int) -> None:
    secret, host = b"/home/alice/run/.trace.json", b'"host_name": "alices-box"'
    filler = b"x" * (writer.CHUNK_BYTES + offset)
    source, target = tmp_path / "t.json", tmp_path / "t.json.gz"
    source.write_bytes(filler + secret + filler + host + filler + secret)
    written = compress_trace(source, target, [(secret, b"t")])
    assert gzip.decompress(target.read_bytes()) == filler + b"t" + filler + b'"host_name": ""' + filler + b"t"
    assert written == target.stat().st_size
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json.gz"]


def test_a_full_disk_leaves_no_scratch_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    source = tmp_path / "t.json"
    source.write_bytes(b"x" * 1000)
    monkeypatch.setattr(writer.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        compress_trace(source, tmp_path / "t.json.gz")
    assert list(tmp_path.iterdir()) == []


def test_background_runs_in_order_and_counts_bytes() -> None:
    background, order = BackgroundWriter(), []
    for number in range(20):
        background.submit(lambda n=number: order.append(n) or 10)
    assert background.join(10)
    assert order == list(range(20))
    assert background.written == 200


def test_background_stops_at_the_first_failure() -> None:
    background, ran = BackgroundWriter(), []

    def fail() -> int:
        raise OSError("disk full")

    background.submit(fail)
    background.submit(lambda: ran.append(1) or 0)
    assert background.join(10)
    assert isinstance(background.error, OSError)
    assert ran == []


def test_a_ctrl_c_while_the_thread_starts_comes_when_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads at work on the same files wrote half a bundle."""
    background, start, going_on = BackgroundWriter(), threading.Thread.start, threading.Event()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        background.submit(lambda: going_on.wait(10) and 1)
    assert background.busy
    assert not background.join(0.05)
    going_on.set()
    assert background.join(10)
    assert background.written == 1


def test_what_kineto_leaves_on_a_full_disk_is_removed_and_its_space_given_back(tmp_path: Path) -> None:
    plain, scratch = tmp_path / "t.json", tmp_path / "t.json.tmp"
    scratch.write_bytes(b"x" * 100_000)
    with open(scratch, "rb") as held:  # Kineto keeps it open
        writer.discard_trace(plain)
        assert os.fstat(held.fileno()).st_size == 0
    assert list(tmp_path.iterdir()) == []


def test_no_trace_is_written_where_little_space_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, plain = writer.RESERVE_BYTES, tmp_path / "t.json"
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: SimpleNamespace(free=left))
    assert writer.export_trace(lambda path: path.write_text("{}") and None, plain, writer.RESERVE_BYTES // 4) == 2
    with pytest.raises(OSError, match="only 128 MB are left") as failure:
        writer.export_trace(lambda _: pytest.fail("it was asked to write"), plain, writer.RESERVE_BYTES)
    assert failure.value.errno == errno.ENOSPC


def test_a_trace_that_the_profiler_did_not_write_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tmp_path / "t.json"
    with pytest.raises(OSError, match="the profiler wrote no trace") as failure:
        writer.export_trace(lambda _: None, plain, 0)
    assert failure.value.errno is None
    free = [writer.RESERVE_BYTES, 0]  # before, and after
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: SimpleNamespace(free=free.pop(0)))
    with pytest.raises(OSError, match="the disk is full") as failure:
        writer.export_trace(lambda path: path.with_name("t.json.tmp").write_text("half") and None, plain, 0)
    assert failure.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []
