"""Errors, exit codes and what starting the command costs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from gpudiag.errors import GpudiagError, InputError


def _gpudiag(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gpudiag", *arguments], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]


def test_version(command) -> None:
    result = command("--version")
    assert (result.code, result.out) == (0, f"gpudiag {version('gpudiag')}\n")


def test_help_lists_the_commands_that_exist(command) -> None:
    result = command("--help")
    assert result.code == 0
    for name in ("report", "ops", "demo", "calibrate", "rules", "schema"):
        assert f"\n  {name} " in result.out


@pytest.mark.parametrize(
    "arguments", [("--help",), ("report", "--help"), ("ops", "--help"), ("schema", "--help"), ("rules", "--help"), ("demo", "--help")]
)
def test_help_is_plain_and_fits(command, arguments: tuple[str, ...]) -> None:
    result = command(*arguments)
    assert "Usage: gpudiag" in result.out + result.err
    assert all(len(line) <= 100 for line in result.out.splitlines())
    assert "\x1b" not in result.out


def test_alone_it_shows_what_to_begin_with(command) -> None:
    result = command()
    assert result.code == 0
    for first in ("gpudiag run train.py", "gpudiag report trace.json.gz", "gpudiag ab --auto train.py", "gpudiag --help"):
        assert first in result.out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("gpudiag re", "report"),
        ("gpudiag ab --fix bf", "bf16"),
        ("gpudiag fixes channels", "channels-last"),
        ("gpudiag rules show OVH-0", "OVH-01"),
        ("gpudiag report tr", "trace.json.gz"),
        ("gpudiag report runs/f", "runs/first/"),
        ("gpudiag run tr", "train.py"),
    ],
)
def test_a_shell_completes_commands_fixes_rules_and_files(typed: str, offered: str, tmp_path: Path) -> None:
    for name in ("trace.json.gz", "train.py", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "runs/first").mkdir(parents=True)
    asked = {"_GPUDIAG_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    done = _gpudiag(env={**os.environ, **asked}, cwd=tmp_path)
    assert offered in done.stdout.splitlines(), done.stderr
    assert "notes.txt" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ops", "x", "--top", "0"), "--top: it should be greater than or equal to 1 (gpudiag ops --help)"),
        (("ops", "x", "--sort", "size"), "--sort: 'size' is not one of 'time', 'calls', 'flops', 'bytes', 'efficiency', 'ai'"),
        (("report",), "missing argument 'PATH' (gpudiag report --help)"),
        (("reprot", "x"), "no such command 'reprot'. Did you mean 'report'"),
        (("rules", "shwo"), "no such command 'shwo'. Did you mean 'show'"),
        (("report", "x", "--tp", "3"), "no such option: --tp"),
    ],
)
def test_a_usage_error_is_one_line_without_words_of_libraries(command, arguments: tuple[str, ...], said: str) -> None:
    result = command(*arguments)
    assert (result.code, result.out, len(result.err.splitlines())) == (2, "", 1)
    assert result.err.startswith(f"gpudiag: {said}")


@pytest.mark.parametrize(
    "arguments", [("no-such-command",), ("report",), ("report", "x", "--rank", "-1"), ("calibrate", "--device", "tpu")]
)
def test_usage_errors_end_with_2(command, api, arguments: tuple[str, ...]) -> None:
    result = command(*arguments)
    assert result.code == 2
    assert result.err
    assert "Traceback" not in result.err
    assert api.calls == []


def test_a_failure_is_one_line_with_its_code(command, api) -> None:
    api.failure = InputError("t.json is empty\nand \x1b[31mred", "record it again")
    result = command("report", "t.json")
    assert (result.code, result.out, result.err) == (2, "", "gpudiag: t.json is empty and red (record it again)\n")
    api.failure = GpudiagError("broken")
    assert command("report", "t.json").code == 3


def test_an_unforeseen_failure_says_that_it_is_a_bug(command, api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUDIAG_DEBUG", raising=False)
    api.failure = KeyError("kernel")
    result = command("report", "t.json")
    assert result.code == 3
    assert result.err.startswith("gpudiag: internal error: KeyError: 'kernel'")
    assert "this is a bug" in result.err
    assert "GPUDIAG_DEBUG=1" in result.err
    assert result.err.count("\n") == 1


def test_the_traceback_can_be_asked_for(command, api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUDIAG_DEBUG", "1")
    api.failure = KeyError("kernel")
    result = command("report", "t.json")
    assert result.code == 3
    assert "Traceback" in result.err
    assert "in diagnose" in result.err


def test_an_interrupt_ends_with_130(command, api) -> None:
    api.failure = KeyboardInterrupt()
    result = command("report", "t.json")
    assert (result.code, result.out) == (130, "")
    assert "Traceback" not in result.err


def test_a_reader_that_leaves_is_no_error() -> None:
    script = (
        "import sys\nfrom gpudiag.cli import main\n"
        "sys.argv = ['gpudiag', 'schema', 'report']\n"
        "import msgspec; msgspec.json.schema = lambda _: {'a': 'x' * 30_000_000}\nsys.exit(main())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # Python ignores a short write then
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    with process.stderr as errors:
        assert errors.read() == b""
    assert process.wait(timeout=60) == 141  # as a program that SIGPIPE ends


def test_starting_loads_no_library_of_the_analysis() -> None:
    code = (
        "import sys, gpudiag.cli\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules} & {'polars', 'numpy', 'rich', 'plotly', 'jinja2', 'torch', 'yaml'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_python_m_is_the_same_command() -> None:
    assert _gpudiag("--version").stdout == f"gpudiag {version('gpudiag')}\n"
    assert importlib.import_module("gpudiag.__main__").main is importlib.import_module("gpudiag.cli").main
