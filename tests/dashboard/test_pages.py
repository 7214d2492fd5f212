"""The pages, asked as a browser asks: what they say of a small recording, where their links lead, and that no name is ever markup."""

from __future__ import annotations

import csv
import io
import re
import shutil
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import handmade
import pytest
from dashclient import ORIGIN, Client, analysed, fp32_trace, links, small_bundle, small_trace, texts

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
from gpudiag_dashboard import library
from gpudiag_dashboard.app import create_app
from gpudiag_dashboard.pages import PAGES

HOSTILE = '<script>alert(1)</script>"onerror=\x1b[31m\u202eevil ' + "x" * 10_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("recordings")
    small_bundle(made / "runs" / "one")
    small_trace(made / "other.json", name="aten::bmm")
    small_trace(made / "hostile.json", name=HOSTILE)
    return made


@pytest.fixture(scope="module")
def client(folder: Path) -> Client:
    made = Client(create_app(folder))
    for name in ("runs/one", "other.json", "hostile.json"):
        analysed(made, name)
    return made


def content(client: Client, address: str) -> Any:
    found = urlsplit(address)
    return client.content(found.path, f"?{found.query}")


def test_every_page_has_a_path_and_a_title_of_its_own() -> None:
    assert len({page.path for page in PAGES}) == len({page.title for page in PAGES}) == len(PAGES)
    assert [page.path for page in PAGES if not page.needs_bundle] == ["/"]


@pytest.mark.slow
def test_every_page_is_reached_from_the_head_of_a_recording(client: Client) -> None:
    head = client.go("/overview", "?bundle=runs/one")["head"]["children"]
    reached = {urlsplit(address).path for _, address in links(head)}
    assert reached == {page.path for page in PAGES}


def test_the_frame_shows_a_page_once_and_leaves_it_alone_when_only_its_query_changes(client: Client) -> None:
    first = client.go("/ops", "?bundle=runs/one")
    assert first["shown"]["data"]["title"] == "Ops - runs/one - gpudiag"
    again = client.written(
        "main.children", {"address.pathname": "/ops", "address.search": "?bundle=runs/one&sort=calls", "shown.data": first["shown"]["data"]}
    )
    assert "main" not in again
    assert "main" in client.go("/ops", "?bundle=other.json", shown=first["shown"]["data"])


