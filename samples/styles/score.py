"""Scores gpudiag on programs in many styles: `python samples/styles/score.py [PROGRAM...]`.

Each program is recorded with `gpudiag run`, as it is. Its first finding, the line of that and the upper bound are held against truth.yaml
and against what the cured program (`--cured`) gains, by wall and by CPU time of pairs of processes that take turns. Nothing above info may
be said of those named `healthy_...` but what a measured gain bears out. What was recorded and measured is kept (`--kept`) and not made
again; SCORE.md is written from all.
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
    score_programs(HERE, "Scores on programs in many styles", __doc__)
