"""`gpudiag ab`: try changes on a training script, and say which help; `gpudiag fixes`: what it can try. The script's output is kept out
of sight."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpudiag.cli import completion, options, terminal
from gpudiag.cli.command import end_with_starter, interrupt_on_signals
from gpudiag.cli.options import check_named, check_targets, parse_share
from gpudiag.errors import GpudiagError, UsageError

if TYPE_CHECKING:
    from gpudiag.experiment.result import ExperimentResult
    from gpudiag.fixes.fix import Fix
    from gpudiag.report.findings import FixPage

STDOUT = Path("-")

RESULTS_PAGE = "experiments.html"

LOOKS = (4, 6, 8, 12)

_PAIRS = re.compile(r"(?:(\d+)\.\.)?(\d+)")

_Words = Annotated[list[str] | None, options.SCRIPT]
_Module = Annotated[str | None, typer.Option("-m", "--module", metavar="MODULE", help="Run a module, as python -m does.")]
_Fix = Annotated[list[str] | None, options.build_fix_option("Try this fix")]
_Variant = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        metavar="NAME=KIND:VALUE",
        help="Try a variant of the program: NAME=args:'--flag 1', NAME=env:KEY=VALUE, NAME=script:FILE.py or NAME=git:REVISION; "
        "may be repeated.",
    ),
]
_Auto = Annotated[bool, typer.Option("--auto", help="Record the program, then search among the fixes that its findings name.")]
_Report = Annotated[
    str, typer.Option("--from", metavar="REPORT", help="Take fixes and upper bounds from a report.json or a bundle.", show_default=False)
]
_Combine = Annotated[bool, typer.Option("--combine", help="Try everything given together, as one variant.")]
_Output = Annotated[
    str, typer.Option("--output", "-o", metavar="BUNDLE", help="Folder for the results (default: runs/<time>).", show_default=False)
]
_Resume = Annotated[str, typer.Option("--resume", metavar="BUNDLE", help="Resume what was interrupted in BUNDLE.", show_default=False)]
_Budget = Annotated[
    str, typer.Option("--budget", metavar="TIME", help="Time budget for all of it: 90s, 10m, 1h (default: as needed).", show_default=False)
]
_Pairs = Annotated[str, typer.Option("--pairs", metavar="N..M", help="Pairs of processes: N at the first interim look, M at most.")]
_MinEffect = Annotated[
    str, typer.Option("--min-effect", metavar="SHARE", help="Smallest effect of interest; smaller ones count as no difference.")
]
_Parity = Annotated[bool, typer.Option("--parity/--no-parity", help="Check parity of loss and gradients.")]
_ParityOnly = Annotated[bool, typer.Option("--parity-only", help="Check parity alone; measure no speed.")]
_ProbeOnly = Annotated[
    bool, typer.Option("--probe-only", help="Probe the baseline alone: steps, samples, memory, minimum detectable effect.")
]
_Aa = Annotated[bool, typer.Option("--aa", help="Compare the baseline with itself (A/A): a test of this machine.")]
_Sandbox = Annotated[
    str, typer.Option("--sandbox", metavar="KIND", help="Protect your files: auto, overlay, block (saves do nothing) or off.")
]
_SteadyMalloc = Annotated[
    bool, typer.Option("--steady-malloc", help="Keep host memory instead of returning it, in baseline and variants: less noise.")
]
_Wait = Annotated[bool, typer.Option("--wait", help="Wait until another experiment on this machine ends.")]
_Patch = Annotated[
    Path | None,
    typer.Option(
        "--patch",
        metavar="FILE",
        help="Write what is proved as a diff of the script to FILE, once the patched copy has run; exit code 1 where nothing is.",
        show_default=False,
    ),
]
_Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result to FILE; - for stdout.", show_default=False)
]


def ab(
    words: _Words = None, module: _Module = None, fix: _Fix = None, variant: _Variant = None, auto: _Auto = False,
    report: _Report = "", combine: _Combine = False, output: _Output = "", resume: _Resume = "",
    budget: _Budget = "", pairs: _Pairs = "4..12", min_effect: _MinEffect = "1%", parity: _Parity = True,
    parity_only: _ParityOnly = False, probe_only: _ProbeOnly = False, aa: _Aa = False, sandbox: _Sandbox = "auto",
    steady_malloc: _SteadyMalloc = False, shared_ok: Annotated[bool, options.SHARED_OK] = False, wait: _Wait = False,
    json: _Json = None, patch: _Patch = None,
) -> None:  # fmt: skip
    """Run A/B experiments on an unchanged script: which fixes make it faster, by how much, and do loss and gradients stay the same."""
    if json is not None and json != STDOUT:
        check_targets([json], "", (".json",))
    if patch is not None:
        check_targets([patch], "", (".diff", ".patch"))
    check_named("--from", [report] if report else [], "give a report.json, or a bundle")
    from gpudiag.experiment.ab import parse_seconds, run_experiment
    from gpudiag.experiment.design import SANDBOX_MODES
    from gpudiag.experiment.plan import Options
    from gpudiag.experiment.result import InterruptedExperiment, StoppedExperimentError, exit_code
    from gpudiag.report.experiment.live import Live

    if sandbox not in SANDBOX_MODES:
        raise UsageError(f"--sandbox {sandbox}: not known", f"one of {', '.join(SANDBOX_MODES)}")
    options = Options(
        output=output, resume=resume, report=report, combine=combine,
        budget_s=parse_seconds(budget or None, "--budget"), looks=_parse_looks(pairs),
        min_effect=parse_share("--min-effect", min_effect, "write 1%, or 0.01", zero=False),
        parity=parity, parity_only=parity_only, probe_only=probe_only, aa=aa,
        sandbox=sandbox,
        steady_malloc=steady_malloc, shared_ok=shared_ok, wait=wait,
        command_shown=(*(("-m", module) if module is not None else ()), *(words or ())),
    )  # fmt: skip
    command: list[str] = []
    if module is not None or words:
        from gpudiag.script_runner import build_run_command

        command = build_run_command(words or [], module)
    elif not resume:
        raise UsageError(
            "nothing to run", "gpudiag ab --fix bf16 train.py ARGS, gpudiag ab ... -m module, or gpudiag ab ... -- torchrun ..."
        )
    offered = True
    with interrupt_on_signals():
        end_with_starter()
        try:
            with Live() as live:
                found = run_experiment(
                    command, fixes=fix or [], variants=variant or [], auto=auto, options=options,
                    progress=live.tell, tell=live.pair, done=live.done, warn=live.warn,
                )  # fmt: skip
        except InterruptedExperiment as stop:
            _try_report_result(stop.result, stop.bundle, json)
            terminal.write_note(f"gpudiag: interrupted; `gpudiag ab --resume {shlex.quote(str(stop.bundle))}` goes on")
            raise
        except StoppedExperimentError as error:
            _try_report_result(error.result, error.result.bundle, json)
            raise
        _report_result(found, found.bundle, json)
        if patch is not None:
            from gpudiag.cli.apply import offer_patch

            offered = offer_patch(found, command, options, patch)
    raise typer.Exit(exit_code(found.data) or (0 if offered else 1))


def _report_result(found: ExperimentResult, bundle: Path | None, json: Path | None) -> None:
    try:
        # Show the result; with `--json -` stdout is the JSON's
        text = found.text(width=terminal.measure_columns(), color=terminal.is_coloured() and json != STDOUT)
        if json == STDOUT:
            terminal.write_aside(text)
            terminal.write_result(found.json().decode())
        else:
            terminal.write_result(text)
    finally:
        if json is not None and json != STDOUT:
            found.save(json)
            terminal.write_note(f"wrote {json}")
        if bundle is not None:
            found.save(bundle / RESULTS_PAGE)
            proved = f"; the recipe is {bundle}/recipe.toml" if found.recipe.proved else ""
            terminal.write_note(f"gpudiag: the results are in {bundle}/experiments; the page is {bundle}/{RESULTS_PAGE}{proved}")


def _try_report_result(found: ExperimentResult, bundle: Path | None, json: Path | None) -> None:
    try:
        _report_result(found, bundle, json)
    except GpudiagError as error:
        terminal.write_note(f"gpudiag: {error}")
    except typer.Exit:  # the reader of stdout has gone
        pass


def _parse_looks(text: str) -> tuple[int, ...]:
    found = _PAIRS.fullmatch(text.strip())
    low, high = (int(found[1] or found[2]), int(found[2])) if found else (0, 0)
    if not 1 <= low <= high:
        raise UsageError(f"--pairs {text}: no number of pairs", "write 4..12, or 8")
    return tuple(sorted({low, *(look for look in LOOKS if low < look < high), high}))


def fixes(
    identifier: Annotated[
        str | None, typer.Argument(metavar="ID", help="A fix, such as bf16.", show_default=False, autocompletion=completion.complete_fix)
    ] = None,
) -> None:
    """List the fixes that an experiment can try; with ID: its code change, conflicts, how it is applied, evidence that it took effect."""
    from gpudiag.errors import UsageError, suggest_nearest
    from gpudiag.fixes import FIX_BY_ID, FIXES
    from gpudiag.report import findings as pages

    if identifier is None:
        found = [_build_page(fix) for fix in FIXES]
        terminal.write_document(pages.build_fix_list(found))
        return
    fix = FIX_BY_ID.get(identifier)
    if fix is None:
        raise UsageError(f"no fix is named {identifier!r}{suggest_nearest(identifier, FIX_BY_ID)}", "`gpudiag fixes` lists them")
    terminal.write_document(pages.build_fix_page(_build_page(fix)))


def _build_page(fix: Fix) -> FixPage:
    from gpudiag.fixes import APPLIERS
    from gpudiag.report.findings import FixPage

    applier = next((found for found in APPLIERS if found.id == fix.id), None)
    if applier is None:
        return FixPage(fix, applies=False)
    # How a fix is applied: what its class says, then what its process is started with
    own = " ".join(" ".join(inspect.cleandoc(applier.__doc__ or "").split("\n\n")[:2]).split())
    environ = f"Started with {' '.join(f'{name}={value}' for name, value in applier.environ.items())}." if applier.environ else ""
    how = " ".join(dict.fromkeys(text for text in (own, environ) if text))
    # What has to show that it took effect: what its method returns
    evidence = _take_first_sentence(inspect.getdoc(getattr(applier, "describe_evidence", applier.evidence)) or "").removeprefix("Return ")
    return FixPage(fix, True, applier.needs_gpu, how, evidence[:1].upper() + evidence[1:])


def _take_first_sentence(text: str) -> str:
    first, stop, _ = " ".join(inspect.cleandoc(text).partition("\n\n")[0].split()).partition(". ")
    return f"{first}{stop.strip()}"
