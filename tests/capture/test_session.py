"""What a recorded loop leaves in the bundle, and that the loop itself is as if nobody had looked."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import polars as pl
import pytest
import torch
from noticewords import format_notices
from torch.utils.data import DataLoader, IterableDataset

import gpudiag
from gpudiag.bundle.reader import open_bundle
from gpudiag.capture.batch_contents import count_samples
from gpudiag.capture.session import Session
from gpudiag.errors import MissingDependencyError, UsageError

Steps = Callable[[Path], list[dict[str, Any]]]
SCHEDULED = ["plain"] * 5 + ["warm"] * 2 + ["timing"] * 6 + ["export", "warm", "sites", "sites", "export"]


def test_the_traces_hold_exactly_the_scheduled_steps(recorded: Path, profiler_steps: Steps) -> None:
    bundle = open_bundle(recorded)
    timing, sites = (profiler_steps(path) for path in bundle.windows())
    assert [event["name"] for event in timing] == [f"ProfilerStep#{step}" for step in range(7, 13)]
    assert [event["name"] for event in sites] == ["ProfilerStep#15", "ProfilerStep#16"]
    assert [(w.kind, w.first_step, w.steps, w.with_stack) for w in bundle.manifest.windows] == [
        ("timing", 7, 6, False), ("sites", 15, 2, True),
    ]  # fmt: skip


def test_the_timing_window_has_shapes_and_no_stacks_the_site_window_has_stacks(recorded: Path, trace_of: Callable[[Path], Any]) -> None:
    timing, sites = (trace_of(path)["traceEvents"] for path in open_bundle(recorded).windows())
    linear = next(event for event in timing if event["name"] == "aten::addmm")
    assert linear["args"]["Input Dims"][1:3] == [[4, 8], [8, 16]]
    assert not [event for event in timing if event.get("cat") == "python_function"]
    frames = [event["name"] for event in sites if event.get("cat") == "python_function"]
    assert any("conftest.py" in name and "train" in name for name in frames)


def test_every_step_has_a_row_with_what_the_profiler_did(recorded: Path) -> None:
    rows = open_bundle(recorded).step_records
    assert rows["step"].to_list() == list(range(24))
    assert rows["window"].to_list()[:18] == SCHEDULED
    assert set(rows["window"][18:]) <= {"plain", "export"}  # export: while the trace is being compressed
    assert rows["samples"].to_list() == [4] * 24
    assert (rows["loader_wait_ns"] > 0).all()
    assert (rows["loader_wait_ns"] <= rows["wall_ns"]).all()
    assert rows.filter(pl.col("window") == "export")["written_bytes"].null_count() == (rows["window"] == "export").sum()


def test_steps_are_contiguous_and_sum_to_the_loop(recorded: Path) -> None:
    rows = open_bundle(recorded).step_records
    ends = rows["start_unix_ns"] + rows["wall_ns"]
    assert (rows["start_unix_ns"][1:] - ends[:-1]).abs().max() < 1_000_000  # two clocks, read one after the other
    total = ends[-1] - rows["start_unix_ns"][0]
    assert abs(total - rows["wall_ns"].sum()) < 1_000_000


def test_marks_align_with_the_annotations(recorded: Path, profiler_steps: Steps, trace_of: Callable[[Path], Any]) -> None:
    bundle = open_bundle(recorded)
    path = bundle.windows()[0]
    base = trace_of(path)["baseTimeNanoseconds"]
    rows = bundle.step_records.filter(pl.col("window") == "timing")
    pairs = list(zip(profiler_steps(path), rows.iter_rows(named=True), strict=True))
    # medians: a busy machine may stop the process between the mark and the record of one step
    assert median(abs(base + event["ts"] * 1000 - row["start_unix_ns"]) for event, row in pairs) < 2_000_000
    assert median(abs(event["dur"] * 1000 - row["wall_ns"]) for event, row in pairs) < 1_000_000


def test_the_manifest_knows_the_settings(tmp_path: Path, make_loop: type) -> None:
    loop = make_loop()
    with Session(tmp_path / "run") as prof:
        for batch in prof.steps(loop.loader()):
            with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
                pass
            loop.train(batch)
    manifest = open_bundle(prof.path).manifest
    assert manifest.steps == 24
    assert manifest.device_kind == ("gpu" if torch.cuda.is_initialized() else "cpu")
    assert manifest.machine.torch == torch.__version__
    settings = manifest.settings
    assert settings.autocast == ("cpu:bf16",)
    assert settings.threads == torch.get_num_threads()
    assert settings.float32_matmul_precision == torch.get_float32_matmul_precision()
    (optimizer,) = settings.optimizers
    assert (optimizer.name, optimizer.parameters, optimizer.tensors, optimizer.fused) == ("AdamW", 161, 4, False)
    assert settings.loader is not None
    assert (settings.loader.num_workers, settings.loader.batch_size) == (0, 4)


def test_losses_are_bit_identical_with_and_without(tmp_path: Path, make_loop: type) -> None:
    plain, profiled = make_loop(), make_loop()
    torch.manual_seed(1)
    for _ in range(2):
        plain.epoch(plain.loader())
    torch.manual_seed(1)
    with Session(tmp_path / "run") as prof:
        for _ in range(2):
            profiled.epoch(prof.steps(profiled.loader()))
    assert profiled.losses == plain.losses


def test_modes_and_threads_are_left_alone(tmp_path: Path, make_loop: type) -> None:
    def state() -> tuple[object, ...]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads(), torch.random.get_rng_state().tolist()

    loop = make_loop()
    before = state()
    with Session(tmp_path / "run") as prof, torch.no_grad():
        for _ in prof.steps(range(24)):
            assert not torch.is_grad_enabled()
    assert state() == before
    assert loop.losses == []


# -- loops of every kind ------------------------------------------------------------------------------------------------


def test_epochs_continue_the_numbering_and_leave_out_what_is_between(tmp_path: Path, make_loop: type, profiler_steps: Steps) -> None:
    loop, training_ns = make_loop(batches=20), 0
    with Session(tmp_path / "run") as prof:
        for _ in range(2):
            begun = time.perf_counter_ns()
            loop.epoch(prof.steps(loop.loader()))
            training_ns += time.perf_counter_ns() - begun
            time.sleep(0.3)  # stands for a validation pass
    rows = open_bundle(prof.path).step_records
    assert rows["step"].to_list() == list(range(40))
    assert rows["wall_ns"].sum() <= training_ns
    assert len(profiler_steps(open_bundle(prof.path).windows()[0])) == 6


def test_short_epochs_begin_the_window_again(tmp_path: Path, profiler_steps: Steps) -> None:
    with Session(tmp_path / "run", skip=5, warm=1, record=4, sites=0) as prof:
        for _ in range(3):
            for _batch in prof.steps(range(8)):
                torch.ones(4).sum()
    bundle = open_bundle(prof.path)
    assert format_notices(bundle.notices) == ()
    (window,) = bundle.manifest.windows
    assert (window.first_step, window.steps) == (9, 4)  # steps 6 and 7 of the first epoch were replaced
    assert [event["name"] for event in profiler_steps(bundle.windows()[0])] == [f"ProfilerStep#{step}" for step in range(9, 13)]


@pytest.mark.parametrize(("stop", "recorded_steps"), [(3, 0), (6, 0), (7, 0), (10, 3), (13, 6)])
def test_break_keeps_the_complete_steps(tmp_path: Path, profiler_steps: Steps, stop: int, recorded_steps: int) -> None:
    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(3, 2)

    with Session(tmp_path / "run") as prof:
        for index, _ in enumerate(prof.steps(endless())):
            torch.ones(4).sum()
            if index == stop:
                break
    bundle = open_bundle(prof.path)
    assert bundle.manifest.finished
    assert bundle.step_records["step"].to_list() == list(range(stop))
    found = [event["name"] for path in bundle.windows() for event in profiler_steps(path)]
    assert found == [f"ProfilerStep#{step}" for step in range(7, 7 + recorded_steps)]
    assert any(text.startswith("sites window: 0 of 2") for text in format_notices(bundle.notices))
    assert any(text.startswith("timing window") for text in format_notices(bundle.notices)) == (recorded_steps < 6)


@pytest.mark.parametrize("error", [ValueError("the user's own"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("at", [2, 9, 16])
def test_exceptions_of_the_loop_pass_unchanged(tmp_path: Path, error: BaseException, at: int) -> None:
    with pytest.raises(type(error)) as caught, Session(tmp_path / "run") as prof:  # noqa: PT012
        for index, _ in enumerate(prof.steps(range(30))):
            if index == at:
                raise error
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    bundle = open_bundle(prof.path)
    assert bundle.manifest.finished
    assert f"the training loop ended with {type(error).__name__}" in format_notices(bundle.notices)
    assert bundle.step_records.height == at
    assert not torch._C._autograd._profiler_enabled()


def test_exceptions_of_the_loader_pass_unchanged(tmp_path: Path) -> None:
    def broken() -> Iterator[int]:
        yield from range(9)
        raise OSError("corrupt shard")

    with pytest.raises(OSError, match="corrupt shard") as caught, Session(tmp_path / "run") as prof:
        for _ in prof.steps(broken()):
            pass
    assert caught.traceback[-1].name == "broken"
    assert open_bundle(prof.path).step_records.height == 9


def test_break_treats_the_loader_as_a_plain_loop_does(tmp_path: Path) -> None:
    closed = []

    def loader() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(True)

    with Session(tmp_path / "run") as prof:
        kept = loader()
        for _ in prof.steps(kept):
            break
        assert next(kept) == 1  # someone else still holds it: it goes on
        assert closed == []
        for _ in prof.steps(loader()):
            break
        assert closed == [True]  # nobody else does: it is closed at once


def test_a_batch_lives_no_longer_than_in_a_plain_loop(tmp_path: Path) -> None:
    alive: list[bool] = []
    with Session(tmp_path / "run") as prof:
        for batch in prof.steps(torch.ones(2) for _ in range(3)):
            reference = weakref.ref(batch)
            del batch
            alive.append(reference() is not None)
    assert alive == [False] * 3


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((5,), float(index)) for index in range(30))


@pytest.mark.parametrize("workers", [0, 1])
def test_iterable_datasets_and_workers(tmp_path: Path, workers: int) -> None:
    with Session(tmp_path / "run", sites=0) as prof:
        seen = [batch.sum().item() for batch in prof.steps(DataLoader(Stream(), batch_size=2, num_workers=workers))]
    assert len(seen) == 15
    bundle = open_bundle(prof.path)
    assert bundle.step_records["samples"].to_list() == [2] * 15
    assert bundle.manifest.settings.loader is not None
    assert bundle.manifest.settings.loader.num_workers == workers


def test_step_marks_boundaries_without_a_loader(tmp_path: Path, make_loop: type, profiler_steps: Steps) -> None:
    loop = make_loop()
    with Session(tmp_path / "run") as prof:
        for batch in loop.loader():
            loop.train(batch)
            prof.step()
    bundle = open_bundle(prof.path)
    assert bundle.step_records["step"].to_list() == list(range(24))
    assert bundle.step_records["window"].to_list()[:18] == SCHEDULED
    assert bundle.step_records["samples"].to_list() == [4] * 24
    waits = bundle.step_records["loader_wait_ns"]
    assert (waits > 0).all()
    assert (waits < bundle.step_records["wall_ns"]).all()
    assert len(profiler_steps(bundle.windows()[0])) == 6
    assert bundle.manifest.settings.loader is not None
    assert bundle.manifest.settings.loader.batch_size == 4


def test_step_without_any_plain_step_first(tmp_path: Path, profiler_steps: Steps) -> None:
    with Session(tmp_path / "run", skip=0, warm=1, record=2, sites=0) as prof:
        for _ in range(8):
            torch.ones(4).sum()
            prof.step()
    bundle = open_bundle(prof.path)
    assert bundle.step_records["window"].to_list()[:5] == ["plain", "warm", "timing", "timing", "export"]
    assert [event["name"] for event in profiler_steps(bundle.windows()[0])] == ["ProfilerStep#2", "ProfilerStep#3"]


def test_loader_wait_is_never_counted_twice(tmp_path: Path) -> None:
    class Slow(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.02)
            return torch.ones(1)

    with Session(tmp_path / "run") as prof:
        for _ in prof.steps(DataLoader(Slow())):
            pass
    rows = open_bundle(prof.path).step_records
    assert rows["loader_wait_ns"].min() >= 20_000_000
    assert (rows["loader_wait_ns"] <= rows["wall_ns"]).all()


def test_workers_that_start_and_end_with_each_epoch_count_as_waits(tmp_path: Path) -> None:
    class Started(DataLoader):  # type: ignore[type-arg]
        def _get_iterator(self) -> Any:
            time.sleep(0.03)
            return super()._get_iterator()

    loader = Started(torch.ones(4, 1))
    with Session(tmp_path / "run") as prof:
        for _ in range(3):
            for _ in loader:
                prof.step()
    waits = open_bundle(prof.path).step_records["loader_wait_ns"].to_list()
    assert [wait >= 30_000_000 for wait in waits[:12]] == [step % 4 == 0 for step in range(12)]


def test_steps_inside_steps_and_step_inside_steps_do_not_count_twice(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="not counted"), Session(tmp_path / "run") as prof:  # noqa: PT031
        for _ in prof.steps(range(6)):
            assert list(prof.steps("ab")) == ["a", "b"]
            prof.step()
    assert open_bundle(prof.path).step_records.height == 6


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(7, 2), 7),
        ((torch.ones(3), torch.ones(9)), 3),
        ({"label": 1, "x": torch.ones(5, 1)}, 5),
        ([{"a": (1, 2)}, {"b": torch.ones(6)}], 6),
        (torch.tensor(1.0), None),
        ("text", None),
        ([[[[torch.ones(2)]]]], None),
        (None, None),
    ],
)
def test_samples_of_a_batch(batch: object, samples: int | None) -> None:
    assert count_samples(batch) == samples


# -- what else the process does -------------------------------------------------------------------------------------------


def test_collections_saves_and_writes_leave_marks(tmp_path: Path, make_loop: type) -> None:
    loop = make_loop()
    cycles = [[] for _ in range(50_000)]
    with Session(tmp_path / "run") as prof:
        for index, _ in enumerate(prof.steps(range(6))):
            if index == 2:
                torch.save(loop.model.state_dict(), tmp_path / "model.pt")
            if index == 3:
                (tmp_path / "log.txt").write_text("loss 1.0")
                (tmp_path / "log.txt").read_text()
            if index == 4:
                gc.collect()
    marks = open_bundle(prof.path).host_marks
    (save,) = marks.filter(kind="save").iter_rows(named=True)
    assert (save["name"], save["step"]) == ("torch.save", 2)
    assert save["duration_ns"] > 0
    assert save["site"].startswith("test_session.py:")
    (write,) = marks.filter(kind="file_write", name="log.txt").iter_rows(named=True)
    assert (write["step"], write["duration_ns"]) == (3, 0)
    assert write["site"].startswith("test_session.py:")
    full = marks.filter(kind="gc", name="gen 2", step=4)
    assert full.height == 1
    assert full["duration_ns"][0] > 100_000
    assert len(cycles) == 50_000
    assert not marks.filter(pl.col("name").str.contains("json|manifest|rank0")).height


def test_waiting_for_the_disk_leaves_a_mark_where_the_loop_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpudiag.bundle import writer

    monkeypatch.setattr(os, "fsync", lambda _descriptor: time.sleep(0.001))
    with Session(tmp_path / "run") as prof:
        for _ in prof.steps(range(4)):
            os.fsync(1)
            writer.write_atomic(tmp_path / "ours.json", b"{}")
        aside = threading.Thread(target=lambda: os.fsync(1))
        aside.start()
        aside.join()
    marks = open_bundle(prof.path).host_marks.filter(kind="save")
    assert marks["name"].to_list() == ["os.fsync"] * 4
    assert marks["duration_ns"].min() >= 1_000_000
    assert marks["site"].str.starts_with("test_session.py:").all()


def test_files_that_gpudiag_opens_itself_leave_no_mark(tmp_path: Path) -> None:
    """Through the standard library too, and wherever they lie; the same call of the loop's own code leaves one."""
    import tempfile

    from gpudiag.bundle import writer

    with Session(tmp_path / "run") as prof:
        for _ in prof.steps(range(3)):
            writer.write_atomic(tmp_path / "elsewhere.json", b"{}")
            with tempfile.NamedTemporaryFile(suffix=".theirs"):
                pass
    names = open_bundle(prof.path).host_marks.filter(kind="file_write")["name"].to_list()
    assert sum(name.endswith(".theirs") for name in names) == 3
    assert not [name for name in names if "elsewhere" in name]


