"""Traces written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Writer = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Write a trace: a list of events (in an object, with header fields as keywords), text or bytes."""

    def writer(content: list[dict[str, Any]] | str | bytes, name: str = "trace.json", **header: Any) -> Path:
        path = tmp_path / name
        if isinstance(content, list):
            content = json.dumps({**header, "traceEvents": content})
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return writer


@pytest.fixture
def event() -> Callable[..., dict[str, Any]]:
    """A complete event; keywords replace its fields."""

    def make(**fields: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 100, "dur": 10, "args": {}} | fields

    return make
