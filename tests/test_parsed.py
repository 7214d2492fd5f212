"""Documents of gpudiag's own that are kept as what came of them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from gpudiag.document_cache import find_cache_folder, load_document

VALUES = [["rules/a.yaml", {"id": "A-01", "n": 1.5, "on": True, "none": None}, {"$": 1, "$.id": 2}]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


class _Reader:
    """Counts how often it reads."""

    def __init__(self, values: Any = VALUES) -> None:
        self.values, self.times = values, 0

    def __call__(self) -> Any:
        self.times += 1
        return self.values


def _kept(home: Path) -> list[Path]:
    return sorted(path for path in home.rglob("*") if path.is_file())


def test_the_same_bytes_are_read_once(home: Path) -> None:
    first, second = _Reader(), _Reader()
    assert load_document("rules", [b"reader", b"text"], first) == load_document("rules", [b"reader", b"text"], second) == VALUES
    assert (first.times, second.times) == (1, 0)
    assert _kept(home) == [home / "gpudiag" / "parsed" / "rules.msgpack"]


@pytest.mark.parametrize("pieces", [[b"reader", b"other"], [b"readertext"], [b"reader", b"text", b""], []])
def test_other_bytes_are_read_anew_and_take_the_place_of_the_old(home: Path, pieces: list[bytes]) -> None:
    load_document("rules", [b"reader", b"text"], _Reader(["old"]))
    again = _Reader()
    assert load_document("rules", pieces, again) == VALUES
    assert again.times == 1
    assert len(_kept(home)) == 1


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x82\xa3key\xa1x", b"\x93" * 100_000, b"[]"])
def test_a_file_that_is_damaged_is_made_anew(home: Path, damage: bytes) -> None:
    load_document("rules", [b"text"], _Reader())
    (path,) = _kept(home)
    path.write_bytes(damage)
    assert load_document("rules", [b"text"], _Reader()) == VALUES
    last = _Reader()
    load_document("rules", [b"text"], last)
    assert last.times == 0


@pytest.mark.parametrize("values", [{"day": datetime.date(2025, 1, 1)}, {"pair": (1, 2)}, {"what": object()}, float("nan"), {"big": 2**70}])
def test_values_that_would_come_back_as_others_are_not_kept(home: Path, values: Any) -> None:
    assert load_document("rules", [b"text"], lambda: values) is values
    assert _kept(home) == []


def test_what_cannot_be_written_is_not_kept(home: Path) -> None:
    (home / "gpudiag").write_text("a file where the folder would be")
    reader = _Reader()
    assert load_document("rules", [b"text"], reader) == load_document("rules", [b"text"], reader) == VALUES
    assert reader.times == 2


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert find_cache_folder() is None
    assert load_document("rules", [b"text"], _Reader()) == VALUES


def test_what_cannot_be_read_says_so_each_time(home: Path) -> None:
    def broken() -> Any:
        raise ValueError("no YAML")

    for _ in range(2):
        with pytest.raises(ValueError, match="no YAML"):
            load_document("rules", [b"text"], broken)
    assert _kept(home) == []
