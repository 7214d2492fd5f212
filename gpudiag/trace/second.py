"""The second of two processes that read a large trace: decodes its share of the chunks and sends their columns to the first."""

from __future__ import annotations

import io
import sys
from contextlib import closing, suppress
from typing import IO

import polars as pl

from gpudiag.trace.collect import Collector
from gpudiag.trace.events import EventDecoder
from gpudiag.trace.framing import Document, EventChunk, Share, ShareDoneError
from gpudiag.trace.garbage import no_cycle_collection
from gpudiag.trace.share import PROCESSES, Growth, Piece, Rest, send
from gpudiag.trace.source import text_blocks


def main(path: str, block_bytes: int) -> None:
    """Send the share of the second process of the trace at `path`; whatever fails ends the process, which the first one notices."""
    send_share(path, block_bytes, sys.stdout.buffer)


def send_share(path: str, block_bytes: int, to: IO[bytes]) -> None:
    """Write the share of the second process of the trace at `path` to `to`, chunk after chunk."""
    decoder = EventDecoder()
    collector = Collector(decoder.times)
    growth = Growth(collector.keys)
    with closing(text_blocks(path, block_bytes)) as blocks, no_cycle_collection():
        document = Document(blocks, decoder, block_bytes, share=Share(1, PROCESSES))
        with suppress(ShareDoneError):
            for part in document.parts():
                if isinstance(part, EventChunk):
                    tables = {table: _ipc(frame) for table, frame in collector.part(part).items()}
                    send(Piece(part.number, growth.new(), tables), to)
                del part  # or its events would live on while the next chunk is decoded
    send(Rest(collector.counts(), decoder.count, dict(decoder.dropped), document.cuts), to)


def _ipc(frame: pl.DataFrame) -> bytes:
    text = io.BytesIO()
    frame.write_ipc(text)
    return text.getvalue()
