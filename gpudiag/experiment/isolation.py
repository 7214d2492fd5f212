"""Keeps experiments apart and harmless: one at a time on a machine or GPU (locks), no change to the program's folder (sandbox), no process
left behind."""

from __future__ import annotations

import errno
import getpass
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec

from gpudiag.errors import InputError, suggest_nearest
from gpudiag.experiment import guard
from gpudiag.experiment.arm import ArmError
from gpudiag.experiment.design import SANDBOX_MODES, Arm, Design

LOCKS_VARIABLE = "GPUDIAG_LOCKS"
"""Environment variable: the folder of the locks, for containers that share a machine but not its /tmp."""

_SHARED_FOLDER = "/tmp"  # noqa: S108 - not TMPDIR, which may be another one for each job; _open_lock_file() follows no link

_LOCK_NAME = "gpudiag-ab"

_GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""Device files of the drivers of NVIDIA and AMD."""

_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Which GPUs a program may use; without one of them it may use all."""

_AGAIN_S = 2.0

_MAX_BYTES = 1000
"""Of a file that tells who holds a lock: some fifty are written."""

Tell = Callable[[str], None]


class LockHolder(msgspec.Struct, frozen=True):
    """Who holds a lock, as its file says."""

    pid: int
    user: str = ""
    host: str = ""
    since_unix_s: Annotated[float, msgspec.Meta(ge=0, le=4e9)] = 0.0

    def __str__(self) -> str:
        """Return it in words; the file may be another user's, so that only letters and digits of it are shown."""
        user, host = (re.sub(r"[^\w.-]", "?", text)[:40] for text in (self.user, self.host))
        where = f" in {host}" if host != socket.gethostname() else ""
        return f"process {self.pid} of {user or '?'}{where}, since {time.strftime('%H:%M', time.localtime(self.since_unix_s))}"


class _TakenError(Exception):
    """Somebody else has a lock."""


@contextmanager
def lock_machine(*, shared_ok: bool = False, wait: bool = False, tell: Tell = lambda _: None) -> Iterator[str]:
    """Give a note for the result: '' where no other experiment runs meanwhile on this machine, or on the GPUs that are chosen here.

    Two at once would each measure what the other does. `wait`: for the end of the other, which `tell` is told once; `shared_ok`: run all
    the same. Raises InputError where another one runs. Where the locks cannot be used, the note says so.
    """
    folder = Path(os.environ.get(LOCKS_VARIABLE) or _SHARED_FOLDER)
    with ExitStack() as held:
        note = told = ""
        try:
            while True:
                try:
                    _take_locks(held, folder, list_chosen_gpus(os.environ))
                    break
                except _TakenError:
                    who = describe_holders(folder) or "which is not known"
                if shared_ok:
                    note = f"another experiment ran on this machine at the same time ({who})"
                    break
                if not wait:
                    hint = "--wait waits for its end, --shared-ok measures all the same"
                    raise InputError(f"another experiment runs on this machine ({who}): each would disturb the other", hint)
                if who != told:
                    tell(f"waiting for the end of another experiment ({who})")
                    told = who
                time.sleep(_AGAIN_S)
        except OSError as error:
            why = f"no lock in {folder} ({error.strerror or error}); {LOCKS_VARIABLE} names another folder"
            note = f"whether another experiment ran at the same time is not known: {why}"
        yield note


def list_chosen_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """List the GPUs that programs started from here are kept to, as the user named them; none where there are none, or all may be used.

    One that two users name differently (a number, a UUID) is told apart here, and found by what computes on it (gpu_state.GpuWatch).
    """
    if not any(map(os.path.exists, _GPUS)):
        return ()
    named = next((environ[name] for name in _VISIBLE_DEVICES if environ.get(name)), "")
    return tuple(dict.fromkeys(re.sub(r"\W", "-", word.strip()) for word in named.split(",") if word.strip() and word.strip() != "-1"))


def describe_holders(folder: Path) -> str:
    """Return who holds locks in `folder`, in words; '' where nobody does. Raises OSError."""
    found = []
    for path in sorted(folder.glob(f"{_LOCK_NAME}*.lock")):
        file = _open_lock_file(path)
        try:
            if not _try_lock(file, exclusive=False):
                found.append(str(msgspec.json.decode(os.pread(file, _MAX_BYTES, 0), type=LockHolder)))
        except (msgspec.MsgspecError, UnicodeDecodeError):  # it has not written its name yet
            found.append("a process that has just begun")
        finally:
            os.close(file)
    return "; ".join(dict.fromkeys(found))


