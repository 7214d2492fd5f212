"""Snapshots of the allocator: of several versions of torch, damaged, and hostile."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from snapshots import BASE, MIB, block, entry, frame, segment, training

from gpudiag.errors import InputError
from gpudiag.trace import memory_snapshot
from gpudiag.trace.memory_snapshot import Frame, decode_snapshot, is_old_pickle, is_pickle, list_frames, read_snapshot


def test_a_snapshot_is_read_with_its_history(tmp_path: Path) -> None:
    path = tmp_path / "dump.pickle"
    path.write_bytes(pickle.dumps(training()))
    assert is_pickle(path)
    found = read_snapshot(path)
    assert [item.total_size for item in found.segments] == [20 * MIB, 20 * MIB]
    assert [entry.action for entry in found.device_traces[0][:2]] == ["alloc", "alloc"]
    assert next(iter(list_frames(found.device_traces[0][0].frames))) == Frame("/x/torch/nn/modules/linear.py", 125, "forward")


def test_a_list_of_segments_is_read() -> None:
    found = decode_snapshot(pickle.dumps([segment(BASE, block(BASE, 512))]), "x")
    assert len(found.segments) == 1
    assert found.device_traces == ()


def test_blocks_of_old_versions_have_no_address() -> None:
    old = segment(BASE, {"size": 1024, "state": "active_allocated", "history": [{"addr": BASE, "real_size": 1000, "frames": []}]})
    found = decode_snapshot(pickle.dumps({"segments": [old], "device_traces": []}), "x")
    assert found.segments[0].blocks[0].address is None


def test_stacks_of_the_wrong_shape_are_empty() -> None:
    for frames in (None, "abc", [1, {"filename": 2, "line": 3, "name": "f"}], {"filename": "x"}):
        assert list(list_frames(frames)) == []


class _Shell:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize(
    "found",
    [
        {"segments": _Shell()},
        {"segments": [{"address": 1}]},
        {"segments": "x"},
        {"no": 1},
        7,
        {"segments": [segment(-5, block(BASE, 512))]},
        {"segments": [segment(BASE, block(BASE, 1 << 50))]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1 << 70}]]},
        {"segments": [], "device_traces": [["alloc"]]},
        {"segments": [], "device_traces": [[entry("alloc", BASE, 1 << 41)]]},
        {"segments": [], "device_traces": [[{"action": "oom", "size": 1 << 63}]]},
        {"segments": [segment(1 << 64, block(BASE, 512))]},
        {"segments": [segment(BASE, block(1 << 64, 512))]},
        {"segments": [segment(BASE, block(BASE, 512), stream=1 << 64)]},
    ],
)
def test_what_is_no_snapshot_is_one_clear_line(found: object) -> None:
    with pytest.raises(InputError, match=r"^x is no snapshot of the CUDA allocator: .* \(give a file written by") as raised:
        decode_snapshot(pickle.dumps(found), "x")
    assert "\n" not in str(raised.value)


def test_one_list_referred_to_from_everywhere_does_not_unfold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_snapshot, "MAX_SNAPSHOT_ROWS", 10_000)
    shared = segment(BASE, *([block(BASE, 512)] * 1000))
    with pytest.raises(InputError, match="more than 10,000 blocks and entries"):
        decode_snapshot(pickle.dumps({"segments": [shared] * 1000}), "x")


def test_a_missing_or_huge_file_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_snapshot(tmp_path / "none.pickle")
    path = tmp_path / "big.pickle"
    path.write_bytes(b"\x80\x04N.")
    monkeypatch.setattr(memory_snapshot, "MAX_SNAPSHOT_BYTES", 2)
    with pytest.raises(InputError, match=r"max_entries=100_000"):
        read_snapshot(path)


def test_what_torch_may_write_is_read() -> None:
    """A request for 2 TiB that failed, a stream's handle with a sign, no kind of segment, addresses from 2^63 on."""
    odd = {**segment(1 << 63, block((1 << 64) - 512, 512), stream=-5), "segment_type": None}
    failed = {"action": "oom", "size": 2 << 40, "device_free": 1 << 20, "stream": 0, "frames": []}
    found = decode_snapshot(pickle.dumps({"segments": [odd], "device_traces": [[failed, entry("alloc", 1 << 63, 512)]]}), "x")
    assert (found.segments[0].address, found.segments[0].stream, found.segments[0].segment_type) == (1 << 63, -5, None)
    assert [(item.size, item.addr) for item in found.device_traces[0]] == [(2 << 40, None), (512, 1 << 63)]


def test_stacks_as_deep_as_the_file_says_are_passed_on_unread() -> None:
    """A pickle of a list in a list, 200,000 times, in the place of a stack; pickle itself writes no such thing."""
    marker = "the stack"
    written = pickle.dumps({"segments": [segment(BASE, {**block(BASE, 512), "frames": marker})]}, 2)
    place = pickle.dumps(marker, 2)[2:-3]  # less PROTO, and the PUT and STOP behind it
    assert written.count(place) == 1
    data = written.replace(place, b"]" * 200_000 + b"a" * 199_999)
    (found,) = decode_snapshot(data, "x").segments
    assert list(list_frames(found.blocks[0].frames)) == []


def test_a_path_that_is_no_utf_8_can_be_reported() -> None:
    """Python keeps such bytes as half surrogate pairs, which pickle writes and no report can."""
    frames = [frame("/home/me/tr\udcffin.py", 3, "step")]
    (found,) = decode_snapshot(
        pickle.dumps({"segments": [segment(BASE, {**block(BASE, 512), "frames": frames}, kind="\ud800")]}), "x"
    ).segments
    (line,) = list_frames(found.blocks[0].frames)
    assert f"{line.filename} {found.segment_type}".encode()


@pytest.mark.parametrize("protocol", [0, 1])
def test_pickles_of_old_protocols_are_told_apart(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "dump.pickle"
    for value in (training(), training()["segments"]):
        path.write_bytes(pickle.dumps(value, protocol))
        assert is_old_pickle(path)
        assert not is_pickle(path)


def test_traces_are_no_pickles(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for text in ("{}", "[]", "", "(d"):
        path.write_text(text)
        assert not is_pickle(path)
        assert not is_old_pickle(path)
    assert not is_pickle(tmp_path / "none")
