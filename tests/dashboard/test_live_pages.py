"""The pages that follow a run: what they say of one that records, has ended, fell silent, or has nothing; of experiments while they run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dashclient import Client, analysed, small_bundle, small_trace, texts
from growingbundle import START_NS, Bundle, aged, gpu_info
from outcomes import experiments, hostile, pair

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
from gpudiag_dashboard import library
from gpudiag_dashboard.app import create_app
from gpudiag_dashboard.components import View
from gpudiag_dashboard.pages import bundles
from gpudiag_dashboard.pages import memory as memory_page
from gpudiag_dashboard.pages import telemetry as telemetry_page

from gpudiag.experiment import store as stores
from gpudiag.experiment.plan import Options, Plan
from gpudiag.experiment.store import BaselineRow, ComparisonRow, PairRow
from gpudiag.model.experiment import Baseline, Comparison, FixCall
from gpudiag.model.memory import MemoryReport, MemoryRow, PoolRow

BAD = ("<script>alert(1)</script>", "\x1b[31mred\x1b[0m", "\u202egnp.exe", '"onerror="x', "x" * 10_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def client(folder: Path) -> Client:
    small_trace(folder / "trace.json")
    return Client(create_app(folder))


def recording(folder: Path, name: str) -> Bundle:
    bundle = Bundle(folder / name, telemetry=gpu_info(), created_unix_ns=time.time_ns())
    bundle.steps(20)
    bundle.samples([k * 50_000_000 for k in range(40)], power_w=[300.0] * 40, sm_clock_mhz=[1500.0] * 40, clock_event_reasons=[0x4] * 40)
    return bundle


@pytest.fixture(autouse=True, scope="module")
def _listed_anew() -> Iterator[None]:
    """The library looks at the folder whenever it is asked, not at most once a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "LISTING_S", -1.0)
        yield


def followed(client: Client, name: str, shown: Any = None, more: str = "") -> dict[str, Any]:
    values = {"address.search": f"?bundle={name}{more}", "address.pathname": "/telemetry", "telemetry-shown.data": shown}
    return client.written("telemetry-state.children", values)


# -- telemetry --------------------------------------------------------------------------------------------------------------


def test_a_run_is_followed_until_it_is_finished(client: Client, folder: Path) -> None:
    bundle = recording(folder, "followed")
    first = followed(client, "followed")
    assert "20 steps, 40 samples so far" in texts(first["telemetry-state"]["children"])
    assert first["telemetry-clock"] == {"disabled": False, "interval": telemetry_page.LIVE_MS}
    assert first["telemetry-strips"]["figure"]["data"]
    told = texts(first["telemetry-words"]["children"])
    assert "SW Power Cap" in told
    assert "30 J" in told, told
    shown = first["telemetry-shown"]["data"]
    assert "telemetry-strips" not in followed(client, "followed", shown)  # nothing was written: nothing is drawn anew
    bundle.steps(5)
    again = followed(client, "followed", shown)
    assert "25 steps" in texts(again["telemetry-state"]["children"])
    assert again["telemetry-strips"]["figure"]["data"] != first["telemetry-strips"]["figure"]["data"]
    bundle.finish()
    last = followed(client, "followed", again["telemetry-shown"]["data"])
    assert last["telemetry-clock"]["disabled"] is True
    assert "so far" not in texts(last["telemetry-state"]["children"])


def test_a_run_that_fell_silent_says_so_and_is_asked_less_often(client: Client, folder: Path) -> None:
    bundle = recording(folder, "silent")
    bundle.save(created_unix_ns=START_NS)
    aged(bundle.path, 4 * 3600, time.time())
    found = followed(client, "silent")
    assert "nothing was written for 4.0 h" in texts(found["telemetry-state"]["children"])
    assert found["telemetry-clock"] == {"disabled": False, "interval": telemetry_page.SILENT_MS}


def test_the_list_tells_the_pace_of_a_run_that_records(client: Client, folder: Path) -> None:
    bundle = recording(folder, "pace")
    bundle.steps(30, 250_000_000)
    rows = {one.entry.name: bundles.build_listed_row(one) for one in bundles.list_recordings(library.Library(folder))}
    step = rows["pace"].cells[6]
    assert (step.text, step.details) == ("250 ms", ("now: the last 50 unprofiled steps",))
    bundle.finish()
    assert bundles.list_recordings(library.Library(folder))[0].pace is None


def test_the_axis_is_chosen_by_the_address(client: Client, folder: Path) -> None:
    recording(folder, "axis").finish()
    by_step = followed(client, "axis")["telemetry-strips"]["figure"]["layout"]["xaxis"]
    by_time = followed(client, "axis", more="&axis=time")["telemetry-strips"]["figure"]["layout"]["xaxis"]
    assert (by_step["title"]["text"], by_step["range"]) == ("step", [0, 20])
    assert (by_time["title"]["text"], by_time["range"]) == ("time since the run began (s)", [0, 2])


