"""Bytes of a trace file as bounded blocks of decompressed text; the kind of compression is told by magic bytes, never by the name."""

from __future__ import annotations

import io
import os
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, BinaryIO, cast

from gpudiag.errors import InputError, suggest_file
from gpudiag.files import NoFileError, open_file

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

inflate_library: Any
try:
    from isal import isal_zlib as inflate_library
except ImportError:  # no wheel for this platform: the standard library does the same at half the speed
    inflate_library = zlib

BLOCK_BYTES = 2_000_000
"""Decompressed text handed on at a time; up to two blocks are decoded at once. Measured on 100 MB: larger ones only cost memory."""
COMPRESSED_PIECE_BYTES = 1 << 20
MAX_TEXT_BYTES = 64 << 30
"""Stop here: no real trace is this large."""
MAX_RATIO, RATIO_FROM_BYTES = 500, 256 << 20
"""Stop where a file of a few kB goes on for gigabytes. Real traces shrink to a thirtieth at most: each event has times of its own."""

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_GZIP_WINDOW_BITS = 31  # zlib manual, inflateInit2: 15 bits of window + 16 for a gzip header
_INFLATE_ERRORS: tuple[type[Exception], ...] = (zlib.error, inflate_library.error)

_AS_FILE = "give the file itself: .json.gz and .json.zst are read as they are; write what comes from a pipe into a file first"
"""A trace is read in parts and by several processes, so that a pipe would have to be kept as a file all the same."""

_WATCHER: ContextVar[Callable[[float], None] | None] = ContextVar("_WATCHER", default=None)


@contextmanager
def watch_reading(tell: Callable[[float], None]) -> Iterator[None]:
    """Have `tell` told, in this context, which share (0..1) of a local file has been read, whenever a block of one has been."""
    before = _WATCHER.set(tell)
    try:
        yield
    finally:
        _WATCHER.reset(before)


def format_path(path: str) -> str:
    """Return `path` for a one-line message: control characters replaced, shortened in the middle when very long."""
    text = "".join(character if character.isprintable() else "?" for character in path)
    return text if len(text) <= 300 else f"{text[:140]}...{text[-140:]}"


def open_bytes(path: str) -> BinaryIO:
    """Return `path` (a local file, or an fsspec URL with '://') opened for reading; raises InputError where it cannot be opened."""
    if "://" in path:
        import fsspec  # type: ignore[import-untyped,unused-ignore]

        try:
            return fsspec.open(path, "rb").open()  # type: ignore[no-any-return,unused-ignore]
        except ImportError as error:
            raise InputError(f"{format_path(path)} needs a package that is not installed: {error.name or error}") from None
        except Exception as error:  # noqa: BLE001 -- every file system has exceptions of its own
            message = f"{format_path(path)} cannot be opened: {type(error).__name__}"
            raise InputError(message, "check the address and your access rights") from None
    if os.path.isdir(path):
        raise InputError(
            f"{format_path(path)} is a directory, not a trace", "give a trace file (.json, .json.gz, .json.zst) or a gpudiag bundle"
        )
    try:
        return open_file(path)
    except FileNotFoundError:
        if path == "-":
            raise InputError("stdin is not read", _AS_FILE) from None
        raise InputError(f"{format_path(path)} does not exist{suggest_file(os.fspath(path))}", "check the path") from None
    except PermissionError:
        raise InputError(f"{format_path(path)} cannot be read: permission denied", "check its access rights") from None
    except (OSError, ValueError) as error:
        hint = _AS_FILE if isinstance(error, NoFileError) else "check the path"
        raise InputError(f"{format_path(path)} cannot be opened: {_format_reason(error)}", hint) from None


def read_text_blocks(path: str, block_bytes: int = BLOCK_BYTES) -> Generator[bytes, None, None]:
    """Yield the decompressed bytes of `path` in blocks of at most `block_bytes`, the next one being read in a second thread.

    A compressed file that ends too early yields what it has. Raises InputError where the file is empty, damaged or unreadable.
    """
    with ThreadPoolExecutor(1, "gpudiag-read") as pool, closing(_read_blocks(path, block_bytes, _WATCHER.get())) as blocks:
        total = 0
        pending = pool.submit(next, blocks, b"")
        try:
            while block := pending.result():
                total += len(block)
                if total > MAX_TEXT_BYTES:
                    raise InputError(f"{format_path(path)} holds more than {MAX_TEXT_BYTES >> 30} GiB of text", "record fewer steps")
                pending = pool.submit(next, blocks, b"")
                yield block
        finally:
            pending.exception()  # a generator cannot be closed while the other thread is inside it
    if not total:
        raise InputError(f"{format_path(path)} is empty", "record the trace again; a run that died while writing leaves an empty file")


