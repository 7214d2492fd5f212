"""torch.compile sees nothing of ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import gpudiag
from gpudiag.capture.phases import Phases
from gpudiag.capture.session import Session


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy"),
    reason="this torch can skip a frame, but not those that it calls: it compiles some of ours, which costs time alone",
)
def test_a_compiled_training_step_is_compiled_without_a_frame_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import convert_frame

    compiled, original = [], convert_frame._compile

    def noting(code: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.append(code.co_filename)
        return original(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "_compile", noting)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters())

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu"):
            torch._dynamo.graph_break()
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        torch.save({}, tmp_path / "checkpoint")

    run = torch.compile(step, backend="eager")
    with Session(tmp_path / "run", skip=1, warm=1, record=1, sites=1, parts=[Phases()]) as prof:
        for batch in prof.steps([torch.ones(2, 4)] * 6):
            run(batch)
    assert compiled.count(__file__) > 2
    package = os.path.dirname(gpudiag.__file__)
    assert [name for name in compiled if name.startswith(package)] == []
