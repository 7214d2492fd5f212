"""What users call of the analysis: `diagnose` reads and judges, `Report` wraps the result.

Heavy layers are imported where they are used.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gpudiag.errors import UsageError
from gpudiag.units import Progress

if TYPE_CHECKING:
    import polars as pl

    from gpudiag.diagnosis.config import Config
    from gpudiag.diagnosis.rule import RuleBase
    from gpudiag.model.finding import Finding
    from gpudiag.model.hardware import Device
    from gpudiag.model.memory import ModelEstimate
    from gpudiag.model.report import OpRow, ReportData

AnyPath = str | os.PathLike[str]


class Rendered(ABC):
    """A result, `data`, with its renderings; the methods of a subclass may take options."""

    data: Any

    @abstractmethod
    def text(self) -> str:
        """Return it for a terminal."""

    @abstractmethod
    def markdown(self) -> str:
        """Return it as GitHub Markdown."""

    @abstractmethod
    def html(self) -> str:
        """Return it as one self-contained HTML page."""

    def json(self) -> bytes:
        """Return it as JSON (`gpudiag schema` prints its schema)."""
        from gpudiag.model.report import encode_report

        return encode_report(self.data)

    def save(self, path: AnyPath) -> None:
        """Write it in the format that the suffix of `path` names: .html, .md or .json; the whole file or none of it.

        Raises UsageError for another suffix, InputError where the file cannot be written.
        """
        from gpudiag.report.files import save_by_suffix

        save_by_suffix(path, {".html": lambda: self.html().encode(), ".md": lambda: self.markdown().encode(), ".json": self.json})

    def __str__(self) -> str:
        return self.text()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"gpudiag.{type(self).__name__}(...)" if cycle else self.text())


class OpRows(tuple["OpRow", ...]):
    """Rows of an op table, which dataframe libraries take as a whole."""

    def to_polars(self) -> pl.DataFrame:
        """Return them as a polars DataFrame, a column for each field (units in the names)."""
        import polars as pl

        return pl.DataFrame([msgspec.to_builtins(row) for row in self], infer_schema_length=None)

    def to_pandas(self) -> Any:
        """Return them as a pandas DataFrame. Raises ImportError without pandas and pyarrow."""
        return self.to_polars().to_pandas()


class Report(Rendered):
    """One diagnosis: `data` is the Report JSON (version 1); the methods are its renderings.

    `rules`: those that it was judged by, for the page, or a function that reads them; None: the built-in ones. `script`: reads the
    recorded program and its arguments, which the page names in the commands that try fixes ('' or None: not known).
    `chosen`: the rank and the window that were asked for.
    """

    def __init__(
        self,
        data: ReportData,
        rules: RuleBase | Callable[[], RuleBase] | None = None,
        script: Callable[[], str] | None = None,
        chosen: tuple[int | None, int | None] = (None, None),
    ) -> None:
        self.data: ReportData = data
        self._rules, self._script, self._chosen = rules, script, chosen

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return the findings, those that can gain most first."""
        return self.data.findings

    @property
    def ops(self) -> OpRows:
        """Return the op table, a row for each op, phase and signature; times are sums over the analysed steps."""
        return OpRows(self.data.ops)

    def sql(self, query: str) -> pl.DataFrame:
        """Return the rows of a SELECT over the tables of the recording (`gpudiag sql PATH` lists them), which is read again.

        Raises InputError where the recording is gone, or the query is not allowed or names what is not there.
        """
        from gpudiag.queries import run_query

        job, (rank, window) = self.data.job, self._chosen
        return run_query(self.data.source.path, query, rank=job.shown_rank if job else rank, window=window)

    def text(self, width: int | None = None, top: int = 10, color: bool = False, everything: bool = False, script: str | None = "") -> str:
        """Return the report for a terminal of `width` columns (default 100) with the `top` ops; `everything`: all findings in full.

        `script`: the program and its arguments, named in the command that tries the fixes; '' where not known, None: no command is named.
        """
        from gpudiag.report.blocks import Amount
        from gpudiag.report.document import build_document
        from gpudiag.report.render_text import render_text

        columns = 100 if width is None else width
        amount = Amount(everything=everything, ops=top, width=columns)
        return render_text(build_document(self.data, amount, script=script), width=columns, color=color)

    def brief(self, width: int | None = None, color: bool = False, script: str | None = "") -> str:
        """Return one page for people and prompts in `width` columns (default 100): the first of everything, and what is not known.

        `script`: as of text().
        """
        from gpudiag.report.brief import build_brief
        from gpudiag.report.render_text import render_text

        return render_text(build_brief(self.data, script), width=100 if width is None else width, color=color)

    def markdown(self, top: int = 20) -> str:
        """Return the report as GitHub Markdown with the `top` ops."""
        from gpudiag.report.blocks import DOCUMENT
        from gpudiag.report.document import build_document
        from gpudiag.report.render_markdown import render_markdown

        return render_markdown(build_document(self.data, msgspec.structs.replace(DOCUMENT, ops=top)))

    def html(self) -> str:
        """Return the report as one self-contained HTML page."""
        from gpudiag.report.blocks import PAGE
        from gpudiag.report.document import build_document
        from gpudiag.report.render_html import render_page

        rules = self._rules() if callable(self._rules) else self._rules
        return render_page(build_document(self.data, PAGE, script=self._script() if self._script else "", rules=rules))

    def _repr_html_(self) -> str:
        from gpudiag.report.blocks import NOTEBOOK
        from gpudiag.report.document import build_notebook_document
        from gpudiag.report.render_notebook import embed_page, render_notebook

        return render_notebook(build_notebook_document(self.data, NOTEBOOK)) + embed_page(self.html())


