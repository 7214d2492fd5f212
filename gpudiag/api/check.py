"""A run checked against limits: a file of gates, a baseline, or both."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpudiag.errors import InputError, UsageError
from gpudiag.files import open_file
from gpudiag.model.gates import CheckData, Gates, to_json
from gpudiag.model.measured import Measured

if TYPE_CHECKING:
    from gpudiag.diagnosis.config import Config

AnyPath = str | os.PathLike[str]
Progress = Callable[[str], None]

MAX_BYTES = 1_000_000
"""Largest file of gates that is read: a thousand times a usual one."""


class CheckResult:
    """What was found of each gate: `data` is its JSON, version 1; the methods are its renderings."""

    def __init__(self, data: CheckData) -> None:
        self.data = data

    @property
    def passed(self) -> bool:
        """Return whether no gate failed."""
        return self.data.passed

    def text(self, width: int | None = None, color: bool = False) -> str:
        """Return it for a terminal of `width` columns (default 100)."""
        from gpudiag.report import gates_text

        return gates_text.render(self.data, width=100 if width is None else width, color=color)

    def github(self, width: int | None = None) -> str:
        """Return it for GitHub Actions: the text, in which no line counts as a command, then an annotation for each gate not passed."""
        from gpudiag.report import gates_github

        return gates_github.fenced(self.text(width), secrets.token_hex(16)) + gates_github.render(self.data)

    def junit(self) -> bytes:
        """Return it as JUnit XML: a test case for each gate."""
        from gpudiag.report import gates_junit

        return gates_junit.render(self.data)

    def json(self) -> bytes:
        """Return it as JSON (schema: `gpudiag schema check`)."""
        return to_json(self.data)

    def __str__(self) -> str:
        return self.text()


def check(
    path: AnyPath | Measured,
    *,
    budget: AnyPath | Gates | None = None,
    baseline: AnyPath | Measured | None = None,
    rank: int | None = None,
    config: Config | None = None,
    progress: Progress | None = None,
) -> CheckResult:
    """Return what was found of each gate of `budget` (a TOML file) on a bundle, a trace or a report.

    With a `baseline` alone the gates are gpudiag.diagnosis.gates.WITH_A_BASELINE. Raises UsageError where neither is given, or gates need
    a baseline that is not; InputError with file, line and key for a file of gates that is wrong, and where something cannot be read.
    """
    from gpudiag.api.measured import measured
    from gpudiag.diagnosis.compare_settings import rank_lines, warnings
    from gpudiag.diagnosis.gates import WITH_A_BASELINE, judged

    if budget is None and baseline is None:
        raise UsageError("nothing to check against", "give --budget gates.toml, --baseline BUNDLE, or both")
    gates = WITH_A_BASELINE if budget is None else budget if isinstance(budget, Gates) else read_gates(budget)
    if gates.needs_baseline and baseline is None:
        raise UsageError(f"{gates.path or 'a gate'}: tolerance_share and new_at compare with a baseline", "give --baseline BUNDLE")

    def side(one: AnyPath | Measured, name: str) -> Measured:
        told = (lambda text: progress(f"{name}: {text}")) if progress else None
        return one if isinstance(one, Measured) else measured(one, rank=rank, config=config, progress=told)

    run = side(path, "run")
    before = None if baseline is None else side(baseline, "baseline")
    results = judged(gates, run, before)
    return CheckResult(
        CheckData(
            path=run.report.source.path,
            budget=gates.path,
            baseline=before.report.source.path if before else "",
            results=results,
            warnings=warnings(before, run, names=("the baseline", "the run")) if before else tuple(rank_lines([run], ["the run"])),
            passed=not any(result.fails for result in results),
        )
    )


def read_gates(path: AnyPath) -> Gates:
    """Return the gates of a TOML file. Raises InputError with file, line and key for one that is wrong."""
    from gpudiag.diagnosis.gates_file import parse
    from gpudiag.diagnosis.loader import rules_in_force

    target = Path(os.fspath(path))
    try:
        with open_file(target) as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise InputError(f"{target}: {error.strerror}", "give a file of gates, such as gates.toml") from None
    except UnicodeDecodeError:
        raise InputError(f"{target}: no text in UTF-8", "give a file of gates, such as gates.toml") from None
    if len(data) > MAX_BYTES:
        raise InputError(f"{target}: larger than {MAX_BYTES} bytes, this is no file of gates")
    return parse(target.as_posix(), text, [rule.id for rule in rules_in_force([], None).judged])
