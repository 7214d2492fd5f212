"""Records a sample bundle on a CUDA/HIP GPU: python samples/gpu/record.py OUT [SECONDS]. Exits 2 where there is none."""

from __future__ import annotations

import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    if not arguments:
        print("usage: python samples/gpu/record.py OUT [SECONDS]", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print(f"no GPU here (torch {torch.__version__} sees none): nothing was recorded; run this on a machine with one", file=sys.stderr)
        return 2
    from gpudiag.capture.demo import train_demo

    run = train_demo(Path(arguments[0]), seconds=float(arguments[1]) if len(arguments) > 1 else 8.0, device="cuda", log=print)
    print(f"{run.steps} steps in {run.seconds:.1f} s, loss {run.first_loss:.2f} -> {run.last_loss:.2f}: {run.path}")
    for warning in run.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
