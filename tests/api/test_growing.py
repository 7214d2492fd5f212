"""A bundle that grows is read piece by piece: what is new alone, and what was replaced anew."""

from __future__ import annotations

import os
import time
from pathlib import Path

import growingbundle
import pytest
from growingbundle import START_NS, Bundle, aged, gpu_info

from gpudiag.errors import InputError
from gpudiag.recordings import live as live_recording
from gpudiag.recordings.live import GrowingRecording, measure_silence_s


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The segments that were opened, in their order."""
    opened: list[str] = []
    plain = live_recording.read_segment
    monkeypatch.setattr(
        live_recording, "read_segment", lambda path, schema: opened.append(f"{path.parts[-3]}/{path.name}") or plain(path, schema)
    )
    return opened


def test_only_new_segments_are_read(tmp_path: Path, reads: list[str]) -> None:
    bundle = Bundle(tmp_path / "run")
    bundle.steps(3)
    reader = GrowingRecording(tmp_path / "run")
    first = reader.read()
    assert (first.steps.height, first.telemetry.height, first.manifest.finished) == (3, 0, False)
    assert reads == ["steps/000000.parquet"]
    assert reader.read().version == first.version  # nothing was written: nothing is drawn anew
    bundle.steps(2)
    bundle.samples([0, 10**9], power_w=[100.0, 200.0])
    second = reader.read()
    assert second.version != first.version
    assert second.steps["step"].to_list() == [0, 1, 2, 3, 4]
    assert second.telemetry["power_w"].to_list() == [100.0, 200.0]
    assert sorted(reads) == ["steps/000000.parquet", "steps/000001.parquet", "telemetry/000000.parquet"]
    bundle.finish()
    last = reader.read()
    assert last.manifest.finished
    assert last.version != second.version
    assert len(reads) == 3


def test_a_segment_that_is_being_written_or_is_a_link_is_not_read(tmp_path: Path, reads: list[str]) -> None:
    bundle = Bundle(tmp_path / "run")
    bundle.steps(1)
    folder = tmp_path / "run" / "steps" / "rank0"
    (folder / ".000001.parquet.tmp").write_bytes(b"half")
    (folder / ".000002.parquet").write_bytes(b"half")
    os.symlink("/etc/passwd", folder / "000003.parquet")
    (folder / "000004.parquet").mkdir()
    found = GrowingRecording(tmp_path / "run").read()
    assert (found.steps.height, found.segments, found.warnings) == (1, 1, ())
    assert reads == ["steps/000000.parquet"]


def test_a_damaged_segment_is_named_once_and_the_others_are_read(tmp_path: Path, reads: list[str]) -> None:
    bundle = Bundle(tmp_path / "run")
    bundle.samples([0], power_w=[1.0]).write_bytes(b"PAR1 but no more")
    bundle.samples([1], power_w=[2.0])
    reader = GrowingRecording(tmp_path / "run")
    for _ in range(3):
        found = reader.read()
    assert found.telemetry["power_w"].to_list() == [2.0]
    assert found.warnings == ("telemetry/rank0/000000.parquet could not be read and is left out",)
    assert len(reads) == 2


def test_merged_segments_are_not_counted_twice(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path / "run")
    bundle.steps(4)
    bundle.steps(4)
    reader = GrowingRecording(tmp_path / "run")
    assert reader.read().steps.height == 8
    merged = Bundle(tmp_path / "merged")
    merged.steps(8)
    folder = tmp_path / "run" / "steps" / "rank0"
    (folder / "000001.parquet").unlink()
    os.replace(tmp_path / "merged" / "steps" / "rank0" / "000000.parquet", folder / "000000.parquet")
    assert reader.read().steps["step"].to_list() == list(range(8))


def test_segments_in_any_order_give_one_table_in_order(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path / "run")
    bundle.samples([5, 6], power_w=[5.0, 6.0])
    reader = GrowingRecording(tmp_path / "run")
    reader.read()
    bundle.samples([1, 2], power_w=[1.0, 2.0])
    assert reader.read().telemetry["power_w"].to_list() == [1.0, 2.0, 5.0, 6.0]


def test_a_rank_is_chosen_and_one_that_is_not_there_is_said(tmp_path: Path) -> None:
    Bundle(tmp_path / "run", rank=0).steps(1)
    Bundle(tmp_path / "run", rank=3).steps(7)
    assert GrowingRecording(tmp_path / "run").read().steps.height == 1
    found = GrowingRecording(tmp_path / "run", 3).read()
    assert (found.steps.height, found.ranks) == (7, (0, 3))
    with pytest.raises(InputError, match=r"no rank 2.*ranks: 0, 3"):
        GrowingRecording(tmp_path / "run", 2)
    with pytest.raises(InputError, match="no rank 0"):
        GrowingRecording(tmp_path / "nowhere")


def test_a_removed_bundle_is_one_clear_line(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path / "run")
    reader = GrowingRecording(bundle.path)
    reader.read()
    (bundle.path / "manifest.json").unlink()
    with pytest.raises(InputError, match="removed or moved"):
        reader.read()


def test_what_is_told_follows_what_is_written_and_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle(tmp_path / "run", telemetry=gpu_info())
    bundle.steps(20)
    bundle.samples([k * 50_000_000 for k in range(40)], power_w=[300.0] * 40, sm_clock_mhz=[1500.0] * 40, clock_event_reasons=[0x4] * 40)
    reader = GrowingRecording(bundle.path)
    told = reader.summarise()
    assert told.telemetry is not None
    assert told.history is not None
    assert told.telemetry.columns["power_w"].median == 300
    assert told.telemetry.throttle_share == 1.0
    assert told.history.median_ns == growingbundle.STEP_NS
    assert told.energy is not None
    assert told.energy.joule_per_step == pytest.approx(30.0)  # 300 W for 0.1 s
    monkeypatch.setattr(live_recording, "build_history", lambda *_: pytest.fail("computed again although nothing was written"))
    assert reader.summarise() is told


def test_an_empty_bundle_tells_nothing(tmp_path: Path) -> None:
    assert GrowingRecording(Bundle(tmp_path / "run").path).summarise() == (None, None, None)


@pytest.mark.parametrize(
    ("run_s", "silent", "told"),
    [(5, 50, False), (5, 70, True), (7_200, 100, False), (7_200, 300, True), (10**6, 1_700, False), (10**6, 1_900, True)],
)
def test_a_run_is_silent_where_it_would_have_written_by_now(tmp_path: Path, run_s: int, silent: int, told: bool) -> None:
    """Segments come every 10 s, in a run of two hours every 72 s, later every 10 minutes; three of them are waited for."""
    now = START_NS / 1e9 + run_s + silent
    bundle = Bundle(tmp_path / "run")
    bundle.steps(1)
    aged(bundle.path, silent, now)
    found = measure_silence_s(GrowingRecording(bundle.path).read(), int(now * 1e9))
    assert (found is not None) == told
    if told:
        assert found == pytest.approx(silent, abs=1)
    bundle.finish()
    assert measure_silence_s(GrowingRecording(bundle.path).read(), time.time_ns()) is None
