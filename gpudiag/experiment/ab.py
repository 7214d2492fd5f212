"""Changes are tried on the user's own program: compared by live pairs of processes, checked for parity, and made a recipe.

The program is run as it is, many times, for some seconds each: nothing of it is changed on disk. From Python `gpudiag.ab` takes a function
that builds a training, `gpudiag.ab_script` a script as it is.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from gpudiag.bundle.layout import is_bundle
from gpudiag.cache import find_version
from gpudiag.capture.launch import choose_default_path
from gpudiag.errors import GpudiagError, InputError, UsageError, suggest_nearest
from gpudiag.experiment import factory, guard
from gpudiag.experiment.arm import ArmError, EndedError
from gpudiag.experiment.batch_size import add_batch_sizes
from gpudiag.experiment.experiment import Done, Experiment, Tell
from gpudiag.experiment.isolation import lock_machine, open_experiment
from gpudiag.experiment.plan import Options, Plan
from gpudiag.experiment.recipe import RECIPE_NAME, format_recipe
from gpudiag.experiment.result import ExperimentResult, InterruptedExperiment, StoppedExperimentError
from gpudiag.experiment.search import note_first_finding, search_and_confirm, take_apart
from gpudiag.experiment.store import begin_store, resume_store
from gpudiag.experiment.variant import Change, Variant, parse_fix_call, parse_variants
from gpudiag.fixes import code_location
from gpudiag.fixes.knobs import KNOB_FIXES
from gpudiag.fixes.registry import replace_appliers
from gpudiag.model.experiment import FixCall
from gpudiag.report.files import write_file
from gpudiag.script_runner import build_run_command, write_bundle_report
from gpudiag.units import Progress


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
    warn: Progress | None = None,
) -> ExperimentResult:
    """Return what each change does to the speed of `command`, and whether it trains the same.

    `command` is a whole one, its Python included (build_run_command); () with options.resume for the one that was interrupted.
    `fixes`: `ID` or `ID=VALUE`; `variants`: see experiment.variant; `auto`: those fixes that the findings of a fresh recording name.
    `progress` is told what is being done, `tell` what the pairs of a comparison say so far, `done` each outcome, `warn` what
    somebody would want to know before time is spent. All is kept in a bundle (options.output).
    Raises InputError and UsageError for what cannot be asked for, and while another experiment runs on this machine,
    InterruptedExperiment after Ctrl-C, StoppedExperimentError for what keeps experiments from going on.
    """
    calls = [parse_fix_call(one) if isinstance(one, str) else one for one in fixes]
    changed = [*parse_variants([one for one in variants if isinstance(one, str)]), *(one for one in variants if isinstance(one, Variant))]
    version = find_version("gpudiag") or "unknown"
    plan = Plan(tuple(command), tuple(dict.fromkeys(calls)), tuple(changed), auto, options or Options(), version, os.getcwd())
    quiet = lambda *_: None  # noqa: E731
    with _open_experiment(plan, progress or quiet, tell or quiet, done or quiet, warn or quiet) as experiment:
        with _end_in_order(experiment):
            plan, chosen = experiment.plan, experiment.plan.list_variants()
            for variant in chosen:
                experiment.arm(variant)  # a script or revision that does not exist is found out before anything has run
            try:
                experiment.probe()
            except EndedError:
                if plan.is_search:  # too short for trials, but not to be recorded
                    note_first_finding(experiment)
                raise
            if plan.options.aa or plan.options.probe_only:
                experiment.measure_noise(claims=plan.options.aa)
            elif plan.is_search:
                search_and_confirm(experiment)
            elif plan.options.parity_only:
                experiment.check_parity_alone(add_batch_sizes(experiment, chosen))
            else:
                chosen = add_batch_sizes(experiment, chosen)
                experiment.fit_blocks(len(chosen) * experiment.design.looks[0])
                experiment.warn_of_budget(len(chosen))
                experiment.compare_all(chosen)
                if plan.options.combine and chosen:
                    take_apart(experiment, chosen[0])
        return _store_result(experiment)


@contextmanager
def _open_experiment(plan: Plan, progress: Progress, tell: Tell, done: Done, warn: Progress) -> Iterator[Experiment]:
    """Give an experiment with its store, alone on this machine: a new one, or the one that was interrupted."""
    options = plan.options
    if not options.resume:
        plan.check()
    with lock_machine(shared_ok=options.shared_ok, wait=options.wait, tell=warn) as note:
        if options.resume:
            store, begun = resume_store(Path(options.resume))
            plan = begun.resume(plan)
        else:
            store = begin_store(Path(options.output) if options.output else choose_default_path(), plan)
        with factory.turn_knobs(plan.command), open_experiment() as (folder, _):
            experiment = Experiment(plan, store, folder, progress=progress, tell=tell, done=done, warn=warn)
            experiment.notes.extend([note] if note else [])
            yield experiment


@contextmanager
def _end_in_order(experiment: Experiment) -> Iterator[None]:
    """Have what ends the experiment early raise an error that holds what was measured until then.

    A program that does not get through as it is is no error: there is nothing to compare with, and the notes say why.
    """
    try:
        yield
    except KeyboardInterrupt:
        experiment.keep_unfinished()
        raise InterruptedExperiment(_store_result(experiment, complete=False), experiment.store.bundle) from None
    except ArmError as error:
        experiment.notes.extend(text for text in (error.message, error.detail) if text)
    except GpudiagError as error:
        if experiment.baseline is None:  # nothing was measured
            raise
        experiment.keep_unfinished()
        try:
            result = _store_result(experiment, complete=False)
        except StoppedExperimentError as stopped:  # nor can it be written
            result = stopped.result
        raise StoppedExperimentError(error, result) from None


def _store_result(experiment: Experiment, *, complete: bool = True) -> ExperimentResult:
    """Return the result, which then also stands in the bundle, with the recipe where something was proved.

    Raises StoppedExperimentError where that cannot be written.
    """
    data, plan, store = experiment.build_result(complete=complete), experiment.plan, experiment.store
    # what `gpudiag run` takes to run the program once more: what a person typed, or for a `build` the program that calls it
    again = plan.command[1:] if factory.PROGRAM in plan.command else plan.options.command_shown or plan.command
    try:
        data = msgspec.structs.replace(data, seconds=store.add_leg("", time.monotonic() - experiment.budget.begun_s))
        if data.recipe.proved:
            write_file(store.bundle / RECIPE_NAME, format_recipe(data, again).encode())
        store.finish(data)  # the last: from then on it is complete, and nothing goes on with it
    except InputError as error:
        raise StoppedExperimentError(error, ExperimentResult(data)) from None
    if complete and is_bundle(store.bundle):  # its report anew, with the experiments; one without a recording has none
        with suppress(Exception):  # what was measured is kept already
            write_bundle_report(store.bundle, measure=False)
    return ExperimentResult(data, store.bundle)


Fixes = Sequence[str | FixCall]
Build = Callable[..., Any] | str
Knobs = Mapping[str, Any]

_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?")


def ab(
    build: Build, fixes: Fixes = (), *, variants: Mapping[str, Knobs] | None = None, knobs: Knobs | None = None, auto: bool = False,
    seed: int = 0, budget: str | float | None = None, quiet: bool = False, **options: Any,
) -> ExperimentResult:  # fmt: skip
    """Return how much faster the training that `build` makes runs with each of `fixes`, and whether it still trains the same.

    >>> def build(cfg):
    ...     model = Net(cfg.get("width", 512)).to(cfg.device)
    ...     optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ...     loader = DataLoader(data, batch_size=cfg.get("batch_size", 32), shuffle=True)
    ...     def step(batch):
    ...         x, y = batch
    ...         return torch.nn.functional.mse_loss(model(x.to(cfg.device)), y.to(cfg.device))
    ...     return gpudiag.Task(model, optimizer, loader, step)
    >>> if __name__ == "__main__":
    ...     found = gpudiag.ab(build, fixes=["bf16", "batch-size=x2"], variants={"wide": {"width": 1024}}, budget="10m")
    ...     print(found)

    `build` is called in processes of its own, many times, with the same `seed`: it stands at the top level of a file that starts nothing
    when it is imported, or is given as "FILE.py:FUNCTION" or "MODULE:FUNCTION". It returns a `gpudiag.Task`.

    ============  ===================================================================================================================
    argument      what it is
    ============  ===================================================================================================================
    fixes         as `gpudiag fixes` lists them, and your own (register_fix): "bf16", "batch-size=x2"; each is tested by itself, with
                  combine=True all together
    variants      name -> knobs that are set in that arm; a class may be named as in "wide:rounding" (default: semantics)
    knobs         set in all arms
    auto          take the fixes that the findings of a fresh recording name, and search for the best set of them
    budget        "90s", "10m", "1h" or seconds for all of it; None: as long as it takes
    quiet         show nothing on stderr meanwhile
    options       further options of `gpudiag ab`, by name: output, resume, looks, min_effect, parity, combine, ...
    ============  ===================================================================================================================

    Two fixes turn a knob: batch-size sets `cfg.batch_size`; accumulation has each batch trained in micro-batches, whose mean losses are
    weighted by their samples (class rounding; exact where the loss is a mean over samples and nothing else depends on the batch, as
    batch normalisation does). A build that reads `cfg.accum` itself does so itself. Every other fix is applied as to a script.

    Everything is kept in a bundle (`output`, default runs/<time>), pair by pair; with `resume` it goes on there after an interruption.
    Raises InputError for a build that cannot be imported or fixes that are not known, InterruptedExperiment (a KeyboardInterrupt with
    the `result` until then) after Ctrl-C.
    """
    _refuse_inside("gpudiag.ab")
    where = code_location.locate_code(build, "build")
    command = factory.build_command(where, knobs or {}, seed)
    changed = []
    for name, values in (variants or {}).items():
        (named,) = parse_variants([f"{name}=args:"])  # the name may carry a parity class
        words = shlex.join(["--knobs", factory.encode_knobs(values)])
        changed.append(msgspec.structs.replace(named, changes=(Change("args", words),)))
    shown = ("gpudiag.ab", where.target.rpartition("/")[2])
    asked = _build_options({"command_shown": shown, **options}, budget)
    with replace_appliers(KNOB_FIXES):
        return _run_with_progress(quiet, command, fixes=_parse_fixes(fixes), variants=changed, auto=auto, options=asked)


def ab_script(
    script: str | os.PathLike[str], args: Sequence[str] = (), *, fixes: Fixes = (), variants: Sequence[str] | Mapping[str, str] = (),
    auto: bool = False, budget: str | float | None = None, quiet: bool = False, **options: Any,
) -> ExperimentResult:  # fmt: skip
    """Return the same as `gpudiag ab SCRIPT ARGS`: how much faster a script trains with each of `fixes`; it is run as it is.

    >>> gpudiag.ab_script("train.py", ["--epochs", "3"], fixes=["bf16", "channels-last"], variants={"wide": "args:--width 1024"})

    `variants`: as for --variant, "NAME=args:..." (env, script, git) in a list, or by name. A command other than Python, torchrun for
    example, is its program: ab_script("torchrun", ["--nproc-per-node", "2", "train.py"]). The others as for `gpudiag.ab`.
    """
    _refuse_inside("gpudiag.ab_script")
    texts = [f"{name}={text}" for name, text in variants.items()] if isinstance(variants, Mapping) else list(variants)
    command = build_run_command([os.fspath(script), *args])
    asked = _build_options({"command_shown": tuple(map(str, (script, *args))), **options}, budget)
    return _run_with_progress(quiet, command, fixes=_parse_fixes(fixes), variants=parse_variants(texts), auto=auto, options=asked)


def parse_seconds(budget: str | float | None, name: str = "budget") -> float | None:
    """Parse a time in seconds: '90s', '10m', '1h' or a number. Raises UsageError, with `name`, for what is none."""
    if budget is None:
        return None
    match = _TIME.fullmatch(str(budget).strip().lower())
    found = float(match[1]) * {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}[match[2] or ""] if match else 0.0
    if found <= 0:
        raise UsageError(f"{name}: {budget!r} is no time", "write 90s, 10m or 1h, or seconds")
    return found


def _refuse_inside(name: str) -> None:
    """Raise InputError in a process of an arm: a file that starts experiments when it is imported would start them without end."""
    if code_location.LOADING or guard.MARK in os.environ:
        raise InputError(f"{name} is called while an arm imports its file", 'put the call below `if __name__ == "__main__":`')


def _build_options(given: dict[str, Any], budget: str | float | None) -> Options:
    known = Options.__struct_fields__
    for name in given:
        if name not in known:
            raise UsageError(f"no option {name!r}{suggest_nearest(name, (*known, 'budget'))}", "see help(gpudiag.ab)")
    return Options(**({"budget_s": parse_seconds(budget)} | given))


def _parse_fixes(fixes: Fixes) -> tuple[FixCall, ...]:
    if isinstance(fixes, str):
        raise UsageError(f"fixes={fixes!r} is one fix, not several", f"write fixes=[{fixes!r}]")
    return tuple(parse_fix_call(fix) if isinstance(fix, str) else fix for fix in fixes)


def _run_with_progress(quiet: bool, command: Sequence[str], **asked: Any) -> ExperimentResult:
    if quiet:
        return run_experiment(command, **asked)
    from gpudiag.report.experiment.live import Live

    with Live() as live:
        return run_experiment(command, progress=live.tell, tell=live.pair, done=live.done, warn=live.warn, **asked)
