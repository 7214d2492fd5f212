"""The nearest gpudiag.toml, or pyproject.toml with [tool.gpudiag]: rules judged, their numbers, whether results are kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpudiag.diagnosis.config import Config

CONFIG_NAMES = ("gpudiag.toml", "pyproject.toml")
CONFIG_KEYS = ("rules", "disable", "thresholds", "cache")
_LEAVE_OUT = "leave it out with --no-config"
MAX_BYTES = 1_000_000
"""Largest file that is read: a thousand times a config of ours."""
_OURS = re.compile(r"^\s*\[\s*tool\s*\.\s*[\"']?gpudiag[\"']?\s*[.\]]", re.MULTILINE)
"""A header of ours. A pyproject.toml that cannot be read is an error where it has one, else it is somebody else's matter."""


def find_config(start: Path | None = None) -> Config:
    """Return the config that is nearest to the folder `start` (default: the working directory), upwards; an empty one where there is none.

    In one folder gpudiag.toml counts before pyproject.toml. Raises InputError with file, line and key for one that is wrong.
    """
    from gpudiag.diagnosis.config import Config

    folder = (start or Path.cwd()).absolute()
    for path in (place / name for place in (folder, *folder.parents) for name in CONFIG_NAMES):
        text = _read_ours(path) if path.is_file() else None
        if text is not None:
            return parse_config(path, text)
    return Config()


def _read_ours(path: Path) -> str | None:
    """Return the text of a config; None for a pyproject.toml without tool.gpudiag, however written, which may be anyone's.

    Raises InputError for a gpudiag.toml that cannot be read, and for a broken pyproject.toml with our header.
    """
    from gpudiag.diagnosis.config import parse_toml
    from gpudiag.errors import InputError

    ours = path.name == CONFIG_NAMES[0]
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if ours:
            raise InputError(f"{path}: cannot be read: {error}", _LEAVE_OUT) from None
        return None
    if ours and len(data) > MAX_BYTES:
        raise InputError(f"{path}: larger than {MAX_BYTES} bytes", _LEAVE_OUT)
    if ours:
        return text
    if len(data) > MAX_BYTES or "gpudiag" not in text:
        return None
    try:
        tool = parse_toml(path.as_posix(), text, _LEAVE_OUT).get("tool")
    except InputError:
        if _OURS.search(text):
            raise
        return None
    return text if isinstance(tool, dict) and "gpudiag" in tool else None


def parse_config(path: Path, text: str) -> Config:
    """Return the config of `text`, which stands in `path`; raises InputError with file, line and key for one that is wrong."""
    from gpudiag.diagnosis.config import Config, parse_toml

    shown = path.as_posix()
    values = parse_toml(shown, text, _LEAVE_OUT)
    if path.name != CONFIG_NAMES[0]:
        tool = values.get("tool")
        values = tool.get("gpudiag", {}) if isinstance(tool, dict) else {}
    empty = Config(shown, text=text)
    if not isinstance(values, dict):
        raise empty.error("tool.gpudiag: a table is needed", "tool", "gpudiag")
    from gpudiag.errors import suggest_nearest

    for key in values:
        if key not in CONFIG_KEYS:
            raise empty.error(
                f"{key}: unknown key{suggest_nearest(key, dict.fromkeys(CONFIG_KEYS))}", key, hint=f"keys: {', '.join(CONFIG_KEYS)}"
            )
    folders = tuple((path.parent / folder).as_posix() for folder in _parse_texts(empty, values, "rules"))
    cache = values.get("cache", True)
    if not isinstance(cache, bool):
        raise empty.error("cache: true or false is needed", "cache")
    return Config(
        shown, folders, _parse_texts(empty, values, "disable"), _parse_thresholds(empty, values.get("thresholds", {})), text, cache
    )


def _parse_texts(config: Config, values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = values.get(key, [])
    if not isinstance(found, list) or not all(isinstance(item, str) and item.strip() for item in found):
        raise config.error(f"{key}: a list of texts is needed", key, hint=f'such as {key} = ["..."]')
    return tuple(found)


def _parse_thresholds(config: Config, found: Any) -> dict[str, dict[str, float]]:
    if not isinstance(found, dict):
        raise config.error("thresholds: a table is needed", "thresholds", hint='such as [thresholds."OVH-01"]')
    thresholds: dict[str, dict[str, float]] = {}
    for identifier, values in found.items():
        if not isinstance(values, dict):
            raise config.error(f"thresholds.{identifier}: a table is needed", "thresholds", identifier, hint="such as min_share = 0.2")
        thresholds[identifier] = {}
        for name, value in values.items():
            where = f"thresholds.{identifier}.{name}"
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise config.error(f"{where}: a number is needed", "thresholds", identifier, name)
            try:
                thresholds[identifier][name] = float(value)
            except OverflowError:
                raise config.error(f"{where}: a number below 1e308 is needed", "thresholds", identifier, name) from None
    return thresholds
