"""Snapshots alone: the planted step, and torch's own reading of the same file."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
from snapshots import BASE, FORWARD, MIB, alloc, block, entry, frame, free, segment, training

from gpudiag.model.memory import MemoryReport, PoolRow
from gpudiag.timeline.memory_peak import NO_HISTORY, build_snapshot_report, find_origin
from gpudiag.trace.memory_snapshot import Snapshot, decode_snapshot


def read(found: Any) -> Snapshot:
    return decode_snapshot(pickle.dumps(found), "x")


def told(found: Any, **options: Any) -> MemoryReport:
    made = build_snapshot_report(read(found), **options)
    assert made is not None
    assert sum(made.by_category.values()) == made.peak_bytes
    return made


def test_the_planted_step() -> None:
    found = told(training())
    assert found.device == "cuda:0"
    assert found.peak_bytes == 26 * MIB
    assert found.by_category == {"optimizer_state": 16 * MIB, "before_recording": 8 * MIB, "unknown": 2 * MIB}
    assert [(row.name, row.bytes) for row in found.by_site] == [("train.py(44): <module>", 16 * MIB)]
    assert found.reserved_peak_bytes == 40 * MIB
    assert found.fragmentation_share == 14 / 40
    assert found.largest_free_bytes == 12 * MIB
    assert found.inactive_split_share == 14 / 40
    assert found.ooms == 0
    assert found.pools == (PoolRow("large", 0, 2, 40 * MIB, 26 * MIB, 12 * MIB),)


@pytest.mark.needs("torch")
def test_torch_reads_the_same() -> None:
    from torch.cuda import _memory_viz

    said = _memory_viz.segsum(training())
    assert re.search(r"total_reserved: 40\.0MiB", said)
    assert re.search(r"total_allocated: 26\.0MiB", said)
    found = told(training())
    assert (found.reserved_peak_bytes, sum(row.allocated_bytes for row in found.pools)) == (40 * MIB, 26 * MIB)


def test_forward_memory_freed_elsewhere_is_kept_for_backward() -> None:
    """4 MiB alive at the peak: 3 are freed by the engine, 1 by the forward pass itself."""
    history = [
        alloc(BASE, 3 * MIB, FORWARD), alloc(BASE + 4 * MIB, MIB, FORWARD), *free(BASE + 4 * MIB, MIB, FORWARD), *free(BASE, 3 * MIB),
    ]  # fmt: skip
    found = told({"segments": [], "device_traces": [history]})
    assert found.by_category == {"activations": 3 * MIB, "temporary": MIB}
    assert [(row.name, row.bytes, row.category) for row in found.by_site] == [
        ("model.py(12): forward", 3 * MIB, "activations"),
        ("model.py(12): forward", MIB, "temporary"),
    ]


def test_where_frees_have_no_stacks_activations_are_not_guessed() -> None:
    found = told({"segments": [], "device_traces": [[alloc(BASE, MIB, FORWARD), *free(BASE, MIB)]]})
    assert found.by_category == {"unknown": MIB}
    assert any("context='all'" in note for note in found.notes)


def test_without_a_history_it_is_the_moment_of_the_snapshot() -> None:
    found = told({"segments": training()["segments"], "device_traces": [[]]})
    assert (found.peak_bytes, found.by_category) == (26 * MIB, {"before_recording": 26 * MIB})
    assert NO_HISTORY in found.notes


def test_reserved_memory_is_walked_back() -> None:
    """20 MiB are reserved at the end; before a segment of 64 was given back it was 84."""
    held = segment(BASE, block(BASE, 20 * MIB, used=False))
    found = told({"segments": [held], "device_traces": [[alloc(1, 512), *free(1, 512), entry("segment_free", 99, 64 * MIB)]]})
    assert found.reserved_peak_bytes == 84 * MIB


def test_the_device_with_the_most_reserved_is_told() -> None:
    small, large = segment(BASE, block(BASE, 512), device=0), segment(BASE, block(BASE, 1024), device=1)
    found = told({"segments": [small, large]})
    assert found.device == "cuda:1"
    assert found.notes[0].startswith("cuda:1 only; not analysed: cuda:0 (")
    assert told({"segments": [small, large]}, device=0).peak_bytes == 512
    assert build_snapshot_report(Snapshot(segments=())) is None


def test_out_of_memory_errors_are_counted() -> None:
    oom = {"action": "oom", "size": 1 << 34, "device_free": 1 << 20, "stream": 0, "frames": []}
    wanted = {**oom, "size": (1 << 63) - 1}
    found = told({"segments": training()["segments"], "device_traces": [[oom, wanted, wanted]]})
    assert (found.ooms, found.reserved_peak_bytes, found.peak_bytes) == (3, 40 * MIB, 26 * MIB)


def test_free_parts_count_as_split_only_beside_used_ones() -> None:
    half = segment(BASE, block(BASE, MIB), block(BASE + MIB, 3 * MIB, used=False))
    empty = segment(BASE + 9 * MIB, block(BASE + 9 * MIB, 5 * MIB, used=False))
    assert told([half, empty]).inactive_split_share == 3 / 9


def test_the_user_s_line_is_the_first_outside_torch() -> None:
    assert find_origin(FORWARD).site == "model.py(12): forward"
    assert find_origin(FORWARD).phase == "forward"
    assert find_origin(None) == (None, None)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/someone/train.py", "train.py"),
        ("/Users/someone/code/models/net.py", "models/net.py"),
        ("C:\\Users\\someone\\train.py", "train.py"),
        ("/".join(("", "root", "train.py")), "train.py"),
        ("/mnt/data/someone/project/models/net.py", "models/net.py"),
    ],
)
def test_a_path_is_told_by_its_end_without_the_user_s_name(path: str, shown: str) -> None:
    assert find_origin([frame(path, 7, "f")]).site == f"{shown}(7): f"


def test_without_a_sign_of_a_backward_pass_nothing_is_kept_for_one() -> None:
    history = [alloc(BASE, 3 * MIB, FORWARD)]
    assert told({"segments": [], "device_traces": [history]}).by_category == {"forward_held": 3 * MIB}
    history.append(alloc(BASE + 8 * MIB, MIB, []))  # the thread of the engine has no Python frames
    assert told({"segments": [], "device_traces": [history]}).by_category == {"activations": 3 * MIB, "unknown": MIB}


def test_addresses_with_the_highest_bit_and_any_stream_are_told() -> None:
    """A block that stands both in the history and among the segments is counted once, by its address."""
    high = (1 << 64) - (1 << 40)
    held = [{**segment(high, block(high, MIB), stream=-5), "segment_type": None}, segment(BASE, block(BASE, 512), stream=high)]
    found = told({"segments": held, "device_traces": [[alloc(high, MIB, FORWARD)]]})
    assert found.peak_bytes == MIB + 512
    assert [(row.size_class, row.stream) for row in found.pools] == [("", -5), ("large", high)]
