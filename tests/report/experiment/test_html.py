"""The page of experiments and the notebook's fragment: safe, offline, and working in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import outcomes as made
import pytest
import report_sample as sample
from htmlpage import Page
from rendered import render_experiments_notebook, render_experiments_page, render_html

from gpudiag.model.experiment import ExperimentData

HARMLESS = (
    "html head meta title style body a header main section h1 h2 h3 p div span b table thead tbody tr th td small ul li dl dt dd code pre "
    "details summary script"
)
NOTEBOOK_TAGS = {"div", "p", "b", "ul", "li", "small", "table", "thead", "tbody", "tr", "th", "td", "br", "pre"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    found = {"all": made.experiments(), "hostile": made.hostile(sample.HOSTILE), "nothing": ExperimentData()}
    return {name: render_experiments_page(data) for name, data in found.items()}


@pytest.mark.parametrize("name", ["all", "hostile", "nothing"])
def test_a_hostile_name_makes_no_element_and_nothing_is_fetched(pages: dict[str, str], name: str) -> None:
    page = Page(pages[name])
    assert {tag for tag, _ in page.tags} <= set(HARMLESS.split())
    assert [key for _, attributes in page.tags for key in attributes if key.startswith("on") or key in {"src", "srcset", "action"}] == []
    assert all((attributes["href"] or "").startswith("#") for tag, attributes in page.tags if tag == "a")


@pytest.mark.parametrize("name", ["all", "hostile", "nothing"])
def test_the_policy_allows_these_scripts_and_no_other(pages: dict[str, str], name: str) -> None:
    page = Page(pages[name])
    kinds = [attributes.get("type") for tag, attributes in page.tags if tag == "script"]
    code = [text for kind, text in zip(kinds, page.scripts, strict=True) if kind is None]
    (policy,) = [attributes["content"] or "" for tag, attributes in page.tags if attributes.get("http-equiv") == "Content-Security-Policy"]
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    assert allowed == {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code}
    assert ("plotly.js (cartesian" in pages[name]) == (name != "nothing")


def test_the_page_says_what_the_terminal_says(pages: dict[str, str]) -> None:
    plain = Page(pages["all"]).plain
    for said in (
        "bf16+channels-last: 1.83x faster (95 % CI 1.79 to 1.87), trains the same, p<1e-5; proved.",
        "The plan is not complete",
        "looks faster x1.31 [1.22, 1.41] samples/s blocks of one process pair: not proof",
        "Upper bound: 50 % less time a sample; measured: 45 % [44, 47].",
        "Screening (ranks variants, proves nothing)",
        "Without a result",
        "not applied x1.67 no result",
        "DIFFERS: loss of step 3 differs by 9,400 x the rounding noise (limit 4)",
        "ValueError: sizes do not fit: 32 and 64",
        "In effect: 12 of 12 convolution weights in NHWC",
        "35.0 ms \u2192 19.1 ms",
        "python train.py --name 'a b'",
    ):
        assert said in plain


def test_a_report_page_shows_its_experiments() -> None:
    page = render_html(sample.report(experiments=made.every_verdict()))
    plain = Page(page).plain
    assert "Experiments: variants against the baseline" in plain
    assert "x1.83 [1.79, 1.87] samples/s" in plain
    assert 'id="experiments"' not in render_html(sample.report())


def test_a_notebook_gets_a_table_without_scripts_and_styles_of_its_own() -> None:
    for data in (made.experiments(), made.hostile(sample.HOSTILE), ExperimentData()):
        page = Page(render_experiments_notebook(data))
        assert {tag for tag, _ in page.tags} <= NOTEBOOK_TAGS
        assert [key for _, attributes in page.tags for key in attributes if key not in {"style", "scope"}] == []
    plain = Page(render_experiments_notebook(made.experiments())).plain
    assert "bf16+channels-last faster x1.83 [1.79, 1.87] samples/s" in plain
    assert plain.count("failed") >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "hostile", "nothing"])
def test_the_page_loads_without_an_error(pages: dict[str, str], tmp_path: Path, name: str) -> None:
    browser = next((path for known in BROWSERS if (path := shutil.which(known))), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed")
    path = tmp_path / "experiments.html"
    path.write_text(pages[name], encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=10000", "--enable-logging=stderr", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert 'data-ready="yes"' in done.stdout
    assert ("main-svg" in done.stdout) == (name != "nothing")  # drawn under the policy, from the hashes
