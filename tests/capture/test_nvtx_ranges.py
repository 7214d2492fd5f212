"""NVTX ranges: balanced whatever the loop does, accepted by the real package, one note where it is missing."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.capture.standard_parts import MAX_NAMED_STEPS, NVTX_DOMAIN, Ranges
from gpudiag.capture.steps import StepRow


class Domain:
    """Keeps what was pushed and started; refuses a pop of nothing and an end of what was not started."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.open: dict[int, str] = {}
        self.log: list[str] = []
        self.names: list[str] = []
        self._next = 0

    def get_event_attributes(self, message: str, payload: int | None = None) -> str:
        self.names.append(message)
        return message

    def push_range(self, attributes: str) -> None:
        self.stack.append(attributes)
        self.log.append(f"+{attributes}")

    def pop_range(self) -> None:
        self.log.append(f"-{self.stack.pop()}")

    def start_range(self, attributes: str) -> int:
        self.open[self._next] = attributes
        self.log.append(f"[{attributes}")
        self._next += 1
        return self._next - 1

    def end_range(self, number: int) -> None:
        self.log.append(f"{self.open.pop(number)}]")


class Context:
    rank = 0

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str, error: BaseException | None) -> None:
        self.notes.append(message)


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch) -> Domain:
    made = Domain()
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(get_domain={NVTX_DOMAIN: made}.__getitem__))
    return made


def started() -> Ranges:
    part = Ranges()
    part.start(Context())  # type: ignore[arg-type]
    return part


ROW = StepRow(0, 0, 1)


def test_a_training_step_is_a_range_with_its_phases_inside(domain: Domain) -> None:
    part = started()
    part.step_began(12, 0)
    part.batch_asked(1)
    part.batch_received(2, 1, None, None)
    part.backward_began(3, None)
    part.backward_ended(4)
    part.optimizer_began(5, None)
    part.optimizer_ended(6, None)
    part.step_ended(ROW, 7)
    expected = "[step 12 +data -data +forward -forward +backward -backward +optimizer -optimizer step 12]"
    assert " ".join(domain.log) == expected


EVENTS = {
    "step_began": (3, 0), "step_ended": (ROW, 0), "interrupted": (), "batch_asked": (0,), "batch_received": (0, 0, None, None),
    "backward_began": (0, None), "backward_ended": (0,), "optimizer_began": (0, None), "optimizer_ended": (0, None),
}  # fmt: skip


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=60), st.sampled_from(["close", "drop"]))
def test_any_order_of_events_leaves_nothing_open(names: list[str], end: str) -> None:
    """Exceptions and interrupts leave out the later half of a pair, closures and nested passes nest them: any order can occur."""
    domain = Domain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nvtx", SimpleNamespace(get_domain=lambda name: domain))
        part = started()
    for name in names:
        getattr(part, name)(*EVENTS[name])
        assert len(domain.stack) <= 1
        assert len(domain.open) <= 1
    getattr(part, end)()
    assert (domain.stack, domain.open) == ([], {})


def test_a_step_s_phase_does_not_outlive_it(domain: Domain) -> None:
    part = started()
    part.step_began(0, 0)
    part.batch_received(0, 0, None, None)
    part.interrupted()
    assert domain.log == ["[step 0", "+forward", "-forward", "step 0]"]


def test_other_threads_do_not_touch_the_stack(domain: Domain) -> None:
    part = started()
    thread = threading.Thread(target=part.batch_asked, args=(0,))
    thread.start()
    thread.join()
    assert domain.log == []


def test_nothing_is_written_after_drop(domain: Domain) -> None:
    part = started()
    part.drop()
    for name, arguments in EVENTS.items():
        getattr(part, name)(*arguments)
    assert domain.log == []


def test_a_million_steps_do_not_leave_a_million_names(domain: Domain) -> None:
    part = started()
    for number in (MAX_NAMED_STEPS - 1, MAX_NAMED_STEPS, 10**6):
        part.step_began(number, 0)
    assert domain.names[-3:] == [f"step {MAX_NAMED_STEPS - 1}", "step", "step"]


def test_without_the_package_there_is_one_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    part, context = Ranges(), Context()
    part.start(context)  # type: ignore[arg-type]
    for name, arguments in EVENTS.items():
        getattr(part, name)(*arguments)
    part.drop()
    assert len(context.notes) == 1
    assert "pip install" in context.notes[0]


def test_the_real_package_accepts_the_calls() -> None:
    pytest.importorskip("nvtx")
    part = started()
    for _ in range(2):
        for name, arguments in EVENTS.items():
            getattr(part, name)(*arguments)
    part.close()
    part.drop()


def test_a_recorded_loop_with_ranges_trains_as_without(tmp_path: Path, make_loop: type, domain: Domain) -> None:
    import torch

    from gpudiag.capture.session import Session

    plain, ranged = make_loop(batches=6), make_loop(batches=6)
    torch.manual_seed(1)
    plain.epoch(plain.loader())
    torch.manual_seed(1)
    with Session(tmp_path / "run", parts=[Ranges()]) as prof:
        ranged.epoch(prof.steps(ranged.loader()))
    assert ranged.losses == plain.losses
    assert (domain.stack, domain.open) == ([], {})
    assert [word for word in domain.log if word.startswith("[")] == [f"[step {number}" for number in range(7)]
    assert domain.log.count("+backward") == domain.log.count("+optimizer") == 6


def test_a_loop_that_raises_in_its_backward_pass_leaves_nothing_open(tmp_path: Path, make_loop: type, domain: Domain) -> None:
    import torch

    from gpudiag.capture.session import Session

    def fail(gradient: Any) -> Any:
        raise KeyboardInterrupt

    loop = make_loop(batches=6)
    with pytest.raises(KeyboardInterrupt), Session(tmp_path / "run", parts=[Ranges()]) as prof:  # noqa: PT012
        for number, (x, _) in enumerate(prof.steps(loop.loader())):
            out = loop.model(x)
            if number == 2:
                out.register_hook(fail)
            out.sum().backward()
    assert (domain.stack, domain.open) == ([], {})
    assert torch.is_grad_enabled()
