"""What README and docs/accuracy.md say of scores is what the kept scores say; tests/test_answers.py holds the known answers."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCORES = ("samples/SCORE.md", "samples/styles/SCORE.md", "samples/field/SCORE.md")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def find(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text, re.IGNORECASE)
    assert found is not None, pattern
    return found.groups()


def rows(text: str) -> list[list[str]]:
    """Return the cells of each row of each table."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]


def test_the_table_of_scores_says_what_the_scores_say() -> None:
    shown = [row for row in rows(read("docs/accuracy.md")) if "SCORE.md" in row[0]]
    assert [find(r"\]\(\.\./(\S+)\)", row[0])[0] for row in shown] == list(SCORES)
    for row, name in zip(shown, SCORES, strict=True):
        text = read(name)
        median, worst, below = find(r"median ([\d.]+), worst ([\d.]+); bounds below the gain: (\d+)", text)
        assert row[3:] == [median, worst, below], name
        (right,) = find(r"first finding right: (\d+ of \d+)", text)
        assert row[1].startswith(right), name
    assert shown[0][2] == find(r"false alarms: (\d+)", read(SCORES[0]))[0]
    for row, name in list(zip(shown, SCORES, strict=True))[1:]:
        assert row[2] == find(r"bears out: (\d+ of \d+)", read(name))[0], name


def test_what_was_said_when_it_was_first_asked_is_counted_as_the_table_has_it() -> None:
    planted = [row for row in rows(read("samples/field/SCORE.md")) if len(row) == 9 and re.match(r"\w+ \((seen|first)\)", row[0])]
    known = [row for row in planted if "no rule" not in row[1]]
    right = [row for row in known if row[8].split()[0] in row[1].split(" or ")]
    said = find(
        r"first asked about the (\d+) of other packages, (\d+) first findings were right", " ".join(read("docs/accuracy.md").split())
    )
    assert said == (str(len(known)), str(len(right)))


def test_the_readme_adds_the_scores_up() -> None:
    right, of, below = 0, 0, 0
    for name in SCORES:
        one = find(r"first finding right: (\d+) of (\d+)", read(name))
        right, of = right + int(one[0]), of + int(one[1])
        below += int(find(r"bounds below the gain: (\d+)", read(name))[0])
    text = " ".join(read("README.md").split())
    assert find(r"first finding was right for (\d+) of (\d+)", text) == (str(right), str(of))
    assert find(r"For (\d+) of the (\d+) the gain was above the bound", text) == (str(below), str(of))
    assert sum(map(int, find(r"(\d+) with a planted bottleneck, (\d+) more .*?, (\d+) healthy ones", text))) == of


def test_known_answers_of_the_readme_stand_in_the_full_table() -> None:
    full = [row for row in rows(read("docs/accuracy.md")) if len(row) == 3]
    shown = [row for row in rows(read("README.md").partition("## Accuracy")[2].partition("\n## ")[0]) if row[0] != "recording"]
    assert len(shown) >= 5
    assert [row for row in shown if row not in full] == []