def test_ranks_are_chosen_by_the_address_and_one_that_is_not_there_is_said(client: Client, folder: Path) -> None:
    recording(folder, "ranks").finish()
    other = Bundle(folder / "ranks", rank=1)
    other.steps(7)
    other.finish()
    assert "20 steps" in texts(followed(client, "ranks")["telemetry-state"]["children"])
    assert "7 steps" in texts(followed(client, "ranks", more="&rank=1")["telemetry-state"]["children"])
    answer = client.callback(
        "telemetry-state.children",
        {"address.search": "?bundle=ranks&rank=9", "address.pathname": "/telemetry", "telemetry-shown.data": None},
    )
    assert answer.status_code == 200
    assert "no rank 9" in answer.get_data(as_text=True)


def test_a_recording_without_samples_and_a_trace_say_what_to_do(client: Client, folder: Path) -> None:
    Bundle(folder / "nothing")
    found = followed(client, "nothing")
    assert found["telemetry-box"]["style"] == {"display": "none"}
    assert "Nothing was sampled yet" in texts(found["telemetry-words"]["children"])
    found = followed(client, "trace.json")
    assert "gpudiag run train.py" in texts(found["telemetry-words"]["children"])
    assert found["telemetry-clock"]["disabled"] is True


def test_reasons_of_a_foreign_manifest_are_harmless(client: Client, folder: Path) -> None:
    info = msgspec.structs.replace(gpu_info(), missing={"power_w": "".join(BAD), BAD[0]: "x"}, limits={"power_limit_w": 1e308, BAD[0]: 1.0})
    bundle = Bundle(folder / "hostile", telemetry=info)
    bundle.steps(3)
    bundle.samples([0], temperature_c=[50.0])
    bundle.finish()
    told = texts(followed(client, "hostile")["telemetry-words"]["children"])
    assert "\x1b" not in told
    assert "\u202e" not in told
    assert len(told) < 3_000
    assert "<script>" in told  # as text


# -- memory -----------------------------------------------------------------------------------------------------------------


def peak(**changes: Any) -> MemoryReport:
    rows = (MemoryRow("train.py(12): step", 700, 3, "activations"), MemoryRow(BAD[0], 300, 1, "temporary"))
    made = MemoryReport(device="cuda:0", peak_bytes=1000, by_category={"activations": 700, "temporary": 300}, by_site=rows, by_op=rows[:1])
    return msgspec.structs.replace(made, **changes)


def plain(component: Any) -> str:
    return texts(component.to_plotly_json() if not isinstance(component, list) else [one.to_plotly_json() for one in component])


def test_categories_have_bars_as_long_as_their_shares_of_the_peak() -> None:
    told = str(memory_page.build_peak(peak(), View("/memory", "a")))
    assert told.index("activations saved for backward") < told.index("'width': '70.00%'") < told.index("'width': '30.00%'")


@pytest.fixture(scope="module")
def plain_bundle(client: Client, folder: Path) -> Path:
    """A recording without memory and experiments, which was analysed."""
    bundle = small_bundle(folder / "plain")
    deadline = time.monotonic() + 120
    while client.go("/memory", "?bundle=plain")["poll"]["disabled"] is False:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return bundle


def test_memory_that_was_not_recorded_says_how_to_record_it(client: Client, plain_bundle: Path) -> None:
    found = client.written(
        "memory-peak.children", {"address.search": "?bundle=plain", "address.pathname": "/memory", "memory-run.id": "memory-run"}
    )
    assert "gpudiag run --memory train.py" in texts(found["memory-peak"]["children"])
    assert found["memory-run"]["style"] == {"display": "none"}


def test_places_are_listed_by_what_is_known_of_them() -> None:
    told = str(memory_page.build_peak(peak(), View("/memory", "a")))
    assert told.index("By call site") < told.index(BAD[0]) < told.index("By op")
    assert "By module" not in told


def test_segments_of_the_allocator_are_shown_where_a_snapshot_was_taken() -> None:
    pools = (PoolRow("large", 7, 3, 20_000_000, 15_000_000, 4_000_000),)
    told = str(memory_page.build_peak(peak(pools=pools, retries=2, reserved_peak_bytes=20_000_000), View("/memory", "a")))
    for text in ("large", "stream", "20.0 MB", "15.0 MB", "4.00 MB", "2 allocation retries"):
        assert text in told
    assert "segments" not in str(memory_page.build_peak(peak(), View("/memory", "a")))


# -- experiments ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(folder: Path) -> stores.Store:
    """A series that is measured as long as this object lives."""
    return stores.begin_store(small_bundle(folder / "tried"), Plan(("python", "train.py"), (FixCall("tf32"),)))


@pytest.fixture(scope="module")
def tried(client: Client, running: stores.Store) -> Path:
    """An analysed recording with a result and a series that runs."""
    bundle = running.bundle
    done = stores.begin_store(bundle, Plan(("python", "train.py"), (FixCall("bf16"),), options=Options(command_shown=("train.py", "--x"))))
    done.finish(experiments(complete=True))
    running.append(BaselineRow(Baseline(command=("python",), step_ns=10**7)))
    for ratio in (1.30, 1.31, 1.32, 1.30, 1.31):
        running.append(PairRow("compare:tf32", pair(ratio)))
    deadline = time.monotonic() + 120
    while client.go("/experiments", "?bundle=tried")["poll"]["disabled"] is False:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return bundle


