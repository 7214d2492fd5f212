"""Rule files: any YAML is a rule, whose own tests can be run, or refused by one line."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

from fuzz.targets.target import Target, refused

from gpudiag.diagnosis.rule import Rule
from gpudiag.diagnosis.rule_check import build_rule, self_test
from gpudiag.diagnosis.rule_yaml import parse_rule_yaml

SMALL = """schema: 1
id: OVH-99
title: Many small kernels
category: ovh
maturity: stable
device_kinds: [gpu, cpu]
bound: overhead
params: {least: {value: 0.25, origin: measured, unit: share}}
facts: {rows: {unit: count, doc: kernels, sql: select count(*) from kernels}}
when: launch_share > least and rows > 3
severity: {warning: launch_share > 0.5, info: true}
message: "{launch_share} of {wall_ns} ({rows:count} kernels)"
why: Launches cost time.
ceiling: {time_ns: wall_ns * launch_share, what_if: no launches}
fixes: [compile]
needless: {compile: rows < 2}
references: [a book]
tests:
  - {facts: {launch_share: 0.6, rows: 5, wall_ns: 100}, expect: warning, ceiling_ns: 60, message: "60 %", fixes: [compile]}
  - {facts: {launch_share: 0.1, rows: 5}, expect: passed}
  - {facts: {}, expect: not_applicable}
"""


def rule(data: bytes) -> None:
    """The path is the name that the small rule must have."""

    def load() -> None:
        found = build_rule(parse_rule_yaml("rules/ovh/OVH-99.yaml", data))
        if isinstance(found, Rule):
            assert all(isinstance(line, str) for line in self_test([found]))

    refused(load)


def _seeds() -> Iterator[bytes]:
    yield SMALL.encode()
    for folder in files("gpudiag_rules").iterdir():
        if folder.is_dir():
            yield from (file.read_bytes() for file in folder.iterdir() if file.name.endswith(".yaml") and "advisory" in file.read_text())


_WORDS = (
    "schema: 1",
    "when: ",
    "tests:\n- ",
    "facts: {",
    "params: ",
    "!!binary ",
    "!!timestamp ",
    "&a ",
    "*a",
    "<<: ",
    "? ",
    "|-\n",
    ".inf",
    "1e400",
    "0x",
    "9" * 400,
    "1:60",
    "---\n",
    "\t",
    "override: true",
    "maturity: advisory",
)

TARGETS = (Target("rule", rule, _seeds, ("gpudiag.diagnosis", "gpudiag.facts.sql"), _WORDS, longest=6000),)
