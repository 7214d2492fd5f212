"""Experiments from Python: `gpudiag.ab` for a function that builds a training, `gpudiag.ab_script` for a script as it is."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gpudiag.api.candidates import parse_fix_call
from gpudiag.api.experiment import ExperimentResult, Options, run_experiment
from gpudiag.api.run import build_run_command
from gpudiag.errors import InputError, UsageError, suggest_nearest
from gpudiag.experiment import code_location, factory, guard
from gpudiag.experiment import knobs as turned
from gpudiag.experiment.fixes.registry import replace_appliers
from gpudiag.experiment.task import MemoryNeed
from gpudiag.experiment.variants import Change, parse_variants
from gpudiag.model.experiment import ExperimentData, FixCall, Outcome
from gpudiag.units import format_bytes

ESTIMATE_S = 120.0
"""A model of a thousand layers takes some seconds; what takes longer is tried without."""

_GPUS = ("/dev/nvidiactl", "/dev/kfd")


def find_too_large(command: Sequence[str], fixes: Sequence[FixCall], accumulation: FixCall | None = None) -> tuple[Outcome, ...]:
    """Find an outcome for each batch size among `fixes` whose tensors alone need more than the GPU has free; none without a GPU.

    `accumulation`: applied together with it.
    """
    if not any(map(os.path.exists, _GPUS)):
        return ()
    outcomes = []
    for call in fixes:
        if call.id == "batch-size" and call.value is not None:
            memory = estimate_need(command, [call, *([accumulation] if accumulation else [])])
            if memory.peak_bytes is not None and memory.free_bytes is not None and memory.peak_bytes > memory.free_bytes:
                need, free = format_bytes(memory.peak_bytes), format_bytes(memory.free_bytes)
                note = f"not started: its tensors need {need} (an estimate on tensors without data), and the device has {free} free"
                outcomes.append(Outcome(fix=str(call), verdict="failed", reason="oom", notes=(note,)))
    return tuple(outcomes)


def estimate_need(command: Sequence[str], fixes: Sequence[FixCall]) -> MemoryNeed:
    """Estimate the memory that the factory `command` takes with the knobs of `fixes` turned; not known where it cannot be estimated."""
    turns = [word for call in fixes for word in ("--turn", str(call))]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            [*command, *turns, "--estimate"], stdin=subprocess.DEVNULL, capture_output=True, timeout=ESTIMATE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return MemoryNeed(reason=str(error))
    lines = done.stdout.splitlines() or [b""]
    try:
        return msgspec.json.decode(lines[-1], type=MemoryNeed)
    except msgspec.MsgspecError:
        return MemoryNeed(reason=done.stderr.decode(errors="replace").strip()[-500:] or "nothing was said")


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
    ways = []
    for name, changed in (variants or {}).items():
        (named,) = parse_variants([f"{name}=args:"])  # the name may carry a parity class
        words = shlex.join(["--knobs", factory.encode_knobs(changed)])
        ways.append(msgspec.structs.replace(named, changes=(Change("args", words),)))
    shown = ("gpudiag.ab", where.target.rpartition("/")[2])
    asked = _build_options({"command_shown": shown, **options}, budget)
    with replace_appliers(turned.KNOB_FIXES):
        calls = _parse_fixes(fixes)
        also = next((call for call in calls if call.id == "accumulation"), None) if asked.combine else None
        failed = find_too_large(command, calls, also)
        too_large = {outcome.fix for outcome in failed}
        calls = tuple(call for call in calls if str(call) not in too_large)
        if failed and (asked.combine or not (calls or ways or auto)):
            return ExperimentResult(ExperimentData(experiments=failed))
        result = _run_with_progress(quiet, command, fixes=calls, variants=tuple(ways), auto=auto, options=asked)
    if not failed:
        return result
    return ExperimentResult(msgspec.structs.replace(result.data, experiments=(*result.data.experiments, *failed)), result.bundle)


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
        return run_experiment(command, progress=live.tell, tell=live.pair, done=live.done, **asked)
