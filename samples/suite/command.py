"""The command that scores a folder of programs against the truth.yaml beside them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch  # before the processes that are timed are forked: importing it is no part of a training
import yaml

from gpudiag.model.report import decode_report
from suite.needs import device_name
from suite.programs import Score, Truth, judge, write_table
from suite.trials import read_pairs, try_out


def score_programs(here: Path, title: str, doc: str) -> None:
    """Score the programs of folder `here` that are named on the command line, and write the table of all that are kept."""
    args = _read_arguments(here, doc)
    truths = read_truths(here)
    if unknown := set(args.names) - set(truths):
        sys.exit(f"score: no program {', '.join(sorted(unknown))}")
    for name in args.names or truths:
        try_out(here / f"{name}.py", args.kept / name, pairs=args.pairs, again=args.again, report=args.report)
    scores = list(_read_scores(here, truths, args.kept))
    about = f"gpudiag run as it is, torch {torch.__version__}, {device_name()}."
    write_table(scores, here / "SCORE.md" if args.out is None else args.out, title, about)


def read_truths(here: Path) -> dict[str, Truth]:
    """Return what is true of each program of a folder, by name; of the healthy ones truth.yaml need not say anything."""
    truths = msgspec.convert(yaml.safe_load((here / "truth.yaml").read_text(encoding="utf-8")), dict[str, Truth])
    healthy = sorted(path.stem for path in here.glob("healthy_*.py"))
    return truths | {name: Truth() for name in healthy if name not in truths}


def _read_arguments(here: Path, doc: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="PROGRAM", help="only these (default: all)")
    parser.add_argument("--kept", type=Path, default=Path("runs") / here.name, metavar="DIR", help="where recordings and times are kept")
    parser.add_argument("--pairs", type=int, default=2, help="pairs of processes that measure a gain (default 2; 0: none)")
    parser.add_argument("--report", action="store_true", help="make the reports of kept recordings again")
    parser.add_argument("--again", action="store_true", help="record and measure again what is kept")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the table (default: SCORE.md beside the programs)")
    return parser.parse_args()


def _read_scores(here: Path, truths: Mapping[str, Truth], kept: Path) -> Iterator[Score]:
    for name, truth in truths.items():
        report = kept / name / "report.json"
        if report.exists():
            yield judge(decode_report(report.read_bytes()), here / f"{name}.py", truth, read_pairs(kept / name))
        elif (kept / name).exists():
            yield Score.without_report(name, truth)