@pytest.mark.parametrize(
    ("pathname", "search", "said"),
    [
        ("/opps", "", "no page is named '/opps'; did you mean '/ops'?"),
        ("/ops", "", "No recording is chosen"),
        ("/ops", "?bundle=runs/on", "did you mean 'runs/one'?"),
        ("/ops", "?bundle=../../etc/passwd", "no recording is named"),
        ("/compare", "?bundle=runs/one&other=none", "no recording is named 'none'"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(client: Client, pathname: str, search: str, said: str) -> None:
    assert said in texts(client.go(pathname, search)["main"]["children"])


def test_the_overview_tells_where_the_step_goes(client: Client) -> None:
    shown = content(client, "/overview?bundle=runs/one")
    told = texts(shown)
    assert "A step takes 1.00 ms." in told
    assert "NVIDIA A100" in told or "A100" in told
    assert "100.0 %" in told
    assert "/timeline" in {urlsplit(address).path for _, address in links(shown)}
    for title in ("Step time", "busy", "MFU", "Top finding", "Data quality"):
        assert title in told.partition("Where a step goes")[0]
    assert _all(shown, "Article")  # the first findings, as cards


def test_a_card_names_the_recorded_program_and_leads_to_its_test_where_programs_may_be_started(tmp_path: Path) -> None:
    small_bundle(tmp_path / "ran", make=fp32_trace, command=("train.py", "--lr", "1"))
    client = Client(create_app(tmp_path))
    analysed(client, "ran")
    shown = content(client, "/findings?bundle=ran")
    assert f" -o {tmp_path / 'ran'} train.py --lr 1" in texts(shown)
    assert "--from" not in texts(shown)  # it holds no report.json yet
    assert "train.py ARGS" not in texts(shown)
    assert "Test it here" not in texts(shown)
    own = Client(create_app(tmp_path, allow_run=True, token="t"), {**ORIGIN, "Cookie": "gpudiag_token_8050=t"})  # noqa: S106
    analysed(own, "ran")
    assert "/experiments" in {urlsplit(address).path for _, address in links(content(own, "/findings?bundle=ran"))}


def test_a_finding_leads_to_ops_and_to_the_timeline(client: Client) -> None:
    shown = content(client, "/findings?bundle=runs/one")
    targets = [urlsplit(address) for _, address in links(shown)]
    windows = [target.query for target in targets if target.path == "/timeline"]
    assert windows
    for query in windows:
        found = dict(part.split("=") for part in query.split("&"))
        assert 0 <= int(found["from"]) < int(found["to"]) <= 3_000_000


def test_ops_are_summed_sorted_and_filtered_by_the_server(client: Client) -> None:
    assert names(content(client, "/ops?bundle=runs/one")) == ["aten::mm", "aten::add"]
    assert names(content(client, "/ops?bundle=runs/one&find=ADD")) == ["aten::add"]
    assert names(content(client, "/ops?bundle=runs/one&bound=compute")) == ["aten::mm"]
    assert names(content(client, "/ops?bundle=runs/one&group=kernel")) == ["sgemm_128x128", "add_kernel"]
    one = texts(content(client, "/ops?bundle=runs/one&op=aten::mm"))
    assert "3 calls, 180 us, 75.0 % of the time of all ops" in one
    assert "[512, 512] [512, 512] fp32" in one


def test_an_op_that_is_not_there_and_a_grouping_without_data_are_said(client: Client) -> None:
    assert "no op of this recording is named 'aten::nothing'" in texts(content(client, "/ops?bundle=runs/one&op=aten::nothing"))
    by_module = texts(content(client, "/ops?bundle=runs/one&group=module"))
    assert "no op of this recording is attributed to an nn.Module" in by_module
    assert "with_stack=True" in by_module
    assert "No row matches" in texts(content(client, "/ops?bundle=runs/one&find=zzz"))


def names(shown: Any) -> list[str]:
    """Return the text of the first cell of each line of the table."""
    rows = [row for body in _all(shown, "Tbody") for row in _all(body, "Tr")]
    return [texts(_all(row, "Th")[0]).split()[0] for row in rows]


def _all(component: Any, kind: str) -> list[Any]:
    if isinstance(component, list):
        return [found for child in component for found in _all(child, kind)]
    if not isinstance(component, dict):
        return []
    own = [component] if component.get("type") == kind else []
    return own + _all(component.get("props", {}).get("children"), kind)


def test_of_a_tree_of_modules_only_what_is_opened_is_there(tmp_path: Path) -> None:
    """A browser draws some hundred rows at once: 249 modules held one up for minutes."""
    events = [*handmade.steps(0, 1000, 2000), handmade.frame("nn.Module: Net_0", 0, 900)]
    for k in range(3):
        begin = 300 * k
        events += [
            handmade.frame(f"nn.Module: {kind}_{k}", begin + 1 + 2 * d, begin + 200 - 2 * d)
            for d, kind in enumerate(("Block", "Mlp", "Linear"))
        ]
        events += [handmade.op("aten::mm", begin + 20, begin + 60, [[64, 64], [64, 64]]), handmade.call(begin + 30, k + 1)]
        events += [handmade.kernel(begin + 40, begin + 90, k + 1, "sgemm")]
    handmade.write(tmp_path / "deep.json", *events, deviceProperties=[handmade.A100_PROPERTIES])
    client = Client(create_app(tmp_path))
    analysed(client, "deep.json")
    closed = content(client, "/ops?bundle=deep.json&group=module")
    assert "Mlp_1" in texts(closed)
    assert "Linear_1" not in texts(closed)
    arrows = {label.rpartition(" ")[2]: href for label, href in links(closed) if "the parts of" in label}
    opened = content(client, arrows["Mlp_1"])
    assert "Linear_1" in texts(opened)
    assert "Linear_0" not in texts(opened)
    (back,) = (href for label, href in links(opened) if "hide the parts of" in label)
    assert texts(content(client, back)) == texts(closed)
    assert "Linear_2" in texts(content(client, "/ops?bundle=deep.json&group=module&find=linear_2"))


def test_the_filter_goes_into_the_address_and_back_to_the_first_sheet(client: Client) -> None:
    values = {"address.pathname": "/ops", "address.search": "?bundle=runs/one&sort=calls&sheet=3", "ops-find.value": "mm"}
    assert client.written("go.href", values, reads="ops-find")["go"]["href"] == "/ops?bundle=runs%2Fone&sort=calls&find=mm"
    assert client.written("go.href", {**values, "ops-find.value": ""}, reads="ops-find") == {}  # nothing has changed


def test_the_filter_follows_the_address_when_somebody_goes_back(client: Client) -> None:
    values = {"address.pathname": "/ops", "address.search": "?bundle=runs/one&find=mm", "ops-find.value": "add"}
    assert client.written("ops-find.value", values)["ops-find"]["value"] == "mm"
    assert client.written("ops-find.value", {**values, "ops-find.value": "mm"}) == {}  # nor does it disturb who is typing


@pytest.mark.parametrize(
    ("click", "leads"),
    [
        ({"points": [{"customdata": 0}]}, "/ops?bundle=runs%2Fone&op=aten%3A%3Amm"),
        ({"points": [{"customdata": 10**9}]}, None),
        ({"points": [{"customdata": True}]}, None),
        ({"points": [{}]}, None),
        ({"points": [7]}, None),
        ({"points": {}}, None),
        ("x", None),
        (None, None),
    ],
)
def test_a_point_of_the_roofline_leads_to_its_op(client: Client, click: Any, leads: str | None) -> None:
    values = {"address.pathname": "/roofline", "address.search": "?bundle=runs/one", "roofline-figure.clickData": click}
    assert client.written("go.href", values, reads="roofline-figure").get("go", {}).get("href") == leads


def test_the_points_of_one_op_stand_out(client: Client) -> None:
    graph = _all(content(client, "/roofline?bundle=runs/one&op=aten::mm"), "Graph")[0]
    chosen = {trace["name"]: len(trace["selectedpoints"]) for trace in graph["props"]["figure"]["data"] if "selectedpoints" in trace}
    assert sum(chosen.values()) == 1
    assert len(chosen) >= 1


def test_two_recordings_are_compared(client: Client) -> None:
    choice = content(client, "/compare?bundle=runs/one")
    assert ("other.json", "/compare?bundle=runs%2Fone&other=other.json") in list(links(choice))
    told = texts(content(client, "/compare?bundle=runs/one&other=other.json"))
    assert "aten::bmm" in told
    assert "gone" in told
    assert "new" in told


def test_the_page_of_a_comparison_takes_the_difference_apart(tmp_path: Path) -> None:
    small_trace(tmp_path / "a.json")
    fp32_trace(tmp_path / "b.json")
    client = Client(create_app(tmp_path))
    for name in ("a.json", "b.json"):
        analysed(client, name)
    assert "part of the difference" in texts(content(client, "/compare?bundle=a.json&other=b.json"))


def test_names_of_a_recording_are_text_and_short(client: Client) -> None:
    """Every string that reaches the browser is checked: nothing is markup, no escape sequence is left, and 10 kB are cut."""
    for path in ("/overview", "/findings", "/ops", "/ops?group=signature", "/roofline", "/compare?other=other.json"):
        joint = "&" if "?" in path else "?"
        shown = content(client, f"{path}{joint}bundle=hostile.json")
        for text in _strings(shown):
            assert "\x1b" not in text
            assert "\u202e" not in text
            assert len(text) < 5_000 or "%" in text  # addresses hold the whole name, quoted
        for kind in ("Markdown", "DangerouslySetInnerHTML", "Script", "Iframe"):
            assert not _all(shown, kind)
    assert "<script>alert(1)</script>" in texts(content(client, "/ops?bundle=hostile.json"))  # as text, which a browser shows as it is


def _strings(component: Any) -> list[str]:
    if isinstance(component, str):
        return [component]
    if isinstance(component, list):
        return [text for child in component for text in _strings(child)]
    if isinstance(component, dict):
        return [text for value in component.values() for text in _strings(value)]
    return []


def test_the_analysis_is_shown_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    small_trace(tmp_path / "trace.json")
    gate, real = threading.Event(), library.open_recording

    def slow(path: str, **options: Any) -> Any:
        options["progress"]("linking")
        gate.wait(20)
        return real(path)

    monkeypatch.setattr(library, "open_recording", slow)
    client = Client(create_app(tmp_path))
    client.go("/overview", "?bundle=trace.json")
    time.sleep(0.2)
    shown = client.go("/overview", "?bundle=trace.json")
    assert "Analysing trace.json" in texts(shown["main"]["children"])
    assert "linking ..." in texts(shown["main"]["children"])
    assert shown["poll"]["disabled"] is False
    gate.set()
    analysed(client, "trace.json")
    assert "Analysing" not in texts(client.go("/overview", "?bundle=trace.json")["main"]["children"])


def test_a_run_without_a_window_says_so_and_shows_the_page_when_it_has_one(tmp_path: Path) -> None:
    small_bundle(tmp_path / "one", finished=False, trace=False)
    client = Client(create_app(tmp_path))
    deadline = time.monotonic() + 20
    while "recorded no window yet" not in texts((shown := client.go("/overview", "?bundle=one"))["main"]["children"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert shown["poll"]["disabled"] is False
    assert "/telemetry?bundle=one" in {address for _, address in links(shown["main"]["children"])}
    shutil.rmtree(tmp_path / "one")
    small_bundle(tmp_path / "one", finished=False)
    analysed(client, "one")
    assert "A step takes" in texts(client.content("/overview", "?bundle=one"))


def listed(client: Client, search: str = "") -> Any:
    """Return what the list of recordings shows for an address."""
    return client.written("bundles-list.children", {"bundles-clock.n_intervals": 0, "address.pathname": "/", "address.search": search})


def column(shown: Any, title: str) -> list[str]:
    """Return the texts of one column of the only table."""
    titles = [texts(head) for head in _all(_all(shown, "Thead"), "Th")]
    place = titles.index(title)
    rows = [row["props"]["children"] for body in _all(shown, "Tbody") for row in _all(body, "Tr")]
    return [texts(row[place]) for row in rows]


def test_the_list_tells_live_from_finished_and_links_what_can_be_read(tmp_path: Path) -> None:
    small_bundle(tmp_path / "live", finished=False)
    small_bundle(tmp_path / "done")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "manifest.json").write_text("{")
    shown = listed(Client(create_app(tmp_path)))["bundles-list"]["children"]
    assert sorted(column(shown, "status")) == ["cannot be read", "finished", "recording"]
    inside = {text: address for body in _all(shown, "Tbody") for text, address in links(body) if not address.startswith("/?")}
    assert inside == {"live": "/telemetry?bundle=live", "done": "/overview?bundle=done"}
    assert "not analysed yet" in texts(shown)


def test_the_list_shows_what_an_analysis_found_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUDIAG_NO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "runs"
    small_bundle(folder / "one")
    client = Client(create_app(folder))
    assert column(listed(client)["bundles-list"]["children"], "top finding") == ["not analysed yet"]
    analysed(client, "one")
    for again in (client, Client(create_app(folder))):  # another dashboard knows it too, without analysing
        shown = listed(again)["bundles-list"]["children"]
        assert column(shown, "step time") == ["1.00 ms analysed steps"]
        assert column(shown, "top finding") == ["Low model FLOPs utilisation (MFU)"]
        assert any("/findings?bundle=one&rule=" in address for _, address in links(shown))


def test_all_that_was_not_analysed_is_analysed_at_a_click(tmp_path: Path) -> None:
    small_bundle(tmp_path / "one")
    small_trace(tmp_path / "two.json")
    client = Client(create_app(tmp_path))
    assert listed(client)["bundles-analyse"]["children"] == "Analyse the 2 that were not analysed yet"
    client.written("bundles-asked.children", {"bundles-analyse.n_clicks": 1})
    deadline = time.monotonic() + 60
    while any("analys" in text for text in column(listed(client)["bundles-list"]["children"], "top finding")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert listed(client)["bundles-analyse"]["style"] == {"display": "none"}


def test_what_cannot_be_analysed_is_said_once_it_is_known(tmp_path: Path) -> None:
    small_bundle(tmp_path / "one", trace=False)
    client = Client(create_app(tmp_path))
    client.go("/overview", "?bundle=one")
    deadline = time.monotonic() + 20
    while "not analysed yet" in (told := texts(listed(client)["bundles-list"]["children"])):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "cannot be analysed" in told
    assert "no window was recorded" in told
    assert listed(client)["bundles-analyse"]["style"] == {"display": "none"}


def test_the_list_is_sorted_and_filtered_by_the_address(tmp_path: Path) -> None:
    small_bundle(tmp_path / "b")
    small_trace(tmp_path / "a.json")
    small_trace(tmp_path / "c.json")
    client = Client(create_app(tmp_path))

    def order(search: str) -> list[str]:
        return [text.split()[0] for text in column(listed(client, search)["bundles-list"]["children"], "recording")]

    assert order("?sort=recording") == ["a.json", "b", "c.json"]
    assert order("?sort=-recording") == ["c.json", "b", "a.json"]
    assert order("?sort=steps") == order("?sort=-steps") == ["b", *order("?find=json")]  # what is not known comes last
    assert set(order("?find=JSON")) == {"a.json", "c.json"}
    assert "No recording matches" in texts(listed(client, "?find=zzz")["bundles-list"]["children"])
    heads = dict(links(_all(listed(client, "?sort=steps")["bundles-list"]["children"], "Thead")))
    assert (heads["steps"], heads["recording"]) == ("/?sort=-steps", "/?sort=recording")


def test_two_are_checked_and_compared_the_older_one_first(tmp_path: Path) -> None:
    small_bundle(tmp_path / "old")
    small_trace(tmp_path / "new.json")
    client = Client(create_app(tmp_path))
    one = listed(client, "?first=new.json")["bundles-list"]["children"]
    assert "is chosen: check another one" in texts(one)
    both = listed(client, "?first=new.json&second=old")["bundles-list"]["children"]
    assert {" ".join(text.split()): address for text, address in links(both)}[
        "Compare old with new.json"
    ] == "/compare?bundle=old&other=new.json"
    boxes = {text.split(" ", 1)[1].strip(): address for text, address in links(_all(both, "Tbody")) if "compare" in text}
    assert boxes == {"compare old no longer": "/?first=new.json", "compare new.json no longer": "/?first=old"}
    small_trace(tmp_path / "third.json")
    assert column(listed(Client(create_app(tmp_path)), "?first=old&second=new.json")["bundles-list"]["children"], "compare").count("") == 1


def test_the_list_is_made_anew_only_where_anything_has_changed(tmp_path: Path) -> None:
    small_bundle(tmp_path / "one")
    client = Client(create_app(tmp_path))
    shown = listed(client)["bundles-shown"]["data"]
    values = {"bundles-clock.n_intervals": 1, "address.pathname": "/", "bundles-shown.data": shown}
    assert client.written("bundles-list.children", values) == {}
    assert client.written("bundles-list.children", {**values, "address.search": "?find=one"}) != {}


def test_an_empty_folder_says_how_to_fill_it(tmp_path: Path) -> None:
    shown = listed(Client(create_app(tmp_path)))["bundles-list"]["children"]
    assert f"gpudiag run -o {tmp_path.name}/first train.py" in texts(shown)


def test_tabs_of_pages_that_are_empty_are_grey_and_say_why(client: Client) -> None:
    head = client.go("/overview", "?bundle=other.json")["head"]["children"]
    grey = {texts(tab) for tab in _all(head, "Span") if "off" in tab["props"].get("className", "").split()}
    assert "Telemetry  (empty: a trace holds no telemetry: only a recording of gpudiag run does)" in grey
    assert any(text.startswith("Ranks  (empty: one rank was recorded)") for text in grey)
    assert any(text.startswith("Memory") for text in grey)
    assert not any(text.startswith(("Overview", "Ops", "Timeline", "Roofline", "Compare")) for text in grey)


def test_ops_are_saved_as_csv_as_far_as_the_filters_leave_them(client: Client) -> None:
    values = {"ops-save.n_clicks": 1, "address.pathname": "/ops", "address.search": "?bundle=runs/one&find=add"}
    saved = client.written("ops-file.data", values)["ops-file"]["data"]
    assert saved["filename"] == "runs-one-op.csv"
    rows = list(csv.DictReader(io.StringIO(saved["content"])))
    assert [(row["group"], row["calls"], row["kernel_ns"]) for row in rows] == [("aten::add", "3", "60000")]


def test_below_the_path_of_a_proxy_every_address_begins_with_it(tmp_path: Path) -> None:
    small_bundle(tmp_path / "one")
    client = Client(create_app(tmp_path, base="/gpudiag"))
    below = {"environ_overrides": {"SCRIPT_NAME": "/gpudiag"}}
    page = client.http.get("/", headers=client.headers, **below).get_data(as_text=True)
    assert 'href="/gpudiag/report.css"' in page
    assert '"requests_pathname_prefix":"/gpudiag/"' in page.replace("\\u002f", "/")
    assert not re.findall(r'(?:src|href)="/(?!gpudiag/)', page)
    values = {"bundles-clock.n_intervals": 0, "address.pathname": "/gpudiag/", "address.search": ""}
    answer = client.http.post("/_dash-update-component", json=client.body("bundles-list.children", values), headers=client.headers, **below)
    shown = answer.get_json()["response"]["bundles-list"]["children"]
    assert ("one", "/gpudiag/overview?bundle=one") in list(links(shown))


def test_its_health_is_told_to_whoever_asks_and_nothing_else_is(tmp_path: Path) -> None:
    client = Client(create_app(tmp_path / "runs", everywhere=True, token="secret"), {"Host": "10.0.0.7"})  # noqa: S106 of no server
    assert client.get("/healthz").status_code == 503
    (tmp_path / "runs").mkdir()
    answer = client.get("/healthz")
    assert (answer.status_code, answer.get_data(as_text=True)) == (200, "ok\n")
    assert client.get("/").status_code == 401
    assert client.http.post("/healthz", headers=client.headers).status_code in (401, 403, 405)
