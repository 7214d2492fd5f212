"""The phases of steps: on the host's clock in worked loops, on a device's clock with a device made up of numbers, and what they cost."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.bundle.reader import open_bundle
from gpudiag.capture.device_clock import DeviceClock
from gpudiag.capture.hooks import Patches
from gpudiag.capture.phases import MAX_SPANS, MAX_WAITING, MOST_NOTED, Phases
from gpudiag.capture.session import Session
from gpudiag.capture.steps import StepRow

PARTS = ("h2d_ns", "forward_ns", "backward_ns", "optimizer_ns")
COLUMNS = (*PARTS, "phase_clock", "backwards", "optimizer_steps")


class Run:
    """Phases fed with events at given times; a clock of its own stands in where `cuda` is given."""

    def __init__(self, cuda: FakeCuda | None = None) -> None:
        self.notes: list[str] = []
        self.patches = Patches()
        self.part = Phases(DeviceClock(FakeCuda(initialized=False) if cuda is None else cuda))
        self.part.start(
            SimpleNamespace(patches=self.patches, note=lambda text, _: self.notes.append(text), events=SimpleNamespace(here=True))  # type: ignore[arg-type]
        )
        self.number, self.begun, self.rows = 0, 0, list[StepRow]()

    def mark(self, at: int) -> None:
        if self.rows or self.number:
            row = StepRow(self.number - 1, 0, at - self.begun)
            self.part.step_ended(row, at)
            self.rows.append(row)
        self.part.step_began(self.number, at)
        self.number, self.begun = self.number + 1, at

    def batch(self, asked: int, received: int, batch: object = None) -> None:
        self.part.batch_asked(asked)
        self.part.batch_received(received, received - asked, batch, None)

    def backward(self, began: int, ended: int) -> None:
        self.part.backward_began(began, None)
        self.part.backward_ended(ended)

    def optimizer(self, began: int, ended: int, optimizer: object = "adam") -> None:
        self.part.optimizer_began(began, optimizer)
        self.part.optimizer_ended(ended, optimizer)

    def last(self) -> tuple[Any, ...]:
        self.part.flush()
        return tuple(getattr(self.rows[-1], column) for column in COLUMNS)


@pytest.fixture
def run() -> Run:
    made = Run()
    made.mark(0)
    return made


def test_a_plain_step(run: Run) -> None:
    run.batch(0, 10)
    run.backward(30, 70)
    run.optimizer(75, 80)
    run.mark(100)
    assert run.last() == (None, 20, 40, 5, "host", 1, 1)
    assert run.rows[0].ready


def test_micro_batches_are_summed(run: Run) -> None:
    for start in (0, 100, 200):
        run.batch(start, start + 10)
        run.backward(start + 30, start + 90)
    run.optimizer(290, 295)
    run.mark(300)
    assert run.last() == (None, 60, 180, 5, "host", 3, 1)


def test_batches_fetched_ahead_at_once_leave_the_forward_of_each(run: Run) -> None:
    run.batch(0, 10)
    run.batch(11, 20)
    run.backward(50, 90)
    run.backward(120, 160)  # 90..120: the second micro-batch
    run.mark(200)
    assert run.last() == (None, 60, 80, None, "host", 2, 0)


def test_a_mark_set_by_the_optimizers_own_hook(run: Run) -> None:
    """The row ends inside the step of the optimizer, before the other listeners hear of its end."""
    run.batch(0, 5)
    run.backward(20, 60)
    run.part.optimizer_began(60, "adam")
    run.mark(81)
    run.part.optimizer_ended(80, "adam")  # told of later, with an earlier time
    assert run.last() == (None, 15, 40, 21, "host", 1, 1)
    run.batch(100, 110)  # 81..100: logging, and waiting is not forward
    run.backward(130, 150)
    run.part.optimizer_began(150, "adam")
    run.mark(160)
    run.part.optimizer_ended(159, "adam")
    assert run.last() == (None, 20, 20, 10, "host", 1, 1)
    run.backward(190, 200)  # the batch was in hand before the mark: forward begins with it
    run.mark(200)
    assert run.last()[:3] == (None, 30, 10)


def test_closures_of_lbfgs_run_backward_inside_the_optimizer(run: Run) -> None:
    run.batch(0, 10)
    run.part.optimizer_began(10, "lbfgs")
    for start in (20, 50):
        run.backward(start, start + 20)
    run.part.optimizer_ended(100, "lbfgs")
    run.mark(100)
    assert run.last() == (None, None, 40, 50, "host", 2, 1)


def test_a_gan_has_two_optimizers_and_a_forward_before_each_backward(run: Run) -> None:
    run.batch(0, 10)
    run.backward(20, 30)
    run.optimizer(30, 35, "d")
    run.backward(50, 70)
    run.optimizer(70, 75, "g")
    run.mark(80)
    assert run.last() == (None, 25, 30, 10, "host", 2, 2)


def test_optimizers_that_step_inside_backward(run: Run) -> None:
    run.batch(0, 10)
    run.part.backward_began(20, None)
    for start in range(30, 60, 10):
        run.optimizer(start, start + 2, start)
    run.part.backward_ended(80)
    run.mark(90)
    assert run.last() == (None, 10, 54, 6, "host", 1, 3)


def test_validation_and_steps_without_backward_have_no_phase(run: Run) -> None:
    for start in range(0, 50, 10):
        run.batch(start, start + 5)
    run.part.batch_asked(50)  # the loader has ended
    run.mark(60)
    assert run.last() == (None, None, None, None, None, 0, 0)
    run.part.batch_asked(60)  # it has ended too: the last batch was fetched ahead
    run.backward(80, 90)
    run.mark(90)
    assert run.last()[:3] == (None, 20, 10)


def test_backward_inside_backward_counts_once(run: Run) -> None:
    run.part.backward_began(10, None)
    run.backward(20, 30)
    run.part.backward_ended(40)
    run.backward(60, 70)
    run.mark(70)
    assert run.last() == (None, 30, 40, None, "host", 2, 0)


def test_a_step_that_was_interrupted_leaves_nothing_to_the_next(run: Run) -> None:
    run.batch(0, 10)
    run.backward(20, 30)
    run.part.interrupted()
    run.batch(40, 50)  # validation between epochs
    run.backward(60, 70)
    run.number = 0
    run.rows = []
    run.mark(100)
    run.batch(100, 110)
    run.backward(115, 120)
    run.mark(130)
    assert run.last() == (None, 5, 5, None, "host", 1, 0)


_EVENTS = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.sampled_from(
            [
                "mark",
                "batch_asked",
                "batch_received",
                "backward_began",
                "backward_ended",
                "optimizer_began",
                "optimizer_ended",
                "interrupted",
            ]
        ),
        st.integers(0, 2),
        st.integers(0, 30),
    ),
    max_size=80,
)


@given(_EVENTS)
def test_phases_never_exceed_their_step(events: list[tuple[int, str, int, int]]) -> None:
    """Also where an event is told of late: after a mark that was set later."""
    run, now = Run(), 0
    run.mark(0)
    for wait, name, identity, late in events:
        now += wait
        at = max(0, now - late)
        if name == "mark":
            run.mark(now)
        elif name == "interrupted":
            run.part.interrupted()
            run.number, run.rows = 0, []
            run.mark(now)
        elif name == "batch_received":
            run.part.batch_received(at, 1, None, None)
        elif name == "backward_ended" or name == "batch_asked":
            getattr(run.part, name)(at)
        else:
            getattr(run.part, name)(at, identity)
        for row in run.rows:
            parts = [getattr(row, part) or 0 for part in PARTS]
            assert min(parts) >= 0
            assert sum(parts) <= row.wall_ns


# -- the device's clock -----------------------------------------------------------------------------------------------------


class FakeStream:
    def __init__(self, stream_id: int, device_index: int = 0) -> None:
        self.stream_id, self.device_index = stream_id, device_index


class FakeCuda:
    """A device that does one us of work between two events, and has reached those recorded up to `reached`."""

    def __init__(self, *, initialized: bool = True) -> None:
        self.initialized, self.capturing, self.failing = initialized, False, False
        self.stream = FakeStream(0)
        self.now, self.reached, self.made, self.recorded, self.asked_in_capture = 0, 0, 0, 0, 0
        cuda = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                cuda.made += 1
                self.at, self.device = -1, cuda.stream.device_index

            def record(self, stream: FakeStream) -> None:
                assert not cuda.capturing
                assert stream.device_index == self.device, "an event belongs to one device"
                if cuda.failing:
                    raise RuntimeError("CUDA error: device-side assert triggered")
                self.at = cuda.now
                cuda.recorded += 1

            def query(self) -> bool:
                cuda.asked_in_capture += cuda.capturing
                return self.at <= cuda.reached

            def elapsed_time(self, end: Any) -> float:
                assert self.query()
                assert end.query()
                return (end.at - self.at) / 1e6

        self.Event = Event

    def is_initialized(self) -> bool:
        return self.initialized

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self) -> FakeStream:
        return self.stream


class DeviceRun(Run):
    """A run on the fake device, whose time is that of the last event told of."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        super().__init__(cuda)

    def step(self, at: int) -> None:
        """One step of 100: waiting 10, forward 30, backward 40, optimizer 15."""
        for offset, call in (
            (0, lambda: self.part.batch_asked(0)),
            (10, lambda: self.part.batch_received(0, 0, None, None)),
            (40, lambda: self.part.backward_began(0, None)),
            (80, lambda: self.part.backward_ended(0)),
            (80, lambda: self.part.optimizer_began(0, "adam")),
            (95, lambda: self.part.optimizer_ended(0, "adam")),
            (100, lambda: self.mark(at + 100)),
        ):
            self.cuda.now = at + offset
            call()


