"""`gpudiag run`: record an unmodified training script, then report on it. Our own lines go to stderr: stdout is the script's."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpudiag.cli import config, options, terminal
from gpudiag.cli.command import PlainCommand
from gpudiag.errors import GpudiagError, UsageError

if TYPE_CHECKING:
    from gpudiag.capture.run_script.plan import OptionValue
    from gpudiag.model.experiment import FixCall
    from gpudiag.script_runner import RunResult

_MODULE_OPTIONS = ("-m", "--module")

Price = tuple[float | None, int | None]
"""Of an hour of one device, and the planned steps; None: not given."""

MOST_LISTED = 4
"""Bundles of further processes that are named; a pool of workers leaves one each."""


class ScriptCommand(PlainCommand):
    """A command whose options end at the script: after `-m MODULE` too, where Python itself ends its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; those after the module's name are the script's."""
        options = {name: param for param in self.params for name in param.opts}
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] != "--":
            name, attached, _ = args[place].partition("=")
            in_one_word = name.startswith("-m") and name not in options  # -mMODULE
            place += 1 if attached or in_one_word or getattr(options.get(name), "is_flag", True) else 2
            if in_one_word or name in _MODULE_OPTIONS:
                return super().parse_args(ctx, [*args[:place], "--", *args[place:]])
        return super().parse_args(ctx, args)


SCRIPT_SETTINGS = {"allow_interspersed_args": False}


def run(
    words: Annotated[
        list[str] | None,
        options.SCRIPT,
    ] = None,
    module: Annotated[str | None, typer.Option("-m", "--module", metavar="MODULE", help="Run a module, as python -m does.")] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="BUNDLE", help="Folder for the recording (default: runs/<time>).", show_default=False)
    ] = "",
    skip: Annotated[int, typer.Option(min=0, help="Steps to skip before the profiled ones.")] = 5,
    warm: Annotated[int, options.WARM] = 2,
    record: Annotated[int, typer.Option(min=1, help="Steps to profile; all times come from these.")] = 6,
    sites: Annotated[int, options.SITES] = 2,
    repeat: Annotated[int, typer.Option(min=0, help="Timing windows to record on schedule.")] = 1,
    wait: Annotated[int, typer.Option(min=0, help="Unprofiled steps between those.")] = 0,
    at_step: Annotated[
        list[int] | None,
        typer.Option(metavar="STEP", help="Record a further window from this step on; may be repeated."),
    ] = None,
    on_signal: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Record a further window when the script gets this signal: USR1, USR2."),
    ] = None,
    on_slow: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Record a further window when the step time rises by this share: 0.3."),
    ] = None,
    max_windows: Annotated[int, typer.Option(min=1, help="Most timing windows to record.")] = 8,
    telemetry_hz: Annotated[float, typer.Option(metavar="HZ", help="Samples per second of clocks, power and load (0: none).")] = 20,
    memory: Annotated[bool, typer.Option("--memory", help="Record peak memory by use and call site.")] = False,
    recipe: Annotated[
        str | None, typer.Option(metavar="FILE", help="Apply the fixes of a recipe.toml of `gpudiag ab`.", show_default=False)
    ] = None,
    fix: Annotated[list[str] | None, options.build_fix_option("Apply a fix")] = None,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Emit NVTX ranges of steps and phases, for Nsight Systems.")] = False,
    source: Annotated[bool, typer.Option("--source/--no-source", help="Show the lines of the program around what a finding names.")] = True,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Report on the recording when the script ends.")] = True,
    rules: Annotated[list[str] | None, options.RULES] = None,
    no_config: Annotated[bool, options.NO_CONFIG] = False,
    gpu_hour_price: Annotated[float | None, options.GPU_HOUR_PRICE] = None,
    planned_steps: Annotated[int | None, options.PLANNED_STEPS] = None,
) -> None:
    """Run a training script unchanged, record it, and report where the time of a step goes."""
    given = words or []
    if module is None and not given:
        raise UsageError("nothing to run", "gpudiag run train.py ARGS, gpudiag run -m module ARGS, or gpudiag run torchrun ... train.py")
    environ = dict(os.environ)  # before polars is imported, which sets a variable of its own
    from gpudiag import script_runner as runner

    command = runner.build_run_command(given, module)
    fixes = _collect_fixes(recipe, fix or [], command)
    number = None if on_signal is None else getattr(signal, f"SIG{on_signal.upper().removeprefix('SIG')}", None)
    if on_signal is not None and not isinstance(number, signal.Signals):
        raise UsageError(f"--on-signal {on_signal}: no such signal", "give USR1 or USR2")
    shown = [*(["-m", module] if module is not None else []), *given]
    options: dict[str, OptionValue] = {
        "skip": skip, "warm": warm, "record": record, "sites": sites, "repeat": repeat, "wait": wait, "at_steps": tuple(at_step or ()),
        "on_signal": None if number is None else int(number), "on_slow": on_slow, "max_windows": max_windows,
        "telemetry_hz": telemetry_hz, "memory": memory, "nvtx": nvtx, "source": source,
    }  # fmt: skip
    inject = None
    if fixes:
        from gpudiag.experiment.recipe import inject_fixes

        inject = inject_fixes(fixes, command)
    ran = runner.run_and_record(command, output, options, shown=shown, environ=environ, inject=inject)
    if _speaks_for_ranks(ran):
        price = (gpu_hour_price, planned_steps)
        report_outcome(ran, report=report, rules=rules or [], no_config=no_config, price=price, script=shlex.join(shown))
    raise typer.Exit(ran.exit_code)


def _collect_fixes(recipe: str | None, given: Sequence[str], command: Sequence[str]) -> tuple[FixCall, ...]:
    if recipe is None and not given:
        return ()
    from gpudiag.experiment.recipe import read_recipe
    from gpudiag.experiment.variant import check_combination, parse_fix_call

    fixes = (*(read_recipe(recipe, command) if recipe is not None else ()), *map(parse_fix_call, given))
    check_combination(fixes)
    terminal.write_note(f"gpudiag: fixes: {', '.join(map(str, fixes)) or 'no fix in it: nothing was proved'}")
    return fixes


def _speaks_for_ranks(ran: RunResult, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process speaks for the ranks of its machine: a launcher may have started each of them as `gpudiag run`.

    The first one of all does, and the first one of another machine, unless nothing was recorded there.
    """
    env = os.environ if environ is None else environ
    return env.get("RANK", "0") == "0" or (env.get("LOCAL_RANK", "0") == "0" and ran.bundle is not None)


