"""The pages of the dashboard, in the order of its navigation: one line a page."""

from __future__ import annotations

from gpudiag_dashboard.page import Page
from gpudiag_dashboard.pages import bundles, compare, experiments, findings, memory, ops, overview, ranks, roofline, telemetry, timeline

PAGES: tuple[Page, ...] = (
    bundles.PAGE,
    overview.PAGE,
    findings.PAGE,
    timeline.PAGE,
    ops.PAGE,
    roofline.PAGE,
    memory.PAGE,
    telemetry.PAGE,
    ranks.PAGE,
    experiments.PAGE,
    compare.PAGE,
)
