"""kill -9 at random moments of a recording, of a report being written, and of an experiment. Each function returns what it saw.

Half of the moments are drawn uniformly over an undisturbed run, half are moments of writing: a temporary file has just appeared, or a
row was added. What may not be raises AssertionError, with the seed.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from abplace import Done, Place, over, until
from noticewords import format_notices

from gpudiag.bundle.reader import OpenedBundle, open_bundle
from gpudiag.experiment.store import BaselineRow, PairRow
from gpudiag.model.notices import NoticeCode

LOOK_S = 0.0005
"""Between two looks for a file that is being written."""

LIMIT_S = 300.0


def hidden(folder: Path) -> set[str]:
    """Return the paths below `folder` of files and folders that are being written: their names begin with a dot."""
    return {f"{parent}/{name}" for parent, folders, files in os.walk(folder) for name in (*folders, *files) if name.startswith(".")}


def while_writing(folder: Path, sightings: int, alive: Callable[[], bool]) -> None:
    """Return when the temporary file number `sightings` has appeared in `folder`, or when the process has ended."""
    seen = hidden(folder)
    while sightings and alive():
        now = hidden(folder)
        sightings = max(0, sightings - len(now - seen))
        seen |= now
        time.sleep(LOOK_S)


# -- recordings ---------------------------------------------------------------------------------------------------------------

RECORDED = """
import os, random, signal, sys, time
from pathlib import Path
import torch, torch._dynamo, torch._inductor, torch.profiler.python_tracer  # what a first window loads, once for all of them
from gpudiag import profile
from gpudiag.capture import session
from kills import while_writing

session.SEGMENT_NS = 3 * 10**7
folder, count, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))

def train(path, told):
    with profile(path, skip=3, warm=1, record=3, sites=1, repeat=6, wait=5, telemetry_hz=50, peaks=None) as prof:
        os.write(told, b"x")
        for _ in prof.steps(range(150)):
            torch.ones(8).sum()
            time.sleep(0.001)

def started(path):
    begun, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(path, told)
        finally:
            os._exit(0)
    os.close(told)
    os.read(begun, 1)
    os.close(begun)
    return child