def _take_locks(held: ExitStack, folder: Path, chosen: tuple[str, ...]) -> None:
    """Lock the machine; or the GPUs `chosen`, and the machine against those that use all.

    Raises _TakenError and OSError, with no lock held.
    """
    with ExitStack() as mine:
        for name, exclusive in ((_LOCK_NAME, not chosen), *((f"{_LOCK_NAME}-gpu-{gpu}", True) for gpu in chosen)):
            file = _open_lock_file(folder / f"{name[:100]}.lock")
            mine.callback(os.close, file)
            if not _try_lock(file, exclusive=exclusive):
                raise _TakenError
            if exclusive:
                try:
                    user = getpass.getuser()
                except (KeyError, OSError, ImportError):  # a container may have no name for it
                    user = str(os.getuid())
                with suppress(OSError):  # a full disk costs the name alone
                    os.ftruncate(file, 0)
                    os.pwrite(file, msgspec.json.encode(LockHolder(os.getpid(), user, socket.gethostname(), time.time())), 0)
        held.push(mine.pop_all())


def _try_lock(file: int, *, exclusive: bool) -> bool:
    """Return whether the file is locked by us now. Raises OSError where that is not possible."""
    import fcntl  # experiments need /proc, other systems can still import this

    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_lock_file(path: Path) -> int:
    """Return the file at `path`, made where there is none, for all users. Raises OSError, for a link or what is no file too.

    It is never removed: two processes could each have locked another file of that name. An existing one is opened without O_CREAT, which
    Linux refuses for files of others in a folder like /tmp (fs.protected_regular).
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, flags)
    except FileNotFoundError:
        with suppress(FileExistsError):
            file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(file, 0o666)  # whatever the mask
            return file
        file = os.open(path, flags)
    state = os.fstat(file)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1:
        os.close(file)
        raise OSError(f"{path.name} is no plain file")
    return file


HELD_BACK = "checkpoints are held back; other files that the program writes are real ones"

_CHECK_S = 20.0
_MOUNT_SPECIALS = frozenset(",:\\\"'\n")
"""Characters that stand for something else in the options of an overlay mount (Documentation/filesystems/overlayfs.rst)."""

_OVERLAY_SCRIPT = """
set -e
layer=$(mktemp -d "$2/layer.XXXXXX")
if [ "$3" = tmpfs ]; then mount -t tmpfs tmpfs "$layer"; fi
mkdir "$layer/upper" "$layer/work"
mount -t overlay overlay -o "lowerdir=$1,upperdir=$layer/upper,workdir=$layer/work$4" "$1"
cd "$1"
shift 4
exec "$@"
"""
"""Arguments: folder, scratch, kind of the upper layer, further options, command. Each start has a layer of its own: two overlays must not
share one. What is mounted is seen by the process and its children alone, and is gone with them."""

_OVERLAYS = (
    (("-U", "-r", "-m"), "disk", ",userxattr"),
    (("-U", "-r", "-m"), "tmpfs", ",userxattr"),
    (("-m",), "disk", ""),
    (("-m",), "tmpfs", ""),
)
"""How it may work: in a user namespace (userxattr: Linux 5.11), or as root; with the layer on the disk, or in memory where that disk cannot
hold one (an overlay itself, as in a container)."""

_CHECK_FILE = ".gpudiag-sandbox-check"


COMPILER_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Folders of each arm's own: its first pair compiles with cold caches, the later ones share what that has compiled. Those of the user stay
as they are: an arm that is killed while it compiles may leave half a file."""


def wrap_in_sandbox(arm: Arm, design: Design, scratch: Path, *, caches: Path | None = None) -> tuple[Arm, str]:
    """Return `arm` as it runs without changing its folder, and a note on what is kept.

    Design.sandbox: overlay (raises InputError where it does not work here), auto (overlay, else as block), block (only what saves
    checkpoints is held back: Design.block_saves), off. `scratch`: for what the program writes; its files are there afterwards, or were in
    memory. `caches`: where its compilers' are, unless it names others itself.
    """
    mode, folder, note = design.sandbox, (arm.cwd or Path.cwd()).resolve(), ""
    prefix: tuple[str, ...] = ()
    if mode not in SANDBOX_MODES:
        raise InputError(f"no sandbox is named {mode!r}{suggest_nearest(mode, SANDBOX_MODES)}", f"one of {', '.join(SANDBOX_MODES)}")
    if mode == "block":
        note = HELD_BACK
    elif mode != "off":
        found = _find_overlay(folder, scratch)
        if isinstance(found, tuple):
            prefix, note = found, f"what the program writes to {folder} goes to a layer that is thrown away; elsewhere it is real"
        elif mode == "overlay":
            raise InputError(f"no overlay of {folder} here: {found}", "--sandbox block holds checkpoints back")
        else:
            note = f"{HELD_BACK} (no overlay here: {found})"
    own = {} if caches is None else {name: str(caches / cache) for name, cache in COMPILER_CACHES.items()}
    return msgspec.structs.replace(arm, command=(*prefix, *arm.command), environ={**own, **arm.environ}), note


