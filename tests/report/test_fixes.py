"""The fixes as text."""

from __future__ import annotations

import msgspec
import pytest
from rendered import render_fix, render_fix_list
from rich.cells import cell_len

from gpudiag.fixes import FIX_BY_ID, FIXES
from gpudiag.report.findings import NOT_ON_GPU, ONLY_VARIANT, FixPage, format_verified_devices

PAGES = tuple(FixPage(fix, applies=fix.id != "accumulation") for fix in FIXES)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_every_fix_is_listed_within_the_width(width: int) -> None:
    lines = render_fix_list(PAGES, width=width).splitlines()
    assert [line for line in lines if cell_len(line) > width] == []
    if width >= 60:
        assert {fix.id for fix in FIXES} <= {line.split()[0] for line in lines if line.split()}


def test_what_no_gpu_has_seen_says_so_in_list_and_page() -> None:
    for kinds, expected in (((), NOT_ON_GPU), (("cpu",), f"CPU; {NOT_ON_GPU}"), (("cpu", "gpu"), "CPU, GPU"), (("gpu",), "GPU")):
        page = FixPage(msgspec.structs.replace(FIX_BY_ID["bf16"], verified=kinds), applies=True)
        assert format_verified_devices(page) == expected
        assert expected in render_fix_list((page,), width=120)
        assert expected in render_fix(page)
    assert format_verified_devices(FixPage(FIX_BY_ID["cuda-graphs"], applies=True, needs_gpu=True)) == NOT_ON_GPU


def test_a_page_tells_change_values_conflicts_and_evidence() -> None:
    fix = msgspec.structs.replace(FIX_BY_ID["bf16"], values="high or medium")
    text = " ".join(render_fix(FixPage(fix, True, False, "Autocast round the forward pass.", "The type inside.")).split())
    assert "change with torch.autocast(device_type, dtype=torch.bfloat16): loss = ..." in text
    assert "gpudiag ab --fix bf16, or --fix bf16=VALUE: high or medium" in text
    assert "parity low precision: they differ by rounding to 16 bit" in text
    assert "conflicts fp16" in text
    assert "applied Autocast round the forward pass. evidence The type inside." in text


def test_a_fix_that_cannot_be_injected_says_what_to_do_instead() -> None:
    page = FixPage(FIX_BY_ID["accumulation"], applies=False)
    assert ONLY_VARIANT in " ".join(render_fix(page).split())
    assert ONLY_VARIANT in " ".join(render_fix_list((page,), width=120).split())
    assert "--fix accumulation" not in render_fix(page)
