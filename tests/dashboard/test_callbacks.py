"""Whatever is sent to a callback: an answer, or one line of kind 400. Never a failure of ours, never a stack, never a path."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from dashclient import ORIGIN, Client, analysed, small_bundle
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
from gpudiag_dashboard.app import create_app
from gpudiag_dashboard.pages import PAGES

PLAIN: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["", "\x00", "x" * 1_000_000, "\ud800", "__proto__", "..", "<script>", 10**30, -1, 2**63, 1e308])
)  # fmt: skip
DEEP: Any = None
for _ in range(100):  # more than Python's stack holds are no JSON (test_security)
    DEEP = [DEEP] if _ % 2 else {"a": DEEP}
JSON = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8
) | st.just(DEEP)
NAMES = (
    *("from", "to", "lane", "op", "event", "row", "first", "count", "number", "pixels", "at_ns", "direction", "setup", "from_ns", "to_ns"),
    *("points", "customdata", "state", "key", "sort", "sheet", "rank", "group", "phase", "bound", "find", "fix", "axis", "module"),
)
"""What callbacks look for in the values that they are given."""
LIKELY = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6)
VALUES = st.sampled_from(["one", "two", "0", "-1", "9" * 19, "kernels-0", ""]) | st.text()
SEARCHES = st.lists(st.tuples(st.sampled_from(("bundle", "other", *NAMES)), VALUES), max_size=6)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    folder = tmp_path_factory.mktemp("project") / "runs"
    small_bundle(folder / "one")
    made = Client(create_app(folder, allow_run=True, token="a-token"), {**ORIGIN, "Cookie": "gpudiag_token_8050=a-token"})  # noqa: S106
    analysed(made, "one")
    return made


def bodies(client: Client) -> st.SearchStrategy[Any]:
    """Requests for a callback of the app: with an address of a page as a rule, and values that its own script would never send."""
    known = [(key, one) for key, one in sorted(client.app.callback_map.items()) if "callback" in one]

    @st.composite
    def body(draw: st.DrawFn) -> Any:
        key, wanted = draw(st.sampled_from(known))
        values = {f"{place['id']}.{place['property']}": draw(JSON | LIKELY) for place in (*wanted["inputs"], *wanted["state"])}
        if draw(st.integers(0, 9)):
            pairs = [("bundle", "one"), *draw(SEARCHES)]
            values["address.search"] = "?" + "&".join(f"{name}={value}" for name, value in pairs)
            values["address.pathname"] = draw(st.sampled_from([page.path for page in PAGES]))
        made = client.body(key.strip(".").partition("...")[0].partition("@")[0], values, reads=wanted["inputs"][0]["id"])
        if draw(st.integers(0, 4)):
            return made
        return spoilt(json.loads(json.dumps(made)), random.Random(draw(st.integers(0, 2**16))), draw(JSON))

    return body()


def spoilt(body: Any, rng: random.Random, value: Any) -> Any:
    """Return the request with one of its parts gone, twice, or replaced."""
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return body
        key = rng.choice(keys)
        if isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.6:
            place = place[key]
            continue
        if rng.random() < 0.3:
            del place[key]
        elif rng.random() < 0.3 and isinstance(place, list):
            place.append(place[key])
        else:
            place[key] = value
        return body


def answered(client: Client, body: Any) -> None:
    data = json.dumps(body)  # with NaN and Infinity, as no browser does
    answer = client.http.post("/_dash-update-component", data=data, content_type="application/json", headers=client.headers)
    text = answer.get_data(as_text=True)
    assert answer.status_code in (200, 204, 400, 413), text[:500]
    assert "Traceback" not in text
    assert "internal error" not in text
    assert str(Path(__file__).parents[2]) not in text
    if answer.status_code >= 400:
        assert text.startswith("gpudiag: ")
        assert text.count("\n") == 1


def attack(client: Client, examples: int) -> None:
    @settings(max_examples=examples, database=None)
    @given(body=bodies(client))
    def check(body: Any) -> None:
        answered(client, body)

    check()


@pytest.mark.parametrize("half", [b'"\\ud800"', b'"\xed\xa0\x80"'], ids=["escaped", "as-it-is"])
def test_half_a_surrogate_pair_is_refused(client: Client, half: bytes) -> None:
    values = {"timeline-search.data": "HALF", "address.search": "?bundle=one"}
    body = json.dumps(client.body("timeline-found.data", values, reads="timeline-search"))
    assert '"HALF"' in body
    data = body.encode().replace(b'"HALF"', half)
    answer = client.http.post("/_dash-update-component", data=data, content_type="application/json", headers=client.headers)
    assert answer.status_code == 400
    assert answer.get_data(as_text=True).startswith("gpudiag: ")


def test_malformed_callbacks_are_answered(client: Client) -> None:
    attack(client, 40)


@pytest.mark.slow
def test_many_malformed_callbacks_are_answered(client: Client) -> None:
    attack(client, 1_000)
