"""The HTML report: safe, offline, and working in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import plotly.graph_objects as go
import pytest
import report_sample as sample
from htmlpage import Page

from gpudiag.diagnosis.loader import read_rules
from gpudiag.report import html
from gpudiag.report.html import figures

LARGEST = 6_000_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
HARMLESS = (
    "html head meta title style body a header main section article p h1 h2 h3 h4 div span b strong table caption thead tbody tfoot "
    "tr th td ul li dl dt dd small code details summary label input button script"
)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    made = {
        "full": sample.report(),
        "roofline": sample.roofline(),
        "no device": sample.no_device(),
        "hostile": sample.hostile(),
        "nothing found": sample.report(findings=(), ops=()),
    }
    return {name: html.render(report) for name, report in made.items()}


NAMES = ("full", "no device", "hostile", "nothing found")


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_makes_no_element_and_no_handler(pages: dict[str, str], name: str) -> None:
    page = Page(pages[name])
    assert {tag for tag, _ in page.tags} <= set(HARMLESS.split())
    assert [attribute for _, attributes in page.tags for attribute in attributes if attribute.startswith("on")] == []
    links = [attributes["href"] or "" for tag, attributes in page.tags if tag == "a"]
    assert all(link.startswith(("#", "https://")) for link in links)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_fetched(pages: dict[str, str], name: str) -> None:
    page = Page(pages[name])
    assert [attributes for _, attributes in page.tags if {"src", "srcset", "data", "poster", "action"} & set(attributes)] == []
    assert [tag for tag, _ in page.tags if tag in {"link", "iframe", "img", "object", "embed", "base", "form"}] == []
    style = re.search(r"<style>(.*?)</style>", pages[name], re.DOTALL)
    assert style is not None
    assert not re.search(r"url\(|@import", style[1])


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_allows_these_scripts_and_no_other(pages: dict[str, str], name: str) -> None:
    page = Page(pages[name])
    kinds = [attributes.get("type") for tag, attributes in page.tags if tag == "script"]
    code = [text for kind, text in zip(kinds, page.scripts, strict=True) if kind is None]
    (policy,) = [attributes["content"] or "" for tag, attributes in page.tags if attributes.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    assert allowed == {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code}
    assert "unsafe-eval" not in policy
    assert re.search(r"script-src ('sha256-[^']+' ?)+;", policy)


def test_size_and_plotly_only_where_there_is_a_figure(pages: dict[str, str]) -> None:
    assert len(pages["full"].encode()) < LARGEST
    assert len(pages["no device"].encode()) < 200_000
    assert pages["full"].count("plotly.js v") == 1


def test_the_reason_stands_where_the_roofline_is_missing(pages: dict[str, str]) -> None:
    text = " ".join(" ".join(Page(pages["no device"]).texts).split())
    assert "No roofline can be drawn: the peak rates of the device are not known. The device of the trace has no name" in text


def test_the_content_is_the_same_as_in_the_terminal(pages: dict[str, str]) -> None:
    text = " ".join(" ".join(Page(pages["full"]).texts).split()).replace("\u00a0", " ")
    for expected in (
        "A step takes 75.0 ms. The GPU spends 39 % of it idle",
        "sum: the step 75.0 ms 100.0 %",
        "Up to 25.0 ms of 75.0 ms (33 %) if every kernel",
        'model = torch.compile(model, mode="reduce-overhead")',
        "Stacks were not recorded",
        "no attention op was recorded",
        "default_pg",
        "model.py:12",
    ):
        assert expected in text


def test_the_title_says_which_report_it_is(pages: dict[str, str]) -> None:
    assert "<title>trace.json.gz - gpudiag</title>" in pages["full"]


def test_a_weak_measurement_is_no_card(pages: dict[str, str]) -> None:
    weak = sample.finding(rule="EFF-03", severity="info", bound="method", ceiling=None, message="Steps analysed: 1.")
    page = html.render(sample.report(findings=(weak,)))
    assert page.count('<article class="card') == 0
    assert pages["full"].count('<article class="card') == 1
    assert "Weak, so findings lose a grade of confidence. Steps analysed: 1. (EFF-03)" in " ".join(Page(page).texts)


def test_ops_show_where_they_are_called() -> None:
    rows = (sample.op("aten::mm", 9, where="/home/me/project/models/net.py(12): forward"), sample.op("aten::add_", 1))
    texts = Page(html.render(sample.report(ops=rows))).texts
    assert "models/net.py:12 forward" in texts
    assert not any("/home/me" in text for text in texts)


def test_roofline_figures_stand_on_the_page() -> None:
    page = html.render(sample.roofline())
    text = " ".join(re.sub(r"<[^>]+>", " ", page.partition("</main>")[0]).replace("\u00a0", " ").split())
    assert "(MFU): 33.6 % of 989 TFLOP/s (bf16 dense, NVIDIA H100 80GB HBM3); with recomputed work (HFU) 43.7 %." in text
    assert "Megatron-LM, 3072 A100: 52.4 % of 312 TFLOP/s bf16 (SC21, table 1)" in text
    assert '<a href="https://example.org/table"' in page
    assert "over roof data in the cache" in text
    assert "33 % recomputed" in text
    assert "exact bf16 peak 1.25 waves, 42 % occupied" in text
    assert "nvjet_tst_128x256 kernel gemm 12" in text  # the class of a replayed kernel
    assert text.index("Cost models cover") < text.index("Where a step goes")
    assert '<th scope="col"><button type="button" title="kind of work by the kernel&#39;s name alone">class' not in html.render(
        sample.report()
    )


def test_every_roof_has_its_label_apart_from_the_others() -> None:
    device = msgspec.structs.replace(sample.device(), cache_bandwidth_byte_per_s=5.5e12)
    figure = figures.roofline(sample.report(device=device))
    assert figure is not None
    labels = {label["text"]: label for label in figure["layout"]["annotations"]}
    assert set(labels) == {"bf16 989 TFLOP/s", "fp32 66.9 TFLOP/s", "DRAM 3.35 TB/s", "cache 5.50 TB/s"}
    low, high = labels["DRAM 3.35 TB/s"], labels["cache 5.50 TB/s"]
    assert high["x"] - low["x"] > 1  # a decade apart, and on the lines
    assert 10 ** (high["y"] - high["x"]) == pytest.approx(5.5e12)
    assert 10 ** low["y"] < 3.35e12 * 10 ** low["x"]  # below its line


def test_every_hostile_name_is_shown_as_text(pages: dict[str, str]) -> None:
    texts = [text.strip() for text in Page(pages["hostile"]).texts]
    assert "<script>alert(1)</script>" in texts
    assert "{{ 7*7 }}{% for %}" in texts
    assert max(len(text) for text in texts) <= 4_000


def test_long_tables_are_cut_and_say_so() -> None:
    page = Page(html.render(sample.many_ops(2_500)))
    assert sum(1 for text in page.texts if text.startswith("aten::op_")) == 2_000
    assert "2,000 largest of 2,500 rows" in page.texts


def test_plotly_accepts_the_figure() -> None:
    figure = figures.roofline(sample.report())
    assert figure is not None
    drawn = go.Figure(figure)  # validates every property
    assert {trace.name for trace in drawn.data} >= {"compute", "memory", "overhead", "DRAM 3.35 TB/s", "bf16 989 TFLOP/s"}
    json.dumps(figure)


def test_the_roofs_are_where_the_peaks_are() -> None:
    figure = figures.roofline(sample.report())
    assert figure is not None
    lines = {trace["name"]: trace for trace in figure["data"] if trace["mode"] == "lines"}
    slope = lines["DRAM 3.35 TB/s"]
    assert [y / x for x, y in zip(slope["x"], slope["y"], strict=True)] == pytest.approx([3.35e12, 3.35e12])
    assert lines["bf16 989 TFLOP/s"]["y"] == [989.4e12, 989.4e12]
    assert lines["bf16 989 TFLOP/s"]["x"][0] == pytest.approx(989.4e12 / 3.35e12)  # the ridge
    assert set(lines) == {"DRAM 3.35 TB/s", "bf16 989 TFLOP/s", "fp32 66.9 TFLOP/s"}  # no op computes in tf32 or fp8


def test_a_point_stands_at_its_intensity_and_rate() -> None:
    figure = figures.roofline(sample.report())
    assert figure is not None
    (compute,) = [trace for trace in figure["data"] if trace["name"] == "compute"]
    assert compute["x"] == pytest.approx([494.7e12 / 362e9])
    assert compute["y"] == pytest.approx([494.7e12], rel=1e-6)
    assert compute["marker"]["size"] == [34.0]  # the largest


def test_hover_text_is_escaped_for_plotly() -> None:
    figure = figures.roofline(sample.hostile())
    assert figure is not None
    texts = " ".join(text for trace in figure["data"] for text in trace.get("text", []))
    assert set(re.findall(r"<\s*/?\s*(\w+)", texts)) == {"b", "br"}
    assert "&lt;script&gt;" in texts


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed")
    return found


def _load(browser: str, path: Path) -> tuple[str, list[str]]:
    """Return the page's DOM after its scripts ran, and what it said on the console."""
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={path.parent / 'profile'}",
    ]
    command += ["--virtual-time-budget=10000", "--enable-logging=stderr", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


PROBE = """
<script>
const answers = {};
const shown = () => Array.from(document.querySelectorAll("#ops tbody tr")).filter((row) => !row.hidden);
const column = (k) => shown().map((row) => row.cells[k].firstChild.textContent);
const button = (title) => Array.from(document.querySelectorAll("#ops th button")).find((item) => item.textContent === title);
const index = (title) => button(title).parentElement.cellIndex;
button("calls").click(); answers.descending = column(index("calls"));
answers.aria = button("calls").parentElement.getAttribute("aria-sort");
button("calls").click(); answers.ascending = column(index("calls"));
button("op").click(); answers.names = column(0);
button("of roof").click(); answers.roof = column(index("of roof"));
button("of roof").click(); answers.roofUp = column(index("of roof"));
const input = document.querySelector("input[data-filters=ops]");
input.value = "OP_0003"; input.dispatchEvent(new Event("input")); answers.filtered = column(0);
answers.count = document.getElementById("ops-count").textContent;
input.value = ""; input.dispatchEvent(new Event("input")); answers.all = column(0).length;
document.body.insertAdjacentHTML("beforeend", "<pre id=answers></pre>");
document.getElementById("answers").textContent = JSON.stringify(answers);
</script>
</body>
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "hostile", "no device"])
def test_the_page_loads_without_an_error(pages: dict[str, str], browser: str, tmp_path: Path, name: str) -> None:
    path = tmp_path / "report.html"
    path.write_text(pages[name], encoding="utf-8")
    dom, console = _load(browser, path)
    assert console == []
    assert 'data-ready="yes"' in dom
    assert ("main-svg" in dom) == (name != "no device")  # drawn under the policy, from the hashes


@pytest.mark.slow
def test_the_policy_stops_a_script_that_is_not_ours(pages: dict[str, str], browser: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(pages["no device"].replace("</body>", "<script>document.title = 'owned'</script></body>"), encoding="utf-8")
    dom, console = _load(browser, path)
    assert "<title>owned" not in dom
    assert any("Content Security Policy" in line for line in console)


@pytest.mark.slow
def test_tables_sort_and_filter(browser: str, tmp_path: Path) -> None:
    rows = (*sample.many_ops(12).ops, sample.op("zz::unknown", 0.001, count=99, efficiency=None))
    text = html.render(sample.report(ops=rows, device=None))
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace("</body>", PROBE)  # the probe is not ours
    path = tmp_path / "report.html"
    path.write_text(text, encoding="utf-8")
    dom, console = _load(browser, path)
    assert console == []
    found = re.search(r'<pre id="answers">(.*?)</pre>', dom)
    assert found is not None
    answers = json.loads(found[1].replace("&amp;", "&"))
    calls = [99, *range(12, 0, -1)]
    assert answers["descending"] == [str(count) for count in calls]
    assert answers["aria"] == "descending"
    assert answers["ascending"] == [str(count) for count in reversed(calls)]
    assert answers["names"] == [*(f"aten::op_{k:04d}" for k in range(12)), "zz::unknown"]
    assert answers["roof"][-1] == "?"
    assert answers["roofUp"][-1] == "?"  # not known comes last in both directions
    assert answers["filtered"] == ["aten::op_0003"]
    assert answers["count"] == "1 of 13 rows"
    assert answers["all"] == 13


def test_a_finding_links_to_what_there_is_to_read_about_its_rule() -> None:
    rules = read_rules()
    page = html.render(sample.report(findings=(sample.finding(rule="OVH-01", title="Idle"),)), rules)
    assert '<a href="#rule-OVH-01">OVH-01</a>' in page
    assert '<details id="rule-OVH-01">' in page
    assert "#rule-OVH-01" not in html.render(sample.report(findings=(sample.finding(rule="OVH-01", title="Idle"),)))