@pytest.fixture
def device_run() -> Iterator[DeviceRun]:
    made = DeviceRun(FakeCuda())
    made.mark(0)
    yield made
    made.patches.restore()


def test_the_device_answers_late(device_run: DeviceRun) -> None:
    for start in (0, 100, 200):
        device_run.step(start)
    assert [row.ready for row in device_run.rows] == [False] * 3
    assert device_run.last()[:5] == (None, None, None, None, None)
    device_run.cuda.reached = 150
    device_run.part.flush()
    assert [row.ready for row in device_run.rows] == [True, False, False]
    device_run.cuda.reached = 1000
    device_run.part.close()
    for row in device_run.rows:
        assert row.ready
        assert (row.h2d_ns, row.forward_ns, row.backward_ns, row.optimizer_ns, row.phase_clock) == (None, 30, 40, 15, "device")


def test_a_device_that_never_answers_leaves_rows_unknown_and_memory_flat(device_run: DeviceRun) -> None:
    device_run.cuda.reached = -1
    for row in range(3 * MAX_WAITING):
        device_run.step(100 * row)
    assert [row.ready for row in device_run.rows] == [True] * (2 * MAX_WAITING) + [False] * MAX_WAITING
    assert device_run.cuda.made < 10 * (MAX_WAITING + 2)
    device_run.part.close()
    assert all(row.ready and row.forward_ns is None and row.phase_clock is None for row in device_run.rows)
    assert all(row.backwards == 1 and row.optimizer_steps == 1 for row in device_run.rows)


