"""Where a process of its own finds a function or class of the user: FILE.py:NAME or MODULE:NAME."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from gpudiag.errors import InputError, suggest_nearest

IMPORTABLE_HINT = "define it at the top level of a file: each arm imports it in a process of its own"


class CodeLocation(msgspec.Struct, frozen=True):
    """A function or class: FILE.py:NAME or MODULE:NAME, and the folder that has to be on sys.path for the module."""

    target: str
    folder: str = ""


def locate_code(found: Any, what: str, folder: str = "") -> CodeLocation:
    """Return where `found`, a function or class (or already 'FILE.py:NAME' or 'MODULE:NAME'), can be imported from.

    `what`: how it is called in messages; `folder`: where a MODULE that is written out is found (default: here).
    Raises InputError for what only exists in this process: lambdas, inner functions, notebooks.
    """
    if isinstance(found, str):
        where, colon, name = found.rpartition(":")
        if not colon or not where or not name.isidentifier():
            raise InputError(f"{what}: {found!r} names no function", "write FILE.py:NAME or MODULE:NAME")
        if not where.endswith(".py"):
            return CodeLocation(found, folder or os.getcwd())
        if not Path(where).is_file():
            raise InputError(f"{what}: {where}: no such file")
        return CodeLocation(f"{Path(where).resolve()}:{name}")
    name, module = getattr(found, "__qualname__", ""), getattr(found, "__module__", "")
    if not name or not module:
        raise InputError(f"{what} is a {type(found).__name__}, not a function or class with a name", IMPORTABLE_HINT)
    if not name.isidentifier():
        kind = "a lambda" if "<lambda>" in name else "defined inside another one" if "<locals>" in name else "part of a class"
        raise InputError(f"{what} ({name}) is {kind} and cannot be imported", IMPORTABLE_HINT)
    home = sys.modules.get(module)
    if getattr(home, name, None) is not found:
        raise InputError(f"{what}: {module}.{name} is something else by now", "give it a name of its own")
    return _locate_in_module(home, name, what)


def _locate_in_module(home: Any, name: str, what: str) -> CodeLocation:
    file = getattr(home, "__file__", None)
    if not file:
        raise InputError(f"{what} ({name}) is defined in no file: in a notebook, or at the prompt", IMPORTABLE_HINT)
    spec = getattr(home, "__spec__", None)
    module = home.__name__ if home.__name__ != "__main__" else getattr(spec, "name", "__main__")
    path = Path(file).resolve()
    alone = "." not in module and path.suffix == ".py" and path.name != "__init__.py"
    if alone:
        return CodeLocation(f"{path}:{name}")
    if module == "__main__":
        raise InputError(f"{what} ({name}) is defined in {path.name}, which cannot be imported", "its name has to end in .py")
    return CodeLocation(f"{module}:{name}", str(path.parents[module.count(".") + (path.name == "__init__.py")]))


LOADING: list[str] = []
"""The files and modules of the user that load_code() executes now."""


def load_code(where: CodeLocation) -> Any:
    """Return what stands at `where`; its file is executed, or its module imported. Raises InputError for what is not there, or fails."""
    from gpudiag.capture.estimate.model_estimate import load_function

    file, _, name = where.target.rpartition(":")
    LOADING.append(where.target)
    try:
        if file.endswith(".py"):
            return load_function(where.target)[0]
        if where.folder and where.folder not in sys.path:
            sys.path.insert(0, where.folder)
        try:
            module = importlib.import_module(file)
        except (Exception, SystemExit) as error:  # the module may raise anything
            raise InputError(f"{file} cannot be imported: {type(error).__name__}: {str(error).strip() or 'no message'}") from error
    finally:
        LOADING.pop()
    found = getattr(module, name, None)
    if not callable(found):
        raise InputError(f"{file} has no {name!r}{suggest_nearest(name, vars(module))}")
    return found
