"""Checks claims about GPU performance on this machine: python samples/figures/run.py [G-01 ...] [--device cpu] [--seconds 1].

Prints what each claim says, what is to be expected on this device (from its data sheet, or measured peaks), what was measured. Exits 1
where a claim failed by an error; a claim that does not hold is a result.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from typing import Any

import others as others
import pointwise as pointwise
import products as products
import training as training
from bench import CLAIMS, Bench, NotHereError, Result

from gpudiag.hardware.calibration import measure_in_child, observe_device
from gpudiag.hardware.device_peaks import resolve_device
from gpudiag.model.hardware import Device


def peaks_of(torch: Any, device: str) -> Device:
    """Return the published peaks of the GPU, or the measured ones of the CPU."""
    if device == "cpu":
        return measure_in_child("cpu")
    return resolve_device(observe_device(torch, torch.cuda.get_device_properties(torch.cuda.current_device()))).device


def check(number: str, bench: Bench) -> tuple[str, str, str, str, str]:
    """Return the row of one claim: number, claim, expectation, measured, verdict."""
    says, run = CLAIMS[number]
    try:
        found = run(bench)
    except NotHereError as reason:
        return number, says, "-", str(reason), "not run"
    except Exception as error:  # noqa: BLE001 - one claim must not cost the others
        return number, says, "-", f"{type(error).__name__}: {error}".splitlines()[0][:120], "ERROR"
    return number, says, found.expected, found.measured, verdict(found)


def verdict(found: Result) -> str:
    """Return the verdict in a word."""
    return "told" if found.holds is None else "holds" if found.holds else "DOES NOT HOLD"


def order(number: str) -> int:
    """Return the place of a claim in the list."""
    return int(number.split("-")[1])


def main(arguments: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("claims", nargs="*", metavar="G-NN", help="claims to check (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=None, help="default: cuda where it is there")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement")
    options = parser.parse_args(arguments)
    unknown = [number for number in options.claims if number not in CLAIMS]
    if unknown:
        parser.error(f"no claim {unknown[0]}; there are {', '.join(sorted(CLAIMS, key=order))}")
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; --device cpu checks what makes sense there", file=sys.stderr)
        return 2
    bench = Bench(torch, device, peaks_of(torch, device), options.seconds)
    print(f"{bench.peaks.name}, torch {torch.__version__}", flush=True)
    failed = False
    for number in options.claims or sorted(CLAIMS, key=order):
        row = check(number, bench)
        failed |= row[-1] == "ERROR"
        print(f"{row[0]}  {row[4]:<13}  {row[1]}\n      expected {row[2]}\n      measured {row[3]}", flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
