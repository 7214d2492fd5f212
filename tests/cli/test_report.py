"""`gpudiag report`: what it writes, and what it refuses to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpudiag.errors import InputError


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_bytes(b"[]")
    return path


def test_text_goes_to_stdout_alone(command, api, trace: Path) -> None:
    result = command("report", trace)
    assert (result.code, result.out, result.err) == (0, "text width=100 top=10 color=False\n", "")
    assert api.calls == [{"path": str(trace), "rank": None, "rules_dirs": []}]


def test_options_reach_the_analysis(command, api, trace: Path) -> None:
    result = command("report", trace, "--top", 3, "--rank", 2, "--rules", "a", "--rules", "b")
    assert result.out == "text width=100 top=3 color=False\n"
    assert api.calls == [{"path": str(trace), "rank": 2, "rules_dirs": ["a", "b"]}]


def test_a_bundle_tells_which_program_it_was_recorded_from(command, api, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"command": ["finetune.py", "--lr", "1"]}')
    assert command("report", tmp_path).out == "text width=100 top=10 color=False script=finetune.py --lr 1\n"


def test_one_page_for_people_and_prompts(command, api, trace: Path) -> None:
    assert command("report", trace, "--brief").out == "brief width=100 color=False\n"
    both = command("report", trace, "--brief", "--all-findings")
    assert (both.code, both.err.count("\n")) == (2, 1)
    assert "leave one of them out" in both.err


def test_files_are_written_by_suffix(command, api, trace: Path) -> None:
    targets = [trace.with_name(name) for name in ("r.html", "r.md", "r.JSON")]
    result = command("report", trace, *(part for target in targets for part in ("-o", target)))
    assert result.code == 0
    assert [target.read_text() for target in targets] == ["<!doctype html>\n", "markdown top=20\n", "{}\n"]
    assert result.err.splitlines() == [f"wrote {target}" for target in targets]
    assert sorted(path.name for path in trace.parent.iterdir()) == ["r.JSON", "r.html", "r.md", "trace.json"]  # no temporary file


def test_an_unknown_suffix_is_refused_before_the_work(command, api, trace: Path) -> None:
    result = command("report", trace, "-o", "report.pdf")
    assert result.code == 2
    assert ".html, .md, .json" in result.err
    assert api.calls == []


def test_the_input_is_never_overwritten(command, api, trace: Path) -> None:
    link = trace.with_name("link.json")
    link.symlink_to(trace)
    for target in (trace, link, trace.parent / "." / "trace.json"):
        result = command("report", trace, "-o", target)
        assert result.code == 2
        assert "will not overwrite" in result.err
    assert trace.read_bytes() == b"[]"
    assert api.calls == []


def test_files_of_a_bundle_are_never_overwritten_but_its_report_may_be(command, api, tmp_path: Path) -> None:
    manifest, report = tmp_path / "manifest.json", tmp_path / "report.json"
    manifest.write_text("kept")
    report.write_text("old")
    assert command("report", tmp_path, "-o", manifest).code == 2
    assert command("report", tmp_path, "-o", report).code == 0
    assert (manifest.read_text(), report.read_text()) == ("kept", "{}\n")


def test_a_missing_folder_is_named_before_the_work(command, api, trace: Path) -> None:
    result = command("report", trace, "-o", trace.parent / "nowhere" / "r.html")
    assert result.code == 2
    assert "there is no folder" in result.err
    assert api.calls == []


def test_a_failed_report_leaves_the_old_file(command, api, trace: Path) -> None:
    target = trace.with_name("r.md")
    target.write_text("old")
    api.failure = InputError("bad")
    assert command("report", trace, "-o", target).code == 2
    assert target.read_text() == "old"


@pytest.mark.parametrize("option", ["--rules", "--graph-capture"])
@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_path_never_means_the_folder_one_stands_in(command, api, trace: Path, option: str, text: str) -> None:
    result = command("report", trace, option, text)
    assert result.code == 2
    assert result.err.startswith(f"gpudiag: {option} is empty")
    assert len(result.err.splitlines()) <= 2
    assert api.calls == []
    assert command("report", text).code == 2


@pytest.mark.parametrize("name", ["report", "ops"])
def test_a_graph_capture_that_is_not_there_is_bad_input(command, api, name) -> None:
    result = command(name, "t.json", "--graph-capture", "/nonexistent/capture.json")
    assert result.code == 2
    assert result.err.startswith("gpudiag: /nonexistent/capture.json: no such file or folder")
    assert api.calls == []


def test_a_window_is_passed_on(command, api, trace: Path) -> None:
    assert command("report", trace, "--window", 2).code == 0
    assert api.calls[0]["window"] == 2
    assert command("report", trace, "--window", -1).code == 2
