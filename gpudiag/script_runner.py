"""Run an unmodified training script with the injector that records it: signals handed on, ranks awaited, the report written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gpudiag.bundle.layout import REPORT_NAME, list_other_ranks, manifest_name
from gpudiag.bundle.manifest import encode_manifest, read_manifest
from gpudiag.bundle.writer import write_atomic
from gpudiag.capture.launch import choose_default_path
from gpudiag.capture.run_script.plan import JournalEntry, OptionValue, Plan, build_environment, read_journal
from gpudiag.capture.schedule import check_options
from gpudiag.capture.standard_parts import make_standard_parts
from gpudiag.errors import GpudiagError, InputError, suggest_file
from gpudiag.model.bundle import Manifest, RankState
from gpudiag.model.hardware import Device

if TYPE_CHECKING:
    from gpudiag.api import Report
    from gpudiag.diagnosis.config import Config
    from gpudiag.units import Progress

_SIGNAL_NAMES = ("SIGINT", "SIGQUIT", "SIGHUP", "SIGTERM", "SIGUSR1", "SIGUSR2")
_SIGNALS: list[int] = [getattr(signal, name) for name in _SIGNAL_NAMES if hasattr(signal, name)]


class Witness:
    """A process of our process group that holds back every signal, so that it can be asked which ones the whole group was sent.

    Who sends a signal says nothing of whom else it went to: a terminal, `timeout` and a scheduler send it to the group or to every process
    of the job, the command's among them; `kill` to this one alone. The witness is a `cat` of a pipe: it ends with us, however we end.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._held: set[int] = set()
        self._program = shutil.which("cat") if Path("/proc/self/status").exists() else None  # what is pending is told by Linux alone
        self._renew()

    def _renew(self) -> None:
        self.close()
        if self._program is None:
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a child begins with the mask of its parent
        try:
            with suppress(OSError):
                self._process = subprocess.Popen(  # noqa: S603 - a fixed program
                    [self._program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/"
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def saw(self, number: int) -> bool | None:
        """Return whether the group was sent this signal too; None where that is not known."""
        # How long a signal may take to reach the whole group: the kernel goes through it in one call, `timeout` and `scancel` in a few
        process, deadline = self._process, time.monotonic() + 0.05
        while process is not None and number not in self._held:
            try:  # the signals that wait for the witness: proc(5)
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                mask = next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:"))
            except (OSError, ValueError, IndexError, StopIteration):
                return None
            pending = {one for one in _SIGNALS if mask >> (one - 1) & 1}
            if number in pending:
                self._held |= pending  # another one's turn comes next, and the new witness knows nothing of it
                self._renew()
            elif time.monotonic() > deadline:
                return False
            else:
                time.sleep(0.002)
        if number not in self._held:
            return None
        self._held.discard(number)
        return True

    def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(OSError):
                process.kill()
            if process.stdin is not None:
                process.stdin.close()
            process.wait()


class Relay:
    """Hands signals on to the child that have not reached it by themselves, as they reach all processes of a group."""

    def __init__(self, saw: Callable[[int], bool | None]) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.interrupted = False
        self._saw = saw

    def __call__(self, number: int, _: object) -> None:
        """Hand the signal on, where the child has not got it."""
        self.interrupted = self.interrupted or number == signal.SIGINT
        child = self.child  # before it has started there is nobody to hand a signal to
        seen = self._saw(number)
        if seen is None:
            seen = signal.Signals(number).name in ("SIGINT", "SIGQUIT", "SIGHUP") and _is_in_foreground()
        if child is not None and not seen:
            with suppress(OSError):
                child.send_signal(number)


def _is_in_foreground() -> bool:
    with suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDONLY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False


@contextmanager
def relay_signals() -> Iterator[Relay]:
    """Yield the relay, in force until the child has ended. Signals that are ignored (nohup) stay so, here and in the child."""
    witness = Witness()
    relay = Relay(witness.saw)
    before: dict[int, Any] = {}
    for number in _SIGNALS:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_IGN)  # anew: a library may have put a handler of its own there, behind Python's back (polars)
        elif signal.getsignal(number) is not None:
            before[number] = signal.signal(number, relay)  # a handler of ours is the default again in the child
    try:
        yield relay
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        witness.close()


_PYTHON_SUFFIXES = (".py", ".pyw", ".pyc", ".pyz", ".zip")


class RunResult(msgspec.Struct, frozen=True):
    """How a script ended and what was recorded of it."""

    exit_code: int
    entries: tuple[JournalEntry, ...] = ()
    interrupted: bool = False

    @property
    def bundle(self) -> Path | None:
        """The bundle of the lowest rank, of the first process where several are no ranks of one run; None: nothing was recorded."""
        first = min((entry for entry in self.entries if entry.what == "bundle"), key=lambda entry: entry.rank, default=None)
        return None if first is None else Path(first.text)

    @property
    def others(self) -> tuple[Path, ...]:
        """The bundles of further processes that trained."""
        found = dict.fromkeys(Path(entry.text) for entry in self.entries if entry.what == "bundle")
        return tuple(path for path in found if path != self.bundle)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that recorded into the bundle."""
        return tuple(sorted({entry.rank for entry in self.entries if entry.what == "bundle" and Path(entry.text) == self.bundle}))

    def told(self, what: str) -> list[JournalEntry]:
        """Return the entries of one kind."""
        return [entry for entry in self.entries if entry.what == what]


Inject = Callable[[Plan, Mapping[str, str]], dict[str, str]]
"""Builds the environment of a command that is recorded by a plan, on top of another one."""


def _inject_recording(plan: Plan, base: Mapping[str, str]) -> dict[str, str]:
    return build_environment(plan.text(), base)


def run_and_record(
    command: Sequence[str],
    path: str = "",
    options: Mapping[str, OptionValue] | None = None,
    *,
    shown: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    inject: Inject | None = None,
) -> RunResult:
    """Return how `command` ended; what of it trains is recorded into a bundle at `path` (default runs/<time>).

    Standard streams, signals, working directory and open files are the command's own. `options`: of gpudiag.profile.
    `shown`: the arguments for the manifest. `environ`: the command's environment (default: this process's, as the libraries loaded here
    may have changed it). `inject`: builds the environment that injects more than the recording, as the fixes of a recipe.
    Raises UsageError for a wrong option, InputError where the command cannot be started.
    """
    given, of_parts = dict(options or {}), signature(make_standard_parts).parameters.keys()
    check_options({name: value for name, value in given.items() if name not in of_parts})
    make_standard_parts(**{name: value for name, value in given.items() if name in of_parts})  # type: ignore[arg-type]
    folder = Path(path) if path else choose_default_path()
    with tempfile.TemporaryDirectory(prefix="gpudiag-run-") as scratch:
        journal = Path(scratch) / "journal"
        journal.touch()
        plan = Plan(os.path.abspath(folder), None if shown is None else tuple(shown), given, str(journal))
        with relay_signals() as relay:
            # Longer plans leave the command out: Linux takes 131,072 bytes for one variable (MAX_ARG_STRLEN, execve(2))
            if len(plan.text().encode()) > 100_000:
                plan = msgspec.structs.replace(plan, command=None)
            surroundings = (inject or _inject_recording)(plan, environ or os.environ)
            try:
                child = subprocess.Popen(command, env=surroundings, close_fds=False)  # noqa: S603 - the user's own command
            except OSError as error:
                raise InputError(f"cannot start {command[0]}: {error.strerror or error}", "name a Python script or a program") from None
            relay.child = child
            code = child.wait()
        return RunResult(128 - code if code < 0 else code, tuple(read_journal(journal)), relay.interrupted)


def build_run_command(words: Sequence[str], module: str | None = None) -> list[str]:
    """Build the command that runs `words`: a Python script with its arguments, or a program; with `module` as `python -m`.

    Raises InputError where there is no such file or program.
    """
    python = sys.executable or "python3"
    if module is not None:
        return [python, "-m", module, *words]
    name = words[0]
    if os.path.isdir(name):
        script = os.path.exists(os.path.join(name, "__main__.py"))
    else:
        script = os.path.isfile(name) and (name.lower().endswith(_PYTHON_SUFFIXES) or not os.access(name, os.X_OK))
    if script:
        return [python, *words]
    found = shutil.which(name) or shutil.which(name, path=os.path.dirname(python))
    if found is None or os.path.isdir(name):
        what = "a folder without __main__.py" if os.path.isdir(name) else f"no such file{suggest_file(name, _PYTHON_SUFFIXES)}"
        raise InputError(f"{name}: {what}", "give a Python script, -m MODULE, or a program such as torchrun")
    return [found, *words[1:]]


def explain_nothing_recorded(ran: RunResult) -> str:
    """Explain why nothing was recorded, in one line."""
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


def write_bundle_report(
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
    from gpudiag.devices import load_or_measure_peaks

    tell = progress or (lambda _: None)
    if measure:
        tell("measuring what this device can do")
        store_peaks(bundle, load_or_measure_peaks)
    report = diagnose(str(bundle), progress=tell, rules_dirs=rules_dirs, config=config, gpu_hour_price=price[0], planned_steps=price[1])
    for name in ("report.html", REPORT_NAME):
        report.save(bundle / name)
    return report


WAIT_S, LOOK_S = 60.0, 0.05
"""How long the ranks of other launchers are waited for, which leave the loop at about the same time and then compress their last trace."""

TELL_S = 2.0

_NOBODY = -1


class LaunchedRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks in one bundle, as one process that started some of them sees them when these are over."""

    ranks: tuple[int, ...]
    unfinished: tuple[int, ...] = ()
    world_size: int = 1
    started: tuple[int, ...] = ()

    @property
    def reports(self) -> bool:
        """Whether this process is the one that reports: it started the lowest rank of the bundle."""
        return not self.ranks or not self.started or min(self.started) == min(self.ranks)

    def notes(self) -> list[str]:
        """Return what to know of ranks that are not in the bundle, or not whole."""
        notes, missing = [], self.world_size - len(self.ranks)
        if self.unfinished and self.world_size > 1:
            notes.append(f"{format_rank_ranges(self.unfinished)} did not finish: killed, or still recording")
        if missing > 0 and self.ranks:
            notes.append(
                f"{len(self.ranks)} of {self.world_size} ranks are in this bundle: where the others ran on other machines, "
                "give all of them one folder that they share (-o), or copy their bundles into this one"
            )
        return notes


