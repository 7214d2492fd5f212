"""What `gpudiag.ab` returns: the experiments of one call, and their renderings."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gpudiag.api.rendered import Rendered
from gpudiag.model.experiment import ExperimentData, Outcome, Parity, Recipe, Unit, Verdict


class ExperimentResult(Rendered):
    """The experiments of one call. The attributes speak of the first one that claims something; `data` holds all of them.

    >>> found.verdict, found.ratio, found.interval
    ('faster', 1.83, (1.79, 1.87))
    """

    def __init__(self, data: ExperimentData) -> None:
        self.data = data
        first = _first(data.experiments)
        self.verdict: Verdict | None = None if first is None else first.verdict
        """None: nothing was measured; `notes` say why."""
        self.reason: str = "" if first is None else first.reason
        """Of a failure: oom, crash, hang, timeout, ended, no_steps."""
        self.ratio: float | None = None if first is None else first.ratio
        """Throughput with the change over that without."""
        self.interval: tuple[float, float] | None = None if first is None else first.interval
        self.p: float | None = None if first is None else first.p
        self.pairs: int = 0 if first is None else first.pairs
        """Pairs of processes: what the interval was computed over."""
        self.unit: Unit = "samples" if first is None else first.unit
        self.parity: Parity | None = None if first is None else first.parity
        self.memory: float | None = None if first is None else first.memory_ratio
        """Peak memory with the change over that without."""
        self.energy: float | None = None if first is None else first.energy_ratio
        """Energy a sample with the change over that without."""
        self.break_even_steps: float | None = None if first is None else first.break_even_steps
        self.evidence: tuple[str, ...] = () if first is None else first.evidence
        self.notes: tuple[str, ...] = data.notes if first is None else (*first.notes, *data.notes)
        self.bundle: Path | None = None
        """Folder that everything was kept in; None: it came from elsewhere."""

    @property
    def recipe(self) -> Recipe:
        """Return what was proved to help, all together; empty: the program as it is."""
        return self.data.recipe

    @property
    def _place(self) -> str:
        return "" if self.bundle is None else str(self.bundle)

    def text(self, width: int | None = None, color: bool = False) -> str:
        """Return the experiments for a terminal of `width` columns (default 100)."""
        from gpudiag.report.experiment.text import text

        return text(self.data, width=100 if width is None else width, color=color, bundle=self._place)

    def markdown(self) -> str:
        """Return the experiments as GitHub Markdown."""
        from gpudiag.report.experiment.markdown import markdown

        return markdown(self.data, bundle=self._place)

    def html(self) -> str:
        """Return the experiments as one self-contained HTML page."""
        from gpudiag.report.experiment.html import html

        return html(self.data, bundle=self._place)

    def json(self) -> bytes:
        """Return the experiments as JSON (schema: `gpudiag schema experiments`)."""
        return msgspec.json.format(msgspec.json.encode(self.data), indent=2) + b"\n"

    def to_json(self) -> str:
        """Return json() as text."""
        return self.json().decode()

    def _repr_html_(self) -> str:
        """Return the experiments as a notebook shows them."""
        from gpudiag.report.experiment.notebook import notebook

        return notebook(self.data, bundle=self._place)


def _first(outcomes: tuple[Outcome, ...]) -> Outcome | None:
    """Return the first experiment that is no screening: those only rank candidates."""
    return next((outcome for outcome in outcomes if not outcome.screening), outcomes[0] if outcomes else None)
