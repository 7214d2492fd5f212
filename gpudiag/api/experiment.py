"""`gpudiag ab`: changes are tried on the user's own program, compared by live pairs of processes, checked for parity, and made a recipe.

The command is run as it is, many times, for some seconds each: nothing of the program is changed on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpudiag.api import Rendered
from gpudiag.api import experiment_store as stores
from gpudiag.api import fix_search as searching
from gpudiag.api.candidates import Candidate, check_call, check_combination, find_named_fixes, load_report, parse_fix_call
from gpudiag.api.experiment_flow import Budget, Done, Flow, Progress, Tell
from gpudiag.api.experiment_store import Options, Planned, Store
from gpudiag.api.fix_search import add_batch_sizes, take_apart
from gpudiag.api.recipe import RECIPE_NAME, format_recipe
from gpudiag.cache import find_version
from gpudiag.capture import bundle_folder
from gpudiag.errors import GpudiagError, InputError, UsageError
from gpudiag.experiment import factory, runner
from gpudiag.experiment.arm import ArmError, EndedError
from gpudiag.experiment.isolation import lock_machine
from gpudiag.experiment.variants import Variant, parse_variants
from gpudiag.model.experiment import ExperimentData, FixCall, Parity, Recipe, Unit, Verdict
from gpudiag.report.files import write_file

if TYPE_CHECKING:
    from gpudiag.report.blocks import Amount, Document

__all__ = ["InterruptedExperiment", "Options", "StoppedExperimentError", "exit_code", "run_experiment"]


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


def run_experiment(
    command: Sequence[str],
    *,
    fixes: Sequence[FixCall | str] = (),
    variants: Sequence[Variant | str] = (),
    auto: bool = False,
    options: Options | None = None,
    progress: Progress | None = None,
    tell: Tell | None = None,
    done: Done | None = None,
) -> ExperimentResult:
    """Return what each change does to the speed of `command`, and whether it trains the same.

    `command` is a whole one, its Python included (api.run.build_run_command); () with options.resume for the one that was interrupted.
    `fixes`: `ID` or `ID=VALUE`; `variants`: see experiment.variants; `auto`: those fixes that the findings of a fresh recording name.
    `progress` is told what is being done, `tell` what the pairs of a comparison say so far, `done` each outcome. All is kept in a
    bundle (options.output).
    Raises InputError and UsageError for what cannot be asked for, and while another experiment runs on this machine,
    InterruptedExperiment after Ctrl-C, StoppedExperimentError for what keeps experiments from going on.
    """
    chosen = options or Options()
    calls = tuple(parse_fix_call(one) if isinstance(one, str) else one for one in fixes)
    texts = [one for one in variants if isinstance(one, str)]
    ways = (*parse_variants(texts), *(one for one in variants if isinstance(one, Variant)))
    version = find_version("gpudiag") or "unknown"
    planned = Planned(tuple(command), tuple(dict.fromkeys(calls)), ways, auto, chosen, version, os.getcwd())
    if not chosen.resume:
        _check_plan(planned)
    say = progress or (lambda _: None)
    with lock_machine(shared_ok=chosen.shared_ok, wait=chosen.wait, tell=say) as note:
        if chosen.resume:
            store, planned = _resume_plan(planned, chosen)
        else:
            store = stores.begin_store(Path(chosen.output) if chosen.output else bundle_folder.choose_default_path(), planned)
        with factory.turn_knobs(planned.command), runner.open_experiment() as (folder, _):
            budget = Budget(chosen.budget_s)
            flow = Flow(
                store, planned, folder, budget, progress=say, tell=tell or (lambda _name, _found: None), done=done or (lambda _: None)
            )
            flow.notes.extend([note] if note else [])
            try:
                _run_plan(flow)
            except KeyboardInterrupt:
                flow.keep_unfinished()
                raise InterruptedExperiment(_store_result(flow, store, complete=False), store.bundle) from None
            except ArmError as error:  # the program as it is does not get through: there is nothing to compare with
                flow.notes.extend(text for text in (error.message, error.detail) if text)
            except GpudiagError as error:
                if flow.baseline is None:  # nothing was measured
                    raise
                flow.keep_unfinished()
                try:
                    result = _store_result(flow, store, complete=False)
                except StoppedExperimentError as stopped:  # nor can it be written
                    result = stopped.result
                raise StoppedExperimentError(error, result) from None
            return _store_result(flow, store)


def _run_plan(flow: Flow) -> None:
    options = flow.options
    chosen = () if _is_search(flow.planned) else _choose_candidates(flow.planned)
    for candidate in chosen:
        flow.arm(candidate)  # a script or revision that does not exist is found out before anything has run
    try:
        flow.probe()
    except EndedError:
        if _is_search(flow.planned):  # too short for trials, but not to be recorded
            searching.note_first_finding(flow)
        raise
    if options.aa or options.probe_only:
        flow.measure_noise(claims=options.aa)
    elif _is_search(flow.planned):
        searching.search_and_confirm(flow)
    else:
        found = add_batch_sizes(flow, chosen)
        if options.parity_only:
            flow.check_parity_alone(found)
        else:
            flow.fit_blocks(len(found) * flow.design.looks[0])
            flow.compare_all(found)
            if options.combine and found:
                take_apart(flow, found[0])


def _is_search(planned: Planned) -> bool:
    """Return whether the fixes are those that findings name: a report alone says which, beside fixes it only lends their ceilings."""
    return planned.auto or (bool(planned.options.report) and not planned.fixes and not planned.variants)


def _store_result(flow: Flow, store: Store, *, complete: bool = True) -> ExperimentResult:
    """Return the result, which then also stands in the bundle, with the recipe where something was proved.

    Raises StoppedExperimentError where that cannot be written.
    """
    data = flow.build_result(complete=complete)
    planned = flow.planned
    # what `gpudiag run` takes to run the program once more: what a person typed, or for a `build` the program that calls it
    again = planned.command[1:] if factory.PROGRAM in planned.command else planned.options.command_shown or planned.command
    try:
        data = msgspec.structs.replace(data, seconds=store.add_leg("", time.monotonic() - flow.budget.begun_s))
        if data.recipe.proved:
            write_file(store.bundle / RECIPE_NAME, format_recipe(data, again).encode())
        store.finish(data)  # the last: from then on it is complete, and nothing goes on with it
    except InputError as error:
        raise StoppedExperimentError(error, ExperimentResult(data)) from None
    if complete and bundle_folder.is_bundle(store.bundle):  # its report anew, with the experiments; one without a recording has none
        from gpudiag.api.run import write_bundle_report

        with suppress(Exception):  # what was measured is kept already
            write_bundle_report(store.bundle, measure=False)
    return ExperimentResult(data, store.bundle)


def _check_plan(planned: Planned) -> None:
    options = planned.options
    if not planned.command:
        raise UsageError("nothing to run", "gpudiag ab --fix bf16 train.py ARGS")
    wanted = bool(planned.fixes or planned.variants)
    modes = [name for name, on in (("--auto", planned.auto), ("--probe-only", options.probe_only), ("--aa", options.aa)) if on]
    if len(modes) > 1:
        raise UsageError(f"{' and '.join(modes)} exclude each other", "give one of them")
    if modes and wanted:
        raise UsageError(f"{modes[0]} takes no --fix and no --variant", f"leave {modes[0]} out, or the changes")
    if not modes and not wanted and not options.report:
        raise UsageError(
            "nothing to try", "give --fix ID, --variant NAME=..., --auto, --probe-only or --aa; `gpudiag fixes` lists the fixes"
        )
    if options.report:
        load_report(options.report)
    for call in planned.fixes:
        check_call(call)
    _choose_candidates(planned)


def _choose_candidates(planned: Planned) -> tuple[Candidate, ...]:
    fixes, variants = planned.fixes, planned.variants
    if not planned.options.combine:
        chosen = [*(Candidate((call,)) for call in fixes), *(Candidate((), variant) for variant in variants)]
    elif len(variants) > 1:
        hint = "give all its changes under one name: --variant NAME=args:.. --variant NAME=env:.."
        raise InputError("--combine takes one variant", hint)
    else:
        check_combination(fixes)
        chosen = [Candidate(fixes, variants[0] if variants else None)] if fixes or variants else []
    names = [one.name for one in chosen]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"two changes are named {twice}", "give the variant another name")
    if planned.options.report:
        ceilings = {one.fix.id: one.ceiling_share for one in find_named_fixes(load_report(planned.options.report))}
        for place, one in enumerate(chosen):
            if len(one.fixes) == 1 and one.variant is None:
                chosen[place] = msgspec.structs.replace(one, ceiling_share=ceilings.get(one.fixes[0].id))
    return tuple(chosen)


def _resume_plan(given: Planned, options: Options) -> tuple[Store, Planned]:
    store, planned = stores.resume_store(Path(options.resume))
    if planned.cwd != os.getcwd():
        raise InputError(f"{options.resume} was begun in {planned.cwd}", f"cd {planned.cwd}")
    plain = Planned(())
    own = [name for name in Options.__struct_fields__ if name not in ("output", "resume", "budget_s", "command_shown", "wait")]
    for name in ("command", "fixes", "variants", "auto", *own):
        structs = (plain.options, planned.options, given.options) if name in own else (plain, planned, given)
        default, before, now = (getattr(struct, name) for struct in structs)
        if now not in (default, before):  # what was not given again is as it was
            shown = f"--{name.replace('_', '-')}" if name in own else name
            raise InputError(
                f"{options.resume} was begun with other {shown}: {before!r}, not {now!r}", "leave it out, or start anew without --resume"
            )
    kept = {name: getattr(options, name) for name in ("budget_s", "resume")}
    return store, msgspec.structs.replace(planned, options=msgspec.structs.replace(planned.options, **kept))


def exit_code(data: ExperimentData) -> int:
    """Return the exit code of `gpudiag ab`: 4 where a change that is faster does not train the same, 5 where nothing could be measured."""
    final = [one for one in data.experiments if not one.screening]
    if any(one.verdict == "faster" and one.parity is not None and one.parity.verdict == "differs" for one in final):
        return 4
    unmeasured = all(one.verdict == "failed" for one in final) if final else not data.complete
    return 5 if data.baseline is None or unmeasured else 0


class ExperimentResult(Rendered):
    """The experiments of one call. The attributes speak of the first one that claims something; `data` holds all of them.

    >>> found.verdict, found.ratio, found.interval
    ('faster', 1.83, (1.79, 1.87))
    """

    def __init__(self, data: ExperimentData, bundle: Path | None = None) -> None:
        self.data: ExperimentData = data
        first = next((outcome for outcome in data.experiments if not outcome.screening), data.experiments[0] if data.experiments else None)
        self.verdict: Verdict | None = None if first is None else first.verdict
        """None: nothing was measured; `notes` say why."""
        self.reason: str = "" if first is None else first.reason
        """Of a failure: oom, crash, hang, timeout, ended, no_steps."""
        self.ratio: float | None = None if first is None else first.ratio
        self.interval: tuple[float, float] | None = None if first is None else first.interval
        self.p: float | None = None if first is None else first.p
        self.pairs: int = 0 if first is None else first.pairs
        self.unit: Unit = "samples" if first is None else first.unit
        self.parity: Parity | None = None if first is None else first.parity
        self.memory: float | None = None if first is None else first.memory_ratio
        self.energy: float | None = None if first is None else first.energy_ratio
        self.break_even_steps: float | None = None if first is None else first.break_even_steps
        self.evidence: tuple[str, ...] = () if first is None else first.evidence
        self.notes: tuple[str, ...] = data.notes if first is None else (*first.notes, *data.notes)
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
