"""The HTML report: safe, offline, and working in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import msgspec
import plotly.graph_objects as go
import pytest
import report_sample as sample
import wholereport
from htmlpage import Page
from rendered import render_html

from gpudiag.api import Report
from gpudiag.diagnosis.loader import read_rules
from gpudiag.fixes import FIXES, make_applier
from gpudiag.model.experiment import FixCall
from gpudiag.model.notices import NoticeCode, make_notice
from gpudiag.model.report import CodeLines, Source
from gpudiag.report import findings, roofline, telemetry
from gpudiag.report.render_html import read_asset

LARGEST = 6_000_000
HARMLESS = (
    "html head meta title style body a header nav main section article figure figcaption pre i p h1 h2 h3 h4 div span b strong "
    "table caption thead tbody tfoot "
    "tr th td ul ol li dl dt dd small code details summary label input select option button script"
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
    return {name: render_html(report) for name, report in made.items()}


NAMES = ("full", "no device", "hostile", "nothing found")


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_makes_no_element_and_no_handler(pages: dict[str, str], name: str) -> None:
    page = Page(pages[name])
    assert {tag for tag, _ in page.tags} <= set(HARMLESS.split())
    assert [attribute for _, attributes in page.tags for attribute in attributes if attribute.startswith("on")] == []
    links = [attributes["href"] or "" for tag, attributes in page.tags if tag == "a"]
    assert all(link.startswith(("#", "https://")) for link in links)


def test_a_card_shows_the_line_that_it_names_among_its_neighbours() -> None:
    lines = ("for batch in loader:", "    loss = model(batch)", "    total += loss.item()", "    if total > 3 < 4:")
    code = CodeLines(file="train.py", line=41, first=39, lines=lines)
    page = render_html(sample.report(code=(code,)))
    assert '<span class="marked"><i>41</i>    total += loss.item()' in page
    assert "<i>42</i>    if total &gt; 3 &lt; 4:" in page
    assert "loss = model(batch)" not in Report(sample.report(code=(code,))).text()


def test_a_card_says_why_there_are_no_lines() -> None:
    code = CodeLines(file="train.py", line=41, status="changed")
    assert "train.py has changed since the recording: its lines are not shown." in Page(render_html(sample.report(code=(code,)))).plain
    shown = msgspec.structs.replace(code, lines=("total += loss.item()",), first=41)
    assert "As recorded; the file has changed since." in Page(render_html(sample.report(code=(shown,)))).plain


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
    assert pages["full"].count("plotly.js (cartesian") == 1


def test_the_reason_stands_where_the_roofline_is_missing(pages: dict[str, str]) -> None:
    text = " ".join(" ".join(Page(pages["no device"]).texts).split())
    assert "No roofline can be drawn: the peak rates of the device are unavailable. The device is not named in the recording" in text


def test_the_content_is_the_same_as_in_the_terminal(pages: dict[str, str]) -> None:
    text = " ".join(" ".join(Page(pages["full"]).texts).split()).replace("\u00a0", " ")
    for expected in (
        "Step time 75.0 ms",
        "GPU busy 61 % of a step; idle: host overhead (Python, framework, launches), 33 % MFU",
        "Top finding up to 33 % The GPU waits for the host",
        "A step takes 75.0 ms. The GPU spends 39 % of it idle",
        "sum: the step 75.0 ms 100.0 %",
        "Potential speed-up: up to 25.0 ms of the 75.0 ms of a step (33 %; an upper bound) if every kernel",
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
    weak = sample.finding(rule="EFF-03", role="measurement", severity="info", bound="method", ceiling=None, message="Steps analysed: 1.")
    page = render_html(sample.report(findings=(weak,)))
    assert page.count('<article class="card') == 0
    assert pages["full"].count('<article class="card') == 1
    assert "Weak: findings lose one grade of confidence. Steps analysed: 1. (EFF-03)" in " ".join(Page(page).texts)


def test_ops_show_where_they_are_called() -> None:
    rows = (sample.op("aten::mm", 9, where="/home/me/project/models/net.py(12): forward"), sample.op("aten::add_", 1))
    texts = Page(render_html(sample.report(ops=rows))).texts
    assert "models/net.py:12 forward" in texts
    assert not any("/home/me" in text for text in texts)


def test_roofline_figures_stand_on_the_page() -> None:
    page = render_html(sample.roofline())
    text = " ".join(re.sub(r"<[^>]+>", " ", page.partition("</main>")[0]).replace("\u00a0", " ").split())
    assert "MFU 33.6 % of 989 TFLOP/s (bf16 dense, NVIDIA H100 80GB HBM3); with recomputed work (HFU) 43.7 %" in text
    assert "Megatron-LM, 3072 A100: 52.4 % of 312 TFLOP/s bf16 (SC21, table 1)" in text
    assert '<a href="https://example.org/table"' in page
    assert "above roofline data in the cache" in text
    assert "33 % recomputed" in text
    assert "exact bf16 peak 1.25 waves, 42 % occupied" in text
    assert "nvjet_tst_128x256 kernel gemm 12" in text  # the class of a replayed kernel
    assert text.index("Cost models cover") < text.index("Where a step goes")
    assert '<th scope="col"><button type="button" title="kind of work by the kernel&#39;s name alone">class' not in render_html(
        sample.report()
    )


def test_every_roof_has_its_label_apart_from_the_others() -> None:
    device = msgspec.structs.replace(sample.device(), cache_bandwidth_byte_per_s=5.5e12)
    figure = roofline.draw_roofline(sample.report(device=device))
    assert figure is not None
    labels = {label["text"]: label for label in figure["layout"]["annotations"]}
    assert set(labels) == {"bf16 989 TFLOP/s", "fp32 66.9 TFLOP/s", "DRAM 3.35 TB/s", "cache 5.50 TB/s"}
    low, high = labels["DRAM 3.35 TB/s"], labels["cache 5.50 TB/s"]
    assert high["x"] - low["x"] > 0.5  # apart, and on the lines
    assert 10 ** (high["y"] - high["x"]) == pytest.approx(5.5e12)
    assert 10 ** low["y"] < 3.35e12 * 10 ** low["x"]  # below its line


def test_every_hostile_name_is_shown_as_text(pages: dict[str, str]) -> None:
    texts = [text.strip() for text in Page(pages["hostile"]).texts]
    assert "<script>alert(1)</script>" in texts
    assert "{{ 7*7 }}{% for %}" in texts
    assert max(len(text) for text in texts) <= 4_000


def data_of(page: str, table: str) -> dict[str, Any]:
    """Return what the page's script is given of a table."""
    found = re.search(rf'<script type="application/json" id="{table}-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_long_tables_are_paged_cut_and_say_so() -> None:
    text = render_html(sample.many_ops(2_500))
    page = Page(text)
    assert sum(1 for said in page.texts if said.startswith("aten::op_")) == 50  # what a browser lays out before the script ran
    assert "1 to 50 of the 2,000 largest of 2,500 rows" in page.texts
    view = data_of(text, "ops")["views"][0]
    assert (len(view["rows"]), view["count"]) == (2_000, 2_500)
    assert view["rows"][1_999]["k"] == {"op": "aten::op_1999"}


def test_ops_are_grouped_by_op_module_and_phase_and_the_sums_are_those_of_the_rows() -> None:
    views = {view["id"]: view for view in data_of(render_html(wholereport.report()), "ops")["views"]}
    assert list(views) == ["rows", "op", "module", "phase"]
    column = {name: [title for title, _, _ in view["columns"]].index("time") for name, view in views.items()}
    sums = {name: sum(row["c"][column[name]][1] for row in view["rows"]) for name, view in views.items()}
    assert len(set(sums.values())) == 1
    assert {row["k"]["phase"] for row in views["phase"]["rows"]} == {"forward", "backward", "optimizer"}
    assert len(views["module"]["rows"]) == 20
    keys = {row["k"]["module"] for row in views["rows"]["rows"]}
    assert keys == {row["k"]["module"] for row in views["module"]["rows"]}  # so that a group leads to its ops


def test_no_view_is_offered_that_the_recording_does_not_tell() -> None:
    views = [view["id"] for view in data_of(render_html(sample.many_ops(3)), "ops")["views"]]
    assert views == ["rows", "op"]  # neither module nor phase is known


def test_a_card_says_what_evidence_where_gain_fix_and_test() -> None:
    page = Page(render_html(wholereport.report()))
    for expected in (
        "1. The GPU waits for the host critical OVH-01",
        "Upper bound up to 33 % Potential speed-up: up to 25.0 ms of the 75.0 ms of a step (33 %; an upper bound) if every kernel were "
        'launched before the device falls idle. On 1 other program (GPU), "Compile with CUDA graphs" gave 1.08 x the speed.',
        "Where loss.item() (train.py:41), 2.00 ms a step",
        "Evidence idle_launch_share 33.3 % Now breakdown.buckets_ns.idle_launch / wall_ns.",
        'change model = torch.compile(model, mode="reduce-overhead") test gpudiag ab --fix compile-reduce-overhead train.py ARGS',
        "test gpudiag ab --variant accumulation=script:COPY.py train.py ARGS",  # only the user can make this change
    ):
        assert expected in page.plain
    links = [attributes.get("data-op") for tag, attributes in page.tags if tag == "a" and "data-op" in attributes]
    assert links == ["aten::op_0003"]  # loss.item() is no op of the table


def test_the_first_screen_is_figures_and_the_verdict_stands_beside_the_parts() -> None:
    page = Page(render_html(sample.report()))
    order = [
        "trace.json.gz",
        "Step time",
        "GPU busy",
        "MFU",
        "Top finding",
        "Data quality",
        "Where a step goes",
        "A step takes",
        "Change, and",
    ]
    places = [page.plain.index(text, page.plain.index("Skip to")) for text in order]
    assert places == sorted(places)
    assert "#finding-OVH-01" in [attributes.get("href") for tag, attributes in page.tags if tag == "a"]
    assert {"finding-OVH-01", "trust"} <= {attributes.get("id") for _, attributes in page.tags}


def test_a_figure_that_is_not_known_says_so_and_why() -> None:
    reason = make_notice(NoticeCode.NO_MFU, reason="no matrix op has shapes")
    page = Page(render_html(sample.report(mfu=None, findings=(), trust=sample.trust(warnings=("w",), notices=(reason,))))).plain
    assert "MFU not known no matrix op has shapes" in page
    assert "Top finding none" in page
    assert "Data quality 1 warning" in page


def test_the_recorded_program_stands_in_the_commands_without_its_secrets() -> None:
    def read(script: str) -> str:
        return Page(Report(wholereport.report(), script=lambda: script).html()).plain

    page = read("train.py --lr 1 'a b' --wandb-key abc --hf_token=def --author me --tokenizer gpt")
    assert "--fix compile-reduce-overhead train.py --lr 1 'a b' --wandb-key abc" not in page
    assert (
        "test gpudiag ab --fix compile-reduce-overhead train.py --lr 1 'a b' --wandb-key ... --hf_token=... --author me --tokenizer gpt"
        in page
    )
    assert findings.SCRIPT_PLACEHOLDER not in page
    assert findings.SCRIPT_PLACEHOLDER in read("")
    assert findings.hide_secrets("cut 'within") == ""


def test_the_command_of_a_bundle_keeps_the_result_in_it() -> None:
    report = sample.report(source=Source("runs/my run", "bundle"))
    assert "gpudiag ab --fix compile --from 'runs/my run' -o 'runs/my run' train.py ARGS" in Page(render_html(report)).plain
    assert findings.explain_test("no-such-fix", report) == ("", "")


BY_HAND = ["pad-vocabulary", "batch-requests", "preprocess-in-dataset", "accumulation"]


def test_every_fix_that_an_experiment_can_apply_is_tested_by_its_id() -> None:
    commands = {fix.id: findings.explain_test(fix.id, sample.report())[0] for fix in FIXES}
    assert [name for name, command in commands.items() if "--variant" in command] == BY_HAND
    bare = [name for name, command in commands.items() if f" --fix {name} train.py ARGS" in command]
    assert [make_applier(FixCall(name)).id for name in bare] == bare  # as `gpudiag ab` makes them of its options
    assert [name for name in commands if name not in bare] == ["fuse-region", *BY_HAND]


def test_what_a_reader_has_to_fill_in_is_said() -> None:
    page = Page(render_html(wholereport.report())).plain
    assert "gpudiag ab --fix fuse-region=VALUE train.py ARGS VALUE: the path of a module below the model" in page
    assert "COPY.py: a copy of your script with the change in it" in page


def test_telemetry_is_a_strip_with_its_throttle_reasons() -> None:
    page = Page(render_html(wholereport.report()))
    labels = [attributes["aria-label"] or "" for tag, attributes in page.tags if tag == "svg"]
    assert "SM clock over the run: lowest 1,410 MHz, median 1,420 MHz, highest 1,980 MHz" in labels
    assert "SW Power Cap held for 48 % of the time" in labels
    assert "SW Power Cap held the clocks down 48 % of the time" in page.plain
    assert "GPU Idle not a fault 10 % of the time" in page.plain


def test_a_hole_in_the_samples_is_a_hole_in_the_chart() -> None:
    strips = telemetry.build_strips(wholereport.telemetry())
    assert strips is not None
    clock = next(lane for lane in strips.lanes if lane.label == "SM clock")
    assert [len(points.split()) // 2 for points in clock.lines] == [50, 64]  # slices before and after the hole
    assert clock.lines[0].startswith("0.0,3.0 6.0,3.0 ")  # the highest, from the left edge


def test_telemetry_without_a_strip_is_a_table() -> None:
    report = wholereport.report(telemetry=wholereport.telemetry(strip=None))
    text = render_html(report)
    assert "<polyline" not in text.partition('id="telemetry-title"')[2].partition("</section>")[0]
    assert "1,410 MHz" in text


def test_what_lowered_the_clocks_may_not_be_known() -> None:
    untold = wholereport.telemetry(clock_events=(), throttle_share=None, missing={"clock_event_reasons": "not supported"})
    page = Page(render_html(wholereport.report(telemetry=untold)))
    assert "What lowered the clocks is unavailable: not supported." in page.plain


def test_experiments_are_a_chart_of_intervals_with_what_was_promised() -> None:
    text = render_html(wholereport.report())
    found = re.search(r'id="intervals-figure">(.*?)</script>', text)
    assert found is not None
    names = {trace["name"] for trace in json.loads(found[1])["data"]}
    assert {"proved faster", "parity differs", "upper bound"} <= names
    assert "Upper bound: 50 % less time a sample; measured: 45 % [44, 47]." in Page(text).plain


def test_trust_shows_coverage_links_and_the_slow_down_or_that_it_is_not_known() -> None:
    known = Page(render_html(sample.report(trust=sample.trust(linked_share=0.97, modelled_share=0.88, profiler_slowdown=1.23)))).plain
    assert "Of the kernel time that can be modelled, 88 % has a cost model" in known
    assert "97 % of all kernel time is attributed to the op that launched it" in known
    assert "Profiled steps take 1.23 x as long as unprofiled ones." in known
    unknown = Page(render_html(sample.report(trust=sample.trust(linked_share=None, modelled_share=None, profiler_slowdown=None)))).plain
    assert "holds no kernel time that could be attributed or modelled" in unknown
    assert "Slow-down unavailable" in unknown


def test_the_bar_has_a_scale_and_its_parts_stand_in_the_order_of_the_table() -> None:
    page = Page(render_html(sample.report()))
    assert "0 18.8 ms 37.5 ms 56.2 ms 75.0 ms Time and share of each part, from left to right" in page.plain
    titles = [attributes["title"] or "" for tag, attributes in page.tags if tag == "span" and "segment" in (attributes.get("class") or "")]
    rows = [title.partition(": ")[0] if not title.startswith("idle") else ": ".join(title.split(": ")[:2]) for title in titles]
    shown = page.plain.partition("part, from left to right time share")[2]
    positions = [shown.index(f"{row} ") for row in rows]
    assert positions == sorted(positions)


def _luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2.1."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_of_parts_are_those_of_the_figures_and_stand_out_in_both_themes() -> None:
    css = read_asset("report.css")
    parts = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})[;}]", css))
    assert {bound: parts[bound] for bound in roofline.COLOURS} == roofline.COLOURS
    backgrounds = [colour for pair in re.findall(r"--(?:page|card): light-dark\((#\w+), (#\w+)\)", css) for colour in pair]
    assert len(backgrounds) == 4
    weak = {name: colour for name, colour in parts.items() if min(_contrast(colour, other) for other in backgrounds) < 3}
    assert len(parts) > 10
    assert weak == {}


