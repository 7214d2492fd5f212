"""Rule files: what is wrong is named with file, line, key and the nearest right word."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gpudiag.diagnosis import load_rules, rule_yaml, self_test
from gpudiag.diagnosis.loader import read_folder
from gpudiag.errors import InputError

RULE = """\
schema: 1
id: TST-01
title: The device idles
category: tst
maturity: stable
device_kinds: [gpu, cpu]
bound: idle_launch
params:
  floor: {value: 0.5, unit: share, origin: a guess}
when: idle_share >= floor
severity: {critical: idle_share > 0.9, warning: true}
message: "Idle for {idle_ns:per_step} a step."
why: It waits.
ceiling: {time_ns: idle_ns, what_if: it never idled}
fixes: [compile]
references: [none]
tests:
  - facts: {idle_share: 0.6, idle_ns: 6.0e+6, steps_analysed: 2}
    expect: warning
    message: "3.00 ms"
    ceiling_ns: 6.0e+6
  - {facts: {idle_share: 0.1}, expect: passed}
  - {facts: {}, expect: not_applicable}
"""


ADVISORY = """\
schema: 1
id: TST-02
title: Nobody can tell
category: tst
maturity: advisory
device_kinds: [gpu]
bound: compute
why: It may be so.
needs: A count of what no counter counts.
references: [none]
"""


def sql_fact(sql: str, name: str = "idle_ns") -> str:
    return f'facts: {{{name}: {{unit: count, doc: A count., sql: "{sql}"}}}}'


def write(folder: Path, text: str = RULE, name: str = "TST-01.yaml") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return str(folder)


def test_of_a_file_without_end_only_the_beginning_is_read(tmp_path: Path) -> None:
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match="larger than 65536 bytes"):
        read_folder(str(tmp_path))


def test_a_rule_of_ones_own_is_loaded_beside_the_built_in_ones(tmp_path: Path) -> None:
    rules = load_rules([write(tmp_path)])
    assert [rule.id for rule in rules] == sorted(rule.id for rule in rules)
    assert {"TST-01", "OVH-01"} <= {rule.id for rule in rules}
    own = read_folder(str(tmp_path)).judged
    assert [rule.id for rule in own] == ["TST-01"]
    assert self_test(own) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("when: idle_share", "whne: idle_share", ":10: whne: unknown key; did you mean 'when'?"),
        ("idle_share >= floor", "idel_share >= floor", ":10: when: column 1: unknown name 'idel_share'; did you mean 'idle_share'?"),
        ("idle_share >= floor", "idle_share + floor", ":10: when: yields a number, a bool is needed"),
        ("idle_share >= floor", "device_word >= floor", ":10: when: column 16: a text cannot be compared with a number"),
        ("[compile]", "[compiel]", ":15: fixes[0]: no fix is named 'compiel'; did you mean 'compile'?"),
        ("{idle_ns:per_step}", "{idle_sn}", ":12: message: unknown name 'idle_sn'; did you mean"),
        ("{idle_ns:per_step}", "{idle_ns!r}", ":12: message: {idle_ns:}: unknown format"),
        ("time_ns: idle_ns", "time_ns: idle_ms", ":14: ceiling.time_ns: column 1: unknown name 'idle_ms'; did you mean 'idle_ns'?"),
        ("origin: a guess", 'origin: ""', ":9: params.floor: says not where the number comes from"),
        ("  floor: {", "  idle_ns: {", ":9: params.idle_ns: a fact has this name"),
        ("schema: 1", "schema: 2", ":1: schema: version 2 is not known"),
        ("id: TST-01", "id: tst1", ":2: id: 'tst1' is no rule id"),
        ("id: TST-01", "id: TST-02", ":2: id: the file must be named TST-02.yaml"),
        ("category: tst", "category: ovh", ":4: category: must be 'tst'"),
        ("bound: idle_launch", "bound: idle_lunch", ":7: bound: 'idle_lunch' is no kind of time; did you mean 'idle_launch'?"),
        ("stable", "stabel", ":5: maturity: 'stabel' is none of stable, preview, advisory; did you mean 'stable'?"),
        (
            "critical: idle_share > 0.9, warning",
            "crtical: true, warning",
            ":11: severity.crtical: 'crtical' is none of info, warning, critical",
        ),
        ("expect: warning", "expect: wraning", ":19: tests[0].expect: 'wraning' is none of fired, info,"),
        ("critical: idle_share > 0.9", "critical: true", ":11: severity.critical: holds always, so those after it are never reached"),
        ("fixes: [compile]", "fixes: [compile, bf16, compile]", ":15: fixes[2]: 'compile' stands in the list already"),
        ("idle_share >= floor", "idle_share >= 0.5", ":9: params.floor: nothing in this rule uses it"),
        ("value: 0.5", "value: .nan", ":9: params.floor.value: a finite number is needed"),
        ("value: 0.5", "value: -.inf", ":9: params.floor.value: a finite number is needed"),
        ("time_ns: idle_ns", "time_ns: idle_share", ":14: ceiling.time_ns: has no fact in ns (idle_share in share)"),
        ("time_ns: idle_ns", "time_ns: 5 * 3", ":14: ceiling.time_ns: has no fact in ns (a number without a unit)"),
        (
            "fixes: [compile]",
            'withholds: [{when: idle_share > 0.1, rules: ["OVH-*", "XYZ-*"], reason: so}]',
            ":15: withholds[0].rules[1]: no rule that can be withheld has an id like 'XYZ-*'",
        ),
        (
            "fixes: [compile]",
            "withholds: [{when: idle_share > 0.1, rules: [HW-01], reason: never}]",
            ":15: withholds[0].rules[0]: no rule that can be withheld has an id like 'HW-01'",
        ),
        ("warning: true", "warning: idle_share > 0.1", ":11: severity: the last severity must be `true`"),
        ("expect: passed", "expect: warning", ":17: tests: no test expects: passed"),
        (
            "{idle_share: 0.1}",
            "{idel_share: 0.1}",
            ":22: tests[1].facts.idel_share: no fact is named 'idel_share'; did you mean 'idle_share'?",
        ),
        ("{idle_share: 0.1}", "{idle_share: much}", ":22: tests[1].facts.idle_share: is a text, the fact is a number"),
        ("why: It waits.", "why: It waits.\nwhy: Again.", ":14: the key why stands twice"),
        ("why: It waits.", "why: [unclosed", "no YAML that can be read: line"),
        ("why: It waits.", "why: &x It waits.\nwhere: *x", "aliases (*name) are not allowed"),
        ("fixes: [compile]", "needless: {compile: compiled}", ":15: needless.compile: is none of the `fixes` of this rule"),
        ("fixes: [compile]", "fixes: [compile]\nneedless: {compile: compield}", ":16: needless.compile: column 1: unknown name 'compield'"),
        ("fixes: [compile]", "fixes: [compile]\nneedless: {compile: idle_ns}", ":16: needless.compile: yields a number, a bool is needed"),
        ("fixes: [compile]", "where: nowhere", ":15: where: no provider of places is named 'nowhere'"),
        ("fixes: [compile]", "explains: [OVH-99]", ":15: explains[0]: no rule 'OVH-99'"),
        ("fixes: [compile]", "explains: [TST-01]", ":15: explains: TST-01 explains itself"),
        ("fixes: [compile]", "needs: more data", ":15: needs: only a rule of maturity advisory has it"),
        ("maturity: stable", "maturity: advisory", ":8: params: an advisory rule is never judged and has none"),
        ("expect: passed", "fixes: [bf16], expect: passed", ":22: tests[1].fixes[0]: 'bf16' is none of the `fixes` of this rule"),
        ("expect: passed", 'withholds: ["A-*"], expect: passed', ":22: tests[1].withholds[0]: 'A-*' is none that this rule withholds"),
        ("title: The device idles", 'title: ""', ":3: title: must not be empty"),
        ("device_kinds: [gpu, cpu]", "device_kinds: [tpu]", ":6: device_kinds[0]: 'tpu' is none of gpu, cpu; did you mean"),
        ("value: 0.5", "value: much", ":9: params.floor.value: Expected `float`, got `str`"),
        ("origin: a guess", "orign: a guess", ":9: params.floor.orign: unknown key; did you mean 'origin'?"),
        ("fixes: [compile]", sql_fact("select 1"), ":15: facts.idle_ns: another fact or parameter has this name"),
        ("fixes: [compile]", sql_fact("selct 1", "own"), ":15: facts.own.sql: only SELECT"),
        ("fixes: [compile]", sql_fact("select max(id) from kernel", "own"), "no table is named 'kernel'; did you mean 'kernels'?"),
        ("fixes: [compile]", sql_fact("select max(busy) from kernels", "own"), "no column is named 'busy'; did you mean 'busy_ns'?"),
        ("fixes: [compile]", sql_fact("select max(name) from kernels", "own"), "facts.own.sql: yields string, which is no number"),
        ("fixes: [compile]", sql_fact("select id, id + 1 as next from kernels", "own"), "facts.own.sql: yields 2 columns, a fact is one"),
        ("fixes: [compile]", sql_fact("select a from read_csv('x')", "own"), "facts.own.sql: read_csv is not allowed"),
        ("fixes: [compile]", sql_fact("select a from read_csv /* a */ ('x')", "own"), "facts.own.sql: read_csv is not allowed"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert RULE.count(old) >= 1
    folder = write(tmp_path, RULE.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load_rules([folder])
    assert says in caught.value.message
    assert caught.value.message.startswith(f"{tmp_path.as_posix()}/TST-01.yaml")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"- a\n- b\n",
        b"\xff\xfe",
        b"[" * 60_000,
        b"- " * 30_000,
        b"? " * 30_000,
        b"a: &a [*a]",
        b"a: {b: " * 5_000,
        b"x: !!python/object/apply:os.system ['true']",
        b'schema: !!int ""',
        b"schema: !!bool x",
        b"!!timestamp schema: 1",
        b'!!float "": 1',
        b"schema: 0x" + b"f" * 5_000,
        b"a: " + b"x" * 70_000,
        b"1: 2",
    ],
)
def test_files_that_are_no_rules(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "TST-01.yaml").write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_rules([str(tmp_path)])
    assert "\n" not in caught.value.message


def test_folders_without_rules(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rule files"):
        load_rules([str(tmp_path)])
    with pytest.raises(InputError, match="no such folder"):
        load_rules([str(tmp_path / "gone")])
    for nothing in ("", "  "):
        with pytest.raises(InputError, match="empty text"):
            read_folder(nothing)


def test_the_same_id_twice_is_an_error_unless_it_overrides_and_then_gives_only_what_changes(tmp_path: Path) -> None:
    first = write(tmp_path / "first")
    with pytest.raises(InputError, match="TST-01 stands in"):
        load_rules([first, write(tmp_path / "copy")])
    change = "id: TST-01\noverride: true\nparams: {floor: {value: 0.05, unit: share, origin: stricter here}}\n"
    tests = "tests:\n  - {facts: {idle_share: 0.06, idle_ns: 1, steps_analysed: 1}, expect: warning}\n"
    rest = "  - {facts: {idle_share: 0.01}, expect: passed}\n  - {facts: {}, expect: not_applicable}\n"
    rules = {rule.id: rule for rule in load_rules([first, write(tmp_path / "change", change + tests + rest)])}
    assert rules["TST-01"].file.params["floor"].value == 0.05
    assert rules["TST-01"].file.title == "The device idles"
    assert self_test([rules["TST-01"]]) == []
    with pytest.raises(InputError, match="there is no rule 'TST-01' to override"):
        load_rules([str(tmp_path / "change")])


def test_a_built_in_threshold_can_be_changed_in_three_lines(tmp_path: Path) -> None:
    text = "id: INP-01\noverride: true\nparams: {min_share: {value: 0.5, unit: share, origin: our loader is shared}}\n"
    changed = {rule.id: rule for rule in load_rules([write(tmp_path, text, "INP-01.yaml")])}["INP-01"]
    assert changed.file.params["min_share"].value == 0.5
    assert changed.file.params["critical_share"].value == 0.2


@pytest.mark.parametrize("fixes", [[], ["gc-freeze"]])
def test_a_built_in_rule_can_offer_other_fixes_in_three_lines(tmp_path: Path, fixes: list[str]) -> None:
    text = f"id: OVH-06\noverride: true\nfixes: [{', '.join(fixes)}]\n"
    changed = {rule.id: rule for rule in load_rules([write(tmp_path, text, "OVH-06.yaml")])}["OVH-06"]
    assert list(changed.file.fixes) == list(changed.file.needless) == fixes
    assert self_test([changed]) == []


def test_a_threshold_that_a_changed_condition_no_longer_needs_may_stay(tmp_path: Path) -> None:
    change = "id: TST-01\noverride: true\nwhen: idle_share >= 0.5\nceiling: {time_ns: wall_ns * idle_share, what_if: none}\n"
    rules = load_rules([write(tmp_path / "first"), write(tmp_path / "change", change)])
    assert {rule.id: rule for rule in rules}["TST-01"].when.text == "idle_share >= 0.5"


def test_circles_of_explanation_are_refused(tmp_path: Path) -> None:
    write(tmp_path, RULE.replace("fixes: [compile]", "explains: [TST-02]"))
    second = RULE.replace("TST-01", "TST-02").replace("fixes: [compile]", "explains: [TST-01]")
    with pytest.raises(InputError, match="explains itself, directly or through others"):
        load_rules([write(tmp_path, second, "TST-02.yaml")])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("expect: warning", "expect: critical", "test 1: expected critical, got warning"),
        ('"3.00 ms"', '"4.00 ms"', "test 1: the message 'Idle for 3.00 ms a step.' does not contain '4.00 ms'"),
        ("ceiling_ns: 6.0e+6", "ceiling_ns: 5.0e+6", "test 1: expected a ceiling of 5e+06 ns, got 6e+06 ns"),
        ("{facts: {}, expect: not", "{facts: {idle_share: 0.2}, expect: not", "test 3: expected not_applicable, got passed"),
    ],
)
def test_inline_tests_that_fail_say_what_came_out(tmp_path: Path, old: str, new: str, says: str) -> None:
    failures = self_test(read_folder(write(tmp_path, RULE.replace(old, new, 1))).judged)
    assert len(failures) == 1
    assert says in failures[0]


def test_without_libyaml_rules_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [path.read_bytes() for path in sorted((Path(__file__).resolve().parents[2] / "rules").rglob("*.yaml"))[::20]]
    fast = [rule_yaml.parse_rule_yaml("rule", text) for text in texts]
    monkeypatch.setattr(rule_yaml, "_Loader", yaml.SafeLoader)
    assert [rule_yaml.parse_rule_yaml("rule", text) for text in texts] == fast


def test_an_advisory_rule_is_read_but_never_judged(tmp_path: Path) -> None:
    folder = write(tmp_path, ADVISORY, "TST-02.yaml")
    base = read_folder(folder)
    assert ([rule.id for rule in base.advisories], base.judged) == (["TST-02"], ())
    assert "TST-02" not in {rule.id for rule in load_rules([folder])}
    write(tmp_path, ADVISORY.replace("needs: A count of what no counter counts.\n", ""), "TST-02.yaml")
    with pytest.raises(InputError, match="missing required field `needs`"):
        read_folder(folder)
    write(tmp_path, ADVISORY.replace("A count of what no counter counts.", '" "'), "TST-02.yaml")
    with pytest.raises(InputError, match=r"TST-02\.yaml:9: needs: must not be empty"):
        read_folder(folder)
    write(tmp_path, ADVISORY + "fixes: [compiel]\n", "TST-02.yaml")
    with pytest.raises(InputError, match="did you mean 'compile'"):
        read_folder(folder)


def test_a_judged_rule_may_explain_an_advisory_one(tmp_path: Path) -> None:
    write(tmp_path, RULE.replace("fixes: [compile]", "explains: [TST-02]"))
    assert {rule.id for rule in load_rules([write(tmp_path, ADVISORY, "TST-02.yaml")])} >= {"TST-01"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("fixes: []", "expected fixes: none; got compile"),
        ('withholds: ["CAP-*", "OVH-01"]', "expected withheld rules: CAP-*, OVH-01; got CAP-*"),
        ('withholds: ["CAP-*"]', "the reason of what is withheld needs idle_ns"),
    ],
)
def test_inline_tests_of_fixes_and_of_what_is_withheld(tmp_path: Path, line: str, says: str) -> None:
    text = RULE.replace(
        "why: It waits.", 'why: It waits.\nwithholds:\n  - {when: idle_share > floor, rules: ["CAP-*"], reason: "{idle_ns}"}'
    )
    second = '  - {when: idle_share > 0.99, rules: ["OVH-01"], reason: none}\n'
    text = text.replace('reason: "{idle_ns}"}\n', 'reason: "{idle_ns}"}\n' + second)
    facts = "{idle_share: 0.6}" if "needs" in says else "{idle_share: 0.6, idle_ns: 6.0e+6, steps_analysed: 2}"
    expect = "not_applicable" if "needs" in says else "warning"
    failures = self_test(read_folder(write(tmp_path, text + f"  - {{facts: {facts}, expect: {expect}, {line}}}\n")).judged)
    assert len(failures) == 1
    assert says in failures[0]


def test_a_late_rank_explains_what_its_waits_look_like() -> None:
    """All others only wait longer in their messages, so what these could be spared is no further finding."""
    explains = {rule.id: set(rule.file.explains) for rule in load_rules()}
    assert explains["DST-06"] >= {"DST-01", "DST-02", "DST-04", "DST-05", "DST-08", "DST-09"}
    assert "DST-06" in explains["DST-10"]
    assert "DST-02" in explains["DST-03"]