def format_rank_ranges(ranks: Iterable[int]) -> str:
    """Return ranks in words, neighbours as a range: 'rank 3', 'ranks 0, 4-7'."""
    from gpudiag.report.ranks import format_ranges

    listed = format_ranges(ranks, most=1_000)
    return f"rank{'' if listed.isdigit() else 's'} {listed}"


def wait_for_ranks(bundle: Path, started: Iterable[int], tell: Progress | None = None, wait_s: float = WAIT_S) -> LaunchedRanks:
    """Return the ranks in `bundle`, after those that this process has not `started` have finished too, or `wait_s` are over.

    `tell` is told once of a wait that takes longer.
    """
    mine = tuple(sorted(set(started)))
    world_size = 1
    with suppress(GpudiagError):
        world_size = read_manifest(bundle / manifest_name(mine[0] if mine else 0)).world_size
    begun, told = time.monotonic(), False
    while True:
        found = _find_recorded_ranks(bundle)
        late = [state.rank for state in found if not state.finished and state.rank not in mine]
        waited_s = time.monotonic() - begun
        if not late or waited_s > wait_s or world_size == 1:
            break
        if tell is not None and waited_s > TELL_S and not told:
            tell(f"waiting for {format_rank_ranges(late)} to finish recording")
            told = True
        time.sleep(LOOK_S)
    unfinished = tuple(state.rank for state in found if not state.finished)
    return LaunchedRanks(ranks=tuple(state.rank for state in found), unfinished=unfinished, world_size=world_size, started=mine)


def _find_recorded_ranks(bundle: Path) -> tuple[RankState, ...]:
    try:
        return list_other_ranks(bundle, _NOBODY)
    except OSError:
        return ()


def store_peaks(bundle: Path, measure: Callable[[Manifest], Device | None]) -> None:
    """Put measured peaks into the manifests of the finished ranks that know none; what fails leaves them unknown, as the report then says.

    Measured once for ranks on devices of one kind.
    """
    known: dict[tuple[object, ...], Device | None] = {}
    for state in _find_recorded_ranks(bundle):
        with suppress(Exception):
            path = bundle / manifest_name(state.rank)
            manifest = read_manifest(path)
            if not (manifest.finished and manifest.windows):
                continue
            name = None if manifest.device is None else manifest.device.name
            kind = (manifest.device_kind, name, manifest.machine.cpu, manifest.machine.torch, manifest.settings.threads)
            if manifest.peaks is not None:
                known.setdefault(kind, manifest.peaks)
                continue
            if kind not in known:
                known[kind] = None  # so that what fails is not tried again for each rank
                known[kind] = measure(manifest)
            if known[kind] is not None:
                write_atomic(path, encode_manifest(msgspec.structs.replace(manifest, peaks=known[kind])))