def results(client: Client, name: str = "tried", seen: Any = None) -> dict[str, Any]:
    values = {"address.search": f"?bundle={name}", "address.pathname": "/experiments", "experiments-seen.data": seen}
    return client.written("experiments-job.children", values)


def told_by(found: dict[str, Any]) -> str:
    """Return what the page says of results and of what runs, from top to bottom."""
    return texts([found["experiments-news"]["children"], found["experiments-results"]["children"]])


def test_pairs_that_come_are_shown_without_a_verdict_beside_the_results(client: Client, tried: Path) -> None:
    found = results(client)
    told = told_by(found)
    assert "Running: tf32" in told
    assert "5 process pairs so far" in told
    assert "proved faster" not in told.partition("Results, against")[0]
    assert "x1.83 [1.79, 1.87] samples/s" in told
    assert "So far: tf32 x1.31 [" in told
    assert "1.83x faster (95 % CI 1.79 to 1.87), trains the same; proved" in told
    assert "Upper bound: 50 % less time a sample; measured: 45 %" in told
    assert found["experiments-clock"]["interval"] == 2_000
    assert found["experiments-stop"]["style"] == {"display": "none"}  # it was not started here


def test_they_are_drawn_anew_only_where_a_row_came(client: Client, tried: Path, running: stores.Store) -> None:
    seen = results(client)["experiments-seen"]["data"]
    assert "experiments-results" not in results(client, seen=seen)
    path = running.path
    with open(path, "ab") as file:
        file.write(msgspec.json.encode(PairRow("compare:tf32", pair(1.31))) + b"\n")
    again = results(client, seen=seen)
    assert "6 process pairs so far" in told_by(again)
    with open(path, "ab") as file:
        over = Comparison(verdict="faster", ratio=1.31, interval=(1.29, 1.33), p=1e-4, pairs=6)
        file.write(msgspec.json.encode(ComparisonRow("compare:tf32", over, 60.0)) + b"\n")
    told = told_by(results(client)).partition("Results, against")[0]
    assert "pairs so far" not in told
    assert "faster" in told


def test_one_that_was_killed_is_not_called_running_from_that_moment_on(client: Client, tried: Path, running: stores.Store) -> None:
    assert "Running: tf32" in told_by(results(client))
    running._held.close()  # type: ignore[union-attr]  # as the system does when a process ends
    told = told_by(results(client))
    assert "Running" not in told
    assert "Not complete: tf32" in told
    assert "before its plan was done" in told


def test_one_of_a_version_without_locks_is_taken_for_ended_when_it_is_silent(client: Client, folder: Path) -> None:
    bundle = small_bundle(folder / "old")
    (bundle / "experiments").mkdir()
    rows = bundle / "experiments" / "20260101-000000.jsonl"
    rows.write_bytes(msgspec.json.encode(Plan(("python", "train.py"), (FixCall("tf32"),))) + b"\n")
    analysed(client, "old")
    assert "Running: tf32" in told_by(results(client, "old"))
    os.utime(rows, (time.time() - 3600,) * 2)
    assert "Not complete: tf32" in told_by(results(client, "old"))


def test_results_that_stand_alone_are_listed_and_shown(client: Client, folder: Path) -> None:
    alone = stores.begin_store(folder / "alone", Plan(("python", "train.py"), (FixCall("bf16"),)))
    listed = {entry.name: entry for entry in library.Library(folder).bundles()}
    assert (listed["alone"].kind, listed["alone"].status, listed["alone"].program) == ("experiments", "live", "python train.py")
    alone.finish(experiments(complete=True))
    listed = {entry.name: entry for entry in library.Library(folder).bundles()}
    assert listed["alone"].status == "finished"
    (row,) = (one for one in bundles.list_recordings(library.Library(folder)) if one.entry.name == "alone")
    told = told_by(results(client, "alone"))
    assert row.verdict
    assert row.verdict in told
    assert "Results, against" in told
    frame = client.go("/overview", "?bundle=alone")
    assert "These are results of experiments, without a recording" in texts(frame["main"]["children"])
    assert frame["poll"]["disabled"] is True


def test_a_recording_without_experiments_and_a_trace_say_what_to_do(client: Client, plain_bundle: Path) -> None:
    assert "Nothing was tried on this recording yet" in texts(results(client, "plain")["experiments-results"]["children"])
    assert "Nothing was tried on this recording yet" in texts(results(client, "trace.json")["experiments-results"]["children"])


def test_names_in_foreign_results_are_harmless(client: Client, folder: Path) -> None:
    bundle = small_bundle(folder / "foreign")
    (bundle / "experiments").mkdir()
    (bundle / "experiments" / "1.json").write_bytes(msgspec.json.encode(hostile(BAD)))
    values = {"address.search": "?bundle=foreign", "address.pathname": "/experiments", "experiments-seen.data": None}
    text = client.callback("experiments-job.children", values).get_data(as_text=True)
    assert "\\u001b" not in text
    assert "\\u202e" not in text
    assert "\u202e" not in text
    assert "x" * 3_000 not in text
    assert "dangerously" not in text