def test_written_bytes_are_the_process_s_own(tmp_path: Path) -> None:
    if not os.path.exists("/proc/self/io"):
        pytest.skip("this system does not count written bytes")
    with Session(tmp_path / "run") as prof:
        for index, _ in enumerate(prof.steps(range(5))):
            if index == 3:
                (tmp_path / "x").write_bytes(bytes(100_000))
    written = open_bundle(prof.path).step_records["written_bytes"].to_list()
    assert 100_000 <= written[3] < 110_000
    assert max(written[:3]) < 10_000


def test_nothing_of_the_environment_reaches_the_bundle(tmp_path: Path, make_loop: type, monkeypatch: pytest.MonkeyPatch) -> None:
    import gzip
    import socket

    token = "hf_planted0123456789"  # noqa: S105
    monkeypatch.setenv("HF_TOKEN", token)
    loop = make_loop()
    with Session(tmp_path / "run") as prof:
        loop.epoch(prof.steps(loop.loader()))
    files = [path for path in prof.path.rglob("*") if path.is_file()]
    assert len(files) == 5 or (len(files) == 4 and not (prof.path / "marks/rank0/000000.json").exists())
    for path in files:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert token.encode() not in data
        assert f'"{socket.gethostname()}"'.encode() not in data
        assert str(tmp_path).encode() not in data or path.name == "rank0-w1.json.gz"  # stacks name source files