def report_outcome(
    ran: RunResult, *, report: bool, rules: Sequence[str] = (), no_config: bool = False, price: Price = (None, None), script: str = "",
    ended: str = "the script has ended", measure: bool = True,
) -> None:  # fmt: skip
    """Say what was recorded, and report on it; `ended`: why it follows now; `measure`: measure the peaks of a device that has none yet."""
    from gpudiag.script_runner import explain_nothing_recorded, format_rank_ranges, wait_for_ranks

    for text in dict.fromkeys(entry.text for entry in ran.told("warned")):
        terminal.write_note(f"gpudiag: {text}")
    bundle = ran.bundle
    if bundle is None:
        terminal.write_note(f"gpudiag: {explain_nothing_recorded(ran)}")
        return
    notes = dict.fromkeys(entry.text for entry in ran.told("note"))
    for note in notes:
        terminal.write_note(f"gpudiag: {note}")
    place = _shorten_path(bundle)
    ranks = wait_for_ranks(bundle, ran.ranks, lambda text: terminal.write_note(f"gpudiag: {text}"))
    if not ranks.reports:
        terminal.write_note(
            f"gpudiag: {format_rank_ranges(ranks.started)} of {ranks.world_size} recorded into {place}: "
            "where rank 0 ran, all are reported on"
        )
        return
    for note in ranks.notes():
        terminal.write_note(f"gpudiag: {note}")
    stepless = bool(notes) and {entry.rank for entry in ran.told("note")}.issuperset(ran.ranks)
    then = "" if stepless else f"; `gpudiag report {shlex.quote(place)}` reports on it"
    if report and not stepless:
        measure = measure and not ran.interrupted
        reported = _report_recording(bundle, rules, no_config, price, script, ended=ended, measure=measure)
        then = f"; the page is {place}/report.html" if reported else then if reported is None else ""
    if ran.others:
        more = len(ran.others) - MOST_LISTED
        others = ", ".join(_shorten_path(path) for path in ran.others[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
        terminal.write_note(f"gpudiag: other processes trained too: {others}")
    terminal.write_note(f"gpudiag: the recording is {place}{then}")


def _report_recording(
    bundle: Path, rules: Sequence[str], no_config: bool, price: Price, script: str, *, ended: str, measure: bool
) -> bool | None:
    """Return whether there is a report, shown then with the next command; None where it may be had later: this time it was broken off.

    The exit code is the script's, whatever becomes of the report: nothing is raised.
    """
    from gpudiag.report import findings
    from gpudiag.script_runner import write_bundle_report

    terminal.write_note(f"gpudiag: {ended}; the report follows (Ctrl-C skips it)")
    try:
        with terminal.show_progress("reading") as progress:
            chosen = None if no_config else config.find_config()
            found = write_bundle_report(bundle, measure=measure, progress=progress, rules_dirs=rules, config=chosen, price=price)
        width, coloured = terminal.measure_table_columns(sys.stderr), terminal.is_coloured(sys.stderr)
        terminal.write_aside("\n" + found.text(width=width, top=10, color=coloured, script=None))  # the command stands last, in one line
        # a process of a launcher knows nothing of its command line
        if "RANK" not in os.environ and (command := findings.build_ab_command(found.data, script)):
            terminal.write_note(f"gpudiag: measure it before you change the code: {command}")
    except KeyboardInterrupt:
        terminal.write_note("gpudiag: no report: interrupted")
        return None
    except GpudiagError as error:
        # A hint may name arguments of gpudiag.profile (`lower skip=`): here they are options
        said = re.sub(r"\b([a-z_]+)=(?=[\s,;.)]|$)", lambda name: "--" + name[1].replace("_", "-"), str(error))
        terminal.write_note(f"gpudiag: no report: {said}")
        return False
    except Exception as error:  # noqa: BLE001
        terminal.write_note(f"gpudiag: no report: {type(error).__name__}: {error}")
        return None
    return True


def _shorten_path(path: Path) -> str:
    with_base = os.path.relpath(path)
    return str(path) if with_base.startswith(os.pardir) else with_base
