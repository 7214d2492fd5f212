"""YAML to the values of a rule file, with the line of every key for messages."""

from __future__ import annotations

from typing import Any

import yaml

from gpudiag.diagnosis.rule import Lines, Source
from gpudiag.errors import InputError

MAX_RULE_BYTES = 65_536
"""Largest rule file: ten times the largest built-in one."""

MAX_DEPTH = 20
"""Levels of nesting: a rule has 4. libyaml composes by recursion in C, where too deep a file ends the process."""


_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml reads eight times as fast; builds without it lack the name


class _Loader(_Base):  # type: ignore[misc]
    def whole_number(self, node: yaml.Node) -> int:
        """Return a number; raises YAMLError for one beyond 64 bits, which no fact has and no message can be written with."""
        found: int = self.construct_yaml_int(node)
        if found.bit_length() > 63:  # of a whole number, besides its sign: what the tables hold
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: a whole number of more than 64 bits")
        return found


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.whole_number)


def parse_rule_yaml(path: str, data: bytes) -> Source:
    """Return the rule file `data`; raises InputError for bad YAML, twice the same key, or anything but a mapping."""
    if len(data) > MAX_RULE_BYTES:
        raise InputError(f"{path}: larger than {MAX_RULE_BYTES} bytes", "a rule file holds one rule")
    try:
        text = data.decode("utf-8")
        # Raise YAMLError for what no rule has and PyYAML cannot bear; without recursion. Aliases can blow a small file up to any size,
        # tags ('!!int x') make values of texts that are none, nesting fills the stack
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            fault = "aliases (*name) are not allowed" if isinstance(event, yaml.AliasEvent) else ""
            fault = fault or ("tags (!name) are not allowed" if getattr(event, "tag", None) is not None else "")
            if fault or depth > MAX_DEPTH:
                where = f"line {event.start_mark.line + 1}: " if event.start_mark is not None else ""
                raise yaml.YAMLError(f"{where}{fault or f'nested deeper than {MAX_DEPTH} levels'}")
        loader = _Loader(text)
        root = loader.get_single_node()
        lines = _find_lines(path, root) if root is not None else {}
        values = loader.construct_document(root) if root is not None else None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        mark, said = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise InputError(f"{path}: no YAML that can be read: {where}{' '.join(str(said).split())}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"{path}: not a rule: a mapping of keys is needed", "see rules/README.md")
    return Source(path, values, lines)


def _find_lines(path: str, root: yaml.Node) -> Lines:
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
