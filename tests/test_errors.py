"""What the user sees of a failure: one line and an exit code."""

from __future__ import annotations

import pytest

from gpudiag.errors import GpudiagError, InputError, MissingDependencyError, UsageError, suggest_nearest


def test_the_hint_follows_the_message() -> None:
    assert str(InputError("a.json is empty", "profile at least one step")) == "a.json is empty (profile at least one step)"
    assert str(InputError("a.json is empty")) == "a.json is empty"


def test_a_value_that_is_quoted_adds_no_line() -> None:
    assert str(InputError("gates.toml:1: a\nb: unknown key", "keys:\r\nmax")) == "gates.toml:1: a b: unknown key (keys: max)"


@pytest.mark.parametrize(("kind", "code"), [(GpudiagError, 3), (InputError, 2), (UsageError, 2), (MissingDependencyError, 2)])
def test_exit_codes(kind: type[GpudiagError], code: int) -> None:
    with pytest.raises(GpudiagError) as caught:
        raise kind("what", "do this")
    assert caught.value.exit_code == code
    assert caught.value.message == "what"
    assert caught.value.hint == "do this"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lauch", "launch"),
        ("BF16", "bf16"),
        ("mem5", "MEM-05"),
        ("num_workers", "loader-workers"),
        ("fused", "fused-optimizer"),
        ("zzz", None),
    ],
)
def test_a_name_that_is_spelt_alike_or_shares_a_word_is_suggested(typed: str, meant: str | None) -> None:
    known = ("launch", "bf16", "MEM-05", "loader-workers", "fused-optimizer")
    assert suggest_nearest(typed, known) == (f"; did you mean {meant!r}?" if meant else "")
