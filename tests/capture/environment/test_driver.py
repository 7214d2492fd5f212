"""The driver's version from NVML, and no error where there is none."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gpudiag.capture.environment.inventory import let_forked_children_use_nvml, read_driver_version


class NVMLError(Exception):
    pass


def fake(answer: Any = "570.86.15", fails: str = "") -> tuple[SimpleNamespace, list[str]]:
    called: list[str] = []

    def call(name: str, value: Any = None) -> Any:
        def method() -> Any:
            called.append(name)
            if name == fails:
                raise NVMLError(name)
            return value

        return method

    names = {"nvmlInit": None, "nvmlShutdown": None, "nvmlSystemGetDriverVersion": answer}
    return SimpleNamespace(NVMLError=NVMLError, **{name: call(name, value) for name, value in names.items()}), called


@pytest.mark.parametrize(("answer", "version"), [("570.86.15", "570.86.15"), (b"535.54.03", "535.54.03"), ("hf_TOKEN", None), ("", None)])
def test_the_version(monkeypatch: pytest.MonkeyPatch, answer: Any, version: str | None) -> None:
    module, called = fake(answer)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert read_driver_version() == version
    assert (called.count("nvmlInit"), called.count("nvmlShutdown")) == (1, 1)


@pytest.mark.parametrize(("fails", "shut"), [("nvmlInit", 0), ("nvmlSystemGetDriverVersion", 1)])
def test_nvml_that_fails_is_left_as_it_was_found(monkeypatch: pytest.MonkeyPatch, fails: str, shut: int) -> None:
    module, called = fake(fails=fails)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert read_driver_version() is None
    assert called.count("nvmlShutdown") == shut


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_driver_version() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_that_is_forked_while_a_thread_looks_a_function_up_can_use_pynvml(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = fake()
    module.libLoadLock = threading.Lock()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    let_forked_children_use_nvml()
    with module.libLoadLock:
        child = os.fork()
        if child == 0:
            os._exit(0 if module.libLoadLock.acquire(timeout=5) else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_nothing_is_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert read_driver_version() is None
    assert "pynvml" not in sys.modules
