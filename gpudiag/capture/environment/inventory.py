"""A part that takes stock of what the training program brought along: its packages, wrappers, compilation, commit and driver."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gpudiag.capture import environment
from gpudiag.capture.environment.live_objects import find_live_objects, read_compiled, read_wrappers
from gpudiag.capture.environment.process import read_packages, read_variables, try_read
from gpudiag.capture.environment.sources import digest_sources
from gpudiag.capture.environment.torch_settings import WindowSettings
from gpudiag.capture.hooks import Context, Hooks
from gpudiag.capture.schedule import WindowKind
from gpudiag.capture.steps import StepRow
from gpudiag.model.bundle import Code, Compiled, Program, Wrappers

TIMEOUT_S = 5.0
"""How long git may take for each question: on network drives `git status` of a large repository may take longer than anyone waits."""

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C"}
"""git --help: writes nothing to the repository where it need not, asks nobody, fetches nothing."""

_HARMLESS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
"""No hook or monitor that the repository's own configuration names is started; _find_changes() does the same for its filters."""

_FILTERS = ("config", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process)$")
_STATUS = ("status", "--porcelain", "-z", "--no-renames", "--untracked-files=no", "--ignore-submodules=all")

MAX_ANSWER = 1 << 16
"""Bytes kept of an answer."""


def find_script() -> Path | None:
    """Return the script that runs; None where there is none (an interpreter, a notebook)."""
    found = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(os.path.abspath(found)) if isinstance(found, str) else None


def read_code(folder: Path, file: Path | None = None) -> Code | None:
    """Return commit and state of the repository that `folder` is in, and whether it tracks `file`; None where git does not answer."""
    git = shutil.which("git")
    commit = None if git is None else _ask_git(git, folder, "rev-parse", "--verify", "HEAD")
    if git is None or commit is None or not _COMMIT.fullmatch(commit):
        return None
    dirty = _find_changes(git, folder)
    if file is None:
        return Code(commit=commit, dirty=dirty, script_tracked=None)
    tracked = _ask_git(git, folder, "--literal-pathspecs", "ls-files", "--", str(file), accepted=(0, 128))  # 128: outside the repository
    return Code(commit=commit, dirty=dirty, script_tracked=None if tracked is None else bool(tracked))


def _find_changes(git: str, folder: Path) -> bool | None:
    """Return whether tracked files differ from the commit; None where git does not say, or only a filter of the repository could.

    A filter is a program that the configuration names, and `git status` runs it on files whose time has changed: all are switched off. An
    empty command is none (git's convert.c), and a filter that is not required may be missing.
    """
    filters = _ask_git(git, folder, *_FILTERS, accepted=(0, 1))  # 1: there are none
    drivers = {key.rpartition(".")[0] for key in (filters or "").splitlines()}
    # Filters that are switched off one by one; with more (Git LFS is one) the changes are unknown
    if filters is None or len(drivers) > 16 or any("=" in driver for driver in drivers):
        return None
    without = [part for driver in sorted(drivers) for key in ("clean=", "process=", "required=false") for part in ("-c", f"{driver}.{key}")]
    changes = _ask_git(git, folder, *without, *_STATUS)
    if not changes or not without:
        return None if changes is None else bool(changes)
    # Without its filter a file that was only touched differs too, so one of the changed files must have none. An entry is 'XY path' with a
    # 0 byte behind it; X is not blank for what was changed in the index, which holds filtered content.
    entries = changes.rstrip("\0").split("\0")[:64]  # changed files that are asked about
    if any(not entry.startswith(" ") for entry in entries):
        return True
    top = _ask_git(git, folder, "rev-parse", "--show-toplevel")  # the paths are relative to it
    attributes = top and _ask_git(git, Path(top), "check-attr", "-z", "filter", "--", *(entry[3:] for entry in entries))
    return True if attributes and {"unspecified", "unset"} & set(attributes.split("\0")[2::3]) else None


