"""Files of gates: what they mean, and where a wrong one is wrong."""

from __future__ import annotations

import pytest

from gpudiag.comparison.gates import parse_gates
from gpudiag.errors import InputError
from gpudiag.model.comparison import FindingGate, Gate

RULES = ("SYN-01", "OVH-01")

WHOLE = """# limits
[step_median_ms]
max = 12.5
tolerance_share = 0.03

[mfu_share]
min = 0.3
required = false

[findings]
fail_at = "critical"
new_at = "warning"
forbid = ["SYN-01"]
allow = ["OVH-01"]
required = false
"""


def test_a_whole_file() -> None:
    found = parse_gates("gates.toml", WHOLE, RULES)
    assert found.gates == (
        Gate(metric="step_median_ms", max=12.5, tolerance_share=0.03, line=2),
        Gate(metric="mfu_share", min=0.3, required=False, line=6),
    )
    assert found.findings == FindingGate(
        fail_at="critical", new_at="warning", forbid=("SYN-01",), allow=("OVH-01",), required=False, line=10
    )
    assert found.needs_baseline


def test_limits_of_its_own_need_no_baseline() -> None:
    assert not parse_gates("gates.toml", "[idle_share]\nmax = 0.2\n[findings]\nfail_at = 'critical'\n", RULES).needs_baseline


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[step_medain_ms]\nmax = 1.0", "gates.toml:1: step_medain_ms: unknown metric; did you mean 'step_median_ms'?"),
        ("[mfu_share]\nmin = 0.3\n[step_p95_ms]\nmaxx = 1", "gates.toml:4: step_p95_ms.maxx: unknown key; did you mean 'max'?"),
        ("[findings]\nforbidd = []", "gates.toml:2: findings.forbidd: unknown key; did you mean 'forbid'?"),
        ("[findings]\nforbid = ['SYN-1']", "gates.toml:2: findings.forbid: no rule 'SYN-1'; did you mean 'SYN-01'?"),
        ("[findings]\nfail_at = 'crtical'", "gates.toml:2: findings.fail_at: no severity; did you mean 'critical'?"),
        ("[findings]\nfail_at = 3", "gates.toml:2: findings.fail_at: no severity"),
        ("[findings]\nforbid = 'SYN-01'", "findings.forbid: a list of rule ids is needed"),
        ("[findings]\nallow = ['SYN-01']", "findings: no limit"),
        ("[findings]\nforbid = ['SYN-01']\nallow = ['SYN-01']", "SYN-01 is both forbidden and allowed"),
        ("[mfu_share]\nmin = 30", "gates.toml:2: mfu_share.min: 30 is no share"),
        ("[step_median_ms]\nmax = '12 ms'", "gates.toml:2: step_median_ms.max: a number is needed (in ms)"),
        ("[step_median_ms]\nmax = true", "a number is needed"),
        ("[step_median_ms]\nmax = nan", "a finite number is needed"),
        (f"[step_median_ms]\nmax = 1{'0' * 400}", "a finite number is needed"),
        ("[step_median_ms]\nmax = 1\ntolerance_share = -0.1", "gates.toml:3: step_median_ms.tolerance_share: not below 0"),
        ("[step_median_ms]\nmin = 3\nmax = 1", "min is above max"),
        ("[step_median_ms]\nrequired = false", "step_median_ms: no limit"),
        ("[step_median_ms]\nmax = 1\nrequired = 'no'", "true or false is needed"),
        ("step_median_ms = 12", "gates.toml:1: step_median_ms: a table is needed"),
        ("", "no gates in it"),
        ("[step_median_ms\nmax = 1", "gates.toml:1: no TOML that can be read"),
    ],
)
def test_a_wrong_file_names_line_key_and_the_right_name(text: str, said: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_gates("gates.toml", text, RULES)
    assert said in str(raised.value)
    assert raised.value.exit_code == 2
