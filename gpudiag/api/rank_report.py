"""The report on the shown rank of a job, made where its trace can be read. Requests and answers are bytes that travel."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from gpudiag.api.inputs import input_of
from gpudiag.api.opened import Question, diagnosed
from gpudiag.api.ranks import RankInput
from gpudiag.diagnosis.config import Config
from gpudiag.diagnosis.loader import SUFFIX, rules_in_force
from gpudiag.errors import InputError
from gpudiag.files import read_file
from gpudiag.model.job import Job
from gpudiag.model.report import Source, to_json

MAX_RULE_BYTES = 1 << 20
"""A rule is a few kB."""


class ReportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the report on the shown rank of a job is made from, but for its trace."""

    item: RankInput
    job: Job | None
    source: Source
    warnings: tuple[str, ...] = ()
    """What the machine that asks has to say of the recording, first."""
    question: Question = Question()
    rules: tuple[dict[str, str], ...] = ()
    """Folders of further rules: file -> text. They are the user's, and nowhere but on his machine."""
    config: Config | None = None


def report(request: bytes) -> bytes:
    """Return the report (JSON) that a request asks for: a ReportRequest as JSON. Raises InputError where the rank cannot be read."""
    asked = msgspec.json.decode(request, type=ReportRequest)
    with _folders(asked.rules) as folders:
        base = rules_in_force(folders, asked.config)
        chosen = input_of(asked.item)
        chosen = chosen._replace(source=asked.source, warnings=(*asked.warnings, *chosen.warnings))
        return to_json(diagnosed(chosen, base, lambda _: None, asked.question, job=asked.job, report_only=True).report)


# -- rules that travel --------------------------------------------------------------------------------------------------------


def packed_rules(folders: Sequence[str]) -> tuple[dict[str, str], ...]:
    """Return the rule files of `folders`. Raises InputError where one cannot be read."""
    found = [(folder, sorted(Path(folder).rglob(f"*{SUFFIX}"))) for folder in folders]
    return tuple({path.relative_to(folder).as_posix(): _text(path) for path in paths} for folder, paths in found)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_RULE_BYTES:
            raise InputError(f"{path}: larger than {MAX_RULE_BYTES >> 20} MB, this is no rule", "leave it out of the folder of rules")
        return read_file(path, MAX_RULE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({type(error).__name__})", "check its access rights, and that it is UTF-8") from None


@contextmanager
def _folders(packed: Sequence[dict[str, str]]) -> Iterator[list[str]]:
    """Yield folders with these rule files; gone afterwards."""
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpudiag-rules-"))) for _ in packed]
        for folder, files in zip(folders, packed, strict=True):
            for number, (name, text) in enumerate(files.items()):  # a folder each: a name that travelled is no path
                own = folder / f"{number:06d}"
                own.mkdir()
                (own / Path(name).name).write_text(text, encoding="utf-8")
        yield [str(folder) for folder in folders]