def test_awkward_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace_of: Callable[[Path], Any]) -> None:
    monkeypatch.chdir(tmp_path)
    with Session('a "quoted" é/run') as prof:
        for _ in prof.steps(range(20)):
            torch.ones(2).sum()
            os.chdir("/")  # the loop may change the directory
    assert prof.path == tmp_path / 'a "quoted" é' / "run"
    assert all(trace_of(path)["traceName"].startswith("rank0-w") for path in open_bundle(prof.path).windows())


def test_an_existing_recording_is_not_touched(recorded: Path) -> None:
    before = (recorded / "manifest.json").read_bytes()
    with pytest.warns(RuntimeWarning, match="already holds"), Session(recorded) as prof:
        for _ in prof.steps(range(3)):
            pass
    assert prof.path == recorded.with_name("run-2")
    assert (recorded / "manifest.json").read_bytes() == before


def test_ranks_share_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):  # in any order
        monkeypatch.setenv("RANK", str(rank))
        with Session(tmp_path / "run") as prof:
            for _ in prof.steps(range(15)):
                torch.ones(2).sum()
        assert prof.path == tmp_path / "run"
    bundle = open_bundle(tmp_path / "run")
    assert bundle.ranks == (0, 1)
    assert bundle.manifest.world_size == 2
    assert [path.name for path in bundle.windows(1)] == ["rank1-w0.json.gz"]
    assert open_bundle(tmp_path / "run", rank=1).step_records.height == 15


