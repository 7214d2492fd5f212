"""Which files the training program consists of, and what tells each from a later one: their lines are read only when a report is made."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from gpudiag.files import digest_content, read_file

MAX_FILES, MAX_FILE_BYTES = 500, 1 << 20
"""Files that are looked at, and the largest of them: half a thousand take some ten milliseconds."""

_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib") if sysconfig.get_path(name))
_INSTALLED = ("/site-packages/", "/dist-packages/")
_NOT_THE_PROGRAM = ("gpudiag", "gpudiag_dashboard", "gpudiag_rules", "torch", "sitecustomize")
DEMO = "gpudiag.capture.demo"
"""It plays the user's script."""


def digest_sources(known: Mapping[str, str]) -> dict[str, str]:
    """Return digests of the files of the program's modules in sys.modules, with those that are `known` already; nothing is imported.

    A file is named by its path below the folder that Python imports it from, as frames of torch.profiler name it.
    """
    found = dict(known)
    for module_name, module in list(sys.modules.items()):
        file = vars(module).get("__file__") if hasattr(module, "__dict__") else None  # lazy modules are not made to load
        if not isinstance(file, str) or not _is_of_program(module_name, file):
            continue
        name = _name_source(module_name, Path(file))
        if name in found or len(found) >= MAX_FILES:
            continue
        try:
            found[name] = digest_content(read_file(file, MAX_FILE_BYTES))
        except OSError:  # gone, or longer than anybody writes
            continue
    return found


def _is_of_program(module_name: str, file: str) -> bool:
    if not file.endswith(".py") or (module_name.partition(".")[0] in _NOT_THE_PROGRAM and module_name != DEMO):
        return False
    path = file.replace("\\", "/")
    return not path.startswith(_LIBRARIES) and not any(folder in path for folder in _INSTALLED)


def _name_source(module_name: str, path: Path) -> str:
    """Return 'package/part.py' of module package.part, whose path ends so; the name of the file for a script."""
    parts = module_name.split(".")
    parts = [*parts, "__init__.py"] if path.name == "__init__.py" else [*parts[:-1], f"{parts[-1]}.py"]
    return "/".join(parts) if path.parts[-len(parts) :] == tuple(parts) else path.name
