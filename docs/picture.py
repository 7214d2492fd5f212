"""Make the picture and the reports that README and docs show, from a fresh demo run: `make picture` (needs torch and Chromium)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "report.png"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "start" / "report.md"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT = 1280, 1180
README_COLUMNS, PAGE_COLUMNS = 100, 80
"""What a page of GitHub and one of the built documentation show without scrolling to the side."""
LARGEST_BYTES = 300_000

MOST_LINES = 25
LEFT_OUT = "[...]"
FIRST_BLOCK = re.compile(r"^```text\n.*?^```$", re.MULTILINE | re.DOTALL)
MARGIN = ("coverage", "device", "profiler", "replay")
"""What the long report keeps of its data quality."""


def main() -> int:
    """Record the demo, take the picture of its page, and put its report into the documents. Returns an exit code."""
    with tempfile.TemporaryDirectory() as folder:
        run_command(folder, "demo")
        # reported on by its short name: the page then shows no folder of this machine
        short = cut_short(run_command(folder, "report", "runs/demo", "-o", "report.html", columns=README_COLUMNS))
        long = cut_long(run_command(folder, "report", "runs/demo", columns=PAGE_COLUMNS))
        take_picture(Path(folder) / "report.html", PICTURE)
    replace_first_block(README, short)
    replace_first_block(PAGE, long)
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size / 1000:.0f} kB; the reports of README.md and docs/start/report.md are new")
    return 0


def run_command(folder: str, *words: str, columns: int = README_COLUMNS) -> str:
    """Return what `gpudiag WORDS` prints in `folder`."""
    environ = {**os.environ, "COLUMNS": str(columns), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gpudiag", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=environ).stdout  # noqa: S603


def take_picture(page: Path, target: Path) -> None:
    """Take a picture of the first screen of `page`. Raises ValueError where it is larger than a document should bring along."""
    from playwright.sync_api import sync_playwright

    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        opened.goto(page.as_uri())
        target.parent.mkdir(exist_ok=True)
        opened.screenshot(path=target)
        browser.close()
    if target.stat().st_size > LARGEST_BYTES:
        raise ValueError(f"{target} has {target.stat().st_size:,} bytes, more than {LARGEST_BYTES:,}: choose a smaller window")


def replace_first_block(document: Path, text: str) -> None:
    """Put `text` in place of the first `text` block of `document`."""
    before = document.read_text(encoding="utf-8")
    document.write_text(FIRST_BLOCK.sub(lambda _: f"```text\n{text}\n```", before, count=1), encoding="utf-8")


def cut_short(report: str) -> str:
    """Return what stands first in a report: what a step takes, its largest parts, and the first finding; MOST_LINES at most."""
    parts = report.strip().split("\n\n")
    goes, findings = _find(parts, "Where a step goes"), _find(parts, "Findings")
    finding = list(_take_first_finding(findings))
    bound = _take_until(r"\.( |$)", finding[finding.index(_first(finding, "Potential")) :])
    tried = finding[finding.index(_first(finding, "Try:")) :]
    above = [parts[0].splitlines()[0], "", *_take_until(r"\.$", parts[1].splitlines()), LEFT_OUT, "", *goes[:2]]
    below = [LEFT_OUT, goes[-1], "", *finding[:3], f"   {LEFT_OUT}", *bound, f"   {LEFT_OUT}", *tried[:2], LEFT_OUT]
    largest = goes[2 : 2 + max(0, MOST_LINES - len(above) - len(below))]
    return "\n".join(line.rstrip() for line in (*above, *largest, *below))


def cut_long(report: str) -> str:
    """Return a report with one finding, six ops, and the rows of its data quality that matter most."""
    parts = report.strip().split("\n\n")
    kept = [parts[0].splitlines()[0], *parts[1:2]]
    for part in parts[2:]:
        lines = part.splitlines()
        if lines[0].startswith("Findings"):
            lines = [*_take_first_finding(lines), LEFT_OUT]
        elif lines[0].startswith("Data quality"):
            lines = [lines[0], *_take_rows(lines[1:], MARGIN), LEFT_OUT]
        elif not lines[0].startswith(("Where a step goes", "What-if")):
            lines = [LEFT_OUT]
        if lines != [LEFT_OUT] or not kept[-1].endswith(LEFT_OUT):
            kept.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(kept)


def _find(parts: list[str], title: str) -> list[str]:
    return next(part for part in parts if part.startswith(title)).splitlines()


def _first(lines: Iterable[str], start: str) -> str:
    return next(line for line in lines if line.strip().startswith(start))


def _take_until(pattern: str, lines: Iterable[str]) -> list[str]:
    """Return the lines up to the first that holds `pattern`."""
    kept = []
    for line in lines:
        kept.append(line)
        if re.search(pattern, line.rstrip()):
            break
    return kept


def _take_first_finding(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if re.match(r"2\. ", line):
            return
        yield line


def _take_rows(lines: list[str], labels: tuple[str, ...]) -> Iterator[str]:
    kept = False
    for line in lines:
        if not line.startswith(" "):
            kept = line.startswith(labels)
        if kept:
            yield line


if __name__ == "__main__":
    raise SystemExit(main())