def test_events_are_used_again(device_run: DeviceRun) -> None:
    device_run.cuda.reached = 10**9
    for row in range(50):
        device_run.step(100 * row)
    assert all(row.phase_clock == "device" for row in device_run.rows)
    assert device_run.cuda.made <= 16
    assert device_run.cuda.recorded >= 50 * 7


def test_nothing_is_recorded_or_asked_while_a_graph_is_captured(device_run: DeviceRun) -> None:
    device_run.cuda.reached = 10**9
    device_run.step(0)
    before = device_run.cuda.recorded
    device_run.cuda.capturing = True
    device_run.step(100)
    device_run.part.flush()
    assert device_run.cuda.recorded == before
    assert device_run.cuda.asked_in_capture == 0
    device_run.cuda.capturing = False
    device_run.step(200)
    device_run.step(300)
    assert [row.phase_clock for row in device_run.rows] == ["device", None, "device", "device"]
    assert all(row.ready for row in device_run.rows)


def test_a_driver_that_fails_costs_the_phases_only(device_run: DeviceRun) -> None:
    device_run.step(0)
    device_run.cuda.failing = True
    for start in (100, 200):
        device_run.step(start)
    assert device_run.notes == ["phases are no longer timed"]
    assert [(row.ready, row.phase_clock, row.backwards) for row in device_run.rows] == [(True, None, 1)] * 3


def test_steps_with_too_many_phases_are_unknown_and_soon_not_timed(device_run: DeviceRun) -> None:
    device_run.cuda.reached = 10**9
    for step in range(6):
        device_run.part.batch_received(0, 0, None, None)
        device_run.part.backward_began(0, None)
        for identity in range(MAX_SPANS):
            device_run.optimizer(0, 0, identity)
        device_run.part.backward_ended(0)
        before = device_run.cuda.recorded
        device_run.mark(100 * step)
    assert all(row.phase_clock is None and row.ready and row.optimizer_steps == MAX_SPANS for row in device_run.rows)
    assert len(device_run.notes) == 1
    device_run.optimizer(0, 0)
    assert device_run.cuda.recorded == before


