"""`gpudiag ab`: changes are tried on the user's own program, compared by live pairs of processes, checked for parity, and made a recipe.

The command is run as it is, many times, for some seconds each: nothing of the program is changed on disk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpudiag.api import auto as searching
from gpudiag.api import store as stores
from gpudiag.api.bench import Budget, Done, Progress, Tell
from gpudiag.api.candidates import Candidate, candidates, check_call, fix_call, report_of
from gpudiag.api.experiment_result import ExperimentResult
from gpudiag.api.flow import Flow
from gpudiag.api.installed import version
from gpudiag.api.recipe import NAME, write_recipe
from gpudiag.api.sizes import compare_smaller, with_sizes
from gpudiag.api.store import Options, Planned, Store
from gpudiag.capture import launch
from gpudiag.errors import GpudiagError, InputError, UsageError
from gpudiag.experiment import factory, runner
from gpudiag.experiment.alone import alone
from gpudiag.experiment.ending import ArmError
from gpudiag.experiment.variants import Variant
from gpudiag.experiment.variants import variants as variants_of
from gpudiag.model.experiment import ExperimentData, FixCall

__all__ = ["InterruptedExperiment", "Options", "StoppedExperimentError", "exit_code", "experiment"]

_OF_THIS_CALL = ("output", "resume", "budget_s", "command_shown", "wait")
"""Options that may be others when experiments go on."""


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


def experiment(
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

    `command` is a whole one, its Python included (api.run.command_of makes it); () with options.resume for the one that was interrupted.
    `fixes`: `ID` or `ID=VALUE`; `variants`: see experiment.variants; `auto`: those fixes that the findings of a fresh recording name.
    `progress` is told what is being done, `tell` what the pairs of a comparison say so far, `done` each outcome. All is kept in a
    bundle (options.output).
    Raises InputError and UsageError for what cannot be asked for, and while another experiment runs on this machine,
    InterruptedExperiment after Ctrl-C, StoppedExperimentError for what keeps experiments from going on.
    """
    chosen = options or Options()
    planned = _planned(command, fixes, variants, auto, chosen)
    if not chosen.resume:
        _checked(planned)
    say = progress or (lambda _: None)
    with alone(shared_ok=chosen.shared_ok, wait=chosen.wait, tell=say) as note:
        store, planned = _resumed(planned, chosen) if chosen.resume else _begun(planned, chosen)
        with factory.turning(planned.command), runner.scratch() as folder:
            budget = Budget(chosen.budget_s)
            flow = Flow(
                store, planned, folder, budget, progress=say, tell=tell or (lambda _name, _found: None), done=done or (lambda _: None)
            )
            flow.notes.extend([note] if note else [])
            return _done(flow, store)


def _begun(planned: Planned, options: Options) -> tuple[Store, Planned]:
    return stores.begin(Path(options.output) if options.output else launch.default_path(), planned), planned


def _done(flow: Flow, store: Store) -> ExperimentResult:
    try:
        _go(flow)
    except KeyboardInterrupt:
        flow.broken_off()
        raise InterruptedExperiment(_kept(flow, store, complete=False), store.bundle) from None
    except ArmError as error:  # the program as it is does not get through: there is nothing to compare with
        flow.notes.extend(text for text in (error.message, error.detail) if text)
    except GpudiagError as error:
        if flow.baseline is None:  # nothing was measured
            raise
        flow.broken_off()
        raise StoppedExperimentError(error, _stopped(flow, store)) from None
    return _kept(flow, store)


def _stopped(flow: Flow, store: Store) -> ExperimentResult:
    """Return what was measured, kept in the bundle if that can be written."""
    try:
        return _kept(flow, store, complete=False)
    except StoppedExperimentError as error:
        return error.result


def _go(flow: Flow) -> None:
    """Do what was planned, step by step; what an earlier call has done is taken over."""
    options = flow.options
    chosen = () if _searches(flow.planned) else _chosen(flow.planned)
    for candidate in chosen:
        flow.arm(candidate)  # a script or revision that does not exist is found out before anything has run
    flow.probe()
    if options.aa or options.probe_only:
        flow.noise(claims=options.aa)
    elif _searches(flow.planned):
        searching.search_and_confirm(flow)
    else:
        found = with_sizes(flow, chosen)
        if options.parity_only:
            flow.parity_alone(found)
        else:
            flow.compare_all(found)
            compare_smaller(flow, chosen)


def _searches(planned: Planned) -> bool:
    """Return whether the fixes are those that findings name: a report alone says which, beside fixes it only lends their ceilings."""
    return planned.auto or (bool(planned.options.report) and not planned.fixes and not planned.variants)


def _kept(flow: Flow, store: Store, *, complete: bool = True) -> ExperimentResult:
    """Return the result, which then also stands in the bundle, with the recipe where something was proved.

    Raises StoppedExperimentError where that cannot be written.
    """
    data = flow.result(complete=complete)
    found = ExperimentResult(data)
    try:
        if data.recipe.proved:
            write_recipe(store.bundle / NAME, data, _again(flow.planned))
        store.finish(data)  # the last: from then on it is complete, and nothing goes on with it
    except InputError as error:
        raise StoppedExperimentError(error, found) from None
    if complete:
        searching.refreshed(store.bundle)
    found.bundle = store.bundle
    return found


