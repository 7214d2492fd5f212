"""A signal in a block that puts it off: its handler runs at the end, once; a second one does not wait."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from gpudiag.capture.torch_profiler import defer_signals


def press(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_ctrl_c_waits_for_the_end_of_the_block() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with defer_signals():
            press()
            reached.append("end")
        reached.append("behind")
    assert reached == ["end"]


def test_a_second_one_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), defer_signals():  # noqa: PT012
        press()
        press()
        pytest.fail("the second Ctrl-C was put off too")


def test_the_program_s_own_handler_is_called_with_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []

    def handler(number: int, frame: FrameType | None) -> None:
        seen.append((number, frame is not None))

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with defer_signals():
            press(signal.SIGTERM)
            assert seen == []
        assert seen == [(signal.SIGTERM, True)]
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_failure_inside_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, defer_signals():  # noqa: PT012
        press()
        raise ValueError("inside")
    assert isinstance(caught.value.__context__, ValueError)


def test_what_is_ignored_stays_ignored_and_other_threads_are_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with defer_signals():
            press()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)

    def elsewhere() -> None:
        with defer_signals():
            seen.append(signal.getsignal(signal.SIGINT))

    seen: list[object] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]
