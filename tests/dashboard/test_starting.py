"""Nothing is started but the fix of a finding on the program of a recording, by a page of this server, with the token, as it was shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dashclient import ORIGIN, Client, small_bundle, small_trace, texts

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
from gpudiag_dashboard import jobs
from gpudiag_dashboard.app import create_app
from gpudiag_dashboard.jobs import Job
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.pages.experiments import EXTENSION

from gpudiag.api import Report
from gpudiag.errors import InputError, UsageError
from gpudiag.experiment import offers
from gpudiag.model.bundle import Manifest
from gpudiag.model.finding import Ceiling, Finding

TOKEN = "the-token-of-this-start"  # noqa: S105 of these tests alone
WORDS = ("train.py", "--lr", "1 e-3", "--", "-o")
FIXES = ("bf16", "accumulation", "batch-size")


class Recorder:
    """Stands in for the jobs of a server: says what it was asked to start."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []
        self.stopped = 0
        self.busy = False

    def close(self) -> None:
        pass

    def start(self, argv: list[str], **told: str) -> Job:
        if self.busy:
            raise UsageError("an experiment is running already")
        self.started.append(argv)
        return Job(told["bundle"], told["fix"], told["shown"], 1.0, "running", 0.0)

    def stop(self) -> bool:
        self.stopped += 1
        return True

    def now(self) -> None:
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("project")
    for name in ("one", "live", "silent"):
        small_bundle(made / "runs" / name)
    (made / "runs" / "one" / "report.json").write_text("{}")
    change(made / "runs" / "one", command=WORDS)
    change(made / "runs" / "live", command=WORDS, finished=False)
    small_trace(made / "runs" / "trace.json")
    small_bundle(made / "outside")
    change(made / "outside", command=WORDS)
    (made / "train.py").write_text("")
    return made


