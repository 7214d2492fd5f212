"""Rule files as plain values, with the line of every key for messages."""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from gpudiag.errors import InputError

MAX_BYTES = 65_536
"""Largest rule file: ten times the largest built-in one."""

MAX_DEPTH = 20
"""Levels of nesting: a rule has 4. libyaml composes by recursion in C, where too deep a file ends the process."""

Lines = dict[str, int]
"""Path of a key, such as '$.tests[0].facts' -> line from 1."""


class Source(msgspec.Struct, frozen=True):
    """A rule file as read: where it stands, its values, its lines."""

    path: str
    values: dict[str, Any]
    lines: Lines

    def error(self, key: str, message: str, hint: str | None = None) -> InputError:
        """Return the error that names file, line and key."""
        return InputError(f"{self.path}:{self.line(key)}: {key.removeprefix('$.')}: {message}", hint)

    def line(self, key: str) -> int:
        """Return the line of `key`, or of the nearest key around it."""
        while key not in self.lines and key not in ("$", ""):
            key = key[: max(key.rfind("."), key.rfind("["))]
        return self.lines.get(key, 1)


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml reads eight times as fast; builds without it lack the name


def _check_shape(text: str) -> None:
    """Raise YAMLError for aliases, which can blow a small file up to any size, and for nesting that no rule has; without recursion."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"{_line(event)}aliases (*name) are not allowed")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"{_line(event)}nested deeper than {MAX_DEPTH} levels")


def _line(event: yaml.Event) -> str:
    return f"line {event.start_mark.line + 1}: " if event.start_mark is not None else ""


def parse(path: str, data: bytes) -> Source:
    """Return the rule file `data`; raises InputError for bad YAML, twice the same key, or anything but a mapping."""
    if len(data) > MAX_BYTES:
        raise InputError(f"{path}: larger than {MAX_BYTES} bytes", "a rule file holds one rule")
    try:
        text = data.decode("utf-8")
        _check_shape(text)
        loader = _Loader(text)
        root = loader.get_single_node()
        lines = _lines(path, root) if root is not None else {}
        values = loader.construct_document(root) if root is not None else None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"{path}: no YAML that can be read: {_one_line(error)}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"{path}: not a rule: a mapping of keys is needed", "see rules/README.md")
    return Source(path, values, lines)


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark is not None else ""
    text = getattr(error, "problem", None) or str(error)
    return where + " ".join(str(text).split())


def _lines(path: str, root: yaml.Node) -> Lines:
    """Return the line of every key; raises InputError where a mapping has the same key twice (YAML would keep the last)."""
    lines: Lines = {"$": 1}
    pending: list[tuple[str, yaml.Node]] = [("$", root)]
    while pending:
        where, node = pending.pop()
        if isinstance(node, yaml.SequenceNode):
            children = [(f"{where}[{index}]", child, child) for index, child in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            children = [(f"{where}.{key.value}", key, child) for key, child in node.value]
        else:
            children = []
        for name, key, child in children:
            line = key.start_mark.line + 1
            if name in lines:
                raise InputError(f"{path}:{line}: the key {name.removeprefix('$.')} stands twice")
            lines[name] = line
            pending.append((name, child))
    return lines
