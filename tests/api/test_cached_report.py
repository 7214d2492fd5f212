"""A report is made once for each state of all that goes into it, and anew when anything of that changes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from cachedtraces import entries
from dashclient import small_bundle, small_trace
from examples import sample

from gpudiag import api, cache, pipeline
from gpudiag.cache import NO_CACHE, CachedResult, ResultKey
from gpudiag.cli import config as config_file
from gpudiag.comparison import recordings as comparison
from gpudiag.comparison.recordings import compare
from gpudiag.diagnosis.config import Config
from gpudiag.errors import InputError
from gpudiag.hardware.peaks_cache import store_peaks
from gpudiag.model.hardware import Device
from gpudiag.model.job import RankRow

pytestmark = pytest.mark.usefixtures("keeping")

RULE = """
id: EFF-01
override: true
title: "%s"
"""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each report that is made."""
    seen: list[int] = []
    original = pipeline.diagnose_window

    def diagnose_and_count(*arguments: object, **options: object) -> pipeline.AnalysedRecording:
        seen.append(1)
        return original(*arguments, **options)

    for module in (pipeline, comparison):
        monkeypatch.setattr(module, "diagnose_window", diagnose_and_count)
    return seen


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return small_bundle(tmp_path / "run")


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "EFF-01.yaml").write_text(RULE % "One title")
    return tmp_path / "rules"


def test_the_second_report_is_the_first_one(bundle: Path, made: list[int]) -> None:
    first, second = api.diagnose(bundle), api.diagnose(bundle)
    assert made == [1]
    assert first.json() == second.json()
    assert first.data == second.data
    assert (first.text(), first.markdown(), first.html()) == (second.text(), second.markdown(), second.html())
    assert [path.parent.parent.name for path in entries(bundle)] == ["report", "tables"]


def test_a_folder_and_a_trace_are_kept_apart(tmp_path: Path, made: list[int]) -> None:
    for rank in range(2):
        small_trace(tmp_path / f"rank{rank}.json")
    alone = [api.diagnose(tmp_path, rank=1).json() for _ in range(2)]
    one = [api.diagnose(tmp_path / "rank1.json").json() for _ in range(2)]
    assert len(made) == 2
    assert alone[0] == alone[1] != one[0] == one[1]
    assert {path.parent.name for path in entries(tmp_path, "report")} == {"all", "rank1.json"}