def test_a_change_of_device_within_a_span_is_unknown(device_run: DeviceRun) -> None:
    device_run.cuda.reached = 10**9
    device_run.part.batch_received(0, 0, None, None)
    device_run.cuda.stream = FakeStream(0, device_index=1)
    device_run.backward(0, 0)
    device_run.mark(100)
    assert device_run.last() == (None, None, None, None, None, 1, 0)


def test_copies_are_taken_out_of_the_phase_on_their_stream_only(device_run: DeviceRun) -> None:
    cuda, part = device_run.cuda, device_run.part
    cuda.reached = 10**9

    def copy(begin: int, end: int) -> None:
        cuda.now = begin
        token = part.copy_begins()
        assert token is not None
        cuda.now = end
        part.copy_ended(token)

    cuda.now = 10
    part.batch_received(0, 0, None, None)
    copy(15, 25)
    cuda.stream = FakeStream(7)
    copy(30, 34)  # on a stream of its own: beside the forward pass
    cuda.stream = FakeStream(0)
    cuda.now = 50
    part.backward_began(0, None)
    cuda.now = 80
    part.backward_ended(0)
    device_run.mark(100)
    assert device_run.last()[:5] == (14, 30, 30, None, "device")


def test_a_copy_inside_another_counts_once(device_run: DeviceRun) -> None:
    device_run.cuda.reached = 10**9
    outer = device_run.part.copy_begins()
    device_run.cuda.now = 5
    inner = device_run.part.copy_begins()
    assert outer is not None
    assert inner is not None
    device_run.cuda.now = 9
    device_run.part.copy_ended(inner)
    device_run.part.copy_ended(outer)
    device_run.mark(100)
    assert device_run.last()[0] == 4


def test_a_run_that_begins_to_use_a_device_changes_the_clock() -> None:
    cuda = FakeCuda(initialized=False)
    run = DeviceRun(cuda)
    run.mark(0)
    run.batch(0, 10)
    run.backward(20, 30)
    cuda.initialized = True  # within the first step
    run.mark(50)
    assert run.last()[:5] == (None, 10, 10, None, "host")
    cuda.reached = 10**9
    run.step(50)
    assert run.last()[:5] == (None, 30, 40, 15, "device")
    run.patches.restore()


# -- the wrapped copies -----------------------------------------------------------------------------------------------------


def test_methods_of_tensors_are_only_replaced_on_a_device_and_put_back() -> None:
    before = {name: getattr(torch.Tensor, name) for name in ("to", "cuda", "copy_")}
    assert Run().part is not None
    assert all(getattr(torch.Tensor, name) is method for name, method in before.items())
    run = Run(FakeCuda())
    run.mark(0)
    assert all(name in vars(torch.Tensor) for name in before)
    assert all(getattr(torch.Tensor, name) is method for name, method in before.items()), "as tables of subclasses know it"
    x = torch.arange(6.0)
    assert torch.equal(x.to(torch.int32), torch.arange(6, dtype=torch.int32))
    assert x.to("cpu") is x
    assert torch.Tensor.to(x, dtype=torch.float64).dtype == torch.float64
    assert torch.zeros(6).copy_(x).equal(x)
    with pytest.raises(RuntimeError, match="device"):
        x.to("no such device")
    model = torch.nn.Linear(3, 3).to(torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16
    run.mark(10)
    assert run.last()[0] is None  # nothing went to a device
    run.patches.restore()
    assert all(name not in vars(torch.Tensor) for name in before)
    assert all(getattr(torch.Tensor, name) is method for name, method in before.items())


class Handled(torch.Tensor):
    """A subclass that looks up what it handles in a table, as quantised tensors do."""

    table: dict[Any, Any] = {}  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.table:
            return cls.table[func]
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_subclass_still_finds_the_method_in_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handled, "table", {torch.Tensor.to: "handled"})
    run = Run(FakeCuda())
    run.mark(0)
    try:
        assert torch.ones(2).as_subclass(Handled).to("cpu") == "handled"
        assert type(torch.ones(2).as_subclass(Handled).cpu()) is Handled
    finally:
        run.patches.restore()


