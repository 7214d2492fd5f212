"""Runs an unmodified training script, with the injector that records it, and reports on what was recorded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpudiag.api.relay import relayed
from gpudiag.capture import launch
from gpudiag.capture.options import checked
from gpudiag.capture.standard import standard_parts
from gpudiag.capture.unmodified.injected import injected
from gpudiag.capture.unmodified.plan import Entry, Option, Plan, read_journal
from gpudiag.errors import InputError

if TYPE_CHECKING:
    from gpudiag.api import Progress, Report
    from gpudiag.diagnosis.config import Config
    from gpudiag.model.experiment import FixCall

MAX_PLAN = 100_000
"""Longer plans leave the command out: Linux takes 131,072 bytes for one variable (MAX_ARG_STRLEN, execve(2))."""

_PYTHON_SUFFIXES = (".py", ".pyw", ".pyc", ".pyz", ".zip")


class Ran(msgspec.Struct, frozen=True):
    """How a script ended and what was recorded of it."""

    exit_code: int
    """The script's own; 128 + n where signal n ended it."""
    entries: tuple[Entry, ...] = ()
    """What its processes told, in time order."""
    interrupted: bool = False
    """Whether the user pressed Ctrl-C meanwhile."""

    @property
    def bundle(self) -> Path | None:
        """Return the bundle of the lowest rank, of the first process where several are no ranks of one run; None: nothing was recorded."""
        begun = sorted((entry for entry in self.entries if entry.what == "bundle"), key=lambda entry: entry.rank)
        return Path(begun[0].text) if begun else None

    @property
    def others(self) -> tuple[Path, ...]:
        """Return the bundles of further processes that trained."""
        found = dict.fromkeys(Path(entry.text) for entry in self.entries if entry.what == "bundle")
        return tuple(path for path in found if path != self.bundle)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that recorded into the bundle."""
        return tuple(sorted({entry.rank for entry in self.entries if entry.what == "bundle" and Path(entry.text) == self.bundle}))

    def told(self, what: str) -> list[Entry]:
        """Return the entries of one kind."""
        return [entry for entry in self.entries if entry.what == what]


def run(
    command: Sequence[str],
    path: str = "",
    options: Mapping[str, Option] | None = None,
    *,
    shown: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    fixes: Sequence[FixCall] = (),
) -> Ran:
    """Return how `command` ended; what of it trains is recorded into a bundle at `path` (default runs/<time>).

    Standard streams, signals, working directory and open files are the command's own. `options`: of gpudiag.profile.
    `shown`: the arguments for the manifest. `environ`: the command's environment (default: this process's, as the libraries loaded here
    may have changed it). `fixes`: of a recipe, put in place in each process that imports torch.
    Raises UsageError for a wrong option, InputError where the command cannot be started.
    """
    _check(options or {})
    folder = Path(path) if path else launch.default_path()
    with tempfile.TemporaryDirectory(prefix="gpudiag-run-") as scratch:
        journal = Path(scratch) / "journal"
        journal.touch()
        plan = Plan(os.path.abspath(folder), None if shown is None else tuple(shown), dict(options or {}), str(journal))
        with relayed() as relay:
            try:
                child = subprocess.Popen(command, env=_environment(plan, environ or os.environ, tuple(fixes), command), close_fds=False)  # noqa: S603 - the user's own command
            except OSError as error:
                raise InputError(f"cannot start {command[0]}: {error.strerror or error}", "name a Python script or a program") from None
            relay.child = child
            code = child.wait()
        return Ran(128 - code if code < 0 else code, tuple(read_journal(journal)), relay.interrupted)


def _check(options: Mapping[str, Option]) -> None:
    """Raise UsageError here and now for what a session in the script's process would refuse."""
    of_parts = signature(standard_parts).parameters.keys()
    checked({name: value for name, value in options.items() if name not in of_parts})
    standard_parts(**{name: value for name, value in options.items() if name in of_parts})  # type: ignore[arg-type]


