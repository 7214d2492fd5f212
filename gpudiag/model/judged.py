"""What judging writes into findings and reasons, and reports read: both need these words, and printing needs no rule engine."""

from __future__ import annotations

MEASUREMENT_RULE = "EFF-03"
"""The rule on the measurement: critical = invalid, else weak (architecture.md section 6)."""

NO_GAIN = 0.005
"""Share of the steps below which a ceiling is none, and a rule that holds is no finding (heuristic: no A/B test of a training run can show
half a percent)."""

AT_RECORDED_PACE = "at the recorded pace"
"""Why a finding gains nothing, where nobody knows how much the profiler slowed the host: the plain step may be limited by other things."""

HOLDS = "holds, but "
"""How the reason of a rule begins that holds and would gain nothing."""

SWITCHED_OFF = "switched off"
"""How the reason of a rule begins that the user does not want judged."""

WITHHELD = "withheld: "
"""How the reasons begin for which a finding about the measurement's fault is not made."""

SLOWED = "with the profiler"
"""What those reasons say that are the profiler's slow-down: reports count them."""