def test_measured_peaks_are_looked_up_at_the_end(tmp_path: Path) -> None:
    from gpudiag.model.hardware import Device

    found = Device(id="cpu", name="cpu", kind="cpu", provenance="measured", source="test", peaks={"fp32": 1e11})
    asked = []
    with Session(tmp_path / "run", peaks=lambda manifest: asked.append(manifest.finished) or found) as prof:
        assert asked == []
        list(prof.steps(range(3)))
    assert asked == [True]
    assert open_bundle(prof.path).manifest.peaks == found


# -- wrong calls -----------------------------------------------------------------------------------------------------------


def test_nested_sessions_are_refused_and_leave_the_outer_one_alone(tmp_path: Path) -> None:
    with Session(tmp_path / "run") as prof:
        with pytest.raises(UsageError, match="already recording"), Session(tmp_path / "inner"):
            pass
        list(prof.steps(range(4)))
        with pytest.raises(UsageError, match="already recording"):
            prof.__enter__()
    assert not (tmp_path / "inner").exists()
    assert open_bundle(prof.path).step_records.height == 4
    with pytest.raises(UsageError, match="used already"):
        prof.__enter__()


def test_calls_outside_the_block_are_refused(tmp_path: Path) -> None:
    prof = Session(tmp_path / "run")
    with pytest.raises(UsageError, match="outside the session"):
        prof.steps([1])
    with pytest.raises(UsageError, match="outside the session"):
        prof.step()


@pytest.mark.parametrize("wrong", [{"skip": -1}, {"warm": 0}, {"record": 0}, {"sites": -1}, {"record": 2.5}, {"skip": True}])
def test_lengths_are_checked(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="not a number of steps"):
        Session(tmp_path / "run", **wrong)


def test_torch_missing_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'gpudiag\[train\]'"):
        Session(tmp_path / "run")


@pytest.mark.parametrize("steps", [4, 6, 7])
def test_a_loop_that_is_too_short_says_so_and_what_it_names_fits(steps: int, tmp_path: Path, make_loop: Any) -> None:
    def run(name: str, **options: int) -> Path:
        with gpudiag.profile(tmp_path / name, **options) as prof:
            loop.epoch(prof.steps(loop.loader()))
        return tmp_path / name

    loop = make_loop(steps)
    with pytest.warns(RuntimeWarning, match=f"{steps} steps were too few") as said:
        run("short")
    options = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", str(said[0].message))}
    assert options["record"] == min(steps - 3, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_bundle(run("fitting", **options)).recorded()
