"""What the descriptor of a fix says of its use is what its applier does."""

from __future__ import annotations

import pytest

from gpudiag.errors import InputError
from gpudiag.fixes import APPLIERS, FIXES
from gpudiag.fixes.fix import Fix

_APPLIERS = {applier.id: applier for applier in APPLIERS}


def _refused_without_value(fix: Fix) -> bool:
    try:
        _APPLIERS[fix.id](None)
    except InputError:
        return True
    return False


@pytest.mark.parametrize("fix", FIXES, ids=lambda fix: fix.id)
def test_the_descriptor_tells_what_the_command_takes(fix: Fix) -> None:
    assert fix.injected == (fix.id in _APPLIERS)
    assert fix.needs_value == (fix.injected and _refused_without_value(fix))
