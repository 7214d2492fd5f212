"""The result of experiments as Python and the command line give it, also where they were interrupted or had to stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpudiag.api import Rendered
from gpudiag.errors import GpudiagError, InputError
from gpudiag.model.experiment import ExperimentData, Outcome, Recipe, Verdict

if TYPE_CHECKING:
    from gpudiag.report.blocks import Amount, Document


class ExperimentResult(Rendered):
    """The experiments of one call. The attributes speak of the first one that claims something; `data` holds all of them.

    >>> found.verdict, found.ratio, found.interval
    ('faster', 1.83, (1.79, 1.87))
    """

    def __init__(self, data: ExperimentData, bundle: Path | None = None) -> None:
        self.data: ExperimentData = data
        found = [one for one in data.experiments if not one.screening] or [*data.experiments]
        first = found[0] if found else Outcome(fix="", verdict="failed")
        self.verdict: Verdict | None = first.verdict if found else None
        """None: nothing was measured; `notes` say why."""
        self.reason = first.reason
        """Of a failure: oom, crash, hang, timeout, ended, no_steps."""
        self.ratio = first.ratio
        self.interval = first.interval
        self.p = first.p
        self.pairs = first.pairs
        self.unit = first.unit
        self.parity = first.parity
        self.memory = first.memory_ratio
        self.energy = first.energy_ratio
        self.break_even_steps = first.break_even_steps
        self.evidence = first.evidence
        self.notes = (*first.notes, *data.notes)
        self.recipe: Recipe = data.recipe
        """What was proved to help, all together; empty: the program as it is."""
        self.bundle = bundle
        """Folder that everything was kept in; None: it came from elsewhere."""

    def text(self, width: int | None = None, color: bool = False) -> str:
        """Return the experiments for a terminal of `width` columns (default 100)."""
        from gpudiag.report.blocks import Amount
        from gpudiag.report.render_text import render_text

        columns = 100 if width is None else width
        return render_text(self._build_document(Amount(width=columns)), width=columns, color=color)

    def markdown(self) -> str:
        """Return the experiments as GitHub Markdown."""
        from gpudiag.report.blocks import DOCUMENT
        from gpudiag.report.render_markdown import render_markdown

        return render_markdown(self._build_document(DOCUMENT))

    def html(self) -> str:
        """Return the experiments as one self-contained HTML page."""
        from gpudiag.report.blocks import PAGE
        from gpudiag.report.render_html import render_page

        return render_page(self._build_document(PAGE))

    def _build_document(self, amount: Amount) -> Document:
        from gpudiag.report.experiment.summary import build_experiments_document

        return build_experiments_document(self.data, amount, str(self.bundle or ""))

    def to_json(self) -> str:
        """Return json() as text."""
        return self.json().decode()

    def _repr_html_(self) -> str:
        from gpudiag.report.blocks import NOTEBOOK
        from gpudiag.report.render_notebook import render_notebook

        return render_notebook(self._build_document(NOTEBOOK))


class InterruptedExperiment(KeyboardInterrupt):
    """Ctrl-C: `result` holds what was measured until then; with Options(resume=str(bundle)) it goes on."""

    def __init__(self, result: ExperimentResult, bundle: Path) -> None:
        super().__init__("interrupted")
        self.result, self.bundle = result, bundle


class StoppedExperimentError(InputError):
    """Something to be mended stands in the way, as a full disk or others on the GPU: `result` holds what was measured until then."""

    def __init__(self, error: GpudiagError, result: ExperimentResult) -> None:
        super().__init__(error.message, error.hint)
        self.result, self.exit_code = result, error.exit_code


def exit_code(data: ExperimentData) -> int:
    """Return the exit code of `gpudiag ab`: 4 where a change that is faster does not train the same, 5 where nothing could be measured."""
    final = [one for one in data.experiments if not one.screening]
    if any(one.verdict == "faster" and one.parity is not None and one.parity.verdict == "differs" for one in final):
        return 4
    unmeasured = all(one.verdict == "failed" for one in final) if final else not data.complete
    return 5 if data.baseline is None or unmeasured else 0
