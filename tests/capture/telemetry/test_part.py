"""The thread and the part: rows on the clock of the bundle, and training that never notices."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakenvml import FakeNvml, identity
from noticewords import format_notices

from gpudiag.bundle.reader import open_bundle
from gpudiag.bundle.segments import encode_segment
from gpudiag.capture.environment import DeviceIdentity, find_stepped_device, identify_cuda_device
from gpudiag.capture.session import Session
from gpudiag.capture.telemetry import sampler as part_module
from gpudiag.capture.telemetry.readings import SECOND, AllocatorSource
from gpudiag.capture.telemetry.sampler import COLUMNS, FULL_RATE_NS, MAX_ROWS, Sampler, Telemetry
from gpudiag.errors import UsageError
from gpudiag.model.trace import GPU_COLUMNS


class Kept:
    """Stands for the session: keeps the segments."""

    def __init__(self) -> None:
        self.segments: list[Mapping[str, Sequence[Any]]] = []

    def segment(self, table: str, columns: Mapping[str, Sequence[Any]]) -> None:
        assert table == "telemetry"
        encode_segment(table, columns)
        self.segments.append(columns)

    def column(self, name: str) -> list[Any]:
        return [value for columns in self.segments for value in columns[name]]


@pytest.fixture
def context() -> Kept:
    return Kept()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gpudiag-telemetry"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threads():
        thread.join(5)
    assert threads() == []


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def on(board: str, hz: float = 50, **options: Any) -> tuple[Telemetry, FakeNvml]:
    lib = FakeNvml(board, **options)
    return Telemetry(hz, load_nvml=lambda: lib, device=lambda: identity(board)), lib


def test_rows_stand_on_the_unix_clock_at_the_rate_that_was_asked_for(context: Kept) -> None:
    telemetry, lib = on("h100_sxm")
    before = time.time_ns()
    telemetry.start(context)  # type: ignore[arg-type]
    assert telemetry._sampler is not None
    until(lambda: telemetry._sampler.samples >= 30)
    telemetry.close()
    after, times = time.time_ns(), context.column("t_ns")
    assert before <= times[0] < times[-1] <= after
    assert times == sorted(times)
    assert {1980.0, 1755.0, 1410.0} <= set(context.column("sm_clock_mhz"))
    assert any(context.column("rss_bytes"))  # the host's columns beside the GPU's
    assert lib.open == 0
    info = telemetry.manifest()["telemetry"]
    assert (info.source, info.interval_ns, info.samples) == ("nvml", 20_000_000, len(times))
    assert info.limits["power_limit_w"] == 700
    assert set(info.missing) & set(GPU_COLUMNS) == set(AllocatorSource.columns)  # this process has no CUDA allocator
    telemetry.drop()


@pytest.mark.parametrize("hip", [False, True])
def test_the_allocator_is_sampled_on_the_device_that_steps_whatever_nvml_knows(
    hip: bool, context: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = {3: {"allocated_bytes.all.current": 11_000_000_000, "reserved_bytes.all.current": 14_000_000_000}}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index: counters.get(index, {}))
    own = identity("h100_sxm")._replace(ordinal=3, hip=hip)
    telemetry = Telemetry(50, load_nvml=lambda: FakeNvml("h100_sxm"), device=lambda: own)
    telemetry.start(context)  # type: ignore[arg-type]
    until(lambda: telemetry._sampler is not None and telemetry._sampler.samples >= 30)
    telemetry.close()
    assert set(context.column("torch_allocated_bytes")) == {None, 11_000_000_000}
    assert set(context.column("torch_reserved_bytes")) == {None, 14_000_000_000}
    missing = telemetry.manifest()["telemetry"].missing
    assert not set(missing) & set(AllocatorSource.columns)
    assert ("power_w" in missing) is hip


def test_an_allocator_without_counters_says_so(context: Kept) -> None:
    telemetry = Telemetry(50, load_nvml=lambda: None, device=lambda: identity("h100_sxm")._replace(ordinal=0))
    telemetry.start(context)  # type: ignore[arg-type]
    until(lambda: telemetry._sampler is not None and telemetry._sampler.samples >= 5)
    telemetry.close()
    assert set(context.column("torch_reserved_bytes")) == {None}
    assert telemetry.manifest()["telemetry"].missing["torch_reserved_bytes"] == "the allocator keeps no such counter"


def test_missed_ticks_are_skipped_and_the_clock_does_not_drift() -> None:
    sampler = Sampler(50, psutil=__import__("psutil"), pynvml=None)
    assert [sampler.find_next_tick(1000, now) for now in (1000, 1001, 1049, 1050, 1210)] == [1050, 1050, 1050, 1100, 1250]


def test_before_cuda_is_used_only_the_host_is_sampled(context: Kept) -> None:
    found: list[DeviceIdentity | None] = [None]
    lib = FakeNvml("h100_sxm")
    telemetry = Telemetry(50, load_nvml=lambda: lib, device=lambda: found[0])
    telemetry.start(context)  # type: ignore[arg-type]
    assert telemetry._sampler is not None
    until(lambda: telemetry._sampler.samples >= 3)
    assert telemetry.manifest()["telemetry"].source == "psutil"
    assert telemetry.manifest()["telemetry"].missing["power_w"] == "this process used no CUDA device"
    assert lib.calls.total() == lib.open == 0
    found[0] = identity("h100_sxm")
    telemetry.step_began(1, 0)
    until(lambda: telemetry._sampler.source == "nvml")
    telemetry.close()


class TwoGpus(FakeNvml):
    """Knows any device."""

    def _handle(self, kind: str, key: Any) -> Any:
        return "board"


def optimizer_on(*devices: str) -> Any:
    parameters = [SimpleNamespace(device=torch.device(device), is_cuda=device.startswith("cuda")) for device in devices]
    return SimpleNamespace(param_groups=[{"params": parameters}])


def ordinal(index: int | None = None) -> DeviceIdentity:
    return identity("h100_sxm")._replace(ordinal=index or 0, key=f"H100 {index or 0}")


def test_the_gpu_is_that_of_the_parameters_not_the_current_one(context: Kept) -> None:
    lib = TwoGpus("h100_sxm")
    telemetry = Telemetry(50, load_nvml=lambda: lib, device=ordinal)
    telemetry.start(context)  # type: ignore[arg-type]
    sampler = telemetry._sampler
    assert sampler is not None
    until(lambda: sampler.source == "nvml" and sampler.samples >= 3)
    telemetry.step_began(0, 0)  # no optimizer has stepped yet
    assert telemetry.manifest()["telemetry"].device_index == 0
    before = time.time_ns()
    telemetry.optimizer_ended(0, optimizer_on("cpu", "cuda:1"))
    telemetry.step_began(1, 0)
    until(lambda: telemetry.manifest()["telemetry"].device_index == 1 and sampler.source == "nvml")
    telemetry.optimizer_ended(0, optimizer_on("cuda:0"))
    telemetry.optimizer_ended(0, optimizer_on("cuda:1"))
    telemetry.step_began(2, 0)  # one of those that step: it stays
    telemetry.step_began(3, 0)  # a step that only accumulates
    telemetry.close()
    info = telemetry.manifest()["telemetry"]
    assert (info.source, info.device_index, info.device_key) == ("nvml", 1, "H100 1")
    assert info.device_since_unix_ns >= before
    assert info.limits["power_limit_w"] == 700
    assert lib.open == 0  # the first one was closed as well


def test_a_program_that_steps_elsewhere_every_time_is_not_followed_for_ever(context: Kept) -> None:
    asked: list[int | None] = []

    def device(index: int | None = None) -> DeviceIdentity:
        asked.append(index)
        return ordinal(index)

    telemetry = Telemetry(50, load_nvml=lambda: TwoGpus("h100_sxm"), device=device)
    telemetry.start(context)  # type: ignore[arg-type]
    for step in range(100):
        telemetry.optimizer_ended(0, optimizer_on(f"cuda:{1 + step % 2}"))
        telemetry.step_began(step, 0)
    telemetry.close()
    assert len(asked) == 1 + part_module.MAX_CHANGES


def test_where_the_parameters_lie_is_found_without_a_gpu() -> None:
    assert find_stepped_device(optimizer_on("cuda:3", "cuda:1")) == 3
    assert find_stepped_device(optimizer_on("cpu", "meta")) is None
    assert find_stepped_device(SimpleNamespace(param_groups=[{"params": {1, 2}}])) is None
    assert find_stepped_device(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1)) is None


@pytest.mark.slow
def test_nvml_that_hangs_while_it_opens_says_so_and_the_host_is_sampled(context: Kept) -> None:
    class Hanging(FakeNvml):
        def nvmlInit(self) -> None:
            time.sleep(1.5)
            super().nvmlInit()

    lib = Hanging("h100_sxm")
    telemetry = Telemetry(50, load_nvml=lambda: lib, device=lambda: identity("h100_sxm"))
    telemetry.start(context)  # type: ignore[arg-type]
    assert telemetry._sampler is not None
    until(lambda: telemetry._sampler.samples >= 1)
    time.sleep(0.05)
    telemetry.close()
    assert telemetry.manifest()["telemetry"].missing["power_w"] == "NVML has not answered"
    assert any(context.column("rss_bytes"))
    for thread in threads():
        thread.join(5)
    assert lib.open == 0


def test_an_exit_in_the_thread_does_not_end_the_training(context: Kept) -> None:
    class Exiting(FakeNvml):
        def _answer(self, key: str) -> Any:
            raise SystemExit(3)

    telemetry = Telemetry(50, load_nvml=lambda: Exiting("h100_sxm"), device=lambda: identity("h100_sxm"))
    telemetry.start(context)  # type: ignore[arg-type]
    until(lambda: not threads())
    with pytest.raises(RuntimeError, match="SystemExit"):
        telemetry.flush()


def test_asking_for_the_device_does_not_initialise_cuda() -> None:
    initialised = torch.cuda.is_initialized()
    identify_cuda_device()
    assert torch.cuda.is_initialized() == initialised


@pytest.mark.parametrize(
    ("identity_", "load", "why"),
    [
        (DeviceIdentity(None, None, None, hip=True), lambda: FakeNvml("h100_sxm"), "AMD"),
        (identity("h100_sxm"), lambda: FakeNvml("h100_sxm", init=12), "NVML Shared Library Not Found"),
        (identity("h100_sxm"), lambda: None, "nvidia-ml-py is not installed"),
        (identity("h100_sxm"), lambda: 1 // 0, "nvidia-ml-py is not installed"),
        (DeviceIdentity("0000", None, None), lambda: FakeNvml("h100_sxm"), "Not Found"),
    ],
)
def test_where_nvml_does_not_answer_the_host_is_sampled_and_the_reason_is_kept(context: Kept, identity_: Any, load: Any, why: str) -> None:
    telemetry = Telemetry(50, load_nvml=load, device=lambda: identity_)
    telemetry.start(context)  # type: ignore[arg-type]
    assert telemetry._sampler is not None
    until(lambda: telemetry._sampler.samples >= 3)
    telemetry.close()
    info = telemetry.manifest()["telemetry"]
    assert info.source == "psutil"
    assert why in info.missing["sm_clock_mhz"]
    assert any(context.column("cpu_util_pct"))


@pytest.mark.slow
def test_nvml_that_raises_at_random_costs_values_only(context: Kept) -> None:
    telemetry, lib = on("h100_sxm", hz=100, raising=0.3)
    telemetry.start(context)  # type: ignore[arg-type]
    assert telemetry._sampler is not None
    until(lambda: telemetry._sampler.samples >= 40)
    telemetry.flush()
    telemetry.close()
    assert telemetry._sampler.error is None
    assert lib.open == 0
    assert any(context.column("rss_bytes"))


@pytest.mark.slow
def test_a_driver_that_hangs_never_holds_the_training_thread(context: Kept) -> None:
    telemetry, _ = on("h100_sxm", hang_s=1.0)
    begun = time.perf_counter()
    telemetry.start(context)  # type: ignore[arg-type]
    time.sleep(0.05)
    for step in range(1000):
        telemetry.step_began(step, 0)
    telemetry.flush()
    assert time.perf_counter() - begun < 1.0
    telemetry.close()
    telemetry.drop()
    assert time.perf_counter() - begun < 3.0
    rows = len(context.column("t_ns"))
    for thread in threads():
        thread.join(30)
    assert len(context.column("t_ns")) == rows  # nothing comes after the end


def test_a_thread_that_ends_by_itself_is_said_at_the_next_flush(context: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Sampler, "_tick", broken)
    telemetry, _ = on("h100_sxm")
    telemetry.start(context)  # type: ignore[arg-type]
    until(lambda: not threads())
    with pytest.raises(MemoryError):
        telemetry.flush()


def test_no_sample_falls_into_a_window_with_stacks(context: Kept) -> None:
    telemetry, _ = on("h100_sxm", hz=100)
    telemetry.start(context)  # type: ignore[arg-type]
    sampler = telemetry._sampler
    assert sampler is not None
    until(lambda: sampler.samples >= 3)
    telemetry.window_began(1, "sites")
    time.sleep(0.1)  # a sample that had begun may end
    held = sampler.samples
    time.sleep(0.2)
    assert sampler.samples == held
    telemetry.window_ended(1, "sites")
    until(lambda: sampler.samples >= held + 3)
    telemetry.close()


def test_after_ten_minutes_it_is_calm_but_not_inside_a_window() -> None:
    sampler = Sampler(50_000_000, psutil=__import__("psutil"), pynvml=None)
    assert sampler.find_next_tick(0, SECOND) == SECOND + 50_000_000
    assert sampler.find_next_tick(0, FULL_RATE_NS) == FULL_RATE_NS + SECOND
    sampler.window_began(stacks=False)
    assert sampler.find_next_tick(0, FULL_RATE_NS) == FULL_RATE_NS + 50_000_000
    sampler.window_ended()
    assert sampler.find_next_tick(0, FULL_RATE_NS) == FULL_RATE_NS + SECOND


def test_rows_that_nobody_takes_are_bounded_and_the_newest_stay() -> None:
    sampler = Sampler(50_000_000, psutil=__import__("psutil"), pynvml=None)
    sampler._rows.extend((number, *[None] * (len(COLUMNS) - 1)) for number in range(MAX_ROWS))
    for at in range(1, 4):
        sampler._tick(at * 10 * SECOND)
    rows = sampler.take()
    assert rows is not None
    assert len(rows["t_ns"]) == MAX_ROWS
    assert rows["t_ns"][0] == sampler.dropped == 3
    assert "3 samples were dropped" in sampler.describe().notes["t_ns"]
    assert sampler.take() is None


def test_segments_grow_with_the_run(context: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry, _ = on("h100_sxm")
    telemetry.start(context)  # type: ignore[arg-type]
    sampler, begun = telemetry._sampler, telemetry._begun_ns
    assert sampler is not None
    sampler.stop(5)
    row = (0, *[None] * (len(COLUMNS) - 1))

    def segments(first_s: int, last_s: int) -> int:
        before = len(context.segments)
        for at in range(first_s, last_s, 10):
            sampler._rows.append(row)
            monkeypatch.setattr(part_module.time, "perf_counter_ns", lambda at=at: begun + at * SECOND)
            telemetry.flush()
        return len(context.segments) - before

    assert segments(10, 1000) == 99  # one every 10 s
    assert segments(1000, 100_000) < 700
    assert segments(100_000, 160_000) <= 112  # one every 540 s or more


def test_a_forked_child_has_no_thread_and_calls_no_nvml(context: Kept) -> None:
    telemetry, lib = on("h100_sxm")
    telemetry.start(context)  # type: ignore[arg-type]
    assert telemetry._sampler is not None
    until(lambda: telemetry._sampler.source == "nvml")
    child = os.fork()
    if child == 0:
        calls = lib.calls.total()
        telemetry.drop()  # what a child that leaves the session's block may do
        os._exit(0 if not threads() and lib.calls.total() == calls and lib.open == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    telemetry.close()
    assert lib.open == 0


@pytest.mark.parametrize("hz", [-1, 101, "20", True, None, float("nan")])
def test_a_rate_that_is_none_is_refused(hz: object) -> None:
    with pytest.raises(UsageError, match="telemetry_hz"):
        Telemetry(hz)  # type: ignore[arg-type]


def test_rate_zero_starts_nothing(context: Kept) -> None:
    telemetry = Telemetry(0)
    telemetry.start(context)  # type: ignore[arg-type]
    telemetry.step_began(0, 0)
    telemetry.flush()
    telemetry.close()
    telemetry.drop()
    assert threads() == []
    assert telemetry.manifest() == {}


def test_a_session_writes_telemetry_that_reads_back(tmp_path: Path) -> None:
    with Session(tmp_path / "run", parts=[Telemetry(50)]) as prof:
        for _ in prof.steps(range(20)):
            torch.ones(8).sum()
            time.sleep(0.02)
    bundle = open_bundle(prof.path)
    assert format_notices(bundle.notices) == ()
    assert bundle.telemetry.height >= 5
    steps = bundle.step_records
    inside = bundle.telemetry["t_ns"].is_between(steps["start_unix_ns"][0], int(steps["start_unix_ns"][-1]) + SECOND)
    assert inside.sum() >= 5
    assert bundle.telemetry["rss_bytes"].drop_nulls().min() > 1 << 20  # type: ignore[operator]
    assert bundle.manifest.telemetry is not None
    assert bundle.manifest.telemetry.samples == bundle.telemetry.height