def test_plotly_accepts_the_figure() -> None:
    figure = roofline.draw_roofline(sample.report())
    assert figure is not None
    drawn = go.Figure(figure)  # validates every property
    assert {trace.name for trace in drawn.data} >= {"compute", "memory", "overhead", "DRAM 3.35 TB/s", "bf16 989 TFLOP/s"}
    json.dumps(figure)


def test_the_roofs_are_where_the_peaks_are() -> None:
    figure = roofline.draw_roofline(sample.report())
    assert figure is not None
    lines = {trace["name"]: trace for trace in figure["data"] if trace["mode"] == "lines"}
    slope = lines["DRAM 3.35 TB/s"]
    assert [y / x for x, y in zip(slope["x"], slope["y"], strict=True)] == pytest.approx([3.35e12, 3.35e12])
    assert lines["bf16 989 TFLOP/s"]["y"] == [989.4e12, 989.4e12]
    assert lines["bf16 989 TFLOP/s"]["x"][0] == pytest.approx(989.4e12 / 3.35e12)  # the ridge
    assert set(lines) == {"DRAM 3.35 TB/s", "bf16 989 TFLOP/s", "fp32 66.9 TFLOP/s"}  # no op computes in tf32 or fp8


def test_small_overhead_bound_ops_are_one_mark_where_all_of_them_together_stand() -> None:
    big = sample.report().ops[0]
    small = [
        msgspec.structs.replace(big, name=f"aten::add{k}", bound="overhead", kernel_ns=1_000, flops=1e3 * k, bytes=4e3, engine=None)
        for k in range(1, 4)
    ]
    report = sample.report(ops=(big, *small))
    figure = roofline.draw_roofline(report)
    assert figure is not None
    marks = [trace for trace in figure["data"] if trace["mode"] == "markers"]
    assert [len(trace["x"]) for trace in marks] == [1, 1]
    assert (marks[1]["x"], marks[1]["y"]) == ([pytest.approx(6e3 / 12e3)], [pytest.approx(6e3 / 3e-6)])
    assert "3 overhead-bound ops together" in marks[1]["text"][0]
    assert "3 overhead-bound ops, each below 1 % of the op time, are one mark" in roofline.format_roofline_note(report)


