"""`gpudiag ab` as it is typed: what becomes of its options, what it prints where, and how it exits."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from fakeab import Machine

from gpudiag.cli.ab import _parse_looks
from gpudiag.cli.options import parse_share
from gpudiag.errors import InputError
from gpudiag.experiment import ab as doors
from gpudiag.experiment.isolation import lock_machine
from gpudiag.model.experiment import Comparison, ExperimentData
from gpudiag.report.experiment.results import read_results

pytest.importorskip("scipy", reason="scipy is not installed")

FUSED = "fused-optimizer"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine({FUSED: 1.2})
    made.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    return made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> list[dict[str, Any]]:
    """The arguments of run_experiment."""
    calls: list[dict[str, Any]] = []
    original = doors.run_experiment

    def experiment(command: Any, **given: Any) -> Any:
        calls.append({"command": command, **given})
        return original(command, **given)

    monkeypatch.setattr(doors, "run_experiment", experiment)
    return calls


def test_options_end_at_the_script(command: Callable[..., Any], asked: list[dict[str, Any]]) -> None:
    done = command("ab", "--fix", FUSED, "-o", "b", "--pairs", "6", "train.py", "--fix", "theirs", "-o", "theirs")
    assert done.code == 0, done.err
    (call,) = asked
    assert call["command"] == [sys.executable, "train.py", "--fix", "theirs", "-o", "theirs"]
    assert (call["fixes"], call["options"].output, call["options"].looks) == ([FUSED], "b", (6,))
    assert call["options"].command_shown == ("train.py", "--fix", "theirs", "-o", "theirs")


@pytest.mark.parametrize(
    ("words", "started", "shown"),
    [
        (["-m", "pkg.train", "--fix", "x"], [sys.executable, "-m", "pkg.train", "--fix", "x"], ("-m", "pkg.train", "--fix", "x")),
        (["--", sys.executable, "-c", "pass"], [sys.executable, "-c", "pass"], (sys.executable, "-c", "pass")),
    ],
)
def test_modules_and_programs(
    command: Callable[..., Any], asked: list[dict[str, Any]], words: list[str], started: list[str], shown: tuple[str, ...]
) -> None:
    assert command("ab", "--fix", FUSED, *words).code == 0
    assert asked[0]["command"] == started
    assert asked[0]["options"].command_shown == shown


def test_every_option_arrives(command: Callable[..., Any], asked: list[dict[str, Any]]) -> None:
    command(
        "ab", "--variant", "a=args:--x", "--combine", "--budget", "10m", "--pairs", "4..8", "--min-effect", "2%",
        "--no-parity", "--sandbox", "off", "--steady-malloc", "--shared-ok", "--wait", "train.py",
    )  # fmt: skip
    options = asked[0]["options"]
    assert (options.budget_s, options.looks, options.min_effect) == (600.0, (4, 6, 8), 0.02)
    assert (options.combine, options.parity) == (True, False)
    assert (options.sandbox, options.steady_malloc, options.shared_ok, options.wait) == ("off", True, True, True)
    assert asked[0]["variants"] == ["a=args:--x"]


def test_the_result_is_on_stdout_and_all_else_on_stderr(command: Callable[..., Any], machine: Machine) -> None:
    done = command("ab", "--fix", FUSED, "-o", "b", "train.py")
    assert FUSED in done.out
    assert "1.2" in done.out
    assert "gpudiag: the results are in b/experiments; the page is b/experiments.html; the recipe is b/recipe.toml" in done.err.splitlines()


def test_json_goes_to_a_file_or_to_stdout_alone(command: Callable[..., Any], machine: Machine) -> None:
    done = command("ab", "--fix", FUSED, "-o", "b", "--json", "-", "train.py")
    data = msgspec.json.decode(done.out.encode(), type=ExperimentData)
    assert data.experiments[0].fix == FUSED
    assert FUSED in done.err
    assert set(json.loads(done.out)) >= {"schema_version", "baseline", "experiments", "recipe"}
    command("ab", "--fix", FUSED, "-o", "c", "--json", "out.json", "train.py")
    written = msgspec.json.decode(Path("out.json").read_bytes(), type=ExperimentData)
    assert read_results(Path("c"))[0] == (written,)


def test_exit_codes(command: Callable[..., Any], machine: Machine) -> None:
    assert command("ab", "--fix", FUSED, "-o", "a", "train.py").code == 0
    machine.differs = {FUSED}
    assert command("ab", "--fix", FUSED, "-o", "b", "train.py").code == 4
    machine.verdicts = {FUSED: Comparison(verdict="failed", reason="crash", notes=("planted",))}
    assert command("ab", "--fix", FUSED, "-o", "c", "train.py").code == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fix", FUSED], "nothing to run"),
        (["train.py"], "nothing to try"),
        (["--fix", "bf61", "train.py"], "did you mean 'bf16'"),
        (["--fix", FUSED, "nowhere.py"], "nowhere.py: no such file"),
        (["--fix", FUSED, "--budget", "soon", "train.py"], "--budget: 'soon' is no time"),
        (["--fix", FUSED, "--pairs", "8..4", "train.py"], "--pairs 8..4"),
        (["--fix", FUSED, "--min-effect", "2", "train.py"], "--min-effect 2: no share"),
        (["--fix", FUSED, "--sandbox", "sand", "train.py"], "one of auto, overlay, block, off"),
        (["--fix", FUSED, "--json", "out.txt", "train.py"], "out.txt"),
        (["--resume", "nowhere"], "it holds no experiments"),
    ],
)
def test_wrong_use_is_one_line_and_starts_nothing(command: Callable[..., Any], machine: Machine, words: list[str], said: str) -> None:
    done = command("ab", *words)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert machine.probed == 0


def test_a_second_experiment_on_this_machine_is_refused_before_anything_is_written(command: Callable[..., Any], machine: Machine) -> None:
    with lock_machine():
        done = command("ab", "--fix", FUSED, "-o", "b", "train.py")
        assert done.code == 2
        assert f"another experiment runs on this machine (process {os.getpid()} of" in done.err
        assert len(done.err.strip().splitlines()) == 1
        assert (machine.probed, Path("b").exists()) == (0, False)
        done = command("ab", "--fix", FUSED, "-o", "b", "--shared-ok", "train.py")
        assert done.code == 0, done.err
    assert "another experiment ran on this machine at the same time" in " ".join(read_results(Path("b"))[0][0].notes)


def test_ctrl_c_says_how_to_go_on_and_goes_on(command: Callable[..., Any], machine: Machine) -> None:
    machine.breaks[3] = KeyboardInterrupt()
    done = command("ab", "--fix", FUSED, "-o", "my runs", "train.py", "--lr", "1")
    assert done.code == 130
    assert "interrupted; `gpudiag ab --resume 'my runs'` goes on" in done.err
    again = command("ab", "--resume", "my runs")
    assert again.code == 0, again.err
    assert machine.compared[-1] == (FUSED, (4, 6, 8, 12), 2)


def test_what_stands_in_the_way_shows_what_was_measured_and_keeps_it(command: Callable[..., Any], machine: Machine) -> None:
    machine.breaks[3] = InputError("other processes compute on this GPU", "wait for them")
    done = command("ab", "--fix", FUSED, "-o", "b", "train.py")
    assert done.code == 2
    assert FUSED in done.out
    assert "broken off after 2 pairs" in done.out
    assert done.err.splitlines()[-1] == "gpudiag: other processes compute on this GPU (wait for them)"
    assert not read_results(Path("b"))[0][0].complete
    assert command("ab", "--resume", "b").code == 0
    assert machine.compared[-1] == (FUSED, (4, 6, 8, 12), 2)


def test_a_result_that_cannot_be_kept_is_shown(command: Callable[..., Any], machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise InputError("cannot write b.json: No space left on device", "choose another place")

    monkeypatch.setattr("gpudiag.experiment.store.write_file", full)
    done = command("ab", "--fix", FUSED, "-o", "b", "train.py")
    assert done.code == 2
    assert f"{FUSED}  faster" in " ".join(done.out.split(" ")).replace("   ", "  ")
    assert done.err.splitlines()[-1].endswith("No space left on device (make room, then gpudiag ab --resume b)")


def test_files_are_written_though_nobody_reads_the_output(
    command: Callable[..., Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(_: str) -> None:
        raise typer.Exit(141)

    monkeypatch.setattr("gpudiag.cli.terminal.write_result", closed)
    assert command("ab", "--fix", FUSED, "-o", "b", "--json", "out.json", "train.py").code == 141
    assert Path("out.json").exists()
    assert Path("b/experiments.html").exists()


def test_numbers_of_pairs_and_shares() -> None:
    assert [_parse_looks(text) for text in ("4..12", "8", "4..10", "5..6", "1")] == [(4, 6, 8, 12), (8,), (4, 6, 8, 10), (5, 6), (1,)]
    assert [parse_share("--min-effect", text, "", zero=False) for text in ("1%", "0.5 %", "0.02")] == [0.01, 0.005, 0.02]
