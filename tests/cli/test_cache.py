"""`gpudiag cache`: what is kept, how large it is, and that it can be deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
from dashclient import small_bundle, small_trace

from gpudiag.api import cache, inputs
from gpudiag.api.cache import NO_CACHE

pytestmark = pytest.mark.usefixtures("keeping")


def test_nothing_is_kept_yet_and_why(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = small_trace(tmp_path / "t.json")
    shown = command("cache", trace)
    assert (shown.code, shown.out, shown.err) == (0, "", f"nothing is cached of {trace}\n")
    monkeypatch.setenv(NO_CACHE, "1")
    assert command("cache", trace).err.endswith(f"{NO_CACHE} is set\n")


def test_a_machine_without_a_place_for_it_is_told(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "find_cache_folder", lambda: None)
    refused = command("cache", small_trace(tmp_path / "t.json"))
    assert (refused.code, "XDG_CACHE_HOME" in refused.err) == (2, True)


def test_what_is_kept_is_shown_and_deleted(command, tmp_path: Path) -> None:
    one, other = small_trace(tmp_path / "t.json"), small_trace(tmp_path / "u.json", "aten::bmm")
    for trace in (one, other):
        inputs.load_trace(trace)
    place = cache.find_place(one)
    assert place is not None
    shown = command("cache", one)
    assert shown.code == 0
    assert "kB  tables of t.json  " in shown.out
    assert str(place / "tables" / "t.json") in shown.out
    assert "u.json" not in shown.out
    assert shown.err.endswith(f"kB in {place}\n")
    assert len(command("cache", tmp_path).out.splitlines()) == 2
    assert "kB from" in command("cache", "clear", one).err
    assert [slot.subject for slot in cache.list_entries(place)] == ["u.json"]
    assert command("cache", "clear", tmp_path).code == 0
    assert not place.exists()
    assert command("cache", "clear", tmp_path).err == f"nothing is cached of {tmp_path}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "t.json", "u.json"]


def test_a_bundle_stays_as_it_is(command, tmp_path: Path) -> None:
    bundle = small_bundle(tmp_path / "run")
    before = {path.relative_to(bundle) for path in bundle.rglob("*")}
    inputs.load_trace(bundle / "trace" / "rank0-w0.json.gz")
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
    place = cache.find_place(trace)
    assert place is not None
    assert not place.exists()
    first, second = command("report", trace), command("report", trace)
    assert anew.code == first.code == second.code == 0
    assert anew.out == first.out == second.out
    assert {slot.kind for slot in cache.list_entries(place)} == {"tables", "report"}
