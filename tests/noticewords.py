"""Notices in words, for tests that read them as a person does."""

from __future__ import annotations

from collections.abc import Iterable

from gpudiag.model.notices import Notice, NoticeCode, format_notice, make_notice


def format_notices(notices: Iterable[Notice]) -> tuple[str, ...]:
    """Return each notice in words."""
    return tuple(map(format_notice, notices))


def texts(*words: str) -> tuple[Notice, ...]:
    """Return notices without a code of their own that say `words`."""
    return tuple(make_notice(NoticeCode.RECORDED_TEXT, text=text) for text in words)
