"""Whether this checkout can be released: `make release`. Exit code 1 where a step failed; what could not be tried is said.

The wheel and the source distribution are built. The wheel is installed without torch into a clean environment of each Python that can be
had, and with everything into one more, where the commands of the README run. Nothing is uploaded, no tag is made: the last lines say how.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from matrix import run as matrix  # noqa: E402 - the same search of interpreters as `make test-matrix`

DIST = ROOT / "dist"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MOST_INSTALLED_MIB = 300
"""On disk beyond Python, byte code included, without torch."""
SECONDS_EACH = 1_800
"""Of a command: an experiment on a busy machine takes up to twelve pairs of processes."""


class StepError(Exception):
    """Why a step failed, in one line."""


class NotTriedError(Exception):
    """Why a step could not be tried."""


def run(command: Sequence[str | Path], cwd: Path = ROOT, accepted: Sequence[int] = (0,)) -> str:
    """Return what `command` prints; raises StepError where it ends otherwise than `accepted`."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=matrix.plain_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_EACH,
    )
    if done.returncode not in accepted:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise StepError(f"{' '.join(map(str, command[-6:]))}: exit code {done.returncode}: {last}")
    return done.stdout


def read_version() -> str:
    """Return the version that pyproject.toml names."""
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    return str(version)


def check_changelog() -> str:
    """The changelog has a dated heading of this version on top, and nothing unreleased above it."""
    version = read_version()
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = list(re.finditer(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.MULTILINE))
    released = next((heading for heading in headings if heading[1] == version), None)
    if released is None or not released[2]:
        raise StepError(f"CHANGELOG.md has no heading '## [{version}] - YYYY-MM-DD'")
    if re.search(r"^- ", text[: released.start()], re.MULTILINE):
        raise StepError(f"CHANGELOG.md has entries above {version}: they belong to it, or the version must grow")
    return f"{version}, {released[2]}"


def check_tree() -> str:
    """Nothing is uncommitted, and no tag of this version names another commit."""
    if changed := run(["git", "status", "--porcelain"]).strip():
        raise StepError(f"uncommitted: {changed.splitlines()[0].strip()}")
    commit, tag = run(["git", "rev-parse", "HEAD"]).strip(), f"v{read_version()}"
    tagged = run(["git", "rev-parse", "--verify", "--quiet", f"{tag}^{{commit}}"], accepted=(0, 1)).strip()
    if tagged not in ("", commit):
        raise StepError(f"{tag} is the commit {tagged[:10]}, this is {commit[:10]}")
    return f"{commit[:10]}, {tag} {'is here' if tagged else 'is free'}"


