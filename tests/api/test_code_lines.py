"""Lines of the program around what a report names: those that were recorded, or none; of no file that the bundle does not know."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpudiag.files import digest_content
from gpudiag.model.bundle import Manifest, Program
from gpudiag.model.finding import Where
from gpudiag.model.report import CodeLines
from gpudiag.recordings.code_lines import AROUND, MOST_PLACES, read_code_lines

SCRIPT = "".join(f"line_{number} = {number}\n" for number in range(1, 101))


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return runs/first beside a script, looked at from another folder."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "train.py").write_text(SCRIPT)
    made = tmp_path / "runs" / "first"
    made.mkdir(parents=True)
    return made


def manifest(command: tuple[str, ...] | None = None, **contents: str) -> Manifest:
    sources = {name.replace("__", "/") + ".py": digest_content(text.encode()) for name, text in contents.items()}
    return Manifest(program=Program(sources=sources), command=command)


def at(file: str, line: int) -> Where:
    return Where("loss.item()", file, line)


def keep(bundle: Path, *code: CodeLines) -> None:
    (bundle / "report.json").write_bytes(msgspec.json.encode({"code": code, "ops": []}))


def test_five_lines_stand_on_each_side_as_far_as_there_are_any(bundle: Path) -> None:
    middle, begin, end = read_code_lines([at("train.py", 41), at("train.py", 2), at("train.py", 100)], bundle, manifest(train=SCRIPT))
    assert (middle.status, middle.first, len(middle.lines)) == ("same", 36, 11)
    assert middle.lines[middle.line - middle.first] == "line_41 = 41"
    assert (begin.first, begin.lines[1]) == (1, "line_2 = 2")
    assert end.lines[AROUND] == "line_100 = 100"


def test_a_script_in_a_folder_and_a_module_of_a_package_are_found(bundle: Path) -> None:
    for name in ("scripts/fit.py", "net/blocks.py"):
        path = bundle.parents[1] / name
        path.parent.mkdir()
        path.write_text(SCRIPT)
    known = manifest(("scripts/fit.py", "--lr", "1"), fit=SCRIPT, net__blocks=SCRIPT)
    found = read_code_lines([at("scripts/fit.py", 7), at("net/blocks.py", 8)], bundle, known)
    assert [one.lines[5] for one in found] == ["line_7 = 7", "line_8 = 8"]


def test_a_file_that_has_changed_or_is_gone_is_said_and_not_shown(bundle: Path) -> None:
    known = manifest(train=SCRIPT, gone=SCRIPT)
    (bundle.parents[1] / "train.py").write_text("import os\n" + SCRIPT)
    found = read_code_lines([at("train.py", 41), at("gone.py", 3)], bundle, known)
    assert [(one.status, one.lines) for one in found] == [("changed", ()), ("missing", ())]


def test_lines_of_the_bundles_own_report_are_shown_where_the_file_is_another_one_by_now(bundle: Path) -> None:
    recorded = CodeLines(file="train.py", line=41, first=40, lines=("before", "meant", "after"))
    keep(bundle, recorded, CodeLines(file="train.py", line=42, first=1, lines=("not around line 42",)))
    (bundle.parents[1] / "train.py").write_text("import os\n" + SCRIPT)
    found = read_code_lines([at("train.py", 41), at("train.py", 42)], bundle, manifest(train=SCRIPT))
    assert found[0] == msgspec.structs.replace(recorded, status="changed")
    assert found[1].lines == ()


def test_a_recording_without_digests_shows_nothing_also_not_what_its_report_holds(bundle: Path) -> None:
    keep(bundle, CodeLines(file="train.py", line=41, first=41, lines=("meant",)))
    for known in (Manifest(), Manifest(program=Program())):
        assert read_code_lines([at("train.py", 41)], bundle, known) == ()


@pytest.mark.parametrize("name", ["../secret.py", "/etc/passwd", "secret.txt", "a\x00b.py"])
def test_a_bundle_cannot_ask_for_other_files(bundle: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (bundle.parents[1] / "secret.py").write_text(SCRIPT)
    (bundle.parents[1] / "secret.txt").write_text(SCRIPT)
    hostile = Manifest(program=Program(sources={name: digest_content(SCRIPT.encode())}))
    monkeypatch.chdir(bundle)
    (found,) = read_code_lines([at(name, 3)], bundle, hostile)
    assert found.lines == ()


def test_two_files_of_one_name_are_none(bundle: Path) -> None:
    known = manifest(a__model=SCRIPT, b__model=SCRIPT)
    assert read_code_lines([at("model.py", 3)], bundle, known) == ()


def test_places_and_lines_are_bounded(bundle: Path) -> None:
    text = SCRIPT + "x" * 10_000
    (bundle.parents[1] / "train.py").write_text(text)
    found = read_code_lines([at("train.py", 101), *(at("train.py", line) for line in range(1, 100))], bundle, manifest(train=text))
    assert len(found) == MOST_PLACES
    assert max(len(line) for one in found for line in one.lines) <= 200
