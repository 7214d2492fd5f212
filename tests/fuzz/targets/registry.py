"""All targets by name."""

from __future__ import annotations

from fuzz.targets import bundles, expressions, pickles, readers, reports, rules, texts
from fuzz.targets.target import Target

TARGETS: dict[str, Target] = {
    target.name: target for module in (expressions, rules, pickles, texts, bundles, readers, reports) for target in module.TARGETS
}
