"""Twelve questions that people ask of a slow training, on recordings of real GPUs: the answers stand in the replies of the tools.

The truths are those of the recordings' README, and figures that were counted there without gpudiag.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from mcpclient import Agent, serve
from realtraces import SHARED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("mcp"),
    pytest.mark.skipif(not (SHARED / "evidence" / "traces").is_dir(), reason="no real recordings here (third-party data)"),
]

LOADER, WORKERS = ("evidence/traces/v100_resnet50_2021a_workers0.json.gz", "evidence/traces/v100_resnet50_2021a_workers4.json.gz")
BERT, JOB = "traces/h100_bert-small.json.gz", "traces/v100_dlrm_train_8ranks"
MEMORY = "traces/v100_resnet50_train_2021_memory_callstack.json.gz"

QUESTIONS = {
    "which line waits longest?": ("idle", {"path": BERT}, [r"bert/modeling\\_bert\.py:364: linear\(\) \| 1\.09 ms \| 24\.\d %"]),
    "is it data loading?": ("findings", {"path": LOADER, "id": "INP-01"}, [
        r"INP-01, critical", r"no worker processes \(num\\_workers=0\)", r"loader_wait_share` = 33\.9 %",
    ]),
    "is it data loading, with workers?": ("findings", {"path": WORKERS, "id": "INP-01"}, [r"status: (passed|suppressed)"]),
    "what should I change first, and how much can it give at most?": ("report", {"path": LOADER}, [
        r"### 1\. The loop waits for its next batch", r"up to 56\.3 ms of the 175 ms of a step \(32 %; an upper bound, replay error",
        r"1\.28 to 1\.39 x the speed", r"gpudiag ab --fix loader-workers",
    ]),
    "would a bigger batch help?": ("whatif", {"path": LOADER, "settings": ["batch=2"]}, [
        r"29\.6 % \u00b1", r"gain per sample", r"a training then differs",
    ]),
    "is the GPU busy?": ("report", {"path": BERT, "part": "breakdown"}, [
        r"overhead-bound kernels \| 307 us \| 6\.9 %", r"host overhead \(Python, framework, launches\) \| 4\.04 ms \| 91\.3 %",
    ]),
    "what is the MFU, and what is unknown?": ("report", {"path": LOADER}, [
        r"MFU\): 28\.3 % of 15\.7 TFLOP/s \(fp32 dense", r"unverified peak rates", r"rules: \d+ could not be judged, which is no all-clear",
    ]),
    "which op takes longest, and why is it bound?": ("ops", {"path": LOADER}, [
        r"`aten::cudnn_convolution_backward_weight`<br>backward \| .*142 ms \| 23\.6 % \| compute \| 58 %<br>of 87 % of it.*derived",
    ]),
    "what changed between A and B?": ("compare", {"a": LOADER, "b": WORKERS}, [
        r"interval -5\d\.\d % to \+\d\.\d %", r"idle: data loading \| 58\.7 ms \| 1\.18 ms \| -57\.5 ms", r"INP-01",
        r"the measurement of B is weak",
    ]),
    "what used the memory at its peak?": ("memory", {"path": MEMORY}, [
        r"At least 2\.79 GB on cuda:0", r"activations saved for backward \| 2\.72 GB \| 97\.5 %", r"the peak is a lower bound",
    ]),
    "is rank 3 slow?": ("report", {"path": JOB, "part": "ranks"}, [
        r"`rank 3` \| 19\.3 ms \| 10\.1 ms \| 9\.57 ms", r"own: the step without wait time", r"cannot be told: fewer than 3 steps",
    ]),
    "how sure are the figures?": ("report", {"path": BERT, "part": "quality"}, [
        r"Weak: findings lose one grade of confidence\. Steps analysed: 1", r"Slow-down unavailable", r"off by \\<1 % at most",
    ]),
    "may I conclude that the step will take 9 % of its time?": ("findings", {"path": BERT, "id": "OVH-01"}, [
        r"91 %; an upper bound", r"Confidence: low", r"1\.32 x the speed", r"An upper bound is what a change cannot exceed",
    ]),
}  # fmt: skip


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    """A client of a server for all real recordings."""
    with serve(SHARED) as found:
        yield found


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_answer_stands_in_the_reply(agent: Agent, question: str) -> None:
    tool, arguments, wanted = QUESTIONS[question]
    text = agent.read(tool, **arguments)
    for pattern in wanted:
        assert re.search(pattern, text), f"{question}: {pattern} is not in\n{text}"