def command_of(words: Sequence[str], module: str | None = None) -> list[str]:
    """Return the command that runs `words`: a Python script with its arguments, or a program; with `module` as `python -m`.

    Raises InputError where there is no such file or program.
    """
    python = sys.executable or "python3"
    if module is not None:
        return [python, "-m", module, *words]
    name = words[0]
    if _is_script(name):
        return [python, *words]
    found = shutil.which(name) or shutil.which(name, path=os.path.dirname(python))
    if found is None or os.path.isdir(name):
        what = "a folder without __main__.py" if os.path.isdir(name) else "no such file"
        raise InputError(f"{name}: {what}", "give a Python script, -m MODULE, or a program such as torchrun")
    return [found, *words[1:]]


def _is_script(name: str) -> bool:
    if os.path.isdir(name):
        return os.path.exists(os.path.join(name, "__main__.py"))
    return os.path.isfile(name) and (name.lower().endswith(_PYTHON_SUFFIXES) or not os.access(name, os.X_OK))


def _environment(plan: Plan, base: Mapping[str, str], fixes: tuple[FixCall, ...], command: Sequence[str]) -> dict[str, str]:
    """Return the environment with the plan, and the injector's folder first on PYTHONPATH."""
    if len(plan.text().encode()) > MAX_PLAN:
        plan = msgspec.structs.replace(plan, command=None)
    if not fixes:
        return injected(plan.text(), base)
    from gpudiag.experiment.factory import turning
    from gpudiag.experiment.fixes import applier
    from gpudiag.experiment.fixes.registered import registered
    from gpudiag.experiment.recording import WATCHER
    from gpudiag.experiment.trial.record import RecordPlan

    with turning(command):
        asked = {name: value for call in fixes for name, value in applier(call).environ.items()}
        own = registered(call.id for call in fixes)
    return injected(RecordPlan(plan, fixes, registered=own).text(), {**base, **asked}, WATCHER)


# -- afterwards -------------------------------------------------------------------------------------------------------


def nothing_because(ran: Ran) -> str:
    """Return why nothing was recorded, in one line."""
    failed = ran.told("failed")
    if failed:
        return f"the recording failed: {failed[0].text}"
    if ran.told("aside"):
        return "the script records itself with gpudiag.profile: the bundle is where that put it"
    if ran.exit_code:
        return f"nothing was recorded: the script ended with exit code {ran.exit_code} before a training step was seen"
    if ran.told("torch"):
        why = "torch was imported, but no backward pass and no optimizer step was seen"
        return f"nothing was recorded: {why} (in a loop without them, such as inference, call gpudiag.step() after each batch)"
    return (
        "nothing was recorded: no Python of the command that has gpudiag installed imported torch, or it was kept from being watched "
        "(python -S, -I and -E ignore PYTHONPATH; so does a process that is started with an environment or a PYTHONPATH of its own; "
        "a gpudiag.py beside the script hides gpudiag)"
    )


def report_on(
    bundle: Path,
    *,
    measure: bool,
    progress: Progress | None = None,
    rules_dirs: Sequence[str] = (),
    config: Config | None = None,
    price: tuple[float | None, int | None] = (None, None),
) -> Report:
    """Return the report on `bundle`, which then also stands in it as report.html and report.json.

    `measure`: measure the peaks of the device, where they are not known, and keep them; `rules_dirs`, `config`: as of api.diagnose;
    `price`: of an hour of one device, and the planned steps.
    Raises GpudiagError where there is nothing to say.
    """
    from gpudiag.api import diagnose
    from gpudiag.api.devices import measured_peaks
    from gpudiag.api.launched import keep_peaks

    tell = progress or (lambda _: None)
    if measure:
        tell("measuring what this device can do")
        keep_peaks(bundle, measured_peaks)
    report = diagnose(str(bundle), progress=tell, rules_dirs=rules_dirs, config=config, gpu_hour_price=price[0], planned_steps=price[1])
    for name in ("report.html", "report.json"):
        report.save(bundle / name)
    return report
