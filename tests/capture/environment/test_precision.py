"""TF32 is told whichever of torch's two generations of switches a program used, also both, and nothing warns or raises.

Each case runs in a child of its own: torch has no way back once both generations were used.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

NEW = hasattr(torch._C, "_get_fp32_precision_getter")
needs_new = pytest.mark.skipif(not NEW, reason="torch before 2.9 has one generation of switches")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no fork on this system")

PROGRAM = """
import json, os, sys, warnings
import torch
from gpudiag.capture.environment.torch_settings import read_precision_settings
for name, lines in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    if os.fork() == 0:
        exec(lines)
        warnings.simplefilter("error")
        print(json.dumps([name, read_precision_settings()]), flush=True)
        os._exit(0)
    os.wait()
"""

CASES = {
    "nothing": ("", (False, True, "highest")),
    "the oldest word": ("torch.set_float32_matmul_precision('high')", (True, True, "high")),
    "bf16 on the CPU": ("torch.set_float32_matmul_precision('medium')", (True, True, "medium")),
    "old flags": ("torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.allow_tf32 = False", (True, False, "high")),
}
NEW_CASES = {
    "new": ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", (True, True, "high")),
    "new for all": ("torch.backends.fp32_precision = 'tf32'", (True, True, "high")),
    "new, convolutions exact": ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", (False, False, "highest")),
    "both": (
        "torch.set_float32_matmul_precision('high'); torch.backends.cuda.matmul.fp32_precision = 'ieee'",
        (False, True, "high"),  # oneDNN still may: the old setter told it
    ),
}


OVERRIDE = "torch.set_float32_matmul_precision('high'); os.environ['NVIDIA_TF32_OVERRIDE'] = '0'"


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What is told after each case; one process imports torch for all."""
    lines = {name: text for name, (text, _) in (CASES | (NEW_CASES if NEW else {})).items()} | {"override": OVERRIDE}
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(lines)], capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


def figures(found: dict[str, object]) -> tuple[object, ...]:
    return found["cuda_matmul_allow_tf32"], found["cudnn_allow_tf32"], found["float32_matmul_precision"]


@pytest.mark.parametrize("name", CASES)
def test_the_older_switches(found: dict[str, dict[str, Any]], name: str) -> None:
    assert figures(found[name]) == CASES[name][1]


@needs_new
@pytest.mark.parametrize("name", NEW_CASES)
def test_the_newer_switches_and_both_together(found: dict[str, dict[str, Any]], name: str) -> None:
    assert figures(found[name]) == NEW_CASES[name][1]
    assert {"cuda.matmul", "cudnn.conv", "mkldnn.matmul"} <= set(found[name]["fp32_precision"])


def test_nvidia_s_override_beats_the_program(found: dict[str, dict[str, Any]]) -> None:
    assert figures(found["override"])[:2] == (False, False)
