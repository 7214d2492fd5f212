"""The files beside a script that it imports: where code of its own may stand that is not in the script itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpudiag.files import read_file

MOST_FILES = 12
"""Files that are looked into: a parse that keeps comments takes some tenths of a second for each."""

MOST_BYTES = 200_000
"""Of one file: a larger one is hardly written by hand."""


def read_imported_files(script: Path, text: str) -> Iterator[tuple[Path, str]]:
    """Yield (path, text) of the files in the folder of a script, and below it, that it imports, or that these import; at most MOST_FILES.

    Found by the names of the import statements alone: nothing is run. What cannot be read, or is no Python, is left out.
    """
    folder, waiting, seen = script.resolve().parent, [(script.resolve(), text)], {script.resolve()}
    while waiting:
        importer, source = waiting.pop(0)
        for path in _list_imports(folder, importer, source):
            if path in seen or len(seen) > MOST_FILES:
                continue
            seen.add(path)
            with suppress(OSError, ValueError):
                found = read_file(path, MOST_BYTES).decode("utf-8")
                yield path, found
                waiting.append((path, found))


def _list_imports(folder: Path, importer: Path, text: str) -> Iterator[Path]:
    """Yield the files below `folder` that the import statements of a file may name."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            names, base = [name.name for name in node.names], folder
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{name.name}".lstrip(".") for name in node.names)]
            base = importer.parents[node.level - 1] if 0 < node.level <= len(importer.parents) else folder
        else:
            continue
        for name in filter(None, names):
            at = base.joinpath(*name.split("."))
            for path in (at.with_suffix(".py"), at / "__init__.py"):
                if path.is_file() and path.resolve().is_relative_to(folder):
                    yield path.resolve()