class DemoResult(msgspec.Struct, frozen=True):
    """What `gpudiag demo` made."""

    report: Report
    bundle: str
    html: str


def diagnose(
    path: AnyPath | Sequence[AnyPath],
    *,
    rank: int | Literal["all"] | None = None,
    window: int | None = None,
    rules_dirs: Sequence[AnyPath] = (),
    config: Config | None = None,
    graph_capture: AnyPath | None = None,
    progress: Progress | None = None,
    modules: bool = False,
    gpu_hour_price: float | None = None,
    planned_steps: int | None = None,
    scheduler: str | None = None,
) -> Report:
    """Diagnose a trace, a bundle, or the ranks of a job: a folder, a pattern, several paths, or fsspec URLs of such.

    Several ranks are compared, and the rank of median pace is shown in full; `rank`: one of them alone ('all', the default, says so
    aloud). `window`: which of a bundle's windows, on all ranks (default: the first timing window that is complete on most of them).
    `scheduler`: address or scheduler file of a dask.distributed cluster whose workers read the ranks; without it this machine does, with
    as many processes as it has cores where that pays.

    `rules_dirs`: folders with further rules; `config`: rules switched off and thresholds changed
    (`gpudiag.cli.config.find_config` reads one); `progress` is told what is being done; `modules`: one op row for each
    nn.Module where Python stacks tell it; `graph_capture`: a trace of the pass that captured the CUDA graphs which `path` replays, where
    `path` does not hold it.
    `gpu_hour_price`, `planned_steps`: what an hour of one device costs, and the steps of the whole run, for rule EFF-02.
    Raises InputError where nothing can be read; a rank that cannot be read among others that can is said in the report.

    Not for a program that goes on training: the analysis starts the threads of polars, and a DataLoader worker that is forked later
    hangs in them. There, `profile.report()` makes the same report in a process of its own.
    """
    from gpudiag.cache import CachedResult, ResultKey, allow_cache, is_complete
    from gpudiag.model.report import ReportData
    from gpudiag.recordings.recorded_command import read_recorded_script

    names = (os.fspath(path),) if isinstance(path, str | os.PathLike) else tuple(os.fspath(one) for one in path)
    if not names:
        raise UsageError("no path was given", "give a trace, a bundle, or the traces of a job")
    number, folders = None if rank == "all" else rank, tuple(os.fspath(folder) for folder in rules_dirs)
    capture = None if graph_capture is None else os.fspath(graph_capture)

    @functools.cache
    def rules() -> RuleBase:
        """Load the rules in force: where a report is made or shown as a page, not where a kept one is printed."""
        from gpudiag.diagnosis.loader import load_active_rules

        return load_active_rules(folders, config)

    with allow_cache(config is None or config.cache):
        asked = (number, window, capture, modules, gpu_hour_price, planned_steps, config)  # all that changes the report
        made_from = names if capture is None else (*names, capture)
        cached = CachedResult(ResultKey("report", made_from, asked, rules=(*(config.rules if config else ()), *folders)))
        data = cached.load(ReportData)
        if data is None:
            from gpudiag.pipeline import ReportOptions, diagnose_paths

            tell = progress or (lambda _: None)
            options = ReportOptions(modules=modules, gpu_hour_price=gpu_hour_price, planned_steps=planned_steps, graph_capture=capture)
            if scheduler is None:
                data = diagnose_paths(names, rules(), tell, options, rank=number, window=window, report_only=True).report
            else:
                from gpudiag.cluster import report_on_cluster
                from gpudiag.recordings.paths import find_ranks

                recording = find_ranks(names, window)
                data = report_on_cluster(recording, scheduler, tell, options, rank=number, rules_dirs=folders, config=config)
            if is_complete(data):
                cached.store(data)
    return Report(data, rules, functools.partial(read_recorded_script, list(names)), (number, window))


