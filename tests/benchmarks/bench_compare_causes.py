"""Changes planted in a training on this CPU: does `gpudiag compare` name the right cause first, and do the parts sum to the difference?

`python tests/benchmarks/bench_compare_causes.py [FOLDER] [CHANGE...]` prints a Markdown table, one row a change, and fails where fewer than
thirteen of fourteen are named. Where noise of the machine hides a change it is recorded again, up to three times. A bundle that FOLDER
holds already is read, not recorded again.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plantedchanges import CHANGES, judge

from gpudiag.units import format_ns, format_share

LEAST_RIGHT = 13 / 14


def main(words: list[str]) -> int:
    """Print the table; return 1 where too few causes are right, or a sum is not that of the difference."""
    folder = Path(words[0]) if words and words[0] not in CHANGES else Path(tempfile.mkdtemp())
    names = [word for word in words if word in CHANGES] or list(CHANGES)
    print("| change | step | first cause | share | sum | right | tries | said |", "|---" * 8 + "|", sep="\n")
    right, exact = 0, True
    for name in names:
        found = judge(name, folder)
        why, first = found.data.explanation, found.data.explanation.causes[0]
        left = why.difference_ns - sum(cause.delta_ns for cause in why.causes)
        right, exact = right + found.right, exact and abs(left) < 1
        step = f"{format_ns(found.data.a.median_ns)} to {format_ns(found.data.b.median_ns)}"
        cause = f"{first.kind}{f', consistent with {first.settings[0]}' if first.settings else ''}"
        cells = (name, step, cause, format_share(first.share), f"off by {left:.1g} ns", "yes" if found.right else "NO", str(found.tries))
        print(f"| {' | '.join((*cells, found.headline))} |", flush=True)
    print(f"\n{right} of {len(names)} right; the bundles are in {folder}")
    return 0 if exact and right >= LEAST_RIGHT * len(names) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
