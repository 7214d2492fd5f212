"""Nobody but the pages of this server asks it for anything, and nobody without the token starts anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from dashclient import HOST, ORIGIN, Client, small_trace

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
from gpudiag_dashboard import security
from gpudiag_dashboard.app import create_app, is_loopback, list_host_names

TOKEN = "the-token-of-this-start"  # noqa: S105 of no server
COOKIE = security.name_cookie(HOST)
BUNDLES = {"bundles-clock.n_intervals": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("recordings")
    small_trace(made / "trace.json")
    return made


@pytest.fixture(scope="module")
def local(folder: Path) -> Any:
    return create_app(folder, allow_run=True, token=TOKEN)


@pytest.fixture(scope="module")
def public(folder: Path) -> Any:
    return create_app(folder, token=TOKEN, names=list_host_names("192.0.2.7"), everywhere=True)


def asked(app: Any, **changes: str | None) -> int:
    """Return the status of a callback that lists the recordings, with headers changed or (None) taken out."""
    headers = {**ORIGIN, **{name.replace("_", "-"): value for name, value in changes.items()}}
    client = Client(app, {name: value for name, value in headers.items() if value is not None})
    return client.callback("bundles-list.children", BUNDLES).status_code


def test_the_pages_of_this_server_are_answered(local: Any) -> None:
    assert asked(local) == 200
    assert Client(local).get("/").status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8050",
        "127.0.0.1.evil.example",
        "",
        "192.0.2.7",
        "[::2]:80",
        "localhost@evil.example",
        "evil.example@localhost",
        "127.0.0.1/evil.example",
    ],
)
def test_a_name_that_is_not_this_servers_is_refused(local: Any, host: str) -> None:
    client = Client(local, {"Host": host})
    answer = client.get("/")
    assert answer.status_code == 400
    assert asked(local, Host=host, Origin=f"http://{host}") in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "localhost:9", "127.0.0.1:8050", "[::1]:8050", "LOCALHOST:8050"])
def test_loopback_is_known_by_its_names_at_any_port(local: Any, host: str) -> None:
    assert Client(local, {"Host": host}).get("/").status_code == 200


@pytest.mark.parametrize(
    "changes",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": None},
        {"Origin": "http://127.0.0.1:8051"},
        {"Origin": "http://["},
        {"Origin": f"http://{HOST}@evil.example"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "none"},
    ],
)
def test_a_post_from_elsewhere_is_refused(local: Any, changes: dict[str, str | None]) -> None:
    assert asked(local, **changes) == 403


def test_an_old_browser_without_fetch_metadata_is_known_by_its_origin(local: Any) -> None:
    assert asked(local, Sec_Fetch_Site=None) == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_may_link_to_a_page_and_load_nothing(local: Any, site: str) -> None:
    def got(path: str, **kind: str) -> int:
        headers = {"Host": HOST, "Sec-Fetch-Site": site, **{f"Sec-Fetch-{name.title()}": value for name, value in kind.items()}}
        return Client(local, headers).get(path).status_code

    assert got("/overview?bundle=x", mode="navigate", dest="document") == 200
    assert got("/", mode="navigate", dest="iframe") == 403
    for path in ("/_dash-layout", "/_favicon.ico", "/report.css", "/assets/gpudiag.js"):
        assert [got(path, mode="no-cors", dest="script"), got(path, mode="cors", dest="empty"), got(path)] == [403, 403, 403], path


def test_two_dashboards_on_one_host_keep_their_tokens_apart(folder: Path) -> None:
    """Cookies know no ports: a browser sends both to both."""
    one, other = (create_app(folder, token=f"token-{name}", everywhere=True) for name in ("one", "other"))
    kept = []
    for app, port in ((one, 8050), (other, 9000)):
        headers = {"Host": f"127.0.0.1:{port}"}
        answer = Client(app, headers).get(f"/?token=token-{'one' if app is one else 'other'}")
        kept.append(answer.headers["Set-Cookie"].partition(";")[0])
    cookies = "; ".join(kept)
    assert [
        Client(app, {"Host": f"127.0.0.1:{port}", "Cookie": cookies}).get("/").status_code for app, port in ((one, 8050), (other, 9000))
    ] == [200, 200]
    assert Client(one, {"Host": "127.0.0.1:9000", "Cookie": cookies}).get("/").status_code == 401
    assert [security.name_cookie(host) for host in ("box", "[::1]:8050", "x:y")] == [
        "gpudiag_token_80",
        "gpudiag_token_8050",
        "gpudiag_token_80",
    ]


def test_another_address_asks_for_the_token_at_every_request(public: Any) -> None:
    for path in ("/", "/report.css", "/_dash-layout", "/_dash-dependencies", "/assets/gpudiag.js"):
        assert Client(public).get(path).status_code == 401, path
    assert asked(public) == 401
    assert asked(public, Cookie=f"{COOKIE}=wrong") == 401
    assert asked(public, Cookie=f"{COOKIE}={TOKEN}") == 200
    assert asked(public, Cookie=f"{COOKIE}={TOKEN}", Host="192.0.2.7:8050", Origin="http://192.0.2.7:8050") == 200
    assert asked(public, Cookie=f"{COOKIE}={TOKEN}", Host="evil.example", Origin="http://evil.example") == 400


def test_the_token_moves_from_the_address_into_a_cookie(public: Any) -> None:
    client = Client(public)
    answer = client.get(f"/ops?bundle=a%20b&token={TOKEN}&sort=calls")
    assert answer.status_code == 302
    assert leads(answer) == "/ops?bundle=a%20b&sort=calls"
    assert TOKEN not in answer.get_data(as_text=True)
    cookie = answer.headers["Set-Cookie"]
    assert f"{COOKIE}={TOKEN}" in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert client.get("/").status_code == 200  # with the cookie
    assert Client(public).get("/?token=wrong").status_code == 401


def leads(answer: Any) -> str:
    """Return where a browser goes on to."""
    return str(answer.headers["Location"])


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example", "//evil.example/%2e%2e", '/"><script>', "/%0d%0aX: y"])
def test_the_way_to_the_cookie_never_leads_to_another_server(public: Any, path: str) -> None:
    answer = Client(public).get(f"{path}?token={TOKEN}&a=%22%3E%3Cscript%3E")
    assert re.fullmatch(r"/([\w%.-][\w%./-]*)?\?a=%22%3E%3Cscript%3E", leads(answer)), leads(answer)
    assert "<script" not in answer.get_data(as_text=True)


def may_run(app: Any, cookie: str | None) -> str | None:
    headers = {**ORIGIN, **({"Cookie": cookie} if cookie else {})}
    with app.server.test_request_context("/", headers=headers):
        return security.explain_run_refusal()


def test_starting_needs_the_option_and_the_token_on_loopback_too(folder: Path, local: Any) -> None:
    assert may_run(local, f"{COOKIE}={TOKEN}") is None
    assert "needs the token" in (may_run(local, None) or "")
    assert "needs the token" in (may_run(local, f"{COOKIE}=x") or "")
    off = create_app(folder, token=TOKEN)
    assert "--allow-run" in (may_run(off, f"{COOKIE}={TOKEN}") or "")


def test_two_starts_have_two_tokens() -> None:
    assert len({security.create_token() for _ in range(50)}) == 50
    assert len(security.create_token()) >= 43  # 256 bits in base64


def test_headers_keep_other_scripts_and_frames_out(local: Any) -> None:
    headers = Client(local).get("/").headers
    policy = dict(part.strip().partition(" ")[::2] for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in policy["script-src"]
    assert "http" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "same-origin"


@pytest.mark.parametrize(
    "path", ["/assets/../app.py", "/assets/..%2fapp.py", "/_dash-component-suites/dash/../../../etc/passwd", "/assets/%2e%2e/server.py"]
)
def test_no_file_outside_of_the_assets_is_served(local: Any, path: str) -> None:
    answer = Client(local).get(path)
    assert b"import" not in answer.data
    assert b"root:" not in answer.data


MALFORMED: list[Any] = [
    None,
    [],
    "text",
    {},
    {"output": 5},
    {"output": "no.such", "inputs": []},
    {"output": "bundles-list.children"},
    {"output": "bundles-list.children", "inputs": "x"},
    {"output": "bundles-list.children", "inputs": [1]},
    {"output": "bundles-list.children", "inputs": [{"id": "bundles-clock", "property": "n_intervals"}], "outputs": 7},
    {
        "output": "bundles-list.children",
        "inputs": [{"id": "bundles-clock", "property": "n_intervals"}],
        "outputs": None,
        "changedPropIds": {"a": 1},
    },
]


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_callbacks_are_answered_in_one_line_of_kind_400(local: Any, body: Any, folder: Path) -> None:
    answer = Client(local).http.post("/_dash-update-component", data=json.dumps(body), content_type="application/json", headers=ORIGIN)
    assert answer.status_code == 400
    one_line(answer, folder)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_is_one_line_too(local: Any, data: bytes, folder: Path) -> None:
    answer = Client(local).http.post("/_dash-update-component", data=data, content_type="application/json", headers=ORIGIN)
    assert 400 <= answer.status_code < 500
    one_line(answer, folder)


def test_a_body_that_is_too_large_is_refused(local: Any, folder: Path) -> None:
    data = b"x" * (security.MOST_BODY_BYTES + 1)
    answer = Client(local).http.post("/_dash-update-component", data=data, content_type="application/json", headers=ORIGIN)
    assert 400 <= answer.status_code < 500
    one_line(answer, folder)


def one_line(answer: Any, folder: Path) -> None:
    text = answer.get_data(as_text=True)
    assert text.startswith("gpudiag: ")
    assert text.count("\n") == 1
    assert "Traceback" not in text
    assert str(folder) not in text
    assert ".py" not in text


@pytest.mark.parametrize("value", [7, ["x"], {"a": {"b": []}}, "x" * 5_000, "\x00", True])
def test_well_formed_callbacks_with_foreign_values_show_no_stack(local: Any, value: Any, folder: Path) -> None:
    """Of every callback of every page: each input and state is a value of another type than a page sends."""
    client = Client(local, {**ORIGIN, "Cookie": f"{COOKIE}=wrong"})
    for key in client.app.callback_map:
        known = client.app.callback_map[key]
        if "callback" not in known:
            continue  # runs in the browser
        values = {f"{place['id']}.{place['property']}": value for place in (*known["inputs"], *known["state"])}
        first = key.strip(".").partition("...")[0].partition("@")[0]
        answer = client.callback(first, values)
        text = answer.get_data(as_text=True)
        assert answer.status_code in (200, 204, 400), (key, text)
        assert "Traceback" not in text, key
        assert "internal error" not in text, key
        assert str(Path(__file__).parents[2]) not in text, key


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104 asked about, not bound
        ("192.0.2.7", False),
        ("box", False),
    ],
)
def test_only_loopback_is_served_without_a_token(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
