"""Size limits, so that a file that was split stays split. Soft limits are printed (`pytest -s`), hard ones fail."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("gpudiag", "dashboard", "rules", "samples", "tests")
FILE_SOFT, FILE_HARD = 400, 600
FUNCTION_SOFT, FUNCTION_HARD = 40, 80


def _files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def _over(sizes: dict[str, int], soft: int, hard: int) -> list[str]:
    for name, lines in sizes.items():
        if soft < lines <= hard:
            print(f"over the soft limit of {soft} lines: {name}: {lines}")  # noqa: T201
    return [f"{name}: {lines} lines, at most {hard}" for name, lines in sizes.items() if lines > hard]


def test_files_are_short() -> None:
    sizes = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in _files()}
    assert "gpudiag/errors.py" in sizes
    assert not _over(sizes, FILE_SOFT, FILE_HARD)


@pytest.mark.slow
def test_functions_are_short() -> None:
    sizes = dict(item for path in _files() for item in _functions(path))
    assert len(sizes) > 50
    assert not _over(sizes, FUNCTION_SOFT, FUNCTION_HARD)
