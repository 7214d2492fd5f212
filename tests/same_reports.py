"""Compare the Report JSON of this checkout with that of another commit, on real recordings: keys, codes and numbers must be equal.

    python tests/same_reports.py COMMIT [RECORDING ...]      default: all of ../shared/traces, ../shared/evidence and a demo bundle made now

Displayed words may differ (WORDS), and keys may be added (ADDED). Exit code 1 where anything else differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"

WORDS = frozenset(
    {
        "message",
        "title",
        "reason",
        "warnings",
        "why",
        "note",
        "hint",
        "text",
        "change",
        "summary",
        "source",
        "rows",
        "explanation",
        "what_if",
    }
)
"""Keys whose strings are sentences for a person; `what_if` of a ceiling is made from the code that its rule names."""
ADDED = frozenset({"notices", "notice", "role"})
"""Keys that stand beside what the other commit knows."""

MAKE = """
import json, sys
from pathlib import Path
from gpudiag import api
from gpudiag.errors import GpudiagError
folder = Path(sys.argv[1])
for number, path in enumerate(sys.argv[2:]):
    try:
        made = api.diagnose(path).json()
    except GpudiagError as error:
        made = json.dumps({"error": type(error).__name__}).encode()
    (folder / f"{number}.json").write_bytes(made)
"""


def find_recordings(folder: Path) -> list[Path]:
    """List the traces of `folder`; ranks of one job are one recording, and graph captures are no recordings of their own."""
    files = [path for suffix in (".json.gz", ".sqlite") for path in folder.rglob(f"*{suffix}")]
    jobs = {path.parent for path in files if path.name.startswith("rank")}
    return sorted([path for path in files if path.parent not in jobs and "memory" not in path.parts] + list(jobs))


def make_reports(tree: Path, recordings: Sequence[Path], folder: Path) -> list[Any]:
    """Diagnose `recordings` with the sources in `tree`, in one process; a refused input is {"error": its class}."""
    names, made = folder / "names", folder / "reports"
    made.mkdir(parents=True)
    names.mkdir()
    for package, source in (("gpudiag", "gpudiag"), ("gpudiag_rules", "rules"), ("gpudiag_dashboard", "dashboard")):
        (names / package).symlink_to(tree / source)
    surroundings = {**os.environ, "PYTHONPATH": str(names), "GPUDIAG_NO_CACHE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    subprocess.run([sys.executable, "-c", MAKE, str(made), *map(str, recordings)], check=True, env=surroundings, cwd=folder)
    return [json.loads((made / f"{number}.json").read_bytes()) for number in range(len(recordings))]


def list_differences(old: Any, new: Any, at: str = "", key: str = "") -> Iterator[str]:
    """List where two JSON values differ in keys, types, numbers, codes or identifiers."""
    if isinstance(old, dict) and isinstance(new, dict):
        yield from (f"{at}.{name}: gone" for name in sorted(old.keys() - new.keys()))
        yield from (f"{at}.{name}: added" for name in sorted(new.keys() - old.keys() - ADDED))
        for name in sorted(old.keys() & new.keys()):
            yield from list_differences(old[name], new[name], f"{at}.{name}", name)
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{at}: {len(old)} -> {len(new)} items"
        for number, (a, b) in enumerate(zip(old, new, strict=False)):
            yield from list_differences(a, b, f"{at}[{number}]", key)
    elif (type(old) is not type(new) or old != new) and not (key in WORDS and isinstance(old, str) and isinstance(new, str)):
        yield f"{at}: {old!r} -> {new!r}"


def record_demo(folder: Path) -> Path:
    """Record the demo training of this checkout."""
    subprocess.run([sys.executable, "-m", "gpudiag", "demo"], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def compare(commit: str, recordings: Sequence[Path], most: int) -> int:
    """Print the differences of each recording; return how many recordings differ."""
    with tempfile.TemporaryDirectory(prefix="same-reports-") as name:
        folder = Path(name)
        tree = folder / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True, cwd=ROOT)
        try:
            chosen = list(recordings) or [*find_recordings(SHARED / "traces"), *find_recordings(SHARED / "evidence"), record_demo(folder)]
            (folder / "old").mkdir()
            (folder / "new").mkdir()
            old, new = make_reports(tree, chosen, folder / "old"), make_reports(ROOT, chosen, folder / "new")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], check=True, cwd=ROOT)
    differing = 0
    for path, a, b in zip(chosen, old, new, strict=True):
        found = list(list_differences(a, b))
        differing += bool(found)
        print(f"{path.name}: {'equal' if not found else f'{len(found)} differences'}")
        for line in found[:most]:
            print(f"  {line}")
    print(f"{len(chosen) - differing} of {len(chosen)} reports equal")
    return differing


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("recordings", nargs="*", type=Path)
    parser.add_argument("--most", type=int, default=10, help="differences to print of each recording")
    asked = parser.parse_args()
    return 1 if compare(asked.commit, [path.resolve() for path in asked.recordings], asked.most) else 0


if __name__ == "__main__":
    sys.exit(main())
