"""Scores gpudiag on programs that nobody here wrote: `python samples/field/run.py [PROGRAM...]`, or `make field`.

Trainers and models of packages of PyPI, on synthetic data. Each is recorded with `gpudiag run`, as it is. Its first finding, the line of
that and the upper bound are held against truth.yaml, which was written before gpudiag was asked, and against what the cured program
(`--cured`) gains. What was recorded and measured is kept (`--kept`); SCORE.md is written from all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several threads wait for each other where cores are busy

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from suite.command import score_programs  # noqa: E402

if __name__ == "__main__":
    score_programs(HERE, "Scores on programs that nobody here wrote", __doc__)