def _again(planned: Planned) -> tuple[str, ...]:
    """Return what `gpudiag run` takes to run the program once more: what a person typed, or for a `build` the program that calls it."""
    return planned.command[1:] if factory.PROGRAM in planned.command else planned.options.command_shown or planned.command


# -- what is asked for ----------------------------------------------------------------------------------------------------


def _planned(
    command: Sequence[str], fixes: Sequence[FixCall | str], variants: Sequence[Variant | str], auto: bool, options: Options
) -> Planned:
    calls = tuple(fix_call(one) if isinstance(one, str) else one for one in fixes)
    texts = [one for one in variants if isinstance(one, str)]
    told = (*variants_of(texts), *(one for one in variants if isinstance(one, Variant)))
    return Planned(tuple(command), tuple(dict.fromkeys(calls)), told, auto, options, version("gpudiag") or "unknown", os.getcwd())


def _checked(planned: Planned) -> None:
    """Raise UsageError or InputError for what contradicts itself or cannot be done, before anything is started."""
    options = planned.options
    if not planned.command:
        raise UsageError("nothing to run", "gpudiag ab --fix bf16 train.py ARGS")
    wanted = bool(planned.fixes or planned.variants)
    modes = [name for name, on in _modes(planned).items() if on]
    if len(modes) > 1:
        raise UsageError(f"{' and '.join(modes)} exclude each other", "give one of them")
    if modes and wanted:
        raise UsageError(f"{modes[0]} takes no --fix and no --variant", f"leave {modes[0]} out, or the changes")
    if not modes and not wanted and not options.report:
        raise UsageError(
            "nothing to try", "give --fix ID, --variant NAME=..., --auto, --probe-only or --aa; `gpudiag fixes` lists the fixes"
        )
    if options.search != Options().search and not _searches(planned):
        raise UsageError(f"--search {options.search}: nothing is searched for", "it goes with --auto; --combine tests all fixes together")
    if options.report:
        report_of(options.report)
    for call in planned.fixes:
        check_call(call)
    _chosen(planned)


def _modes(planned: Planned) -> dict[str, bool]:
    return {"--auto": planned.auto, "--probe-only": planned.options.probe_only, "--aa": planned.options.aa}


def _chosen(planned: Planned) -> tuple[Candidate, ...]:
    """Return the changes that were asked for, with the ceilings of the report that was given. Raises InputError."""
    found = candidates(planned.fixes, planned.variants, combine=planned.options.combine)
    names = [one.name for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"two changes are named {twice}", "give the variant another name")
    if not planned.options.report:
        return found
    ceilings = searching.ceilings(planned.options.report)
    return tuple(
        msgspec.structs.replace(one, ceiling_share=ceilings.get(one.fixes[0].id)) if len(one.fixes) == 1 and one.variant is None else one
        for one in found
    )


# -- going on -------------------------------------------------------------------------------------------------------------


def _resumed(given: Planned, options: Options) -> tuple[Store, Planned]:
    """Return the store that goes on and its plan. Raises InputError where something else is asked for than was begun."""
    store, planned = stores.resume(Path(options.resume))
    if planned.cwd != os.getcwd():
        raise InputError(f"{options.resume} was begun in {planned.cwd}", f"cd {planned.cwd}")
    for name, before, now in _differences(planned, given):
        raise InputError(
            f"{options.resume} was begun with other {name}: {before!r}, not {now!r}", "leave it out, or start anew without --resume"
        )
    kept = {name: getattr(options, name) for name in ("budget_s", "resume")}
    return store, msgspec.structs.replace(planned, options=msgspec.structs.replace(planned.options, **kept))


def _differences(planned: Planned, given: Planned) -> list[tuple[str, object, object]]:
    """Return what of `given` contradicts the plan: what was not given again is as it was."""
    found: list[tuple[str, object, object]] = []
    plain = Planned(())
    for name in ("command", "fixes", "variants", "auto"):
        before, now = getattr(planned, name), getattr(given, name)
        if now not in (getattr(plain, name), before):
            found.append((name, before, now))
    for name in Options.__struct_fields__:
        before, now = getattr(planned.options, name), getattr(given.options, name)
        if name not in _OF_THIS_CALL and now not in (getattr(plain.options, name), before):
            found.append((f"--{name.replace('_', '-')}", before, now))
    return found


# -- afterwards -----------------------------------------------------------------------------------------------------------


def exit_code(data: ExperimentData) -> int:
    """Return the exit code of `gpudiag ab`: 4 where a change that is faster does not train the same, 5 where nothing could be measured."""
    final = [one for one in data.experiments if not one.screening]
    if any(one.verdict == "faster" and one.parity is not None and one.parity.verdict == "differs" for one in final):
        return 4
    unmeasured = all(one.verdict == "failed" for one in final) if final else not data.complete
    return 5 if data.baseline is None or unmeasured else 0
