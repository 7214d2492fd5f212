"""`gpudiag scrub` as a command: what it says, and the list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fuzz.documents import complete, gpu_training

from gpudiag.cli.export import scrub
from gpudiag.errors import UsageError
from gpudiag.scrub.words import ARGUMENTS, HEADERS

SECRET = "hf_abcdefghij0123456789"  # noqa: S105 - the bait


def test_what_was_removed_is_said_and_what_stands_in_kept_names_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = gpu_training() | {"env": {"HF": SECRET, "OTHER": "token-0123456789"}}
    source, target = tmp_path / "trace.json", tmp_path / "copy.json.gz"
    source.write_text(json.dumps(document))
    scrub(str(source), target)
    said = capsys.readouterr().err
    assert f"wrote {target}" in said
    assert "removed or replaced: " in said
    assert "keys of the header: 1" in said
    assert said.rstrip().endswith("none is in it")
    assert SECRET not in said
    document["traceEvents"].append(complete("kernel_token_0123456789", "kernel", 5, 5, 7))
    document["env"]["OTHER"] = "kernel_token_0123456789"
    source.write_text(json.dumps(document))
    scrub(str(source), target, force=True)
    assert "1 also occur in names that stay; look at them before you share it; --show lists them" in capsys.readouterr().err
    scrub(str(source), target, force=True, show=True)
    assert "kernel_token_0123456789" in capsys.readouterr().err


def test_the_list_names_all_that_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    scrub(listing=True)
    shown = " ".join(capsys.readouterr().out.split())
    for key in (*ARGUMENTS, *HEADERS, *HEADERS["deviceProperties"], *HEADERS["distributedInfo"]):
        assert key in shown
    for words in ("environment variables", "Files of a bundle", "Vocabulary", "site-packages"):
        assert words in shown


def test_a_recording_and_a_place_are_needed() -> None:
    with pytest.raises(UsageError, match="a recording and a place"):
        scrub("trace.json")
