"""Rules from the package and from folders."""

from __future__ import annotations

import fnmatch
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from gpudiag.diagnosis.config import Config, apply_config
from gpudiag.diagnosis.engine import NEVER_WITHHELD
from gpudiag.diagnosis.rule import Advisory, Rule, RuleBase, Source
from gpudiag.diagnosis.rule_check import build_rule
from gpudiag.document_cache import load_document
from gpudiag.errors import InputError, suggest_nearest
from gpudiag.files import open_file

RULE_SUFFIX = ".yaml"


def load_rules(extra_dirs: Sequence[str] = (), config: Config | None = None) -> tuple[Rule, ...]:
    """Return the rules that can be judged, by id; raises InputError as load_active_rules."""
    return load_active_rules(extra_dirs, config).judged


def load_active_rules(extra_dirs: Sequence[str] = (), config: Config | None = None) -> RuleBase:
    """Return all rules: the built-in ones, those of the folders of `config`, then of `extra_dirs`; with the changes of `config`.

    Raises InputError for anything wrong in a rule file or in `config`.
    """
    if config is None:
        return read_rules(extra_dirs)
    for folder in config.rules:
        if not os.path.isdir(folder):
            raise config.error(f"rules: no such folder of rules: {folder}", "rules", os.path.basename(folder))
    return apply_config(read_rules((*config.rules, *extra_dirs)), config)


def read_rules(extra_dirs: Sequence[str] = (), *, builtin: bool = True) -> RuleBase:
    """Return all rules: the built-in ones, then those of each folder, which may override earlier ones.

    Raises InputError for anything wrong in a file, an id that stands twice without `override: true`, an override of nothing, an
    unknown id in `explains`, rules that explain each other in a circle, and a pattern in `withholds` that no rule has.
    """
    ours = _read_builtin() if builtin else ()
    sources = {rule.id: source for source, rule in ours}
    rules = {rule.id: rule for _, rule in ours}
    for directory in extra_dirs:
        for source in _read_folder(directory):
            merged = _merge_override(source, sources)
            rule = build_rule(merged)
            rules[rule.id], sources[rule.id] = rule, merged
    found = [rules[identifier] for identifier in sorted(rules)]
    _check_explains(found, sources, complete=builtin)
    # A pattern of rules to withhold names one that is there; those that are never withheld do not count
    judged = [rule for rule in found if isinstance(rule, Rule)]
    known = {rule.id: None for rule in judged if not rule.id.startswith(NEVER_WITHHELD)}
    patterns = [
        (rule.id, f"$.withholds[{place}].rules[{index}]", pattern)
        for rule in judged
        for place, withholding in enumerate(rule.file.withholds)
        for index, pattern in enumerate(withholding.rules)
    ]
    for identifier, key, pattern in patterns if builtin else ():
        if not fnmatch.filter(known, pattern):
            message = f"no rule that can be withheld has an id like {pattern!r}{suggest_nearest(pattern, known)}"
            raise sources[identifier].error(key, message)
    return _build_base(found)


def _build_base(rules: Iterable[Rule | Advisory]) -> RuleBase:
    found = tuple(rules)
    return RuleBase(tuple(rule for rule in found if isinstance(rule, Rule)), tuple(rule for rule in found if isinstance(rule, Advisory)))


def read_folder(directory: str) -> RuleBase:
    """Return the rules of one folder alone, checked beside the built-in ones (which they may override); raises InputError as read_rules.

    The folder of the built-in rules itself can be given too.
    """
    own = Path(str(files("gpudiag_rules"))).resolve()
    given = Path(directory).resolve()
    itself = given == own or given in own.parents or own in given.parents
    ids = {source.values.get("id") for source in _read_folder(directory)}
    return _build_base(rule for rule in read_rules((directory,), builtin=not itself).all if rule.id in ids)


