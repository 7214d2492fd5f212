"""`gpudiag doctor` as a command: its exit code and its two forms."""

from __future__ import annotations

import json

import pytest
import typer

from gpudiag.cli.machine import Need, doctor
from gpudiag.doctor import checks
from gpudiag.doctor.checks import Examination
from gpudiag.doctor.machine import Check

FOUND = (Check("GPU", "missing", "there", "no kernels", "nvidia-smi must show it", ("gpu",)), Check("torch", "ok", "2.13.0"))


@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_code_is_1_where_something_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    asked = []
    for failed in (("GPU",), ()):
        found = Examination(verdict="all is well", failed=failed, checks=FOUND)
        monkeypatch.setattr(checks, "examine", lambda needs, found=found: asked.append(needs) or found)
        if failed:
            with pytest.raises(typer.Exit) as stopped:
                doctor([Need.gpu], as_json=as_json)
            assert stopped.value.exit_code == 1
        else:
            doctor(None, as_json=as_json)
        shown = capsys.readouterr().out
        assert json.loads(shown)["failed"] == list(failed) if as_json else shown.startswith("All is well.\n\nmissing\n  GPU")
    assert asked == [["gpu"], []]
