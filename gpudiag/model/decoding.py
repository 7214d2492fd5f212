"""What decoding a file that somebody else may have written raises."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""Another form, text that is no UTF-8 or holds half a surrogate pair, and nesting that msgspec follows too deeply."""
