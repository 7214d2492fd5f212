"""The report on a large recording and the steps of a side of a comparison, made once for each state of all that goes into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gpudiag.api.cache import Kind, allowed
from gpudiag.api.cached_result import Key, kept_as
from gpudiag.model.measured import Measured
from gpudiag.model.report import ReportData

if TYPE_CHECKING:
    from gpudiag.diagnosis.config import Config

Result = TypeVar("Result")


def kept_report(
    make: Callable[[], ReportData], paths: tuple[str, ...], asked: tuple[object, ...], *, capture: str | None = None,
    rules_dirs: tuple[str, ...] = (), config: Config | None = None,
) -> ReportData:  # fmt: skip
    """Return the report that `make` returns, or the one that is kept of the same recordings, rules, options, peaks and gpudiag.

    `paths`: the recordings as the user gave them, since a report names them; `asked`: every option that changes the report.
    """
    given = paths if capture is None else (*paths, capture)
    return _kept("report", make, ReportData, given, asked, _complete, rules_dirs=rules_dirs, config=config)


def _kept(
    kind: Kind, make: Callable[[], Result], of: type[Result], paths: tuple[str, ...], asked: tuple[object, ...],
    sure: Callable[[Result], bool], *, rules_dirs: tuple[str, ...] = (), config: Config | None = None,
) -> Result:  # fmt: skip
    """Return what `make` returns, a struct of type `of`, as `kept_report` does; `sure`: see cached_result.kept_as."""
    folders = rules_dirs if config is None else (*config.rules, *rules_dirs)
    with allowed(config is None or config.cache):
        key = Key(kind, paths, (*asked, config), rules=folders)
        return kept_as(key, make, msgspec.msgpack.encode, lambda data: msgspec.msgpack.decode(data, type=of), sure)


def kept_measured(make: Callable[[], Measured], path: str, asked: tuple[object, ...], *, config: Config | None = None) -> Measured:
    """Return the side of a comparison that `make` returns, or the one that is kept, as `kept_report` does."""
    return _kept("measured", make, Measured, (path,), asked, lambda found: _complete(found.report), config=config)


def _complete(report: ReportData) -> bool:
    """Return whether every rank could be read: one that could not, such as on a worker that was killed, may be readable next time."""
    return not any(row.unread for row in report.ranks or ())
