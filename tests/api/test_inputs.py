"""What a path names: a trace, a folder of ranks, a bundle with its windows; and what else is there."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from handmade import op, steps, write
from noticewords import format_notices

import gpudiag
from gpudiag import api
from gpudiag.errors import InputError, UsageError
from gpudiag.inputs import resolve_input
from gpudiag.model.bundle import Manifest, Window

ROOT = Path(__file__).resolve().parents[2]
EVENTS = [*steps(0, 50, 100), op("aten::mm", 10, 40, [[64, 32], [32, 16]]), op("aten::mm", 60, 90, [[64, 32], [32, 16]])]
FRAME = {"ph": "X", "cat": "python_function", "name": "train.py(12): forward", "pid": 1, "tid": 1, "ts": 1, "dur": 95, "args": {}}


def bundle(folder: Path, kinds: list[str], rank: int = 0) -> Path:
    """Write a bundle by hand: a manifest and one trace for each window."""
    (folder / "trace").mkdir(parents=True, exist_ok=True)
    places = {"timing": 0, "sites": 1}
    windows = tuple(
        Window(rank, places[kind], kind, f"trace/rank{rank}-w{places[kind]}.json.gz", 0, 2, True, kind == "sites") for kind in kinds
    )  # type: ignore[arg-type]
    for window in windows:
        events: list[dict[str, Any]] = [*EVENTS, FRAME] if window.kind == "sites" else EVENTS
        (folder / window.file).write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    manifest = Manifest(finished=True, windows=windows, steps=2, rank=rank)
    (folder / ("manifest.json" if rank == 0 else f"manifest-rank{rank}.json")).write_bytes(msgspec.json.encode(manifest))
    return folder


def test_a_trace_file(tmp_path: Path) -> None:
    path = str(write(tmp_path / "t.json", *EVENTS))
    report = api.diagnose(path).data
    assert (report.source.kind, report.source.path) == ("trace", path)
    with pytest.raises(UsageError, match="--rank"):
        api.diagnose(path, rank=0)


@pytest.mark.slow
def test_a_folder_of_ranks_is_one_job_of_which_one_rank_is_shown_or_the_one_asked_for_alone(tmp_path: Path) -> None:
    for rank in (1, 2, 5):
        write(tmp_path / f"rank{rank}.json", *EVENTS, *[op("aten::relu", 96, 98, [[8]])] * (rank == 5))
    for every in (api.diagnose(str(tmp_path)).data, api.diagnose(str(tmp_path), rank="all").data):
        assert (every.source.kind, every.source.ranks) == ("folder", (1, 2, 5))
        assert every.job is not None
        assert [row.rank for row in every.job.ranks] == [1, 2, 5]
        assert not [text for text in every.trust.warnings if "not analysed" in text]
    alone = api.diagnose(str(tmp_path), rank=5).data
    assert {row.name for row in alone.ops} == {"aten::mm", "aten::relu"}
    assert (alone.job, alone.source.ranks) == (None, (1, 2, 5))
    assert "rank 5 only; not analysed: ranks 1, 2" in alone.trust.warnings
    with pytest.raises(InputError, match="no rank 3"):
        api.diagnose(str(tmp_path), rank=3)


def test_a_bundle_takes_times_from_one_window_and_call_sites_from_the_other(tmp_path: Path) -> None:
    report = api.diagnose(str(bundle(tmp_path, ["timing", "sites"]))).data
    assert report.source.kind == "bundle"
    assert [row.where for row in report.ops if row.name == "aten::mm"] == ["train.py(12): forward"]
    assert report.trust.site_match_share == 1.0
    assert not [text for text in report.trust.warnings if "window is missing" in text]


def test_a_bundle_with_one_window_says_which_half_is_missing(tmp_path: Path) -> None:
    report = api.diagnose(str(bundle(tmp_path / "a", ["timing"]))).data
    assert "the site window is missing: no call sites" in report.trust.warnings
    assert {row.where for row in report.ops} == {None}
    report = api.diagnose(str(bundle(tmp_path / "b", ["sites"]))).data
    assert [text for text in report.trust.warnings if text.startswith("the timing window is missing")]
    with pytest.raises(InputError, match="no window was recorded"):
        api.diagnose(str(bundle(tmp_path / "c", [])))


def test_a_site_window_that_cannot_be_read_costs_only_the_sites(tmp_path: Path) -> None:
    bundle(tmp_path, ["timing", "sites"])
    (tmp_path / "trace" / "rank0-w1.json.gz").write_bytes(b"no gzip")
    report = api.diagnose(str(tmp_path)).data
    assert report.steps.count == 2
    assert {row.where for row in report.ops} == {None}


def test_the_ranks_of_a_bundle(tmp_path: Path) -> None:
    bundle(tmp_path, ["timing"], rank=0)
    bundle(tmp_path, ["timing"], rank=3)
    found = resolve_input(str(tmp_path), 3)
    assert found.source.ranks == (0, 3)
    assert Path(found.trace).name == "rank3-w0.json.gz"
    assert [text for text in format_notices(found.notices) if text == "rank 3 only; not analysed: rank 0"]


def test_many_ranks_are_not_listed_one_by_one(tmp_path: Path) -> None:
    for rank in range(40):
        write(tmp_path / f"rank{rank}.json", *EVENTS)
    (warning,) = format_notices(resolve_input(str(tmp_path), None).notices)
    assert warning.endswith("and 23 more")


def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(InputError):
            api.diagnose(str(path))


class Folder(os.PathLike[str]):
    """Something that names a path and is neither str nor Path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


@pytest.mark.parametrize("kind", [str, Path, Folder])
@pytest.mark.needs("torch")
def test_the_public_names_take_every_kind_of_path(tmp_path: Path, kind: Any) -> None:
    trace = write(tmp_path / "t.json", *EVENTS)
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / "OVH-01.yaml").write_bytes((ROOT / "rules" / "ovh" / "OVH-01.yaml").read_bytes())
    report = api.diagnose(kind(trace))
    assert (report.data.source.path, report.data.source.kind) == (str(trace), "trace")
    assert api.diagnose(kind(bundle(tmp_path / "b", ["timing"]))).data.source.kind == "bundle"
    with pytest.raises(InputError, match="OVH-01"):
        api.diagnose(trace, rules_dirs=[kind(rules)])
    report.save(kind(tmp_path / "r.md"))
    assert (tmp_path / "r.md").read_text().startswith("# gpudiag report")
    assert gpudiag.profile(kind(tmp_path / "recorded")).path == tmp_path / "recorded"


@pytest.mark.slow
def test_all_ranks_of_a_bundle_are_one_job_with_the_sites_of_the_shown_one(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        bundle(tmp_path, ["timing", "sites"] if rank < 2 else [], rank=rank)
    report = api.diagnose(tmp_path).data
    assert (report.source.kind, report.source.ranks) == ("bundle", (0, 1, 2))
    assert report.job is not None
    assert {row.rank: row.unread for row in report.job.ranks} == {
        0: "", 1: "", 2: "window 0, which is read of the other ranks, was not recorded"
    }  # fmt: skip
    assert [row.where for row in report.ops if row.name == "aten::mm"] == ["train.py(12): forward"]
    assert api.diagnose(tmp_path, window=1).data.job is not None
    alone = api.diagnose(tmp_path, rank=1).data
    assert (alone.job, [text for text in alone.trust.warnings if "not analysed" in text]) == (
        None,
        ["rank 1 only; not analysed: ranks 0, 2"],
    )