def test_the_roof_of_an_engine_is_drawn_where_ops_were_judged_by_it_or_mfu_is() -> None:
    row = msgspec.structs.replace(sample.report().ops[0], dtype="fp32", engine="tf32")
    drawn = roofline.find_used_peaks(sample.device(), [row])
    assert any("tf32" in name for name in drawn)
    assert any("fp8" in name for name in roofline.find_used_peaks(sample.device(), [row], "fp8"))


def test_a_point_stands_at_its_intensity_and_rate() -> None:
    figure = roofline.draw_roofline(sample.report())
    assert figure is not None
    (compute,) = [trace for trace in figure["data"] if trace["name"] == "compute"]
    assert compute["x"] == pytest.approx([494.7e12 / 362e9])
    assert compute["y"] == pytest.approx([494.7e12], rel=1e-6)
    assert compute["marker"]["size"] == [34.0]  # the largest


def test_hover_text_is_escaped_for_plotly() -> None:
    figure = roofline.draw_roofline(sample.hostile())
    assert figure is not None
    texts = " ".join(text for trace in figure["data"] for text in trace.get("text", []))
    assert set(re.findall(r"<\s*/?\s*(\w+)", texts)) == {"b", "br"}
    assert "&lt;script&gt;" in texts


def test_a_finding_links_to_what_there_is_to_read_about_its_rule() -> None:
    rules = read_rules()
    page = render_html(sample.report(findings=(sample.finding(rule="OVH-01", title="Idle"),)), rules)
    assert '<a href="#rule-OVH-01">OVH-01</a>' in page
    assert '<details id="rule-OVH-01">' in page
    assert "#rule-OVH-01" not in render_html(sample.report(findings=(sample.finding(rule="OVH-01", title="Idle"),)))
