"""Where questions are answered: the recordings below one folder, each report made once and kept while its files stay as they are."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gpudiag.agents.pages import build_page
from gpudiag.agents.questions import Question, read_question
from gpudiag.agents.root import confine_path
from gpudiag.diagnosis.config import Config
from gpudiag.diagnosis.rule import Advisory, Rule
from gpudiag.model.report import ReportData
from gpudiag.recordings.folder import Entry, Lister, read_version_stamp
from gpudiag.recordings.recorded_command import read_recorded_script
from gpudiag.report.findings import hide_secrets

MOST_REPORTS = 8
"""Reports kept in memory; what large recordings took to read is kept on disk as for all commands (cache.py)."""


class OpenedReport(NamedTuple):
    """A report, and the recorded program with its arguments, without what is called like a secret ('': not known)."""

    data: ReportData
    script: str


class Desk:
    """Answers questions about the recordings below `root`, a resolved folder; nothing outside of it is opened. Works in that folder."""

    def __init__(self, root: Path, config: Config) -> None:
        self.root, self.config = root, config
        self._reports: OrderedDict[tuple[Any, ...], OpenedReport] = OrderedDict()

    def answer(self, question: Question) -> str:
        """Return one page of the answer, as it is sent. Raises GpudiagError where there is none."""
        return build_page(question.answer(self), question.page)

    def find(self, path: str) -> str:
        """Return the path of a recording as it is shown, relative to the folder. Raises InputError for what lies outside."""
        return confine_path(self.root, path)

    def list_entries(self) -> tuple[Entry, ...]:
        """List the recordings, the newest first."""
        return Lister(self.root).entries()

    def find_rules(self) -> dict[str, Rule | Advisory]:
        """Return all rules by id."""
        from gpudiag.diagnosis.loader import load_active_rules

        return {rule.id: rule for rule in load_active_rules([], self.config).all}

    def open_report(self, path: str, rank: int | None, window: int | None, *, modules: bool = False) -> OpenedReport:
        """Return the report on a recording, made anew only where its files have changed. Raises GpudiagError."""
        from gpudiag.api import diagnose

        place = self.find(path)
        key = (place, rank, window, modules, read_version_stamp(Path(place)))
        if key not in self._reports:
            found = diagnose(place, rank=rank, window=window, config=self.config, modules=modules)
            self._reports[key] = OpenedReport(found.data, hide_secrets(read_recorded_script([place])))
        self._reports.move_to_end(key)
        while len(self._reports) > MOST_REPORTS:
            self._reports.popitem(last=False)
        return self._reports[key]

    def choose_rank(self, path: str, rank: int | None) -> int | None:
        """Return the rank that is asked for, else that which the report shows; None where there is none to choose. Raises GpudiagError."""
        if rank is not None or not Path(self.find(path)).is_dir():
            return rank
        job = self.open_report(path, None, None).data.job
        return job.shown_rank if job else None


class Request(msgspec.Struct, frozen=True):
    """What the server asks of the process in which the analysis runs."""

    root: str
    config: Config
    tool: str
    arguments: dict[str, Any]


def answer_request(request: bytes) -> bytes:
    """Answer a Request in JSON with text in UTF-8. Raises GpudiagError."""
    asked = msgspec.json.decode(request, type=Request)
    desk = _open_desk(asked.root, msgspec.json.encode(asked.config))
    return desk.answer(read_question(asked.tool, asked.arguments)).encode()


@functools.cache
def _open_desk(root: str, config: bytes) -> Desk:
    os.chdir(root)  # paths are shown as the agent gives them
    return Desk(Path(root), msgspec.json.decode(config, type=Config))