@pytest.mark.slow
def test_a_job_is_kept_whole_and_rank_by_rank(tmp_path: Path, made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from gpudiag import analysis

    summed: list[int] = []
    original = analysis.rank_summary.summarise_rank
    monkeypatch.setattr(analysis.rank_summary, "summarise_rank", lambda found, **of: summed.append(of["rank"]) or original(found, **of))
    for number in range(3):
        small_trace(tmp_path / f"rank{number}.json")
    first, second = api.diagnose(tmp_path), api.diagnose(tmp_path)
    assert first.data.ranks is not None
    assert [row.rank for row in first.data.ranks] == sorted(summed) == [0, 1, 2]
    assert first.json() == second.json()
    assert len(made) == 1
    small_trace(tmp_path / "rank1.json", "aten::bmm")
    api.diagnose(tmp_path)
    assert len(made) == 2
    assert sorted(summed) == [0, 1, 1, 2]  # the other two are as they were


@pytest.mark.slow
def test_options_are_told_apart(bundle: Path, made: list[int]) -> None:
    api.diagnose(bundle)
    for number, options in enumerate(
        ({"rank": 0}, {"window": 0}, {"modules": True}, {"gpu_hour_price": 2.0}, {"planned_steps": 9}), start=2
    ):
        for _ in range(2):
            api.diagnose(bundle, **options)
        assert len(made) == number, options
    assert len(entries(bundle, "report")) == 6


def add_experiment(bundle: Path) -> None:
    (bundle / "experiments").mkdir()
    (bundle / "experiments" / "20260101-000000.json").write_text("{}")


def replace_trace(bundle: Path) -> None:
    """Replace the trace by another one of the same size and time of change."""
    path = bundle / "trace" / "rank0-w0.json.gz"
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[4:8] = b"\1\2\3\4"  # the time in the gzip header: the content is another one, the text is not
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def change_manifest(bundle: Path) -> None:
    text = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(text.replace('"steps":50', '"steps":51'))


def measure_peaks(_: Path) -> None:
    store_peaks(Device(id="cpu", name="CPU", kind="cpu", provenance="measured", source="a test"), "key")


def add_steps(bundle: Path) -> None:
    (bundle / "steps" / "rank0").mkdir(parents=True)
    (bundle / "steps" / "rank0" / "0.parquet").write_text("damaged")


@pytest.mark.parametrize(
    "change", sample([add_experiment, replace_trace, change_manifest, measure_peaks, add_steps]), ids=lambda change: change.__name__
)
def test_what_goes_into_a_report_makes_it_stale(bundle: Path, made: list[int], change: Callable[[Path], None]) -> None:
    api.diagnose(bundle)
    change(bundle)
    for _ in range(2):
        api.diagnose(bundle)
    assert len(made) == 2


@pytest.mark.slow
def test_a_changed_rule_is_judged(bundle: Path, rules: Path, made: list[int]) -> None:
    pages = []
    for title in ("One title", "One title", "Another title", "Another title"):
        (rules / "EFF-01.yaml").write_text(RULE % title)
        pages.append(api.diagnose(bundle, rules_dirs=[rules]).html())
    assert len(made) == 2
    assert ["One title" in page for page in pages] == [True, True, False, False]  # the page shows the rules in force
    assert ["Another title" in page for page in pages] == [False, False, True, True]
    (rules / "EFF-01.yaml").write_text("no rule")
    with pytest.raises(InputError):
        api.diagnose(bundle, rules_dirs=[rules])


@pytest.mark.slow
def test_a_changed_config_counts(bundle: Path, made: list[int]) -> None:
    configs = [Config(), Config(disable=("OVH-01",)), Config(thresholds={"OVH-01": {"min_share": 0.9}})]
    for number, config in enumerate(configs, start=1):
        for _ in range(2):
            api.diagnose(bundle, config=config)
        assert len(made) == number


def test_another_gpudiag_makes_it_anew(bundle: Path, made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    api.diagnose(bundle)
    monkeypatch.setattr(cache, "digest_code", lambda: "another")
    api.diagnose(bundle)
    assert len(made) == 2


def test_a_recording_that_changes_while_the_report_is_made_is_not_kept(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = pipeline.diagnose_window

    def diagnose_and_change(*arguments: object, **options: object) -> pipeline.AnalysedRecording:
        found = original(*arguments, **options)
        change_manifest(bundle)
        return found

    monkeypatch.setattr(pipeline, "diagnose_window", diagnose_and_change)
    api.diagnose(bundle)
    assert not entries(bundle, "report")


def test_it_can_be_switched_off(bundle: Path, made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    api.diagnose(bundle, config=Config(cache=False))
    assert not entries(bundle)
    assert NO_CACHE not in os.environ
    monkeypatch.setenv(NO_CACHE, "1")
    api.diagnose(bundle)
    assert not entries(bundle)
    assert len(made) == 2


def test_the_config_file_switches_it_off(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.gpudiag]\ncache = false\n")
    assert config_file.find_config(tmp_path).cache is False
    (tmp_path / "gpudiag.toml").write_text("")
    assert config_file.find_config(tmp_path).cache is True
    (tmp_path / "gpudiag.toml").write_text('disable = []\ncache = "no"\n')
    with pytest.raises(InputError, match=r"gpudiag.toml:2: cache: true or false is needed"):
        config_file.find_config(tmp_path)


@pytest.mark.slow
def test_a_report_of_somebody_else_is_refused(bundle: Path, made: list[int]) -> None:
    first = api.diagnose(bundle).json()
    (entry,) = entries(bundle, "report")
    place = cache.find_place(bundle)
    assert place is not None
    slot = cache.Slot(place, "report", "all", entry.stem)
    for data in (b"", b"no report", msgspec.msgpack.encode({"schema_version": "x"}), b"\x91" * 10_000):
        assert cache.store_entry(slot, [("data", data)])
        assert api.diagnose(bundle).json() == first
    assert len(made) == 5


def test_a_job_with_a_rank_that_could_not_be_read_is_not_kept(bundle: Path) -> None:
    whole = api.diagnose(bundle).data
    partly = msgspec.structs.replace(whole, ranks=(RankRow(rank=0), RankRow(rank=1, unread="its worker was killed")))
    assert cache.is_complete(whole)
    assert not cache.is_complete(partly)


def test_a_comparison_is_the_same_when_its_sides_are_kept(bundle: Path, tmp_path: Path, made: list[int]) -> None:
    trace = small_trace(tmp_path / "b.json", "aten::bmm")
    first, second = compare(bundle, trace), compare(bundle, trace)
    assert len(made) == 2
    assert first.json() == second.json()
    assert len(entries(bundle, "measured")) == len(entries(tmp_path, "measured")) == 1


def test_bytes_are_made_once(tmp_path: Path) -> None:
    trace = small_trace(tmp_path / "t.json")
    key = ResultKey("rank", (trace,), asked=("window 0",), rank=3)
    keys = (key, key, key._replace(rank=4), key._replace(asked=()))
    found = []
    for number, one in enumerate(keys):
        found.append(CachedResult(one).load(bytes))
        CachedResult(one).store(b"%d" % number)
    assert found == [None, b"0", None, None]
    changing = CachedResult(key)
    small_trace(trace, "aten::bmm")
    assert CachedResult(key).load(bytes) is None
    changing.store(b"of what it was")
    assert CachedResult(key).load(bytes) is None
    remote = CachedResult(ResultKey("rank", ("memory://t.json",)))
    remote.store(b"of a URL")
    assert remote.load(bytes) is None


def test_a_folder_that_was_moved_is_read_anew(bundle: Path, tmp_path: Path, made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    api.diagnose("run")
    (tmp_path / "moved").mkdir()
    bundle.rename(tmp_path / "moved" / "run")
    monkeypatch.chdir(tmp_path / "moved")
    api.diagnose("run")
    assert len(made) == 2


def test_small_recordings_cost_neither_a_digest_nor_a_folder(bundle: Path, made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MIN_TEXT_BYTES", 32_000_000)
    monkeypatch.setattr(cache, "digest_file", lambda *_, **__: pytest.fail("read"))
    api.diagnose(bundle)
    api.diagnose(bundle)
    assert len(made) == 2
    assert not entries(bundle)


@pytest.mark.slow
def test_a_hit_takes_no_time(bundle: Path) -> None:
    api.diagnose(bundle)
    cache.digest_code()
    began = time.process_time()
    api.diagnose(bundle)
    assert time.process_time() - began < 0.1


_PRINT = """
import sys
from gpudiag.api import diagnose
from gpudiag import cache
cache.MIN_TEXT_BYTES = 1
found = diagnose(sys.argv[1])
found.text()
heavy = ("polars", "numpy", "yaml", "gpudiag.roofline", "gpudiag.timeline", "gpudiag.facts.catalogue", "gpudiag.diagnosis.engine")
heavy += ("gpudiag.capture.session", "gpudiag.trace", "gpudiag.report.experiment")
print([name for name in heavy if name in sys.modules])
"""


@pytest.mark.slow
def test_printing_what_is_kept_loads_no_tables_facts_or_rules(bundle: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def loaded() -> str:
        return subprocess.run(
            [sys.executable, "-c", _PRINT, str(bundle)], env=environment, check=True, capture_output=True, text=True
        ).stdout

    assert "gpudiag.facts.catalogue" in loaded()
    assert loaded() == "[]\n"