def _find_overlay(folder: Path, scratch: Path) -> tuple[str, ...] | str:
    why = _explain_unsuitable(folder, scratch)
    if why is not None:
        return why
    said = "unshare is not installed"
    for flags, kind, options in _OVERLAYS if shutil.which("unshare") else ():
        prefix = ("unshare", *flags, "sh", "-c", _OVERLAY_SCRIPT, "gpudiag-sandbox", str(folder), str(scratch.resolve()), kind, options)
        said = _find_fault(prefix, folder)
        if not said:
            return prefix
    return said


def _explain_unsuitable(folder: Path, scratch: Path) -> str | None:
    """Return why an overlay of `folder` would hide something that the program or the experiment needs; None: it would not."""
    if _MOUNT_SPECIALS & set(f"{folder}{scratch}"):
        return "its path has characters that a mount does not take"
    if any(place.resolve().is_relative_to(folder) for place in (scratch, Path(tempfile.gettempdir()))):
        return "the folder for temporary files lies in it"
    with suppress(OSError):  # proc(5): the fifth field, with octal escapes
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            place = Path(line.split()[4].encode().decode("unicode_escape"))
            if place != folder and place.is_relative_to(folder):
                return f"another file system is mounted in it ({place})"
    return None


def _find_fault(prefix: tuple[str, ...], folder: Path) -> str:
    """Return what goes wrong with a command behind `prefix` that writes to `folder`; '' where it does as it should."""
    try:
        run = subprocess.run(  # noqa: S603 - our own command
            (*prefix, "sh", "-c", f": > {_CHECK_FILE} && test -e {_CHECK_FILE}"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_CHECK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    leaked = folder / _CHECK_FILE
    if leaked.exists():
        leaked.unlink()
        return "what was written came through"
    lines = run.stderr.decode(errors="replace").strip().splitlines()
    return "" if run.returncode == 0 else (lines[-1] if lines else f"exit code {run.returncode}")


def list_layer_files(scratch: Path) -> tuple[str, ...]:
    """List the files that sandboxed programs wrote into layers on the disk, relative to their folder."""
    layers = [layer / "upper" for layer in scratch.glob("layer.*")]
    found = {os.path.relpath(path, layer) for layer in layers for path in layer.rglob("*") if path.is_file() and path.name != _CHECK_FILE}
    return tuple(sorted(found))


FULL_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def catch_full_disk(folder: Path) -> Iterator[None]:
    """Have a full disk raise ArmError, in one line."""
    try:
        yield
    except OSError as failure:
        if failure.errno not in FULL_DISK_ERRNOS:
            raise
        raise ArmError("crash", f"cannot write to {folder}: {failure.strerror}; TMPDIR names a folder with more room") from None


@contextmanager
def open_experiment() -> Iterator[tuple[Path, str]]:
    """Give a folder for temporary files, and a mark for processes: all of them are ended, and the folder removed, at the end, even where
    this process is killed.

    Raises InputError where there is no room for a folder.
    """
    mark = uuid.uuid4().hex
    try:
        made = tempfile.TemporaryDirectory(prefix="gpudiag-ab-", ignore_cleanup_errors=True)
    except OSError as error:  # tempfile tries several places, and says which
        raise InputError(f"no temporary folder: {error.strerror or error}", "TMPDIR names one with room") from None
    with made as folder, guard_processes(mark, folder):
        yield Path(folder), mark


@contextmanager
def guard_processes(mark: str, folder: str = "") -> Iterator[None]:
    """Have a process of its own end all arms when this process is gone, however that came about: a frozen arm cannot see it.

    `folder`: of temporary files, which it then removes.
    """
    command = [sys.executable, "-I", "-S", guard.__file__, f"{mark}.", folder]
    process = subprocess.Popen(  # noqa: S603 - our own file; in a session of its own, which Ctrl-C does not reach
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        process.wait()
