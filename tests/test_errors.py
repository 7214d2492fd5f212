"""What the user sees of a failure: one line and an exit code."""

from __future__ import annotations

import pytest

from gpudiag.errors import GpudiagError, InputError, MissingDependencyError, UsageError


def test_the_hint_follows_the_message() -> None:
    assert str(InputError("a.json is empty", "profile at least one step")) == "a.json is empty (profile at least one step)"
    assert str(InputError("a.json is empty")) == "a.json is empty"


@pytest.mark.parametrize(("kind", "code"), [(GpudiagError, 3), (InputError, 2), (UsageError, 2), (MissingDependencyError, 2)])
def test_exit_codes(kind: type[GpudiagError], code: int) -> None:
    with pytest.raises(GpudiagError) as caught:
        raise kind("what", "do this")
    assert caught.value.exit_code == code
    assert caught.value.message == "what"
    assert caught.value.hint == "do this"