@functools.cache
def _read_builtin() -> tuple[tuple[Source, Rule | Advisory], ...]:
    root = files("gpudiag_rules")
    folders = sorted((item for item in root.iterdir() if item.is_dir()), key=lambda item: item.name)
    found = [(folder, file) for folder in folders for file in sorted(folder.iterdir(), key=lambda item: item.name)]
    texts = {f"rules/{folder.name}/{file.name}": file.read_bytes() for folder, file in found if file.name.endswith(RULE_SUFFIX)}
    reader = files("gpudiag.diagnosis").joinpath("rule_yaml.py").read_bytes()

    def parse_texts() -> list[list[Any]]:
        from gpudiag.diagnosis.rule_yaml import parse_rule_yaml  # here: where the values are kept, nothing else needs PyYAML

        parsed = [parse_rule_yaml(path, text) for path, text in texts.items()]
        return [[source.path, source.values, source.lines] for source in parsed]

    pieces = [piece for path, text in texts.items() for piece in (path.encode(), text)]
    sources = [Source(*row) for row in load_document("rules", [reader, *pieces], parse_texts)]
    return tuple((source, build_rule(source)) for source in sources)


def _read_folder(directory: str) -> Iterator[Source]:
    if not directory.strip():
        raise InputError("the folder of rules is empty text", f"give a folder that holds files *{RULE_SUFFIX}")
    from gpudiag.diagnosis.rule_yaml import MAX_RULE_BYTES, parse_rule_yaml

    root = Path(directory)
    if not os.path.isdir(directory):
        raise InputError(f"{directory}: no such folder of rules")
    found = sorted(path for path in root.rglob(f"*{RULE_SUFFIX}") if path.is_file())
    if not found:
        raise InputError(f"{directory}: no rule files", f"they end in {RULE_SUFFIX}")
    for path in found:
        try:
            with open_file(path) as file:
                data = file.read(MAX_RULE_BYTES + 1)
            yield parse_rule_yaml(path.as_posix(), data)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _merge_override(source: Source, known: dict[str, Source]) -> Source:
    identifier = source.values.get("id")
    earlier = known.get(identifier) if isinstance(identifier, str) else None
    overrides = source.values.get("override", False)
    if not isinstance(overrides, bool):
        raise source.error("$.override", "true or false")
    if earlier is None:
        if overrides:
            raise source.error("$.override", f"there is no rule {identifier!r} to override{suggest_nearest(str(identifier), known)}")
        return source
    if not overrides:
        raise source.error("$.id", f"{identifier} stands in {earlier.path} already", "to change it: `override: true` and the changed keys")
    # `earlier` with `changes`: whole keys, except that single `params` can be changed (their value, unit, origin)
    merged = {**earlier.values, **source.values}
    old, new = earlier.values.get("params"), source.values.get("params")
    if isinstance(old, dict) and isinstance(new, dict):
        merged["params"] = {**old, **new}
    if isinstance(fixes := source.values.get("fixes"), list):
        _leave_out_fixes(merged, {"tests", "needless"} - source.values.keys(), fixes)
    return Source(source.path, merged, {**earlier.lines, **source.lines})


def _leave_out_fixes(merged: dict[str, Any], inherited: set[str], fixes: list[Any]) -> None:
    """Leave out what the earlier rule says of its own fixes, where an override names others."""
    tests, needless = merged.get("tests"), merged.get("needless")
    if "tests" in inherited and isinstance(tests, list):
        merged["tests"] = [{key: test[key] for key in test if key != "fixes"} if isinstance(test, dict) else test for test in tests]
    if "needless" in inherited and isinstance(needless, dict):
        merged["needless"] = {fix: needless[fix] for fix in needless if fix in fixes}


def _check_explains(rules: Iterable[Rule | Advisory], sources: dict[str, Source], *, complete: bool) -> None:
    """Raise InputError where a rule explains an unknown rule (if these are all), itself, or a rule that (through others) explains it."""
    explains = {rule.id: rule.file.explains for rule in rules}
    for identifier, symptoms in explains.items():
        source = sources[identifier]
        for index, symptom in enumerate(symptoms):
            if complete and symptom not in explains:
                raise source.error(f"$.explains[{index}]", f"no rule {symptom!r}{suggest_nearest(symptom, explains)}")
        reached, pending = set[str](), list(symptoms)
        while pending:
            symptom = pending.pop()
            if symptom not in reached:
                reached.add(symptom)
                pending.extend(explains.get(symptom, ()))
        if identifier in reached:
            raise source.error("$.explains", f"{identifier} explains itself, directly or through others")