began = time.perf_counter()
os.waitpid(started(folder / "whole"), 0)
whole_s = time.perf_counter() - began
for attempt in range(count):
    path = folder / str(attempt)
    child = started(path)
    if attempt % 2:
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while_writing(path, chance.randint(1, 25), lambda: os.waitid(os.P_PID, child, look) is None)
    else:
        time.sleep(chance.uniform(0, whole_s))
    os.kill(child, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def recordings(folder: Path, count: int, seed: int) -> Counter[str]:
    """Kill `count` recordings; they are forked from one process that has imported torch."""
    command = [sys.executable, "-c", RECORDED, str(folder), str(count), str(seed)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=LIMIT_S + 120 * count, check=False)
    codes = [int(line) for line in done.stdout.split()]
    assert (done.returncode, len(codes)) == (0, count), (seed, done.stderr)
    assert set(codes) <= {0, -signal.SIGKILL}, (seed, codes)
    whole = check_recording(open_bundle(folder / "whole"))
    assert whole == Counter(finished=1, windows=7, steps=150), whole
    seen = Counter(kills=codes.count(-signal.SIGKILL), over=codes.count(0))
    for attempt in range(count):
        seen.update(check_recording(open_bundle(folder / str(attempt))))
    return seen


def check_recording(bundle: OpenedBundle) -> Counter[str]:
    """Count what is in a bundle. It has no hole, no damaged file, all of each trace that is there, and says where it was killed."""
    assert bundle.step_records["step"].to_list() == list(range(bundle.step_records.height))
    assert not [text for text in format_notices(bundle.notices) if "could not be read" in text]
    assert bundle.manifest.finished or NoticeCode.RECORDING_UNFINISHED in [notice.code for notice in bundle.notices]
    recorded = bundle.recorded()
    for index in recorded:
        trace = bundle.trace(index)
        assert trace is not None
        assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    what = "finished" if bundle.manifest.finished else "said_unfinished"
    litter = [name for name in hidden(bundle.path) if not name.endswith(".recording")]
    counted = {what: 1, "windows": len(recorded), "steps": bundle.step_records.height, "litter": len(litter)}
    return Counter({name: number for name, number in counted.items() if number})


# -- reports ------------------------------------------------------------------------------------------------------------------

KEEPING = """
import os, signal, sys
from gpudiag import cache
cache.MIN_TEXT_BYTES = 1
left, folder = int(os.environ["KILL_AT"]), os.environ["KILL_IN"]

def hook(event, given):
    global left
    writes = event in ("os.rename", "os.mkdir", "os.remove", "os.chmod") or (event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR))
    if writes and str(given[0]).startswith(folder):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

if left:
    sys.addaudithook(hook)
from gpudiag.cli import main
sys.exit(main())
"""
"""The command gpudiag, which keeps what it has read of small recordings too. It kills itself just before its write number KILL_AT."""

KINDS = ("html", "json", "md")
OLD = b"the report of last week\n"


def reports(folder: Path, bundle: Path, count: int, seed: int, tell: Callable[[str], None] = lambda _: None) -> Counter[str]:
    """Kill `count` commands that write three reports on `bundle`, and its cache; now and then one is left alone and must be right."""
    chance, seen = random.Random(seed), Counter[str]()
    began = time.perf_counter()
    right = written(folder, bundle)
    whole_s = time.perf_counter() - began
    for attempt in range(count):
        for kind in KINDS:
            (folder / f"r.{kind}").write_bytes(OLD)
        if attempt % 4 < 2:
            forget(folder)
        process = report(folder, bundle, kill_at=chance.randint(1, 45) if attempt % 2 else 0)
        if attempt % 2:
            process.wait()
        else:
            time.sleep(chance.uniform(0.2, 0.9) * whole_s)
            process.kill()
        process.communicate()
        seen["kills" if process.returncode == -signal.SIGKILL else "over"] += 1
        for kind in KINDS:
            found = (folder / f"r.{kind}").read_bytes()
            assert found in (OLD, right[kind]), (seed, attempt, kind)
            seen["old" if found == OLD else "new"] += 1
        tell(f"{attempt}: {'killed' if process.returncode == -signal.SIGKILL else 'over'}, {len(litter(folder))} temporary files")
        if attempt % 8 == 7 or attempt == count - 1:
            assert written(folder, bundle) == right, (seed, attempt)
            seen["right afterwards"] += 1
    seen["litter"] = len(litter(folder))
    for path in litter(folder):
        os.utime(path, (0, 0))
    forget(folder, keep_litter=True)
    assert written(folder, bundle) == right
    assert litter(folder) == []
    return seen


def report(folder: Path, bundle: Path, kill_at: int = 0) -> subprocess.Popen[str]:
    """Start the command; `kill_at`: see KEEPING."""
    environ = {name: value for name, value in os.environ.items() if name != "GPUDIAG_NO_CACHE"}
    environ |= {"XDG_CACHE_HOME": str(folder / "home"), "KILL_AT": str(kill_at), "KILL_IN": str(folder)}
    outputs = [word for kind in KINDS for word in ("-o", str(folder / f"r.{kind}"))]
    command = [sys.executable, "-c", KEEPING, "report", str(bundle), *outputs]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def written(folder: Path, bundle: Path) -> dict[str, bytes]:
    """Return what a command that is left alone writes."""
    done = over(report(folder, bundle))
    assert done.code == 0, done.err
    return {kind: (folder / f"r.{kind}").read_bytes() for kind in KINDS}


def forget(folder: Path, *, keep_litter: bool = False) -> None:
    """Remove the entries of the cache, so that they are written anew."""
    for entry in (folder / "home" / "gpudiag" / "recordings").glob("*/*/*/*"):
        if not (keep_litter and entry.name.startswith(".")):
            entry.unlink()


def litter(folder: Path) -> list[str]:
    """Return temporary files beside the reports and in the cache."""
    return sorted(hidden(folder))


# -- experiments --------------------------------------------------------------------------------------------------------------

ASKED = ("--pairs", "2", "--no-parity", "--variant=same:exact=env:A=B", "train.py")
VICTIMS = ("controller", "arm", "guard", "controller", "controller")


def experiments(place: Callable[[], Place], count: int, seed: int, tell: Callable[[str], None] = lambda _: None) -> Counter[str]:
    """Kill `count` processes of experiments: the command, an arm, or the guard; what a killed command has measured goes on."""
    chance, seen, here = random.Random(seed), Counter[str](), place()
    began, whole = time.perf_counter(), b""
    assert here.run(*ASKED).code == 0
    whole_s, here = time.perf_counter() - began, place()
    for attempt in range(count):
        resumed = bool(here.rows())
        process = here.start(*(("--resume", str(here.bundle)) if resumed else ("-o", str(here.bundle), *ASKED)))
        victim = VICTIMS[attempt % len(VICTIMS)]
        hit = strike(here, process, victim, chance, whole_s / 2 if resumed else whole_s)
        if victim == "controller" and hit:
            process.communicate()
        done = over(process) if victim != "controller" or not hit else None
        here.check_clean()  # nobody is left, frozen or not; the project is as it was
        now = next(iter(sorted((here.bundle / "experiments").glob("*.jsonl"), reverse=True)), None)
        text = now.read_bytes() if now is not None else b""
        assert text.startswith(whole), (seed, attempt, victim)
        whole = text[: text.rfind(b"\n") + 1]
        seen["kills" if hit else "over"] += 1
        seen[f"{victim}s"] += hit
        seen["resumed"] += resumed
        tell(f"{attempt}: {victim}{'' if hit else ' (it was over)'}, {len(here.rows())} rows")
        if done is not None:
            check_ended(here, done, victim, seed, seen)
            here, whole = place(), b""
    finish(here, seed, seen)
    return seen


def strike(here: Place, process: subprocess.Popen[str], victim: str, chance: random.Random, lasts_s: float) -> bool:
    """Kill the victim at a random moment of a command that `lasts_s`; return whether it lived until then."""
    delay_s, aimed = chance.uniform(0, lasts_s if victim == "controller" else lasts_s / 3), chance.random() < 0.5
    if victim == "controller" and aimed:
        rows = len(here.rows())
        until(lambda: len(here.rows()) > rows or process.poll() is not None, LIMIT_S)
        delay_s = chance.uniform(0, 0.5)
    elif victim != "controller":
        until(lambda: bool(found(here, victim)) or process.poll() is not None, LIMIT_S)
    time.sleep(delay_s)
    pids = [process.pid] if victim == "controller" else found(here, victim)
    if process.poll() is not None or not pids:
        return False
    try:
        os.kill(chance.choice(sorted(pids)), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def found(here: Place, victim: str) -> list[int]:
    """Return the arms, or the guards."""
    return list(here.arms()) if victim == "arm" else [pid for pid, command in here.left().items() if "guard.py" in command]


def check_ended(here: Place, done: Done, victim: str, seed: int, seen: Counter[str]) -> None:
    """A command that was not killed has come to a result, or says what became of its arm."""
    told = " ".join((*here.data.notes, *(note for one in here.data.experiments for note in one.notes)))
    if victim == "arm" and done.code == 5:
        assert "signal 9" in told, (seed, told)
        seen["said the arm was killed"] += 1
    else:
        assert done.code == 0 or is_complete(done), (seed, victim, done.code, done.err, told)
        check_result(here, seed)
        seen["came to a result"] += 1


def is_complete(done: Done) -> bool:
    """Return whether nothing was left to resume: the command before was killed when the result stood."""
    return done.code == 2 and "all experiments in it are complete" in done.err


def check_result(here: Place, seed: int) -> None:
    """Each pair was measured once, and all of them stand in the result."""
    rows = here.rows()
    assert sum(isinstance(row, BaselineRow) for row in rows) == 1, seed
    assert sum(isinstance(row, PairRow) for row in rows) == here.outcome("same").pairs == 2, seed
    assert here.data.complete, seed


def finish(here: Place, seed: int, seen: Counter[str]) -> None:
    """What was killed last comes to its end."""
    if not here.rows():
        return
    done = over(here.start("--resume", str(here.bundle)))
    assert done.code == 0 or is_complete(done), (seed, done.err)
    check_result(here, seed)
    here.check_clean()
    seen["came to a result"] += 1


def places(folder: Path) -> Iterator[Place]:
    """Yield fresh places below `folder`."""
    number = 0
    while True:
        number += 1
        (folder / str(number)).mkdir()
        yield Place(folder / str(number))
