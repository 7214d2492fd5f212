"""`gpudiag cache`: what is kept, how large it is, and that it can be deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
from dashclient import small_bundle, small_trace

from gpudiag.api import cache, inputs
from gpudiag.api.cache import BESIDE, IN_BUNDLE, NO_CACHE

pytestmark = pytest.mark.usefixtures("keeping")


def test_nothing_is_kept_yet_and_why(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = small_trace(tmp_path / "t.json")
    shown = command("cache", trace)
    assert (shown.code, shown.out, shown.err) == (0, "", f"nothing is cached in {tmp_path / BESIDE}\n")
    (tmp_path / BESIDE).symlink_to(tmp_path)
    assert command("cache", trace).err.endswith("it is a link, which is not followed\n")
    monkeypatch.setenv(NO_CACHE, "1")
    assert command("cache", trace).err.endswith(f"{NO_CACHE} is set\n")


def test_a_read_only_folder_is_said(command, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    trace = small_trace(closed / "t.json")
    closed.chmod(0o555)
    assert command("cache", trace).err == f"nothing is cached in {closed / BESIDE}: {closed} is read-only\n"


def test_what_is_kept_is_shown_and_deleted(command, tmp_path: Path) -> None:
    one, other = small_trace(tmp_path / "t.json"), small_trace(tmp_path / "u.json", "aten::bmm")
    for trace in (one, other):
        inputs.load_trace(trace)
    place = tmp_path / BESIDE
    shown = command("cache", one)
    assert shown.code == 0
    assert "kB  tables of t.json  " in shown.out
    assert str(place / "v1" / "tables" / "t.json") in shown.out
    assert "u.json" not in shown.out
    assert shown.err.endswith(f"kB in {place}\n")
    assert len(command("cache", tmp_path).out.splitlines()) == 2
    assert "kB from" in command("cache", "clear", one).err
    assert [kept.subject for kept in cache.list_entries(place)] == ["u.json"]
    assert command("cache", "clear", tmp_path).code == 0
    assert not place.exists()
    assert command("cache", "clear", tmp_path).err == f"nothing is cached in {place}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "u.json"]


def test_a_bundle_keeps_what_is_its_own(command, tmp_path: Path) -> None:
    bundle = small_bundle(tmp_path / "run")
    inputs.load_trace(bundle / "trace" / "rank0-w0.json.gz")
    before = {path.relative_to(bundle) for path in bundle.rglob("*") if IN_BUNDLE not in path.parts}
    assert "rank0-w0.json.gz" in command("cache", bundle).out
    assert command("cache", "clear", bundle).code == 0
    assert {path.relative_to(bundle) for path in bundle.rglob("*")} == before


def test_names_cannot_steer_the_terminal(command, tmp_path: Path) -> None:
    inputs.load_trace(small_trace(tmp_path / "t\x1b[2J.json"))
    shown = command("cache", tmp_path)
    assert "\x1b" not in shown.out + shown.err
    assert "tables of t" in shown.out


WRONG = [(["clear"], "clear what?"), (["a", "b"], "one PATH"), (["gone"], "no such file"), ([""], "empty")]


@pytest.mark.parametrize(("words", "said"), WRONG)
def test_wrong_use_is_one_line(command, words: list[str], said: str) -> None:
    refused = command("cache", *words)
    assert refused.code == 2
    assert said in refused.err
    assert len(refused.err.splitlines()) == 1


@pytest.mark.slow
def test_report_keeps_nothing_where_it_is_told_to(command, tmp_path: Path) -> None:
    trace = small_trace(tmp_path / "t.json")
    anew = command("report", trace, "--no-cache", "--no-config")
    assert not (tmp_path / BESIDE).exists()
    first, second = command("report", trace), command("report", trace)
    assert anew.code == first.code == second.code == 0
    assert anew.out == first.out == second.out
    assert {kept.kind for kept in cache.list_entries(tmp_path / BESIDE)} == {"tables", "report"}
