"""A bundle while it is being recorded: what a look sees, and when a run is taken for silent or gone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import polars as pl
import pytest
from segments import segment

from gpudiag.capture.recording import encode_manifest
from gpudiag.errors import InputError
from gpudiag.model import trace
from gpudiag.model.bundle import Manifest, Window
from gpudiag.recordings import live as live_recording

MS = 1_000_000


def _manifest(folder: Path, **fields: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(Manifest(), **fields)))


def _segment(folder: Path, table: str, number: int, rows: list[dict[str, object]]) -> None:
    place = folder / {"step_records": "steps", "telemetry": "telemetry"}[table] / "rank0"
    place.mkdir(parents=True, exist_ok=True)
    schema = trace.build_table_schema(table)
    frame = pl.DataFrame([{name: row.get(name) for name in schema} for row in rows], schema=schema, orient="row")
    (place / f"{number:06d}.parquet").write_bytes(segment(table, frame))


def _steps(first: int, count: int, wall_ms: float) -> list[dict[str, object]]:
    return [
        {
            "step": k,
            "start_unix_ns": k * MS,
            "wall_ns": int(wall_ms * MS),
            "loader_wait_ns": int(wall_ms * MS / 4),
            "samples": 8,
            "window": "plain",
        }
        for k in range(first, first + count)
    ]


def test_a_look_sees_pace_device_and_windows(tmp_path: Path) -> None:
    window = Window(0, 0, "timing", "", 7, 6, True, False)
    _manifest(tmp_path / "run", windows=(window, msgspec.structs.replace(window, index=1, kind="sites", first_step=13, steps=2)))
    _segment(tmp_path / "run", "step_records", 0, _steps(0, 300, 10.0))
    _segment(tmp_path / "run", "telemetry", 0, [{"t_ns": k, "power_w": 100.0 + k, "temperature_c": None} for k in range(3)])
    watch = live_recording.Watch(str(tmp_path / "run"))
    found = watch.look()
    assert (found.status, found.steps, found.over) == ("recording", 300, live_recording.LATEST)
    assert found.step_ns == 10.0 * MS
    assert found.loader_share == pytest.approx(0.25)
    assert found.samples_per_s == pytest.approx(800.0)
    assert found.sampled == {"power_w": 102.0}
    assert found.windows == ("steps 7 to 12", "steps 13 to 14 with stacks")
    _segment(tmp_path / "run", "step_records", 1, _steps(300, 200, 30.0))
    slower = watch.look()
    assert slower.step_ns == 30.0 * MS  # of the latest steps alone
    assert slower.version != found.version
    assert watch.look().version == slower.version


def test_a_run_that_writes_nothing_is_silent_then_gone(tmp_path: Path) -> None:
    _manifest(tmp_path / "run")
    written_s = (tmp_path / "run" / "manifest.json").stat().st_mtime
    later = (1.0, 59.0, 61.0, live_recording.GONE_AFTER_S + 1)
    told = [
        live_recording.Watch(str(tmp_path / "run"), clock=lambda after_s=after_s: written_s + after_s).look().status for after_s in later
    ]
    assert told == ["recording", "recording", "silent", "gone"]


def test_a_finished_run_and_one_that_lost_its_recording(tmp_path: Path) -> None:
    _manifest(tmp_path / "done", finished=True, steps=40)
    assert (live_recording.Watch(str(tmp_path / "done"), clock=lambda: 4e9).look().status) == "finished"
    _manifest(tmp_path / "off", warnings=("recording was switched off, training goes on: OSError",))
    off = live_recording.Watch(str(tmp_path / "off")).look()
    assert (off.status, off.reason) == ("stopped", "recording was switched off, training goes on: OSError")


def test_a_bundle_may_begin_later_but_not_never(tmp_path: Path) -> None:
    now = [0.0]
    watch = live_recording.Watch(str(tmp_path / "later"), clock=lambda: now[0])
    assert watch.look().status == "waiting"
    _manifest(tmp_path / "later")
    assert watch.look().status == "recording"
    never = live_recording.Watch(str(tmp_path / "never"), clock=lambda: now[0])
    now[0] = live_recording.BEGUN_WITHIN_S + 1
    with pytest.raises(InputError, match="no bundle was begun there within 301 s"):
        never.look()


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("{}")
    with pytest.raises(InputError, match="this is a file"):
        live_recording.Watch(str(tmp_path / "trace.json"))
    _manifest(tmp_path / "run")
    with pytest.raises(InputError, match="no rank 3"):
        live_recording.Watch(str(tmp_path / "run"), rank=3).look()


def test_steps_whose_phases_are_not_known_leave_what_they_tell_unknown(tmp_path: Path) -> None:
    _manifest(tmp_path / "run")
    rows = [{"step": k, "start_unix_ns": k, "wall_ns": 5 * MS, "window": "plain"} for k in range(3)]
    _segment(tmp_path / "run", "step_records", 0, rows)
    found = live_recording.Watch(str(tmp_path / "run")).look()
    assert (found.loader_share, found.samples_per_s, found.sampled) == (None, None, {})
    assert found.step_ns == 5 * MS


def test_one_rank_of_several_is_followed(tmp_path: Path) -> None:
    _manifest(tmp_path / "one")
    watch = live_recording.Watch(str(tmp_path / "one"))
    watch.look()
    assert watch.rank is None
    _manifest(tmp_path / "two")
    (tmp_path / "two" / "manifest-rank1.json").write_bytes(encode_manifest(Manifest(rank=1)))
    watch = live_recording.Watch(str(tmp_path / "two"))
    assert watch.rank is None  # nothing was looked at yet
    watch.look()
    assert watch.rank == 0
    assert live_recording.Watch(str(tmp_path / "two"), rank=1).rank == 1