def _ask_git(git: str, folder: Path, *words: str, accepted: Sequence[int] = (0,)) -> str | None:
    """Return what git prints; None where it ends in another way than `accepted`, or takes too long and has to be ended.

    No lock of Python's is held meanwhile (tempfile and imports have such): a DataLoader worker that is forked in that moment would find it
    locked for ever. Nor does anything wait for the end of a pipe, of which such a worker may hold a copy: the answer is read as it comes,
    until git has ended. With these arguments Python spawns without a pipe of its own (os.posix_spawn).
    """
    # Set while git runs a hook; they would name another repository
    environment = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")} | _QUIET
    answer, end = os.pipe()
    try:
        os.set_blocking(answer, False)
        try:
            process = subprocess.Popen(  # noqa: S603 - fixed words
                [git, "-C", str(folder), *_HARMLESS, *words],
                stdin=subprocess.DEVNULL, stdout=end, stderr=subprocess.DEVNULL, env=environment, close_fds=False,
            )  # fmt: skip
        except OSError:
            return None
        finally:
            os.close(end)
        deadline, found = time.monotonic() + TIMEOUT_S, bytearray()
        while process.poll() is None:
            _drain_pipe(answer, found)
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
                return None
            time.sleep(0.005)  # between two looks at a git that has not finished
        _drain_pipe(answer, found)
        return found.decode(errors="surrogateescape").strip("\r\n") if process.returncode in accepted else None
    finally:
        os.close(answer)


def _drain_pipe(answer: int, found: bytearray) -> None:
    for _ in range(16):
        try:
            data = os.read(answer, MAX_ANSWER)
        except BlockingIOError:
            return
        if not data:
            return
        found += data[: MAX_ANSWER - len(found)]


_fork_prepared = False

_DRIVER_VERSION = re.compile(r"\d{1,5}(\.\d{1,5}){0,3}")


def read_driver_version() -> str | None:
    """Return the driver's version (nvmlSystemGetDriverVersion), such as '570.86.15'; None where NVML is not there or does not answer."""
    pynvml: Any = sys.modules.get("pynvml")  # torch.cuda imports it; an import in a thread holds a lock that a forked child needs
    if pynvml is None:
        return None
    try:
        pynvml.nvmlInit()
        try:
            found = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()  # NVML counts: whoever else has started it keeps it
    except pynvml.NVMLError:
        return None
    text = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
    return text if _DRIVER_VERSION.fullmatch(text) else None


def let_forked_children_use_nvml() -> None:
    """Return None; from now on forked children of this process may use pynvml. Call before a thread of ours does.

    pynvml holds a lock while it looks a function up for the first time: a child that is forked in that moment would wait for it for ever.
    """
    global _fork_prepared
    if not _fork_prepared and hasattr(os, "register_at_fork"):
        _fork_prepared = True

        def renew_lock() -> None:
            pynvml: Any = sys.modules.get("pynvml")
            if hasattr(pynvml, "libLoadLock"):
                pynvml.libLoadLock = threading.Lock()

        os.register_at_fork(after_in_child=renew_lock)


LOOK_INTERVAL_STEPS = 16
"""Switches are looked at inside each of so many first steps and those of windows, then in one of so many."""

JOIN_S = 2.0
"""How long the end of a session waits for git and NVML."""

_CHECKPOINT = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl", "check_backward_validity")
"""What torch.utils.checkpoint.checkpoint calls in its two forms (the second name: torch 2.15). It never runs inside compiled code,
and is itself left alone."""