def change(bundle: Path, **changes: Any) -> None:
    path = bundle / "manifest.json"
    found = msgspec.json.decode(path.read_bytes(), type=Manifest)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, **changes)))


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project as the working directory; every recording has a finding that names FIXES."""
    monkeypatch.chdir(folder)
    plain = Library.report

    def report(self: Library, name: str) -> Report:
        found = plain(self, name)
        finding = Finding("X-01", "Too precise", "warning", "compute", "m", ceiling=Ceiling(1, 0.25, "formula", "w"), fixes=FIXES)
        return Report(msgspec.structs.replace(found.data, findings=(finding,)))

    monkeypatch.setattr(Library, "report", report)
    return folder


# -- the plan ---------------------------------------------------------------------------------------------------------------


def test_the_plan_is_the_recorded_program_with_the_fix(here: Path) -> None:
    library = Library(here / "runs")
    made = jobs.plan_run(library, "one", "bf16")
    assert (made.why_not, made.offer.ceiling_share, made.offer.findings) == ("", 0.25, ("Too precise",))
    bundle = str(here / "runs" / "one")
    assert made.argv == [sys.executable, "-m", "gpudiag", "ab", "--fix", "bf16", "--from", bundle, "--output", bundle, "--", *WORDS]
    assert made.shown == "gpudiag ab --fix bf16 --from runs/one --output runs/one -- train.py --lr '1 e-3' -- -o"
    assert made.digest == offers.digest_command(made.arguments)
    assert "--from" not in jobs.plan_run(library, "silent", "bf16").arguments
    assert str(jobs.plan_run(library, "one", "batch-size").offer.call) == "batch-size=x2"


@pytest.mark.parametrize(
    ("name", "why"),
    [("live", "still records"), ("silent", "does not hold the command"), ("trace.json", "a trace does not tell")],
)
def test_what_cannot_be_started_says_why_and_shows_the_command_to_type(here: Path, name: str, why: str) -> None:
    made = jobs.plan_run(Library(here / "runs"), name, "bf16")
    assert why in made.why_not
    assert (made.arguments, made.digest) == ((), "")
    assert made.shown.startswith("gpudiag ab --fix bf16 ")
    assert "train.py" in made.shown


def test_a_program_that_is_not_in_this_folder_is_not_started(here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    made = jobs.plan_run(Library(here / "runs"), "one", "bf16")
    assert "train.py: no such file" in made.why_not
    assert str(tmp_path) in made.hint


def test_results_are_never_written_through_a_link(here: Path, tmp_path: Path) -> None:
    small_bundle(tmp_path / "runs" / "linked")
    change(tmp_path / "runs" / "linked", command=WORDS)
    (tmp_path / "runs" / "linked" / "experiments").symlink_to(tmp_path / "runs")
    assert "is a link" in jobs.plan_run(Library(tmp_path / "runs"), "linked", "bf16").why_not
    (tmp_path / "runs" / "linked" / "experiments").unlink()
    (tmp_path / "runs" / "linked" / "experiments").symlink_to(tmp_path)
    with pytest.raises(InputError, match="leads out of the folder"):
        jobs.plan_run(Library(tmp_path / "runs"), "linked", "bf16")


def test_options_of_ours_in_a_foreign_manifest_are_not_run(here: Path, tmp_path: Path) -> None:
    small_bundle(tmp_path / "runs" / "evil")
    change(tmp_path / "runs" / "evil", command=("--sandbox=off", "--output", "/etc", "train.py"))
    made = jobs.plan_run(Library(tmp_path / "runs"), "evil", "bf16")
    assert "begins with an option" in made.why_not
    assert made.arguments == ()
    assert "/etc" not in made.shown


def test_fixes_that_no_finding_names_or_that_cannot_be_injected_are_refused(here: Path) -> None:
    library = Library(here / "runs")
    for fix, why in (("tf32", "no finding"), ("", "no finding"), ("bf16; rm", "no finding"), ("accumulation", "cannot be tried")):
        with pytest.raises(InputError, match=why):
            jobs.plan_run(library, "one", fix)


@pytest.mark.parametrize("name", ["../outside", "outside", "/etc", "", "..", "one/../../outside"])
def test_recordings_outside_the_folder_are_refused(here: Path, name: str) -> None:
    with pytest.raises(InputError, match="no recording is named"):
        jobs.plan_run(Library(here / "runs"), name, "bf16")


def test_what_was_shown_is_what_is_started(here: Path, tmp_path: Path) -> None:
    small_bundle(tmp_path / "runs" / "one")
    change(tmp_path / "runs" / "one", command=("train.py", "a"))
    library = Library(tmp_path / "runs")
    seen = jobs.plan_run(library, "one", "bf16").digest
    assert jobs.check_run_plan(library, "one", "bf16", seen).digest == seen
    change(tmp_path / "runs" / "one", command=("train.py", "b"))
    for digest in (seen, "", "0" * 64):
        with pytest.raises(InputError, match="has changed since the command was shown"):
            jobs.check_run_plan(library, "one", "bf16", digest)
    with pytest.raises(InputError, match="does not hold the command"):
        jobs.check_run_plan(Library(here / "runs"), "silent", "bf16", "")


# -- the request ------------------------------------------------------------------------------------------------------------


def asked(app: Any, here: Path, *, search: str = "?bundle=one&fix=bf16", digest: str | None = None, **changes: str | None) -> Any:
    """Return the answer to a click on 'Start', with headers changed or (None) taken out."""
    known = jobs.plan_run(Library(here / "runs"), "one", "bf16").digest if digest is None else digest
    headers = {**ORIGIN, "Cookie": f"gpudiag_token_8050={TOKEN}", **{name.replace("_", "-"): value for name, value in changes.items()}}
    client = Client(app, {name: value for name, value in headers.items() if value is not None})
    values = {"experiments-go.n_clicks": 1, "address.search": search, "address.pathname": "/experiments", "experiments-digest.data": known}
    return client.callback("experiments-begun.data", values)


@pytest.fixture(scope="module")
def apps(folder: Path) -> dict[bool, Any]:
    """Two servers, one that may run and one that may not; both only say what they were asked to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpudiag_dashboard.jobs.Jobs", Recorder)
        patch.setattr("atexit.register", lambda _: None)
        return {allowed: create_app(folder / "runs", allow_run=allowed, token=TOKEN) for allowed in (True, False)}


@pytest.fixture
def app(apps: dict[bool, Any], here: Path) -> Any:
    for one in apps.values():
        one.server.extensions[EXTENSION].__init__()
    return apps[True]


