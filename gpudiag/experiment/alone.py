"""One experiment at a time on a machine, or on each of its GPUs: locked files. A lock ends with the process that holds it."""

from __future__ import annotations

import getpass
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec

from gpudiag.errors import InputError

PLACE = "GPUDIAG_LOCKS"
"""Environment variable: the folder of the locks, for containers that share a machine but not its /tmp."""

_EVERYBODYS = "/tmp"  # noqa: S108 - not TMPDIR, which may be another one for each job; _opened() follows no link

_NAME = "gpudiag-ab"

_GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""Device files of the drivers of NVIDIA and AMD."""

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Which GPUs a program may use; without one of them it may use all."""

_AGAIN_S = 2.0

_MAX_BYTES = 1000
"""Of a file that tells who holds a lock: some fifty are written."""

Tell = Callable[[str], None]


class Holder(msgspec.Struct, frozen=True):
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
def alone(*, shared_ok: bool = False, wait: bool = False, tell: Tell = lambda _: None) -> Iterator[str]:
    """Give a note for the result: '' where no other experiment runs meanwhile on this machine, or on the GPUs that are chosen here.

    Two at once would each measure what the other does. `wait`: for the end of the other; `shared_ok`: run all the same. Raises
    InputError where another one runs. Where the locks cannot be used, the note says so.
    """
    folder = Path(os.environ.get(PLACE) or _EVERYBODYS)
    with ExitStack() as held:
        try:
            note = _entered(held, folder, shared_ok=shared_ok, wait=wait, tell=tell)
        except OSError as error:
            why = f"no lock in {folder} ({error.strerror or error}); {PLACE} names another folder"
            note = f"whether another experiment ran at the same time is not known: {why}"
        yield note


def _entered(held: ExitStack, folder: Path, *, shared_ok: bool, wait: bool, tell: Tell) -> str:
    while True:
        try:
            _lock(held, folder, gpus(os.environ))
        except _TakenError:
            who = holders(folder) or "which is not known"
        else:
            return ""
        if shared_ok:
            return f"another experiment ran on this machine at the same time ({who})"
        if not wait:
            hint = "wait for its end, as --wait does, or measure all the same with --shared-ok"
            raise InputError(f"another experiment runs on this machine ({who}): each would measure what the other does", hint)
        tell(f"waiting for the end of another experiment ({who})")
        time.sleep(_AGAIN_S)


def gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that programs started from here are kept to, as the user named them; none where there are none, or all may be used.

    One that two users name differently (a number, a UUID) is told apart here, and found by what computes on it (gpustate.Watch).
    """
    if not any(map(os.path.exists, _GPUS)):
        return ()
    named = next((environ[name] for name in _VISIBLE if environ.get(name)), "")
    return tuple(dict.fromkeys(re.sub(r"\W", "-", word.strip()) for word in named.split(",") if word.strip() and word.strip() != "-1"))


def holders(folder: Path) -> str:
    """Return who holds locks in `folder`, in words; '' where nobody does. Raises OSError."""
    found = []
    for path in sorted(folder.glob(f"{_NAME}*.lock")):
        file = _opened(path)
        try:
            if not _locked(file, exclusive=False):
                found.append(_text(os.pread(file, _MAX_BYTES, 0)))
        finally:
            os.close(file)
    return "; ".join(dict.fromkeys(found))


def _text(data: bytes) -> str:
    try:
        return str(msgspec.json.decode(data, type=Holder))
    except (msgspec.MsgspecError, UnicodeDecodeError):  # it has not written its name yet
        return "a process that has just begun"


def _lock(held: ExitStack, folder: Path, chosen: tuple[str, ...]) -> None:
    """Lock the machine; or the GPUs `chosen`, and the machine against those that use all.

    Raises _TakenError and OSError, with no lock held.
    """
    with ExitStack() as mine:
        for name, exclusive in ((_NAME, not chosen), *((f"{_NAME}-gpu-{gpu}", True) for gpu in chosen)):
            file = _opened(folder / f"{name[:100]}.lock")
            mine.callback(os.close, file)
            if not _locked(file, exclusive=exclusive):
                raise _TakenError
            if exclusive:
                _sign(file)
        held.push(mine.pop_all())


def _locked(file: int, *, exclusive: bool) -> bool:
    """Return whether the file is locked by us now. Raises OSError where that is not possible."""
    import fcntl  # experiments need /proc, other systems can still import this

    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(file: int) -> None:
    """Write who we are; a full disk costs the name alone."""
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, msgspec.json.encode(Holder(os.getpid(), _user(), socket.gethostname(), time.time())), 0)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container may have no name for it
        return str(os.getuid())


def _opened(path: Path) -> int:
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
