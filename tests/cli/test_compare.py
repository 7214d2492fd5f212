"""`gpudiag compare` and `gpudiag check`: what they print, write, refuse, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from handmade import op, steps, write

STEP = 100.0


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two traces; the steps of the second are half as long again."""
    made = []
    for name, factor in (("a", 1.0), ("b", 1.5)):
        length = STEP * factor
        events = [*steps(*(length * place + (place % 3) * 0.1 for place in range(9)))]
        events += [
            op("aten::mm", length * place + 5, length * place + 5 + 20 * factor + 0.1 * (place % 3), [[64, 32], [32, 16]])
            for place in range(8)
        ]
        made.append(write(tmp_path / f"{name}.json", *events))
    return made[0], made[1]


def test_compare_prints_and_writes(command, pair, tmp_path: Path) -> None:
    targets = [tmp_path / f"x.{suffix}" for suffix in ("html", "md", "json")]
    result = command("compare", *pair, *(word for target in targets for word in ("-o", target)))
    assert result.code == 0
    assert result.out.startswith("B takes 50.0 us (50.0 %) longer a step")
    assert "\x1b" not in result.out
    assert [target.read_text()[:15] for target in targets[:2]] == ["<!doctype html>", "# gpudiag compa"]
    assert json.loads(targets[2].read_text())["verdict"] == "slower"
    assert result.err.splitlines() == [f"wrote {target}" for target in targets]


def test_compare_prints_json(command, pair) -> None:
    made = json.loads(command("compare", *pair, "--json", "--fail-if-slower", "90%").out)
    assert (made["schema_version"], made["gate"]["outcome"]) == (1, "passed")


@pytest.mark.parametrize(
    ("turned", "limit", "code"), [(False, "3%", 1), (False, "0.03", 1), (False, "0%", 1), (False, "60%", 0), (True, "3%", 0)]
)
def test_fail_if_slower_decides_the_exit_code(command, pair, turned: bool, limit: str, code: int) -> None:
    result = command("compare", *(pair[::-1] if turned else pair), "--fail-if-slower", limit)
    assert result.code == code
    assert "fail-if-slower: " + ("FAILED" if code else "passed") in result.out


def test_a_recording_is_never_slower_than_itself(command, pair) -> None:
    result = command("compare", pair[0], pair[0], "--fail-if-slower", "0%")
    assert result.code == 0
    assert "the same recording" in result.out


@pytest.mark.parametrize("text", ["3", "-1%", "three", "1000%", "nan"])
def test_compare_refuses_what_is_no_share(command, pair, text: str) -> None:
    result = command("compare", *pair, f"--fail-if-slower={text}")
    assert result.code == 2
    assert "write 3%, or 0.03" in result.err
    assert result.out == ""


def test_compare_refuses_to_overwrite_its_inputs_and_what_is_not_there(command, pair, tmp_path: Path) -> None:
    before = pair[1].read_bytes()
    assert command("compare", *pair, "-o", pair[1]).code == 2
    assert pair[1].read_bytes() == before
    missing = command("compare", pair[0], tmp_path / "none.json")
    assert (missing.code, missing.out, missing.err.count("\n")) == (2, "", 1)


# -- check ------------------------------------------------------------------------------------------------------------------


def _gates(folder: Path, text: str) -> Path:
    path = folder / "gates.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("limit", "code", "word"), [(0.2, 0, "ok"), (0.05, 1, "FAIL")])
def test_check_against_a_budget(command, pair, tmp_path: Path, limit: float, code: int, word: str) -> None:
    result = command("check", pair[0], "--budget", _gates(tmp_path, f"[step_median_ms]\nmax = {limit}\n"))
    assert result.code == code
    assert f"\n{word} " in result.out
    assert "6 profiled steps" in " ".join(result.out.split())


@pytest.mark.slow
def test_check_against_a_baseline(command, pair) -> None:
    worse = command("check", pair[1], "--baseline", pair[0])
    assert (worse.code, "FAIL step_median_ms tolerance" in " ".join(worse.out.split())) == (1, True)
    assert "peak_memory_gb" in worse.out  # not known, and said
    assert command("check", pair[0], "--baseline", pair[1]).code == 0


def test_what_is_not_known_fails_unless_it_is_not_required(command, pair, tmp_path: Path) -> None:
    gates = "[peak_memory_gb]\nmax = 1.0\n"
    required = command("check", pair[0], "--budget", _gates(tmp_path, gates))
    assert (required.code, "unknown peak_memory_gb max: not known" in " ".join(required.out.split())) == (1, True)
    assert command("check", pair[0], "--budget", _gates(tmp_path, f"{gates}required = false\n")).code == 0


def test_check_for_github_and_junit(command, pair, tmp_path: Path) -> None:
    gates, xml = _gates(tmp_path, "[step_median_ms]\nmax = 0.05\n"), tmp_path / "gates.xml"
    result = command("check", pair[0], "--budget", gates, "--github", "--junit", xml)
    assert result.code == 1
    lines = result.out.splitlines()
    assert lines[0].startswith("::stop-commands::")
    assert f"::{lines[0].rpartition('::')[2]}::" in lines
    assert lines[-2].startswith(f"::error file={gates.as_posix()},line=1,title=gpudiag%3A step_median_ms max::")
    assert ElementTree.parse(xml).getroot()[0].get("failures") == "1"  # noqa: S314 our own
    assert result.err == f"wrote {xml}\n"


def test_check_prints_json(command, pair) -> None:
    made = json.loads(command("check", pair[0], "--baseline", pair[1], "--json").out)
    assert made["passed"] is True
    assert {result["outcome"] for result in made["results"]} == {"passed", "unknown"}


def test_check_against_two_recordings_of_the_baseline(command, pair) -> None:
    result = command("check", pair[1], "--baseline", pair[0], "--baseline", pair[1], "--json")
    made = json.loads(result.out)
    assert made["baselines"] == [made["baseline"], made["path"]]
    (step,) = (one for one in made["results"] if one["name"] == "step_median_ms tolerance")
    assert step["outcome"] == "within_noise"
    assert "against each baseline" in " ".join(command("check", pair[1], *["--baseline", pair[0]] * 2).out.split())


def test_check_refuses_what_is_wrong(command, pair, tmp_path: Path) -> None:
    assert "nothing to check against" in command("check", pair[0]).err
    wrong = command("check", pair[0], "--budget", _gates(tmp_path, "[step_medain_ms]\nmax = 1\n"))
    assert (wrong.code, wrong.out) == (2, "")
    assert "gates.toml:1: step_medain_ms: unknown metric; did you mean 'step_median_ms'?" in wrong.err
    assert command("check", pair[0], "--baseline", pair[1], "--github", "--json").code == 2
    assert command("check", pair[0], "--baseline", pair[1], "--junit", tmp_path / "x.txt").code == 2
    assert command("check", "", "--baseline", pair[1]).code == 2
