"""A place to run `gpudiag ab` in, as a process of its own: a project that must stay as it is, and ways to see what was left behind."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gpudiag.experiment.store import PairRow, Row
from gpudiag.model.experiment import ExperimentData, Outcome
from gpudiag.report.experiment.results import read_results

HERE = Path(__file__).parent
TAG = "GPUDIAG_TEST_TAG"
LIMIT_S = 400.0
"""For one command, on a machine that does other things too."""

QUICK = {"blocks": 20, "block_s": 0.0, "block_steps": 4, "warm_limit_s": 0.3, "start_limit_s": 120.0, "silent_limit_s": 6.0}


class Done(msgspec.Struct):
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


class Place:
    """Folders for one test: the project, the bundle, and temporary files; and a tag that all processes of its commands have."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.project, self.bundle = folder, folder / "project", folder / "bundle"
        self.temporary = Path(tempfile.mkdtemp(prefix="ab-"))  # short, as where people run it: names of sockets have a limit
        self.project.mkdir()
        self.tag = uuid.uuid4().hex
        (self.project / "model.pt").write_bytes(b"a checkpoint of a real run")
        self.take(HERE / "awkward" / "faulty.py")

    def take(self, script: Path) -> None:
        """Have `script` be the one that trains."""
        shutil.copy(script, self.project / "train.py")
        self.before = tree(self.project)

    def environment(self, **design: Any) -> dict[str, str]:
        """Return the environment of a command whose design has `design` in it."""
        quick = msgspec.json.encode(QUICK | design).decode()
        own = {"QUICK_AB": quick, TAG: self.tag, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}

    def command(self, *words: str) -> list[str]:
        """Return the command `gpudiag ab WORDS`."""
        return [sys.executable, str(HERE / "cli" / "quickab.py"), "ab", *words]

    def start(self, *words: str, env: dict[str, str] | None = None, **design: Any) -> subprocess.Popen[str]:
        """Start `gpudiag ab WORDS` in the project."""
        environ = self.environment(**design) | (env or {})
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.command(*words), cwd=self.project, env=environ, stdout=pipe, stderr=pipe, text=True, preexec_fn=hear_signals
        )

    def run(self, *words: str, env: dict[str, str] | None = None, **design: Any) -> Done:
        """Run `gpudiag ab -o BUNDLE WORDS` to its end."""
        return over(self.start("-o", str(self.bundle), *words, env=env, **design))

    # -- what it found ----------------------------------------------------------------------------------------------------

    @property
    def data(self) -> ExperimentData:
        """Return the newest result in the bundle."""
        found, warnings = read_results(self.bundle)
        assert not warnings
        return found[-1]

    def outcome(self, name: str) -> Outcome:
        """Return the outcome of a variant."""
        return next(one for one in self.data.experiments if one.variant == name)

    def rows(self) -> list[Row]:
        """Return the rows that the newest file of the bundle holds; the line that is being written is left out."""
        files = sorted((self.bundle / "experiments").glob("*.jsonl"))
        lines = files[-1].read_bytes().split(b"\n")[:-1] if files else []
        return [msgspec.json.decode(line, type=Row) for line in lines]

    def pairs(self) -> int:
        """Return how many pairs the bundle holds."""
        return sum(isinstance(row, PairRow) for row in self.rows())

    # -- what it left -------------------------------------------------------------------------------------------------------

    def left(self) -> dict[int, str]:
        """Return living processes of this place: with its tag, or with its project as their folder."""
        found = {}
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()):
            try:
                state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
                tagged = f"{TAG}={self.tag}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                inside = Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(self.folder)
                if state not in (b"Z", b"X") and (tagged or inside):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # gone
                continue
        return found

    def arms(self) -> dict[int, str]:
        """Return the processes that train."""
        return {pid: command for pid, command in self.left().items() if "train.py" in command and "quickab.py" not in command}

    def check_clean(self) -> None:
        """Nothing runs, no temporary file is left, and the project is as it was, byte for byte."""
        until(lambda: not self.left(), 10.0)
        assert self.left() == {}
        until(lambda: not list(self.temporary.iterdir()), 10.0)
        assert list(self.temporary.iterdir()) == []
        assert tree(self.project) == self.before


def tree(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Return mode, time of change and digest of each file and folder below `folder`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (state.st_mode, state.st_mtime_ns, digest)
    return found


def over(process: subprocess.Popen[str]) -> Done:
    """Return what a command left when it is over."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Done(process.returncode, out, err)


def hear_signals() -> None:
    """Heed the signals that a shell's background or nohup has the tests ignore: children inherit that."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def until(holds: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    """Wait until holds(); return whether it did."""
    end = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def variants(**arguments: str | Sequence[str]) -> list[str]:
    """Return the options of variants that differ by arguments."""
    return [f"--variant={name}=args:{value}" for name, value in arguments.items()]