def test_compiled_code_sees_nothing_of_the_copies() -> None:
    run = Run(FakeCuda())
    run.mark(0)
    torch._dynamo.reset()
    try:
        compiled = torch.compile(lambda x: x.to(torch.float64).to("cpu") * 2, backend="eager", fullgraph=True)
        assert compiled(torch.ones(3)).dtype == torch.float64
    finally:
        run.patches.restore()


# -- in a session -----------------------------------------------------------------------------------------------------------


def test_the_bundle_of_a_real_loop_holds_the_phases(tmp_path: Path, loop: Any) -> None:
    with Session(tmp_path / "run", parts=[Phases()]) as prof:
        loop.epoch(prof.steps(loop.loader()))
    rows = open_bundle(prof.path).step_records
    assert rows["phase_clock"].to_list() == ["host"] * 24
    assert rows["backwards"].to_list() == rows["optimizer_steps"].to_list() == [1] * 24
    assert rows["h2d_ns"].null_count() == 24
    assert (rows.select(pl.sum_horizontal(*PARTS, "loader_wait_ns")).to_series() <= rows["wall_ns"]).all()
    assert rows.select("forward_ns", "backward_ns", "optimizer_ns").min_horizontal().min() > 0


@pytest.mark.parametrize("manual", [True, False])
def test_a_slow_backward_is_found_in_its_phase(tmp_path: Path, loop: Any, manual: bool) -> None:
    loop.model[0].weight.register_hook(lambda _: time.sleep(0.02))
    with Session(tmp_path / "run", parts=[Phases()]) as prof:
        for batch in loop.loader() if manual else prof.steps(loop.loader()):
            loop.train(batch)
            if manual:
                prof.step()
    rows = open_bundle(prof.path).step_records
    assert rows["backward_ns"].min() >= 20_000_000
    assert rows["forward_ns"].median() < 15_000_000
    assert rows["optimizer_ns"].median() < 15_000_000


def test_losses_are_the_same_bit_for_bit(tmp_path: Path, make_loop: Any) -> None:
    plain, recorded = make_loop(), make_loop()
    torch.manual_seed(1)
    plain.epoch(plain.loader())
    torch.manual_seed(1)
    with Session(tmp_path / "run", parts=[Phases(DeviceClock(FakeCuda()))]) as prof:
        recorded.epoch(prof.steps(recorded.loader()))
    assert recorded.losses == plain.losses
    assert open_bundle(prof.path).step_records["phase_clock"].to_list() == ["device"] * 24
    assert "to" not in vars(torch.Tensor)


@pytest.mark.slow
def test_compiled_steps_run_inside(tmp_path: Path, loop: Any) -> None:
    torch._dynamo.reset()
    step = torch.compile(loop.optimizer.step, backend="eager")
    with warnings.catch_warnings(), Session(tmp_path / "run", sites=0, parts=[Phases()]) as prof:
        warnings.simplefilter("error", UserWarning)
        for x, y in prof.steps(loop.loader()):
            (loop.model(x) - y).square().mean().backward()
            step()
    rows = open_bundle(prof.path).step_records
    assert rows["backwards"].to_list() == [1] * 24


@pytest.mark.slow
def test_a_step_costs_a_few_microseconds(tmp_path: Path) -> None:
    run = Run()
    run.mark(0)
    batch = (torch.ones(4, 2), torch.ones(4))
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        for at in range(0, 200_000, 100):
            run.batch(at, at + 10, batch)
            run.backward(at + 20, at + 50)
            run.optimizer(at + 50, at + 60)
            row = StepRow(0, 0, 100)
            run.part.step_ended(row, at + 100)
            run.part.step_began(0, at + 100)
        best = min(best, (time.perf_counter() - begun) / 2000)
    assert best < 60e-6, f"{best * 1e6:.1f} us a step"


def test_memory_stays_flat_where_nobody_marks_steps(run: Run) -> None:
    for at in range(0, 40_000, 4):
        run.batch(at, at + 1)
        run.backward(at + 2, at + 3)
    assert len(run.part._noted) <= MOST_NOTED
    run.mark(40_000)
    run.batch(40_000, 40_010)
    run.backward(40_050, 40_080)
    run.optimizer(40_080, 40_100)
    run.mark(40_110)
    assert run.last()[1:4] == (40, 30, 20)
