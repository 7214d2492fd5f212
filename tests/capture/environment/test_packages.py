"""Versions of imported packages, without importing or loading anything."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch

from gpudiag.capture.environment.process import KNOWN_PACKAGES, read_packages


def test_what_is_imported_has_its_version() -> None:
    found = read_packages()
    assert found["torch"] == torch.__version__
    assert set(found) <= set(KNOWN_PACKAGES.values())


def test_asking_imports_nothing() -> None:
    before = set(sys.modules)
    read_packages()
    assert set(sys.modules) == before


def test_a_lazy_module_is_not_made_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was loaded")

    def version(name: str) -> str:
        if name != "timm":  # others that tests have imported
            raise metadata.PackageNotFoundError(name)
        return "1.0.9"

    monkeypatch.setitem(sys.modules, "timm", Lazy("timm"))
    monkeypatch.setattr(metadata, "version", version)
    assert read_packages()["timm"] == "1.0.9"


@pytest.mark.parametrize("version", ["/home/me/timm", "1.0; token=x", "", "x" * 100, 7])
def test_what_is_no_version_is_left_out(monkeypatch: pytest.MonkeyPatch, version: object) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    module = ModuleType("timm")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", module)
    monkeypatch.setattr(metadata, "version", absent)
    assert "timm" not in read_packages()
    monkeypatch.setitem(sys.modules, "timm", None)  # an import that was blocked
    assert "timm" not in read_packages()
