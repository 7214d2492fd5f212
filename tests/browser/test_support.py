"""The helpers see what they are asked about."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import support

pytestmark = pytest.mark.slow
BAD = """<!doctype html><title>bad</title><img src="data:image/gif;base64,R0lGODlhAQABAAAAACw="><div style="width: 3000px">wide</div>
<script>console.error("said"); throw new Error("thrown")</script>"""


def test_what_is_wrong_on_a_page_is_seen(browser, axe: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    file.write_text(BAD, encoding="utf-8")
    with support.opened(browser, file, width=support.NARROW) as seen:
        assert sorted(error.partition(":")[0] for error in seen.errors) == ["error", "exception"]
        assert any(line.startswith("image-alt (critical)") for line in support.violations(seen.page, axe))
        assert support.overflow_px(seen.page) > 2_000
        assert support.picture(seen.page, "bad", tmp_path).stat().st_size > 1_000
        assert support.first_paint_ms(seen.page) > 0
