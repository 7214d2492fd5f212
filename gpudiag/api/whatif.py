"""What a change would give: the representative steps of a recording replayed with costs changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gpudiag.api.analysis import analyse
from gpudiag.api.inputs import resolve_input
from gpudiag.model.analysis import Analysis
from gpudiag.model.replay import ReplayTrust, WhatIf
from gpudiag.timeline.whatif.analysed import study_of
from gpudiag.timeline.whatif.registry import parse

NOT_REPLAYED = "the recording holds no launches or ops within a complete step, so there is no dependency graph to replay"
SCHEMA_VERSION = 1


class WhatIfs(msgspec.Struct, frozen=True):
    """What-ifs of one recording, largest gain first, and how far the replay can be trusted."""

    source: str
    what_ifs: tuple[WhatIf, ...]
    trust: ReplayTrust | None
    reason: str = ""
    """Why there is no replay; '' where there is one."""
    schema_version: int = SCHEMA_VERSION


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of what `gpudiag whatif PATH --json FILE` writes."""
    return msgspec.json.schema(WhatIfs)


def what_ifs(path: str, settings: Sequence[str] = (), *, rank: int | None = None, progress: Callable[[str], None] | None = None) -> WhatIfs:
    """Return the steps of `path` (trace, bundle or folder of ranks) with all `settings` at once, as `gpudiag whatif --set` takes them.

    Without settings: every standard what-if that applies. Raises InputError where `path` cannot be read, a setting does not exist, has
    a wrong value, or is about nothing that the steps hold.
    """
    chosen = parse(settings)
    tell = progress or (lambda _: None)
    analysis, _ = analyse(resolve_input(path, rank), tell)
    tell("replaying")
    study = study_of(analysis)
    if study is None:
        return WhatIfs(path, (), None, _reason(analysis))
    return WhatIfs(path, (study.what_if(chosen),) if chosen else study.standard(), analysis.replay)


def _reason(analysis: Analysis) -> str:
    return next((warning for warning in analysis.warnings if "replay" in warning), NOT_REPLAYED)
