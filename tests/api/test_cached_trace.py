"""The second read of a large trace returns the same tables, and never those of another one."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import polars as pl
import pytest
from cachedtraces import entries
from dashclient import small_bundle, small_trace
from examples import sample
from nsysfile import NsysFile

from gpudiag import cache, inputs
from gpudiag.cache import NO_CACHE
from gpudiag.errors import InputError
from gpudiag.model.trace import TRACE_TABLES, Trace
from gpudiag.trace import read_trace as read_anew


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read from traces themselves."""
    seen: list[str] = []
    monkeypatch.setattr(inputs, "read_trace", lambda path: seen.append(str(path)) or read_anew(path))
    return seen


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return small_trace(tmp_path / "t.json")


def assert_same(one: Trace, other: Trace) -> None:
    assert one.meta == other.meta
    for name in TRACE_TABLES:
        first, second = getattr(one, name), getattr(other, name)
        assert first.schema == second.schema, name
        assert first.equals(second), name


REAL = (
    "mi300x_resnet18_ddp8_actckpt_train_rank0",
    "a100_dlrm_train_rank3of8",
    "a100-80g_sam_fast_compiled_cudagraph",
    "v100_resnet50_train_2021_memory_callstack",
)


@pytest.mark.usefixtures("keeping")
@pytest.mark.parametrize("name", sample(REAL))
def test_tables_of_real_traces_are_the_same_after_a_round_trip(traces: Path, tmp_path: Path, reads: list[str], name: str) -> None:
    path = tmp_path / f"{name}.json.gz"
    shutil.copyfile(traces / path.name, path)
    first = inputs.load_trace(path)
    second = inputs.load_trace(path)
    assert reads == [str(path)]
    assert_same(first, second)
    assert sum(getattr(second, table).height for table in TRACE_TABLES) > 1000
    for table in TRACE_TABLES:  # names that are the same are the same category, also beside those of another table
        frame = getattr(second, table)
        if "name" in frame.columns and frame.schema["name"] == pl.Categorical:
            assert frame["name"].cast(pl.String).equals(getattr(first, table)["name"].cast(pl.String))


@pytest.mark.usefixtures("keeping")
def test_a_trace_of_a_bundle_is_kept_as_one_of_the_bundle(tmp_path: Path, reads: list[str]) -> None:
    bundle = small_bundle(tmp_path / "run")
    path = bundle / "trace" / "rank0-w0.json.gz"
    assert_same(inputs.load_trace(path), inputs.load_trace(path))
    assert len(reads) == 1
    assert len(entries(bundle)) == 1
    assert sorted(child.name for child in (bundle / "trace").iterdir()) == ["rank0-w0.json.gz"]


@pytest.mark.usefixtures("keeping")
def test_an_export_of_nsight_systems_is_kept_too(tmp_path: Path, reads: list[str]) -> None:
    file = NsysFile()
    file.gpu()
    file.call("cudaLaunchKernel", 100, 110, 1)
    file.kernel("gemm", 120, 180, 1)
    path = file.write(tmp_path / "n.sqlite")
    assert_same(inputs.load_trace(path), inputs.load_trace(path))
    assert len(reads) == 1


def test_nothing_is_kept_of_a_small_trace(trace: Path, reads: list[str]) -> None:
    inputs.load_trace(trace)
    inputs.load_trace(trace)
    assert len(reads) == 2
    assert not entries(trace)


@pytest.mark.usefixtures("keeping")
def test_nothing_is_kept_where_it_is_switched_off(trace: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs.load_trace(trace)
    monkeypatch.setenv(NO_CACHE, "1")
    inputs.load_trace(trace)
    assert len(reads) == 2


@pytest.mark.usefixtures("keeping")
def test_another_content_under_the_same_name_is_read(trace: Path, reads: list[str]) -> None:
    first = inputs.load_trace(trace)
    small_trace(trace, "aten::bmm")
    second = inputs.load_trace(trace)
    assert len(reads) == 2
    assert "aten::bmm" in second.ops["name"].cast(pl.String).to_list()
    assert_same(first, inputs.load_trace(small_trace(trace)))  # the one before is still kept
    assert len(reads) == 2


@pytest.mark.usefixtures("keeping")
def test_a_trace_that_grows_while_it_is_read_is_not_kept(trace: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = trace.read_text()

    def read_and_grow(path: Path) -> Trace:
        found = read_anew(path)
        trace.write_text(text + " ")
        return found

    monkeypatch.setattr(inputs, "read_trace", read_and_grow)
    inputs.load_trace(trace)
    assert not entries(trace.parent)
    inputs.load_trace(trace)  # it has grown to its end: the second writing changes nothing
    assert len(entries(trace.parent)) == 1


@pytest.mark.usefixtures("keeping")
def test_another_gpudiag_reads_it_anew(trace: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs.load_trace(trace)
    monkeypatch.setattr(cache, "digest_code", lambda: "another")
    inputs.load_trace(trace)
    assert len(reads) == 2


@pytest.mark.usefixtures("keeping")
def test_faults_of_the_input_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("no trace")
    for path in (tmp_path / "t.json", tmp_path / "gone.json", tmp_path):
        with pytest.raises(InputError):
            inputs.load_trace(path)
    assert not entries(tmp_path)


@pytest.mark.usefixtures("keeping")
def test_a_trace_that_was_cut_off_is_kept_with_its_warning(trace: Path, reads: list[str]) -> None:
    cut = trace.with_name("cut.json.gz")
    cut.write_bytes(gzip.compress(trace.read_bytes()[:-200]))
    first, second = inputs.load_trace(cut), inputs.load_trace(cut)
    assert first.meta.truncated
    assert_same(first, second)
    assert len(reads) == 1
