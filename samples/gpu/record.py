"""Records sample trainings and prints how much of each is modelled: python samples/gpu/record.py OUT [--only NAME,...] [--tiny].

One bundle a sample below OUT. `--device cpu --tiny` tries it out anywhere. Exits 2 where there is no GPU (and none was asked to do
without), 1 where a sample failed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from pathlib import Path

STEPS = 22
"""5 plain, 2 warm-up, 6 timed, 1 export, 1 + 2 + 1 with stacks, and a few plain ones after them."""

HEADINGS = ("sample", "seconds", "modelled", "of all", "linked", "replays", "MFU", "over roof", "worst rows above 103 %")


def record(name: str, folder: Path, device: str, *, tiny: bool) -> Path:
    """Train the sample and return its bundle."""
    import torch
    from training import SAMPLES, Run

    import gpudiag

    sample = SAMPLES[name]
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(sample.precision)
    torch.backends.cudnn.allow_tf32 = sample.precision != "highest"
    try:
        torch.manual_seed(0)
        training = sample.make(Run(device, tiny))
        batches = [training.batch() for _ in range(4)]
        with gpudiag.profile(str(folder / name)) as prof:
            for batch in prof.steps(batches[step % len(batches)] for step in range(STEPS)):
                training.step(batch)
            if device == "cuda":
                torch.cuda.synchronize()
        return Path(prof.path)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def summary(name: str, bundle: Path, seconds: float) -> tuple[str, ...]:
    """Return the line of the table for one bundle."""
    import gpudiag

    report = gpudiag.diagnose(str(bundle)).data
    trust, over = report.trust, [row for row in report.ops if row.over_roof is not None]
    total = sum(row.kernel_ns for row in report.ops) or 1
    over.sort(key=lambda row: row.kernel_ns, reverse=True)
    worst = ", ".join(f"{row.name} {row.over_roof:.0%} {row.over_roof_cause}" for row in over[:3])
    shares = (trust.modelled_share, trust.modelled_share_of_all, trust.linked_share, trust.replay_share, report.mfu and report.mfu.share)
    over_share = sum(row.kernel_ns for row in over) / total
    return (name, f"{seconds:.0f}", *("-" if share is None else f"{share:.1%}" for share in (*shares, over_share)), worst)


def free(device: str) -> None:
    """Give back what the last sample held."""
    import torch

    gc.collect()
    torch.compiler.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the bundles")
    parser.add_argument("--only", default="", help="samples by name, separated by commas (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that any machine trains in a second")
    options = parser.parse_args(arguments)
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU here (torch {torch.__version__} sees none): nothing was recorded; run this on a machine with one", file=sys.stderr)
        return 2
    from training import SAMPLES

    names = [name for name in options.only.split(",") if name] or list(SAMPLES)
    unknown = [name for name in names if name not in SAMPLES]
    if unknown:
        print(f"no such sample: {', '.join(unknown)} (there are {', '.join(SAMPLES)})", file=sys.stderr)
        return 2
    print("\t".join(HEADINGS))
    failed = 0
    for name in names:
        begun = time.perf_counter()
        try:
            bundle = record(name, options.out, options.device, tiny=options.tiny)
            print("\t".join(summary(name, bundle, time.perf_counter() - begun)), flush=True)
        except Exception:  # noqa: BLE001 - one sample that fails must not cost the others
            failed += 1
            print(f"{name}\tfailed", flush=True)
            traceback.print_exc()
        free(options.device)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main(sys.argv[1:]))
