"""FILE.py:FUNCTION: a function in a file of the user that makes what is to be estimated. The file is executed."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from gpudiag.errors import InputError, UsageError, nearest

KEYS = ("model", "batch", "loss", "optimizer", "autocast", "device", "accumulate")
"""What a function may return by name."""

_SHOWN = 6


def load(text: str) -> tuple[Callable[[], Any], str]:
    """Return the function that FILE.py:FUNCTION names, and its name; the file is executed. Raises InputError for what is not there."""
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file.endswith(".py") or not name:
        raise UsageError(f"{text}: no function is named", "write FILE.py:FUNCTION; the function returns (model, batch), or a dict")
    if not path.is_file():
        raise InputError(f"{file}: no such file")
    module = _execute(path)
    function = getattr(module, name, None)
    if not callable(function):
        own = [known for known, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == module.__name__]
        hint = f"it has {', '.join(own[:_SHOWN])}" if own else "it has no functions"
        raise InputError(f"{file}: no function {name!r}{nearest(name, own)}", hint)
    return function, name


def _execute(path: Path) -> ModuleType:
    """Return the module of `path`, which imports what stands beside it as it would when run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module  # dataclasses and pickles look their module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the file may raise anything
        at = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = at[-1] if at else getattr(error, "lineno", None)
        raise InputError(f"{path}{f':{line}' if line else ''}: {type(error).__name__}: {str(error).strip() or 'no message'}") from error
    finally:
        if before is not None:
            sys.modules[path.stem] = before
    return module


def named(found: Any, name: str) -> dict[str, Any]:
    """Return what a function returned, by the names of KEYS. Raises InputError where it is not what was asked for."""
    if isinstance(found, Mapping):
        values = {str(key): value for key, value in found.items()}
        values = {"batch" if key == "example_batch" else key: value for key, value in values.items()}
        unknown = [key for key in values if key not in KEYS]
        if unknown or not {"model", "batch"} <= values.keys():
            what = f"has {unknown[0]!r}" if unknown else "has no 'model' or no 'batch'"
            raise InputError(f"{name}() returns a dict that {what}", f"its keys: model, batch, and any of {', '.join(KEYS[2:])}")
        return values
    if isinstance(found, tuple) and len(found) == 2:
        return {"model": found[0], "batch": found[1]}
    raise InputError(
        f"{name}() returns a {type(found).__name__}", "return (model, batch), or a dict with these and loss, optimizer, autocast"
    )
