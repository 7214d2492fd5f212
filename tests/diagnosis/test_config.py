"""A user's thresholds and switched-off rules, laid over the built-in ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gpudiag.diagnosis.config import Config, apply_config, find_line, list_config_changes
from gpudiag.diagnosis.loader import load_active_rules, read_rules
from gpudiag.errors import InputError

BASE = read_rules()


def test_a_threshold_keeps_its_default_and_origin_in_sight() -> None:
    rules = {rule.id: rule for rule in apply_config(BASE, Config("a/gpudiag.toml", thresholds={"INP-01": {"min_share": 0.5}})).judged}
    param = rules["INP-01"].file.params["min_share"]
    default = next(rule for rule in BASE.judged if rule.id == "INP-01").file.params["min_share"]
    assert param.value == 0.5
    assert param.unit == default.unit
    assert param.origin == f"gpudiag.toml (default {default.value:g}: {default.origin})"
    assert list_config_changes(rules.values()) == (f"INP-01: min_share 0.5 (default {default.value:g})",)


def test_nothing_given_changes_nothing() -> None:
    assert apply_config(BASE, Config()).judged == BASE.judged
    assert list_config_changes(BASE.judged) == ()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Config("c", disable=("OVH-1",)), "c:1: disable: no rule 'OVH-1'; did you mean 'OVH-01'?"),
        (Config("c", disable=("ovh-07",), text='\ndisable = ["ovh-07"]'), "c:2: disable: no rule 'ovh-07'; did you mean 'OVH-07'?"),
        (
            Config("c", disable=("CAP-08",), text='disable = [\n"CAP-08"]'),
            "c:2: disable: CAP-08 is an advisory rule, which is never judged",
        ),
        (Config("c", thresholds={"OVH-1": {"x": 1}}), "c:1: thresholds: no rule 'OVH-1'; did you mean 'OVH-01'?"),
        (
            Config("c", thresholds={"INP-01": {"min_shar": 1}}, text='\n[thresholds."INP-01"]\n\nmin_shar = 1\n'),
            "c:4: thresholds.INP-01.min_shar: no such threshold; did you mean 'min_share'?",
        ),
        (Config("c", thresholds={"INP-01": {"min_share": math.nan}}), "c:1: thresholds.INP-01.min_share: a finite number is needed"),
    ],
)
def test_mistakes_name_line_key_and_the_nearest_right_name(config: Config, says: str) -> None:
    with pytest.raises(InputError) as caught:
        apply_config(BASE, config)
    assert caught.value.message.startswith(says)


def test_a_folder_of_rules_that_is_not_there_is_named_with_its_line(tmp_path: Path) -> None:
    config = Config("c", rules=((tmp_path / "nowhere").as_posix(),), text='disable = []\nrules = [\n  "nowhere",\n]\n')
    with pytest.raises(InputError, match=r"c:3: rules: no such folder of rules: .*nowhere"):
        load_active_rules(config=config)


def test_a_line_is_found_by_words_one_after_the_other() -> None:
    text = '[thresholds."A-01"]\nmin = 1\n[thresholds."A-02"]\nmin_share = 2\nmin = 3\n'
    assert find_line(text, "A-02", "min") == 5
    assert find_line(text, "A-01", "min") == 2
    assert find_line(text, "gone") == 1
