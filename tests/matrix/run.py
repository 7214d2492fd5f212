"""`make test-matrix`: the tests on the oldest and the newest versions that gpudiag says it works with, each in an environment of its own.

A cell is a Python, a choice of versions and the extras that are installed. `uv` resolves them: `lowest` takes the lower bound of everything
that pyproject.toml names, `highest` the newest release of it. A cell whose Python or packages cannot be had is named with the reason; it
counts neither as passed nor as failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "runs" / "matrix"
EVERYTHING = ("all", "dev")
TOOLS = ("pytest", "pytest-rerunfailures", "pytest-xdist", "hypothesis", "jsonschema", "setuptools")
"""What running the tests takes where the extra `dev`, which brings torch and the frameworks, is left out."""

NOT_HERE = ("tests/architecture/test_linters.py",)
"""Linters judge the sources, once, in the versions that are pinned; those of other versions have other opinions."""


@dataclass(frozen=True)
class Cell:
    """One column of the matrix; `extras` empty: analysis only, without torch."""

    python: str
    versions: str
    extras: tuple[str, ...] = EVERYTHING

    @property
    def name(self) -> str:
        """Return how the cell is called on the command line."""
        return f"{self.python}-{self.versions}" + ("" if self.extras else "-core")


CELLS = (
    Cell("3.10", "lowest"),
    Cell("3.11", "lowest"),
    Cell("3.12", "highest"),
    Cell("3.13", "highest"),
    Cell("3.10", "lowest", ()),
    Cell("3.13", "highest", ()),
)


@dataclass(frozen=True)
class Result:
    """What became of a cell: `passed`, `failed` or `not run`, and in which words."""

    cell: Cell
    outcome: str
    words: str
    seconds: float


def interpreter(version: str) -> str | None:
    """Return the path of an interpreter of `version` ("3.12"): on PATH, or one that pyenv keeps; None: there is none."""
    kept = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    for candidate in [shutil.which(f"python{version}"), *map(str, reversed(kept))]:
        if candidate and _output([candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]) == version:
            return candidate
    return None


def find_uv() -> str | None:
    """Return the path of uv: beside this interpreter, or on PATH; None: it is not installed."""
    return shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def prepare(cell: Cell, python: str, uv: str, cpu: bool) -> str:
    """Make the environment of `cell`; return the last words of what failed, '' where nothing did.

    The versions are resolved first, the project then goes in without looking again: what is tested is what was resolved.
    """
    home = FOLDER / cell.name
    backend = ["--torch-backend", "cpu"] if cpu else []
    resolution = "lowest-direct" if cell.versions == "lowest" else "highest"
    wanted = home / "requirements.txt"
    extras = [word for extra in cell.extras for word in ("--extra", extra)]
    compiled = ["pip", "compile", "--quiet", "--resolution", resolution, "--python", str(_python(home)), *backend, *extras]
    install = ["pip", "install", "--quiet", "--python", str(_python(home))]
    return (
        _failed([uv, "venv", "--quiet", "--clear", "--seed", "--python", python, str(home)])
        or _failed([uv, *compiled, "--output-file", str(wanted), "pyproject.toml"])
        or _failed([uv, *install, *backend, "-r", str(wanted)])
        or ("" if cell.extras else _failed([uv, *install, *TOOLS]))
        or _failed([uv, *install, "--no-deps", "-e", "."])
    )


def tests_of(cell: Cell, options: Sequence[str]) -> tuple[bool, str]:
    """Return whether the tests passed in the environment of `cell`, and the line in which pytest counts them. The output goes to a file."""
    home = FOLDER / cell.name
    ignored = [f"--ignore={path}" for path in NOT_HERE]
    command = [str(_python(home)), "-m", "pytest", "-p", "no:cacheprovider", *ignored, *options]
    log = home / "tests.txt"
    with log.open("w", encoding="utf-8") as out:
        done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=plain_environment(), check=False)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
    counted = [line for line in lines if re.search(r"\b\d+ (passed|failed|error)", line)]
    return done.returncode == 0, (counted or lines)[-1].strip("= ")


def run(cell: Cell, uv: str, cpu: bool, keep: bool, options: Sequence[str]) -> Result:
    """Return what became of `cell`: its environment made (with `keep`: only where it is missing), then the tests."""
    began = time.monotonic()
    python = interpreter(cell.python)
    if python is None:
        return Result(cell, "not run", f"there is no Python {cell.python} on PATH or among those of pyenv", 0.0)
    if not (keep and _python(FOLDER / cell.name).exists()):
        failed = prepare(cell, python, uv, cpu)
        if failed:
            shutil.rmtree(FOLDER / cell.name, ignore_errors=True)  # half an environment would be kept for the next time
            return Result(cell, "not run", f"its packages could not be installed: {failed}", time.monotonic() - began)
    passed, words = tests_of(cell, options)
    return Result(cell, "passed" if passed else "failed", f"{words}; {_versions(cell)}", time.monotonic() - began)


def main() -> int:
    """Run the cells that were asked for and return 1 where one failed, 2 where none could run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--cells", default=",".join(cell.name for cell in CELLS), help="names with commas between (default: all)")
    parser.add_argument("--cpu", action="store_true", help="builds of torch without CUDA, from PyTorch's own index")
    parser.add_argument("--keep", action="store_true", help="use the environments that an earlier run made")
    parser.add_argument("options", nargs="*", help='for pytest, after -- (default: -n logical -m "not slow and not long")')
    chosen = parser.parse_args()
    uv = find_uv()
    if uv is None:
        print("make test-matrix: uv is not installed (pip install uv)", file=sys.stderr)
        return 2
    unknown = set(chosen.cells.split(",")) - {cell.name for cell in CELLS}
    if unknown:
        print(f"make test-matrix: no cell {', '.join(sorted(unknown))} (there are {', '.join(c.name for c in CELLS)})", file=sys.stderr)
        return 2
    options = chosen.options or ["-n", "logical", "-m", "not slow and not long"]
    results = []
    for cell in [cell for cell in CELLS if cell.name in chosen.cells.split(",")]:
        print(f"{cell.name} ...", flush=True)
        results.append(run(cell, uv, chosen.cpu, chosen.keep, options))
        print(_line(results[-1]), flush=True)
    print("", *map(_line, results), f"what each printed: {FOLDER}/CELL/tests.txt", sep="\n")
    if all(result.outcome == "not run" for result in results):
        return 2
    return int(any(result.outcome == "failed" for result in results))


def _line(result: Result) -> str:
    return f"{result.cell.name:18} {result.outcome:8} {result.words} ({result.seconds / 60:.0f} min)"


def _python(home: Path) -> Path:
    return home / "bin" / "python"


def _versions(cell: Cell) -> str:
    """Return the versions that were tested of what matters most."""
    ask = (
        "from importlib.metadata import version, PackageNotFoundError as missing\n"
        "for name in ('torch', 'polars', 'msgspec', 'numpy', 'dash', 'transformers', 'lightning'):\n"
        "    try: print(name, version(name), end='  ')\n"
        "    except missing: print(name, 'none', end='  ')"
    )
    return _output([str(_python(FOLDER / cell.name)), "-c", ask])


def plain_environment() -> dict[str, str]:
    """Return the environment of the tests: without paths of the interpreter that runs this."""
    return {name: text for name, text in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _failed(command: Sequence[str]) -> str:
    """Run `command` in the project's root; return the last line of what it said where it failed, '' where it did not."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=plain_environment(), check=False)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return (lines or [f"exit code {done.returncode}"])[-1] if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main())
