"""What users write: gpudiag.toml, files of gates, `--set NAME=VALUE`, URLs and names of files."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from fuzz.targets.target import Target, refused, text_of

from gpudiag.cli.config import parse_config
from gpudiag.comparison.gates import parse_gates
from gpudiag.diagnosis.config import apply_config, list_config_changes
from gpudiag.diagnosis.loader import read_rules
from gpudiag.diagnosis.rule import RuleBase
from gpudiag.memory_estimate import estimate_transformer
from gpudiag.recordings.paths import is_url_pattern, list_remote_traces
from gpudiag.timeline.whatif import registry
from gpudiag.trace.trace_files import filter_traces, parse_ranks

CONFIG = b'rules = ["mine"]\ndisable = ["OVH-01"]\ncache = false\n[thresholds."SYN-01"]\nmin_share = 0.2\n'
GATES = b"""[step_median_ms]
max = 12.0
tolerance_share = 0.03
[mfu_share]
min = 0.4
required = false
[findings]
fail_at = "critical"
new_at = "warning"
forbid = ["SYN-01"]
allow = ["OVH-01"]
"""
SETTINGS = (
    b"launch=0",
    b"kernel:gemm=0.5",
    b"roof=0.8\nsync=train.py:42",
    b"host=0.5\nbatch=2",
    b"copies=overlapped",
    b"fused",
    b"loader=0\ngc=0",
)
SIZES = (b"batch=100,layers=3", b"zero-stage=2\nhidden=4096", b"precision=bf16", b"seq = 1e3")
NAMES = (
    b"memory://a/rank0.json.gz",
    b"memory://a/*.json",
    b"memory://x[0-9]/?.json::zip://y",
    b"s3://bucket/rank_1.json",
    b"rank10.json\nrank2.json\nworker-3.json.zst",
)


@functools.cache
def _rules() -> RuleBase:
    return read_rules()


def config(data: bytes) -> None:
    """TOML as gpudiag.toml, then as pyproject.toml; what it says is laid over the rules."""
    text = data.decode("utf-8", "replace")
    for name in ("gpudiag.toml", "pyproject.toml"):
        refused(lambda name=name: list_config_changes(apply_config(_rules(), parse_config(Path(name), text)).judged))  # type: ignore[misc]


def gates(data: bytes) -> None:
    """TOML as a file of gates."""
    refused(lambda: parse_gates("gates.toml", data.decode("utf-8", "replace"), ("SYN-01", "OVH-01")))


def settings(data: bytes) -> None:
    """Each line as `--set` of what-ifs, and all of them."""
    lines = text_of(data).split("\n")
    for line in lines:
        refused(lambda line=line: registry.parse_settings([line]))  # type: ignore[misc]
    refused(lambda: registry.parse_settings(lines))


def sizes(data: bytes) -> None:
    """Each line as `--set` of `gpudiag memory --estimate`."""
    refused(lambda: estimate_transformer(settings=text_of(data).split("\n")))


def names(data: bytes) -> None:
    """Lines as the names in a folder; the first one as a URL in memory (no other file system: those are not ours to knock at)."""
    lines = text_of(data).split("\n")
    assert len(parse_ranks(lines)[0]) == len(lines)
    assert set(filter_traces(lines)) <= set(lines)
    is_url_pattern(lines[0])
    refused(lambda: list_remote_traces("memory://" + lines[0].rpartition("://")[2]))


def _once(*seeds: bytes) -> Iterator[bytes]:
    yield from seeds


TARGETS = (
    Target(
        "config",
        config,
        lambda: _once(CONFIG, b"[tool.gpudiag]\n" + CONFIG),
        ("gpudiag.cli.config", "gpudiag.diagnosis.config"),
        ("[tool.gpudiag]\n", "[thresholds.", "inf", "nan", "1979-05-27", '"""', "9" * 400, "1e999"),
        600,
    ),
    Target(
        "gates",
        gates,
        lambda: _once(GATES),
        ("gpudiag.comparison.gates", "gpudiag.diagnosis.config"),
        ("[findings]\n", "max = ", "inf", "nan", "9" * 400, "1e999", "[[", "{", "'''"),
        400,
    ),
    Target("settings", settings, lambda: _once(*SETTINGS), ("gpudiag.timeline.whatif",), ("=", ":", *registry.KIND_BY_NAME), 100),
    Target(
        "sizes",
        sizes,
        lambda: _once(*SIZES),
        ("gpudiag.memory_estimate", "gpudiag.roofline.transformer"),
        ("=", ",", "batch", "layers", "hidden", "9" * 400),
        500,
    ),
    Target(
        "names",
        names,
        lambda: _once(*NAMES),
        ("gpudiag.recordings.paths", "gpudiag.trace.trace_files"),
        ("rank", "worker", ".json", ".gz", "::", "://", "*", "[", "?", "²", "٣"),
        120,
    ),
)
