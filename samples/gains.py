"""Adds what `gpudiag ab` measured to the gains that reports tell beside an upper bound: `python samples/gains.py BUNDLE PROGRAM cpu|gpu`.

PROGRAM: in a few words, with the device ("nanoGPT on an RTX 3060"); what it gave before is replaced.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from suite.gains import add_experiments  # noqa: E402

from gpudiag.model.notices import format_notice  # noqa: E402
from gpudiag.report.experiment.results import read_results  # noqa: E402

GAINS = HERE.parent / "gpudiag" / "diagnosis" / "gains.yaml"


def main() -> int:
    """Return the exit code: 2 where the bundle holds no result."""
    parser = argparse.ArgumentParser(description="Add results of gpudiag ab to gains.yaml.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("program")
    parser.add_argument("device", choices=("cpu", "gpu"))
    args = parser.parse_args()
    found, notices = read_results(args.bundle)
    for notice in notices:
        print(f"gains: {format_notice(notice)}", file=sys.stderr)
    outcomes = [outcome for experiment in found for outcome in experiment.experiments]
    if not outcomes:
        print(f"gains: no result of gpudiag ab in {args.bundle}", file=sys.stderr)
        return 2
    GAINS.write_text(add_experiments(GAINS.read_text(encoding="utf-8"), args.program, args.device, outcomes), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