class Inventory(Hooks):
    """Looks quickly on the training thread, slowly (git, files, NVML) in a thread of its own, and at living objects once, at the end."""

    def __init__(self, *, source: bool = True) -> None:
        """`source`: note what tells the program's files from later ones, so that reports can show lines of them."""
        self._sources: dict[str, str] | None = {} if source else None
        self._thread: threading.Thread | None = None
        self._asks_git = self._stepped = False
        self._packages: dict[str, str] = {}
        self._code: Code | None = None
        self._driver: str | None = None
        self._compiled: Compiled | None = None
        self._wrappers: Wrappers | None = None
        self._checkpointed: bool | None = None
        self._closed = self._in_window = False
        self._looking = True
        self._switches = WindowSettings()

    def start(self, context: Context) -> None:
        """Ask git in the background (one rank: they run the same script), and hear of activation checkpointing."""
        let_forked_children_use_nvml()
        self._asks_git = context.rank == 0
        self._machine = environment.read_machine()

        def wrap_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any, **kwargs: Any) -> Any:
                self._checkpointed = True
                return original(*args, **kwargs)

            return noted

        checkpoint = sys.modules.get("torch.utils.checkpoint")
        for name in _CHECKPOINT if checkpoint is not None else ():
            context.patches.wrap(checkpoint, name, wrap_checkpoint)
        self._switches.install(context.patches)
        self._look()

    def backward_began(self, at_ns: int, loss: Any) -> None:
        """Look at switches that may be on inside the step only."""
        if self._looking:
            self._switches.backward_began()

    def step_ended(self, row: StepRow, at_ns: int) -> None:
        """Look again after the first step: by now the program has imported what it uses, and initialised its device; no window runs yet."""
        self._stepped = self._stepped or self._look()
        self._looking = self._in_window or row.step < LOOK_INTERVAL_STEPS or not row.step % LOOK_INTERVAL_STEPS

    def window_began(self, index: int, kind: WindowKind) -> None:
        """Look inside each of its steps."""
        self._looking = self._in_window = True

    def window_ended(self, index: int, kind: WindowKind) -> None:
        """Keep the switches as they stood in the window."""
        self._in_window = False
        if kind == "timing":
            self._switches.now(freeze=True)

    def close(self) -> None:
        """Look at what is alive, keeping none of it, and wait for the thread."""
        if self._thread is not None:
            self._thread.join(JOIN_S)
        self._look()
        found = find_live_objects()
        self._compiled = try_read(lambda: read_compiled(found))
        if found is not None:
            self._wrappers = try_read(lambda: read_wrappers(found))
            self._checkpointed = bool(
                self._checkpointed
                or found.get("checkpointed")
                or any(vars(item).get("gradient_checkpointing") is True for item in found.get("module", ()))  # transformers' switch
            )
        self._closed = True
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def manifest(self) -> Mapping[str, Any]:
        """Return the program, and the machine with its device and driver."""
        program = Program(
            packages=self._packages,
            variables=read_variables(),
            code=self._code,
            compiled=self._compiled if self._closed else try_read(lambda: read_compiled(None)),
            wrappers=self._wrappers,
            activation_checkpointing=self._checkpointed,
            sources=self._sources,
        )
        machine = msgspec.structs.replace(self._machine, driver=self._driver, gpu_uuid=try_read(environment.read_gpu_uuid))
        return {"program": program, "machine": machine, "settings": self._switches.now()}

    # A DataLoader worker may be forked at any moment, and finds every lock of Python as it is then, for ever. So this thread imports
    # nothing, writes no temporary file and warns of nothing.

    def _look(self) -> bool:
        import torch

        if self._thread is not None and self._thread.is_alive():
            return False
        uses_device = bool(torch.cuda.is_initialized())

        def look_slowly() -> None:
            self._packages = try_read(read_packages) or self._packages
            if self._sources is not None:
                self._sources = try_read(partial(digest_sources, self._sources)) or self._sources
            if self._asks_git:
                self._asks_git = False
                self._code = try_read(lambda: read_code(Path.cwd() if (script := find_script()) is None else script.parent, script))
            if uses_device and self._driver is None:
                self._driver = try_read(read_driver_version)

        self._thread = threading.Thread(target=look_slowly, name="gpudiag inventory", daemon=True)
        self._thread.start()
        return True
