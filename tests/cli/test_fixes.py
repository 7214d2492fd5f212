"""`gpudiag fixes`."""

from __future__ import annotations

import subprocess
import sys

from gpudiag.cli.ab import _build_page
from gpudiag.fixes import APPLIERS, FIX_BY_ID, FIXES


def test_the_list_names_every_fix(command) -> None:
    result = command("fixes")
    assert result.code == 0
    assert all(f"\n{fix.id} " in result.out for fix in FIXES)
    assert f"{len(FIXES)} fixes" in result.out


def test_one_fix_in_full(command) -> None:
    result = command("fixes", "bf16")
    assert result.code == 0
    assert "torch.autocast" in result.out
    assert "not verified on a GPU" in result.out or "GPU" in result.out


def test_a_fix_that_does_not_exist_is_one_line_and_exit_code_2(command) -> None:
    result = command("fixes", "bf-16")
    assert result.code == 2
    assert result.err == "gpudiag: no fix is named 'bf-16'; did you mean 'bf16'? (`gpudiag fixes` lists them)\n"


def test_every_fix_that_can_be_applied_says_how_and_what_has_to_show_it() -> None:
    for applier in APPLIERS:
        page = _build_page(applier.id and next(fix for fix in FIXES if fix.id == applier.id))
        assert page.applies
        assert len(page.applied.split()) >= 4, applier.id
        assert len(page.evidence.split()) >= 3, applier.id
        assert "Raises" not in page.evidence
    assert _build_page(FIX_BY_ID["compile"]).evidence == "The graphs that Dynamo made of each, with breaks and recompilations."


def test_the_list_needs_no_torch() -> None:
    code = "import sys; from gpudiag.cli import main; sys.argv = ['gpudiag', 'fixes']; main(); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "channels-last" in done.stdout
