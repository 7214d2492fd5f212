"""The plan goes down as one environment variable; the journal comes back whatever its state."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gpudiag.capture.run_script.plan import JournalEntry, Plan, append_journal, read_journal


def test_a_plan_survives_the_environment() -> None:
    plan = Plan("/x/run", ("train.py", "--näme", "a b"), {"skip": 3}, "/x/journal")
    assert msgspec.json.decode(plan.text(), type=Plan) == plan
    assert "\n" not in plan.text()


def test_the_journal_keeps_the_order_and_leaves_out_what_it_cannot_read(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.write_text("")
    plan = Plan("run", journal=str(journal))
    append_journal(plan, "torch")
    with open(journal, "a") as file:
        file.write('{"what": "from a newer version"}\nnot json\n')
    append_journal(plan, "bundle", "/x/run", rank=2)
    assert read_journal(journal) == [JournalEntry("torch"), JournalEntry("bundle", "/x/run", 2)]


def test_a_journal_that_is_gone_bothers_nobody(tmp_path: Path) -> None:
    append_journal(Plan("run", journal=str(tmp_path / "gone")), "torch")
    assert not (tmp_path / "gone").exists()
    assert read_journal(tmp_path / "gone") == []
