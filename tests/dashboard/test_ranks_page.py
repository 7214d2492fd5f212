"""The page Ranks, and one rank looked at on all pages: a folder of ranks with a hand-made comparison of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jobviews
import msgspec
import pytest
from dashclient import Client, analysed, links, small_trace, texts

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
from gpudiag_dashboard import library as library_module
from gpudiag_dashboard.app import create_app
from gpudiag_dashboard.components import View
from gpudiag_dashboard.library import Library

from gpudiag.pipeline import AnalysedRecording, open_recording

HOSTILE = '<img src=x onerror="alert(1)">\x1b[31m\u202e'
OPENED: list[tuple[str, int | None]] = []


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A dashboard of a folder of three ranks, of which the op of each has a name of its own, a folder of many, and one trace."""
    folder = tmp_path_factory.mktemp("recordings")
    for name in ("job", "many"):
        (folder / name).mkdir()
        for rank in range(3):
            small_trace(folder / name / f"rank{rank}.json", name=f"aten::mm{rank}")
    small_trace(folder / "one.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library_module, "open_recording", compared)
        made = Client(create_app(folder))
        for name in ("job", "many", "one.json"):
            analysed(made, name)
        yield made


def compared(path: str, *, rank: int | None = None, progress: Any = None) -> AnalysedRecording:
    """Return one rank as it is; of all ranks the lowest with a hand-made comparison."""
    OPENED.append((Path(path).name, rank))
    place = Path(path)
    found = open_recording(str(place / f"rank{rank or 0}.json") if place.is_dir() else path, progress=progress)
    if rank is not None or not place.is_dir():
        return found
    job = jobviews.job(512) if place.name == "many" else jobviews.job(3)
    rows = [msgspec.structs.replace(job.ranks[0], host=HOSTILE), *job.ranks[1:]]
    return found._replace(report=jobviews.with_job(found.report, msgspec.structs.replace(job, ranks=tuple(rows))))


def content(client: Client, address: str) -> Any:
    found = urlsplit(address)
    return client.content(found.path, f"?{found.query}")


@pytest.mark.slow
def test_the_page_says_who_is_late_and_why(client: Client) -> None:
    shown = texts(content(client, "/ranks?bundle=job"))
    for said in ("3 ranks: a step takes", "Rank 2 is the straggler", "It waits 22.4 ms a step for its batches", "default_pg: ranks 0-2"):
        assert said in shown
    assert "<img" in shown  # as text
    assert "\x1b" not in shown


def test_each_rank_leads_to_its_own_report_and_that_stays_from_page_to_page(client: Client) -> None:
    found = dict(links(content(client, "/ranks?bundle=job")))
    assert found["rank 2 (straggler, longest own)"] == "/overview?bundle=job&rank=2"
    analysed(client, "job&rank=2")
    head = client.go("/ops", "?bundle=job&rank=2")["head"]["children"]
    assert "rank 2 alone" in texts(head)
    pages = dict(links(head))
    assert pages["Findings"] == "/findings?bundle=job&rank=2"
    assert pages["All ranks"] == "/ops?bundle=job"
    assert "aten::mm2" in texts(content(client, "/ops?bundle=job&rank=2"))
    assert "aten::mm0" in texts(content(client, "/ops?bundle=job"))


def test_the_page_on_ranks_shows_all_whichever_rank_is_looked_at(client: Client) -> None:
    before = len(OPENED)
    shown = client.go("/ranks", "?bundle=job&rank=1")
    assert shown["poll"]["disabled"] is True
    assert "3 ranks: a step takes" in texts(content(client, "/ranks?bundle=job&rank=1"))
    assert OPENED[before:] == []


def test_a_click_on_a_bar_leads_to_its_rank(client: Client) -> None:
    def clicked(customdata: Any, bundle: str = "job") -> Any:
        values = {
            "ranks-bars.clickData": {"points": [{"customdata": customdata}]},
            "address.pathname": "/ranks",
            "address.search": f"?bundle={bundle}",
        }
        return client.written("go.href", values, "ranks-bars.clickData", reads="ranks-bars").get("go", {}).get("href")

    assert clicked(1) == "/overview?bundle=job&rank=1"
    assert [clicked(bad) for bad in (99, True, "1", None, [1])] == [None] * 5
    assert clicked(511, "many") == "/overview?bundle=many&rank=511"


def test_many_ranks_come_page_by_page_in_the_order_that_is_asked_for(client: Client) -> None:
    assert "page 1 of 11" in texts(content(client, "/ranks?bundle=many"))
    first = next(name for name, _ in links(content(client, "/ranks?bundle=many&sort=own")) if name.startswith("rank "))
    assert first == "rank 511 (straggler, longest own)"
    last = texts(content(client, "/ranks?bundle=many&sheet=11"))
    assert "rank 511" in last
    assert "rank 499" not in last


def test_one_rank_alone_says_how_to_get_several(client: Client) -> None:
    shown = texts(content(client, "/ranks?bundle=one.json"))
    assert "There is one rank here" in shown
    assert "gpudiag run torchrun" in shown


def test_a_rank_in_the_address_of_a_recording_of_one_is_that_one(client: Client) -> None:
    before = len(OPENED)
    assert "A step takes 1.00 ms" in texts(content(client, "/overview?bundle=one.json&rank=5"))
    assert OPENED[before:] == []
    assert "alone" not in texts(client.go("/overview", "?bundle=one.json&rank=5")["head"]["children"])


def test_a_rank_is_kept_analysed_beside_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        small_trace(tmp_path / f"rank{rank}.json")
    asked: list[int | None] = []

    def told(path: str, *, rank: int | None = None, progress: Any = None) -> AnalysedRecording:
        asked.append(rank)
        return open_recording(str(tmp_path / f"rank{rank or 0}.json"), progress=progress)

    monkeypatch.setattr(library_module, "open_recording", told)
    library = Library(tmp_path)
    first = library.opened(".", 1)
    assert library.opened(".", 1) is first
    assert library.opened(".") is not first
    assert asked == [1, None]


def test_the_rank_of_an_address_stays_and_other_state_does_not() -> None:
    view = View.parse("/ops", "?bundle=a&rank=3&sort=calls")
    assert view.rank == 3
    assert view.href("/findings") == "/findings?bundle=a&rank=3"
    assert view.href(sort=None) == "/ops?bundle=a&rank=3"
    assert view.href("/ranks", rank=None) == "/ranks?bundle=a"
    assert view.bare.href() == "/ops?bundle=a&rank=3"
    assert View.parse("/ops", "?bundle=a&rank=x").rank is None
