"""What a person gets who types what is no command, or an option that other tools have: the call that was meant."""

from __future__ import annotations

import pytest

from gpudiag.cli.command import check_command, check_format
from gpudiag.errors import UsageError

KNOWN = ("report", "run")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("train.py", "--lr", "1"), "gpudiag run train.py --lr 1"),
        (("torchrun", "train.py"), "gpudiag run torchrun train.py"),
        (("my trace.json.gz",), "gpudiag report 'my trace.json.gz'"),
        (("help",), "gpudiag --help"),
    ],
)
def test_a_word_that_is_no_command_names_the_call_that_was_meant(words, meant) -> None:
    with pytest.raises(UsageError) as failed:
        check_command(None, words, KNOWN)
    assert meant in str(failed.value)


def test_a_folder_that_exists_is_taken_for_a_recording(tmp_path) -> None:
    with pytest.raises(UsageError, match="gpudiag report"):
        check_command(None, [str(tmp_path)], KNOWN)


@pytest.mark.parametrize(
    ("group", "word", "meant"), [("rules", "mem-05", "rules show mem-05"), ("export", "a.json", "export perfetto a.json")]
)
def test_groups_know_what_their_commands_take(group, word, meant) -> None:
    with pytest.raises(UsageError, match=meant):
        check_command(group, [word], ("show",))


@pytest.mark.parametrize(
    ("group", "words"), [(None, ("report", "x.json")), (None, ("reprot",)), (None, ()), ("rules", ("shw",)), ("schema", ("a.py",))]
)
def test_nothing_is_said_where_nothing_suggests_itself(group, words) -> None:
    check_command(group, words, KNOWN)  # the parser suggests what is spelt alike


def test_an_option_for_the_format_leads_to_the_name_of_the_file() -> None:
    with pytest.raises(UsageError, match=r"-o report\.html"):
        check_format("report", ["x.json", "--html=y.html"])
    check_format("report", ["x.json", "-o", "y.html"])
    for command in ("ops", "compare"):
        check_format(command, ["x.json", "--json"])  # their own


def test_the_parser_asks_for_hints(command) -> None:
    for words, meant in ((("train.py",), "gpudiag run train.py"), (("report", "x.json", "--json"), "-o report.json")):
        result = command(*words)
        assert result.code == 2
        assert meant in result.err


def test_options_of_a_script_stay_its_own(command) -> None:
    assert "no such file" in command("run", "no-such-script.py", "--html").err


def test_help_has_a_short_name_and_whole_sentences(command) -> None:
    result = command("-h")
    assert result.code == 0
    assert "..." not in result.out.replace("[ARGS]...", "")  # no sentence is cut off
    assert "gpudiag run train.py" in result.out
