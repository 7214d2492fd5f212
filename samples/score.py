"""Scores the rules of gpudiag on the samples: `python samples/score.py [SAMPLE...]`, or `make score`.

Each sample is recorded with `gpudiag run`, its report judged against expected.toml, and the gain of its repaired twin measured beside it.
The exit code is 1 where something is wrong, 2 where nothing could be scored.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
GAINS = HERE.parent / "gpudiag" / "diagnosis" / "gains.yaml"
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from suite.expected import Sample, find_samples  # noqa: E402
from suite.gains import update_gains  # noqa: E402
from suite.needs import device_name, lacking  # noqa: E402
from suite.scoring import Options, score, score_recorded  # noqa: E402
from suite.table import Row, cells, section, text_table, totals, with_section  # noqa: E402

from gpudiag.errors import GpudiagError, InputError  # noqa: E402


def main() -> int:
    """Return the exit code."""
    args = _arguments()
    options = Options(runs=args.runs, pairs=args.pairs, gain=not args.no_gain, record=args.record)
    try:
        samples = find_samples(args.samples, tuple(args.names))
        rows, skipped = _scores(samples, options, args.samples)
    except InputError as error:
        print(f"score: {error}", file=sys.stderr)
        return 2
    for name, reason in skipped:
        print(f"not scored: {name}: {reason}")
    if not rows:
        print("score: no sample could be scored here", file=sys.stderr)
        return 2
    print(text_table(rows))
    for row in rows:
        for note in filter(None, (row.failed, row.note)):
            print(f"{row.name}: {note}")
    if skipped:
        print(f"not scored: {len(skipped)}")
    _keep(args, rows, skipped)
    print(*totals(rows).lines(), sep="\n")
    return 0 if totals(rows).fine else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score the rules on the samples.")
    parser.add_argument("names", nargs="*", metavar="SAMPLE", help="only these (default: all; then SCORE.md is written)")
    parser.add_argument("--runs", type=int, default=1, help="record and judge so often; the first finding must be right in all (default 1)")
    parser.add_argument("--pairs", type=int, default=2, help="pairs of live processes that measure the gain of a twin (default 2)")
    parser.add_argument("--no-gain", action="store_true", help="do not measure the twins")
    parser.add_argument("--record", type=Path, metavar="DIR", help="keep the bundles and gains there")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the file to write to (default: SCORE.md beside the samples, for a full run)"
    )
    parser.add_argument("--samples", type=Path, default=HERE, metavar="DIR", help="where the samples are (default: beside this file)")
    args = parser.parse_args()
    if args.runs < 1 or args.pairs < 1:
        parser.error("--runs and --pairs are at least 1")
    return args


def _scores(samples: list[Sample], options: Options, folder: Path) -> tuple[list[Row], list[tuple[str, str]]]:
    """Return the scores of the samples that run here or were recorded elsewhere, and the others with the reason."""
    rows, skipped = [], []
    for number, sample in enumerate(samples, 1):
        reason = lacking(sample.expected.requires)
        try:
            row = score(sample, options, _tell) if reason is None else score_recorded(sample, folder / "recorded" / sample.name)
        except (GpudiagError, OSError) as error:
            row = Row(name=sample.name, wanted=sample.expected.first, failed=str(error))
        except KeyboardInterrupt:
            return rows, [*skipped, *((left.name, "interrupted") for left in samples[number - 1 :])]
        if row is None:
            skipped.append((sample.name, reason or ""))
            continue
        rows.append(row)
        _tell(f"{number} of {len(samples)}: {' | '.join(cells(row))} {row.failed or row.note}".rstrip())
    return rows, skipped


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _keep(args: argparse.Namespace, rows: list[Row], skipped: list[tuple[str, str]]) -> None:
    """Write the section of this device, and its gains where all of the suite was scored; of a part of it only where a file is named."""
    target = args.out if args.out is not None or args.names or args.no_gain else args.samples / "SCORE.md"
    if target is None:
        return
    device = device_name()
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    times = "once" if args.runs == 1 else f"{args.runs} times"
    pairs = "one pair" if args.pairs == 1 else f"{args.pairs} pairs"
    about = f"{today}, torch {torch.__version__}; each sample recorded {times}, gains over {pairs} of processes."
    before = target.read_text(encoding="utf-8") if target.exists() else ""
    target.write_text(with_section(before, device, section(device, about, rows, skipped)), encoding="utf-8")
    if args.out is None and args.samples == HERE:
        GAINS.write_text(update_gains(GAINS.read_text(encoding="utf-8"), device, rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
