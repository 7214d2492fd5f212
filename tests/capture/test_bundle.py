"""Opening bundles: finished, killed, damaged, foreign."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import polars as pl
import pytest
from noticewords import format_notices
from tracecheck import check_table

from gpudiag.bundle.layout import is_bundle
from gpudiag.bundle.reader import open_bundle
from gpudiag.bundle.segments import encode_segment
from gpudiag.errors import InputError
from gpudiag.model import trace


def test_a_finished_bundle(recorded: Path) -> None:
    bundle = open_bundle(recorded)
    check_table("step_records", bundle.step_records)
    check_table("host_marks", bundle.host_marks)
    assert bundle.manifest.finished
    assert format_notices(bundle.notices) == ()
    assert bundle.ranks == (0,)
    assert [path.name for path in bundle.windows()] == ["rank0-w0.json.gz", "rank0-w1.json.gz"]
    assert bundle.window("sites") == recorded / "trace" / "rank0-w1.json.gz"
    assert bundle.windows(rank=1) == ()


def test_traces_are_found_by_listing_not_by_paths_in_the_manifest(recorded: Path) -> None:
    manifest = json.loads((recorded / "manifest.json").read_text())
    manifest["windows"][0]["file"] = "../../../etc/passwd"
    (recorded / "manifest.json").write_text(json.dumps(manifest))
    (recorded / "trace" / "rank0-w7.json.gz").symlink_to("/etc/passwd")
    assert open_bundle(recorded).window("timing") == recorded / "trace" / "rank0-w0.json.gz"
    assert len(open_bundle(recorded).windows()) == 2


def test_damaged_segments_and_leftovers_cost_only_themselves(recorded: Path) -> None:
    steps = recorded / "steps" / "rank0"
    whole = open_bundle(recorded).step_records.height
    (steps / "000001.json").write_bytes((steps / "000000.json").read_bytes()[:-40])
    (steps / "000002.json").write_bytes(b"")
    pl.DataFrame({"step": [1]}).write_parquet(steps / "000003.json")
    (steps / ".000004.json.tmp").write_bytes(b"PAR1")
    (recorded / "trace" / ".rank0-w2.json").write_text("{")
    bundle = open_bundle(recorded)
    assert bundle.step_records.height == whole
    assert [text for text in format_notices(bundle.notices) if "could not be read" in text] == [
        f"steps/rank0/00000{number}.json could not be read and is left out" for number in (1, 2, 3)
    ]
    assert len(bundle.windows()) == 2


@pytest.mark.parametrize("time", [2**63 - 1, -(2**63), 2**62 + 1])
def test_a_segment_with_a_time_that_no_clock_has_is_left_out(recorded: Path, time: int) -> None:
    before = open_bundle(recorded)
    row = {name: [None] for name in trace.build_table_schema("telemetry")} | {"t_ns": [time]}
    (recorded / "telemetry" / "rank0").mkdir(parents=True, exist_ok=True)
    (recorded / "telemetry" / "rank0" / "000077.json").write_bytes(encode_segment("telemetry", row))
    bundle = open_bundle(recorded)
    assert bundle.telemetry.equals(before.telemetry)
    assert format_notices(bundle.notices) == (
        *format_notices(before.notices),
        "telemetry/rank0/000077.json could not be read and is left out",
    )


def test_missing_folders_give_empty_tables(recorded: Path) -> None:
    for name in ("steps", "marks", "trace"):
        shutil.rmtree(recorded / name)
    bundle = open_bundle(recorded)
    assert bundle.step_records.equals(trace.build_empty_table("step_records"))
    assert bundle.host_marks.equals(trace.build_empty_table("host_marks"))
    assert bundle.windows() == ()
    assert bundle.window("timing") is None


def test_a_newer_version_is_refused_in_one_line(recorded: Path) -> None:
    (recorded / "manifest.json").write_text('{"bundle_version": 3, "machine": "another type"}')
    with pytest.raises(InputError, match=r"bundle version 3, this gpudiag reads up to version 2") as caught:
        open_bundle(recorded)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"steps": "many"}', b'{"x":' * 30_000])
def test_a_manifest_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(InputError, match="not the manifest of a bundle"):
        open_bundle(tmp_path)


def test_what_is_no_bundle(tmp_path: Path) -> None:
    assert not is_bundle(tmp_path)
    assert not is_bundle(tmp_path / "absent")
    with pytest.raises(InputError, match=r"no manifest\.json"):
        open_bundle(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        open_bundle(tmp_path / "absent")


def test_ranks(recorded: Path) -> None:
    shutil.copy(recorded / "manifest.json", recorded / "manifest-rank3.json")
    os.rename(recorded / "steps" / "rank0", recorded / "steps" / "rank3")
    assert open_bundle(recorded).ranks == (0, 3)
    assert open_bundle(recorded).step_records.height == 0
    assert open_bundle(recorded, rank=3).step_records.height == 24
    with pytest.raises(InputError, match="no rank 1"):
        open_bundle(recorded, rank=1)
