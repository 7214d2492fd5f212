"""Bytes come out of files of every kind in bounded blocks; what cannot be read is one clear line."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from gpudiag.errors import InputError
from gpudiag.trace import decompression
from gpudiag.trace.decompression import zstd

TEXT = b"".join(b'{"ph": "X", "ts": %d},\n' % number for number in range(20_000))
NOISE = os.urandom(3_000_000)


@pytest.fixture(params=["isal", "zlib"])
def _inflate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both gunzip libraries behave the same."""
    if request.param == "zlib":
        monkeypatch.setattr(decompression, "inflate_library", zlib)
    else:
        isal_zlib = pytest.importorskip("isal.isal_zlib")
        monkeypatch.setattr(decompression, "inflate_library", isal_zlib)


def _file(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "trace.bin"
    path.write_bytes(content)
    return str(path)


def _all(path: str, block_bytes: int = 50_000) -> bytes:
    blocks = list(decompression.read_text_blocks(path, block_bytes))
    assert all(0 < len(block) <= 2 * block_bytes for block in blocks)
    return b"".join(blocks)


@pytest.mark.usefixtures("_inflate")
@pytest.mark.parametrize(
    "packed",
    [
        TEXT,
        gzip.compress(TEXT),
        gzip.compress(TEXT[:1000]) + gzip.compress(TEXT[1000:]),
        gzip.compress(TEXT) + b"\0" * 700,
        gzip.compress(TEXT) + b"garbage",
        b"".join(gzip.compress(TEXT[place : place + 997]) for place in range(0, len(TEXT), 997)),
        zstd.compress(TEXT),
        zstd.compress(TEXT[:5000]) + zstd.compress(TEXT[5000:]),
    ],
    ids=["plain", "gz", "two members", "padded", "trailing garbage", "many members", "zst", "two frames"],
)
def test_all_kinds_give_the_text_whatever_the_name(tmp_path: Path, packed: bytes) -> None:
    assert _all(_file(tmp_path, packed)) == TEXT


@pytest.mark.usefixtures("_inflate")
def test_incompressible_data_keeps_its_bounds(tmp_path: Path) -> None:
    assert _all(_file(tmp_path, gzip.compress(NOISE)), 100_000) == NOISE


@pytest.mark.usefixtures("_inflate")
def test_a_member_border_on_a_piece_border_is_no_end(tmp_path: Path) -> None:
    """The next member's magic may lie split between two reads."""
    first = gzip.compress(NOISE[: decompression.COMPRESSED_PIECE_BYTES - 1000], 0)
    for missing in range(3):
        head = first + b"\0" * (decompression.COMPRESSED_PIECE_BYTES - len(first) - missing)
        assert _all(_file(tmp_path, head + gzip.compress(b"tail")), 1 << 20).endswith(b"tail")


@pytest.mark.usefixtures("_inflate")
def test_a_truncated_gz_gives_what_it_has(tmp_path: Path) -> None:
    packed = gzip.compress(TEXT)
    found = _all(_file(tmp_path, packed[: len(packed) // 2]))
    assert TEXT.startswith(found)
    assert len(found) > len(TEXT) // 4


def test_a_truncated_zst_gives_what_it_has(tmp_path: Path) -> None:
    packed = zstd.compress(NOISE)
    found = _all(_file(tmp_path, packed[: len(packed) // 2]), 1 << 20)
    assert NOISE.startswith(found)
    assert len(found) > 1_000_000


@pytest.mark.usefixtures("_inflate")
@pytest.mark.parametrize("place", [-6, 5000], ids=["checksum", "middle"])
def test_a_damaged_gz_is_refused(tmp_path: Path, place: int) -> None:
    packed = bytearray(gzip.compress(NOISE[:100_000]))
    packed[place] ^= 0xFF
    with pytest.raises(InputError, match="damaged"):
        _all(_file(tmp_path, bytes(packed)))


def test_a_damaged_zst_is_refused(tmp_path: Path) -> None:
    packed = bytearray(zstd.compress(TEXT, options={zstd.CompressionParameter.checksum_flag: 1}))
    packed[len(packed) // 2] ^= 0xFF
    with pytest.raises(InputError, match="damaged"):
        _all(_file(tmp_path, bytes(packed)))


@pytest.mark.parametrize("outer", [gzip.compress, zstd.compress])
def test_a_file_compressed_twice_is_named_so(tmp_path: Path, outer: object) -> None:
    with pytest.raises(InputError, match="compressed twice"):
        _all(_file(tmp_path, outer(gzip.compress(TEXT))))  # type: ignore[operator]


@pytest.mark.parametrize("content", [b"", gzip.compress(b"", mtime=0), zstd.compress(b"")])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InputError, match="is empty"):
        _all(_file(tmp_path, content))


def test_a_bomb_stops_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decompression, "MAX_TEXT_BYTES", 1 << 20)
    with pytest.raises(InputError, match="more than"):
        _all(_file(tmp_path, gzip.compress(b" " * (1 << 24))))


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
def test_a_file_that_unpacks_to_hundreds_of_times_its_size_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    """The limit asks for bytes that differ, as those of real traces do, and not for the same ones again and again."""
    monkeypatch.setattr(decompression, "RATIO_FROM_BYTES", 1 << 20)
    assert _all(_file(tmp_path, pack(TEXT * 2))) == TEXT * 2  # each event has a time of its own
    same = b" " * (8 << 20)
    assert _all(_file(tmp_path, same)) == same  # what is not packed is what it is
    with pytest.raises(InputError, match=r"decompresses to over 500 times its size.*decompress it first"):
        _all(_file(tmp_path, pack(same)))


def test_urls_go_through_fsspec() -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://gpudiag/trace.json.gz", "wb") as file:
        file.write(gzip.compress(TEXT))
    assert _all("memory://gpudiag/trace.json.gz") == TEXT
    with pytest.raises(InputError, match="cannot be opened: FileNotFoundError"):
        _all("memory://gpudiag/other.json")
    with pytest.raises(InputError, match="cannot be opened"):
        _all("nosuchprotocol://x")


def test_missing_and_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        _all(str(tmp_path / "none.json"))
    with pytest.raises(InputError, match=r"is a directory.*bundle"):
        _all(str(tmp_path))
    with pytest.raises(InputError, match="cannot be opened"):
        _all("a\0b")


def test_the_path_is_shown_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        _all(str(tmp_path / "a\nb\x1b[31m"))
    assert caught.value.message.isprintable()


def test_giving_up_half_way_leaves_no_thread_behind(tmp_path: Path) -> None:
    import threading

    blocks = decompression.read_text_blocks(_file(tmp_path, TEXT), 1000)
    next(blocks)
    assert any(thread.name.startswith("gpudiag-read") for thread in threading.enumerate())
    blocks.close()
    assert not any(thread.name.startswith("gpudiag-read") for thread in threading.enumerate())


def test_what_to_do_about_a_pipe_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("-", str(tmp_path / "pipe")):
        with pytest.raises(InputError) as refused:
            decompression.open_bytes(path)
        assert refused.value.hint.endswith("write what comes from a pipe into a file first")
