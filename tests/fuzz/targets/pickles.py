"""Snapshots of the CUDA allocator: any pickle is a snapshot, whose memory can be told, or refused by one line; nothing is called."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from copy import deepcopy

from fuzz.targets.dice import Dice, broken, decisions
from fuzz.targets.target import Target, refused
from snapshots import training

from gpudiag.model.memory import MEMORY_CATEGORIES
from gpudiag.timeline.memory_peak import build_snapshot_report, sum_reserved
from gpudiag.trace.memory_snapshot import NotPlainDataError, decode_snapshot, load_plain_data


def unpickle(data: bytes) -> None:
    """Plain data comes out, or one error."""
    refused(lambda: load_plain_data(data), NotPlainDataError)


def snapshot(data: bytes) -> None:
    """The first byte says whether the others are a pickle, or decide what is broken in the pickle of a training."""
    dice = Dice(data[1:])
    text = data[1:] if data[:1] < b"\x80" else pickle.dumps(broken(deepcopy(training()), dice, 12), protocol=4)  # its frames are shared

    def tell() -> None:
        found = decode_snapshot(text, "a snapshot")
        devices = sum_reserved(found)
        if devices:
            report = build_snapshot_report(found, None)
            assert report is None or (
                sum(report.by_category.values()) == report.peak_bytes and set(report.by_category) <= set(MEMORY_CATEGORIES)
            )

    refused(tell)


def _pickles() -> Iterator[bytes]:
    yield from (pickle.dumps(training(), protocol=protocol) for protocol in (2, 3, 4, 5))
    yield pickle.dumps(training()["segments"], protocol=4)


def _small() -> Iterator[bytes]:
    whole = training()
    for piece in (
        whole["segments"][0]["blocks"][:1],
        whole["device_traces"][0][0]["frames"][:2],
        {"a": [1, 2.5, None, True, -5, 2**40, (1, 2), "é", b"b", {}]},
    ):
        yield from (pickle.dumps(piece, protocol=protocol) for protocol in (2, 4))


def _snapshots() -> Iterator[bytes]:
    yield from (b"\x00" + text for text in _pickles())
    yield from (b"\xff" + data for data in decisions())


_WORDS = (
    b"}q\x00",
    b"X\x04\x00\x00\x00",
    b"\x8c\x04",
    b"K\x01",
    b"M\x01\x02",
    b"G",
    b"h\x00",
    b"\x94",
    "segments",
    "device_traces",
    "blocks",
)

TARGETS = (
    Target("unpickle", unpickle, _small, ("gpudiag.trace.memory_snapshot",), _WORDS, longest=250),
    Target("snapshot", snapshot, _snapshots, ("gpudiag.trace", "gpudiag.timeline.memory_peak"), _WORDS, longest=2000),
)