def _read_blocks(path: str, block_bytes: int, tell: Callable[[float], None] | None = None) -> Generator[bytes, None, None]:
    """Yield the decompressed blocks of `path`; every failure below is turned into one InputError. `tell`: see `watch_reading`."""
    with open_bytes(path) as raw:
        size = os.path.getsize(path) if tell is not None and "://" not in path else 0
        try:
            buffered = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, raw))  # has peek()
            for block in _decompress(path, buffered, block_bytes):
                if tell is not None and size:
                    tell(min(1.0, raw.tell() / size))
                yield block
        except _INFLATE_ERRORS:
            raise InputError(
                f"{format_path(path)} is damaged: its gzip data does not decompress or fails its checksum", "copy it again"
            ) from None
        except zstd.ZstdError:
            raise InputError(f"{format_path(path)} is damaged: its zstd data does not decompress", "copy it again") from None
        except OSError as error:
            raise InputError(f"{format_path(path)} cannot be read: {_format_reason(error)}", "copy it again") from None


def _decompress(path: str, raw: io.BufferedReader, block_bytes: int) -> Iterator[bytes]:
    head = raw.peek(4)[:4]
    if head.startswith(GZIP_MAGIC):
        blocks = _join_pieces(_gunzip(raw, block_bytes), block_bytes)
    elif head.startswith(ZSTD_MAGIC):
        blocks = _join_pieces(_read_zstd(raw, block_bytes), block_bytes)
    else:
        yield from iter(partial(raw.read, block_bytes), b"")
        return
    total = 0
    for block in blocks:
        if total == 0 and block.startswith((GZIP_MAGIC, ZSTD_MAGIC)):
            raise InputError(f"{format_path(path)} is compressed twice", "decompress it once, then give the result")
        total += len(block)
        if total > max(RATIO_FROM_BYTES, MAX_RATIO * raw.tell()):
            message = f"{format_path(path)} decompresses to over {MAX_RATIO} times its size"
            raise InputError(message, "no trace of a training does; if it is one, decompress it first")
        yield block


def _join_pieces(pieces: Iterator[bytes], block_bytes: int) -> Iterator[bytes]:
    """Yield `pieces` joined to blocks of about `block_bytes`, so that a poorly compressed stream is not cut into crumbs."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= block_bytes:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _read_zstd(raw: io.BufferedReader, block_bytes: int) -> Iterator[bytes]:
    """Yield the text of all zstd frames of `raw` in pieces of at most `block_bytes`; ends quietly where the data stops."""
    with zstd.ZstdFile(raw) as text, suppress(EOFError):
        yield from iter(partial(text.read1, block_bytes), b"")


def _gunzip(raw: io.BufferedReader, block_bytes: int) -> Iterator[bytes]:
    """Yield the text of all gzip members of `raw` in pieces of at most `block_bytes`; ends quietly where the data stops."""
    inflate = inflate_library.decompressobj(_GZIP_WINDOW_BITS)
    piece = raw.read(COMPRESSED_PIECE_BYTES)
    while piece:
        text = inflate.decompress(piece, block_bytes)
        if text:
            yield text
        piece = inflate.unconsumed_tail
        if inflate.eof:
            piece = inflate.unused_data.lstrip(b"\0")
            if len(piece) < len(GZIP_MAGIC):
                piece = (piece + raw.read(COMPRESSED_PIECE_BYTES)).lstrip(b"\0")
            if not piece.startswith(GZIP_MAGIC):  # only padding or foreign bytes follow: passed over, as gunzip does
                piece = b""
            inflate = inflate_library.decompressobj(_GZIP_WINDOW_BITS)
        elif not piece:
            piece = raw.read(COMPRESSED_PIECE_BYTES)
    rest = inflate.flush()
    if rest:
        yield rest


def _format_reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