def calibrate(device: str = "auto") -> Device:
    """Measure the peaks of `device` ('auto', 'cpu' or 'cuda') in a child process, and keep them for reports."""
    from gpudiag.devices import calibrate_device

    return calibrate_device(device)


def demo(folder: AnyPath, log: Progress, *, rules_dirs: Sequence[AnyPath] = (), config: Config | None = None) -> DemoResult:
    """Train a small transformer for a few seconds on whatever device is there, record it below `folder`, and report on it."""
    from gpudiag.bundle.layout import REPORT_NAME
    from gpudiag.capture.demo import train_demo
    from gpudiag.devices import load_or_measure_peaks

    run = train_demo(Path(os.fspath(folder)), log=log, peaks=load_or_measure_peaks)
    log("reporting")
    report = diagnose(str(run.path), rules_dirs=rules_dirs, config=config)
    html = run.path / "report.html"
    report.save(html)
    report.save(run.path / REPORT_NAME)
    return DemoResult(report, str(run.path), str(html))


def estimate_memory(
    model: Any, example_batch: Any, *, loss: Callable[..., Any] | None = None, optimizer: Any = "AdamW", autocast: Any = None,
    device: str = "cuda", accumulate: bool = False,
) -> ModelEstimate:  # fmt: skip
    """Estimate the memory of training `model`, found by running two steps on tensors without data: no GPU, no memory, nothing changed.

    =============  ==================================================================================================================
    argument       what it is
    =============  ==================================================================================================================
    model          a module (it is not touched), or a function that makes one: then its weights are never made, however large
    example_batch  a tensor, (input, targets, ...), a dict of keyword arguments, or a function that makes it
    loss           called with the output and the rest of the batch; None: the model returns its loss (as `.loss`, or a number)
    optimizer      a name in torch.optim, a function of the parameters, an optimizer of this model, or None
    autocast       "bf16" or "fp16"; None: as the model's own types are
    device         "cuda": kernels and defaults of a GPU are assumed; "cpu": those of the CPU
    accumulate     gradients are kept from step to step: gradient accumulation, or zero_grad() after the forward pass
    =============  ==================================================================================================================

    Raises InputError where the model fails or needs the values of a tensor, UsageError for arguments that do not fit.
    """
    from gpudiag.capture.estimate.model_estimate import EstimateInput, run_estimate

    asked = partial(
        EstimateInput,
        model=model, batch=example_batch, loss=loss, optimizer=optimizer, autocast=autocast, device=device, accumulate=accumulate,
    )  # fmt: skip
    return run_estimate(asked, "making the model and the batch")