def build() -> str:
    """The wheel and the source distribution, with their digests in dist/SHA256SUMS."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([find_uv(), "build", "--quiet", "--out-dir", DIST])
    made = sorted(path for path in DIST.iterdir() if path.suffix in {".whl", ".gz"})
    (DIST / "SHA256SUMS").write_text("".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in made))
    return ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in made)


def find_uv() -> str:
    """Return the path of uv; raises NotTriedError where it is not installed."""
    uv = matrix.find_uv()
    if uv is None:
        raise NotTriedError("uv is not installed (pip install uv)")
    return uv


def find_python(version: str) -> str:
    """Return an interpreter of `version`; raises NotTriedError where there is none."""
    found = matrix.interpreter(version)
    if found is None:
        raise NotTriedError(f"there is no Python {version} here")
    return found


def make_environment(home: Path, python: str, extra: str = "", constraints: bool = False) -> Path:
    """Install the wheel, and nothing of the checkout, into a new environment; return its folder of programs."""
    (wheel,) = DIST.glob("*.whl")
    run([python, "-m", "venv", home])
    pip = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if constraints:  # torch first and alone, so that no newer build with gigabytes of libraries is chosen
        (torch,) = re.findall(r"^torch==.+$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
        run([*pip, torch])
        pip += ["-c", ROOT / "constraints.txt"]
    run([*pip, f"{wheel}{extra}"])
    return home / "bin"


def measure_mib(home: Path) -> float:
    """Return what the packages of an environment take on disk, byte code included, pip itself not."""
    (packages,) = home.glob("lib/python*/site-packages")
    own = {"pip", "setuptools", "wheel", "pkg_resources", "_distutils_hack"}
    names = (path for path in packages.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in names if path.relative_to(packages).parts[0].split("-")[0] not in own) / 2**20


def try_core(version: str) -> str:
    """A Python without torch: a report of a trace as text, page, Markdown and JSON, and a trace that is none."""
    python = find_python(version)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        trace = write_trace(home / "trace.json.gz")
        programs = make_environment(home / "env", python)
        began = time.monotonic()
        text = run([programs / "gpudiag", "report", trace], home)
        seconds = time.monotonic() - began
        for suffix in ("html", "md", "json"):
            run([programs / "gpudiag", "report", trace, "-o", home / f"report.{suffix}"], home)
        json.loads((home / "report.json").read_text(encoding="utf-8"))
        (home / "broken.json").write_text("{", encoding="utf-8")
        run([programs / "gpudiag", "report", home / "broken.json"], home, accepted=(2,))
        size = measure_mib(home / "env")
    if "A step takes" not in text:
        raise StepError("gpudiag report says nothing of the step")
    if size > MOST_INSTALLED_MIB:
        raise StepError(f"{size:.0f} MiB on disk, more than {MOST_INSTALLED_MIB}")
    return f"{size:.0f} MiB on disk, the first report in {seconds:.1f} s"


def write_trace(path: Path) -> Path:
    """Write a small trace of a GPU: four steps of 10 ms, each a matrix product and a gap. Times in us, as torch.profiler writes them."""
    events: list[dict[str, object]] = []
    for step in range(4):
        at, link = step * 10_000, step + 1
        shapes = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["float", "float"], "External id": link}
        events += [
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1, "ts": at, "dur": 10_000},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": at + 50, "dur": 60, "args": shapes},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": at + 80, "dur": 10,
             "args": {"correlation": link}},
            {"ph": "X", "cat": "kernel", "name": "ampere_sgemm_128x64_nn", "pid": 0, "tid": 7, "ts": at + 100, "dur": 9_000,
             "args": {"correlation": link, "device": 0, "stream": 7, "External id": link}},
        ]  # fmt: skip
    device = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "computeMajor": 8, "computeMinor": 0, "numSms": 108}
    path.write_bytes(gzip.compress(json.dumps({"deviceProperties": [device], "traceEvents": events}).encode()))
    return path


def try_readme() -> str:
    """Everything installed: each command that the README types after a `$`, in a folder with its `train.py`, and its lines of Python."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line[2:].split() for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
                for line in block.splitlines() if line.startswith("$ ")]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        programs = make_environment(home / "env", sys.executable, "[all]", constraints=True)
        write_trace(home / "trace.json.gz")
        shutil.copy(ROOT / "samples" / "forloop_optimizer" / "train.py", home)
        began = time.monotonic()
        for command in commands:
            run([programs / command[0], *command[1:]], home)
        for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            ast.parse(block)  # it is run by the tests of the documents
        seconds = time.monotonic() - began
    return f"{len(commands)} commands in {seconds:.0f} s"


def main() -> int:
    """Take the steps and print what each found; return 1 where one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--no-readme", action="store_true", help="leave out the environment with torch")
    chosen = parser.parse_args()
    steps: dict[str, Callable[[], str]] = {"changelog": check_changelog, "tree": check_tree, "build": build}
    steps |= {f"Python {version}": lambda version=version: try_core(version) for version in PYTHONS}  # type: ignore[misc]
    if not chosen.no_readme:
        steps["README"] = try_readme
    failed = False
    for name, step in steps.items():
        try:
            outcome = ("ok", step())
        except NotTriedError as reason:
            outcome = ("not tried", str(reason))
        except (StepError, subprocess.TimeoutExpired) as reason:
            outcome, failed = ("FAILED", str(reason)), True
        print(f"{name:12} {outcome[0]:10} {outcome[1]}", flush=True)
    if failed:
        print("not ready to be released")
    else:
        tag = f"v{read_version()}"
        print("\nready; nothing was published. To do so:")
        print(f"  git tag -s {tag} -m 'gpudiag {tag}' && git push origin {tag}")
        print("  .venv/bin/uv publish dist/*.whl dist/*.tar.gz")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
