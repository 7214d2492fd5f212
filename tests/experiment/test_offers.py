"""What may be tried on a recorded program: fixes that a finding names, and a command of which every word is the program's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpudiag.errors import InputError
from gpudiag.experiment import offers
from gpudiag.experiment.offers import build_ab_arguments, choose_offer, digest_command, explain_missing_program
from gpudiag.model.experiment import FixCall


def parsed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Return what `gpudiag ab` makes of its arguments."""
    from gpudiag.cli import main
    from gpudiag.experiment import ab as experiments

    seen: dict[str, object] = {}

    def stop(command: object, **options: object) -> None:
        seen.update(options, command=command)
        raise InputError("seen")

    monkeypatch.setattr(experiments, "run_experiment", stop)
    monkeypatch.setattr(sys, "argv", ["gpudiag", *words])
    assert main() == 2
    return seen


@pytest.mark.parametrize(
    "words", [("train.py", "--lr", "1", "--fix", "tf32", "--sandbox", "off", "-m", "x"), ("train.py", "--", "--output", "y")]
)
def test_no_argument_of_the_program_is_an_option_of_ours(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    seen = parsed(build_ab_arguments(FixCall("bf16"), "/runs/a b", words, ceilings=False), monkeypatch)
    assert seen["command"] == [sys.executable, *words]
    assert list(seen["fixes"]) == ["bf16"]  # type: ignore[call-overload]
    assert seen["options"].output == "/runs/a b"  # type: ignore[attr-defined]
    assert seen["options"].sandbox == "auto"  # type: ignore[attr-defined]


def test_a_module_keeps_its_arguments_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = parsed(
        build_ab_arguments(FixCall("batch-size", "x2"), "/runs/a", ("-m", "json.tool", "--fix", "x", "--"), ceilings=False), monkeypatch
    )
    assert seen["command"] == [sys.executable, "-m", "json.tool", "--fix", "x", "--"]
    assert list(seen["fixes"]) == ["batch-size=x2"]  # type: ignore[call-overload]


def test_ceilings_come_from_the_bundle_that_has_a_report(tmp_path: Path) -> None:
    assert build_ab_arguments(FixCall("bf16"), "b", ("t.py",))[:5] == ["ab", "--fix", "bf16", "--from", "b"]
    assert "--from" not in build_ab_arguments(FixCall("bf16"), "b", ("t.py",), ceilings=False)
    assert not offers.has_report(tmp_path)
    (tmp_path / "elsewhere.json").write_text("{}")
    (tmp_path / "report.json").symlink_to(tmp_path / "elsewhere.json")
    assert not offers.has_report(tmp_path)
    (tmp_path / "report.json").unlink()
    (tmp_path / "report.json").write_text("{}")
    assert offers.has_report(tmp_path)


def test_a_program_that_is_not_here_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no such file" in explain_missing_program(("train.py",))
    assert explain_missing_program(("-m", "whatever")) == ""
    (tmp_path / "train.py").write_text("")
    assert explain_missing_program(("train.py",)) == ""


def test_the_command_is_of_this_python_and_a_digest_tells_every_word() -> None:
    assert digest_command(["a b"]) != digest_command(["a", "b"])
    assert digest_command(["a"]) == digest_command(["a"])


def test_a_fix_that_no_finding_names_is_refused() -> None:
    with pytest.raises(InputError, match="no finding of this recording names"):
        choose_offer((), "bf16")