def test_a_page_of_this_server_with_the_token_starts_what_it_shows(app: Any, here: Path) -> None:
    answer = asked(app, here)
    assert answer.status_code == 200
    assert answer.get_json()["response"]["experiments-begun"]["data"] == 1.0
    (argv,) = app.server.extensions[EXTENSION].started
    assert argv[-len(WORDS) :] == list(WORDS)
    assert argv[:6] == [sys.executable, "-m", "gpudiag", "ab", "--fix", "bf16"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"Cookie": None}, "needs the token"),
        ({"Cookie": "gpudiag_token_8050=guessed"}, "needs the token"),
        ({"search": "?bundle=one&fix=tf32"}, "no finding"),
        ({"search": "?bundle=one"}, "no finding"),
        ({"search": "?bundle=../outside&fix=bf16"}, "no recording is named"),
        ({"search": "?fix=bf16"}, "no recording is named"),
        ({"search": "?bundle=silent&fix=bf16"}, "does not hold the command"),
        ({"digest": "0" * 64}, "has changed since"),
    ],
)
def test_anything_else_starts_nothing_and_says_why(app: Any, here: Path, changes: dict[str, Any], told: str) -> None:
    answer = asked(app, here, **changes)
    assert answer.status_code == 200
    assert told in texts(answer.get_json()["response"]["experiments-answer"]["children"])
    assert app.server.extensions[EXTENSION].started == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": None}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Host": "evil.example:8050", "Origin": "http://evil.example:8050"}, 400),
    ],
)
def test_a_foreign_page_is_refused_although_the_browser_sends_the_token(app: Any, here: Path, headers: dict[str, Any], status: int) -> None:
    assert asked(app, here, **headers).status_code == status
    assert app.server.extensions[EXTENSION].started == []


def test_without_allow_run_nothing_is_started_or_stopped(app: Any, apps: dict[bool, Any], here: Path) -> None:
    closed = apps[False]
    answer = asked(closed, here).get_json()["response"]
    assert "--allow-run" in texts(answer["experiments-answer"]["children"])
    stopped = Client(closed, {**ORIGIN, "Cookie": f"gpudiag_token_8050={TOKEN}"}).written(
        "experiments-stopped.children", {"experiments-stop.n_clicks": 1}
    )
    assert "--allow-run" in texts(stopped["experiments-stopped"]["children"])
    assert closed.server.extensions[EXTENSION].started == []
    assert closed.server.extensions[EXTENSION].stopped == 0


def test_stopping_needs_the_token_too(app: Any) -> None:
    for cookie, count in (("", 0), (f"gpudiag_token_8050={TOKEN}", 1)):
        client = Client(app, {**ORIGIN, "Cookie": cookie})
        client.written("experiments-stopped.children", {"experiments-stop.n_clicks": 1})
        assert app.server.extensions[EXTENSION].stopped == count


def test_a_second_experiment_is_refused_in_words(app: Any, here: Path) -> None:
    app.server.extensions[EXTENSION].busy = True
    told = asked(app, here).get_json()["response"]
    assert "running already" in texts(told["experiments-answer"]["children"])


def test_no_click_starts_nothing(app: Any) -> None:
    """Dash calls back when a button is put into the page."""
    client = Client(app, {**ORIGIN, "Cookie": f"gpudiag_token_8050={TOKEN}"})
    for clicks in (None, 0):
        values = {"experiments-go.n_clicks": clicks, "address.search": "?bundle=one&fix=bf16", "address.pathname": "/experiments"}
        assert client.written("experiments-begun.data", values) == {}
    assert app.server.extensions[EXTENSION].started == []


@pytest.mark.parametrize(("cookie", "shown"), [(f"gpudiag_token_8050={TOKEN}", True), ("", False)])
def test_the_button_is_there_only_for_whom_it_would_work_and_the_command_for_all(app: Any, cookie: str, shown: bool) -> None:
    client = Client(app, {**ORIGIN, "Cookie": cookie})
    found = client.written("experiments-plan.children", {"address.search": "?bundle=one&fix=bf16", "address.pathname": "/experiments"})
    assert (found["experiments-go"]["style"] == {}) == shown
    assert bool(found["experiments-digest"]["data"]) == shown
    told = texts(found["experiments-plan"]["children"])
    assert "gpudiag ab --fix bf16" in told
    assert "cannot be put into a running program" in told  # accumulation, in the list
