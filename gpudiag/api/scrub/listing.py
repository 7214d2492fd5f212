"""The allow-list in words, for `gpudiag scrub --list`."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping

from gpudiag.api.scrub import kept
from gpudiag.api.scrub.vocabulary import WORDS
from gpudiag.api.scrub.words import MAX_NUMBER


def listing(width: int) -> str:
    """Return what a copy keeps and what it does not, in lines of at most `width` characters."""
    parts = [
        _head("Kept: names"), *(_item(what, how, width) for what, how in kept.NAMES),
        _head("Kept: keys of the header"), *_by_form(kept.HEADERS, width),
        _item("distributedInfo", f"{', '.join(sorted(kept.DISTRIBUTED))}; of each group {', '.join(sorted(kept.GROUP))}", width),
        _item("deviceProperties", f"of each device {', '.join(sorted(kept.DEVICE))}", width),
        _head("Kept: arguments of events"), *_by_form(kept.ARGUMENTS, width),
        _head("Removed"), *(_item("-", text, width) for text in kept.REMOVED),
        _head("Files of a bundle"), *(_item(what, how, width) for what, how in kept.BUNDLE),
        _head(f"Vocabulary ({len(WORDS)} words; numbers of up to {MAX_NUMBER} digits)"), *_wrapped(" ".join(sorted(WORDS)), width, "  "),
    ]  # fmt: skip
    return "\n".join(parts).lstrip("\n") + "\n"


def _by_form(allowed: Mapping[str, kept.FormName], width: int) -> Iterable[str]:
    """Yield the keys of an allow-list under what may stand in them."""
    keys = defaultdict(list)
    for key, form in allowed.items():
        keys[form].append(key)
    for form, found in keys.items():
        yield _item(kept.FORMS[form], ", ".join(sorted(found)), width)


def _head(text: str) -> str:
    return f"\n{text}"


def _item(what: str, text: str, width: int) -> str:
    return "\n".join(_wrapped(f"{what}: {text}" if what != "-" else text, width, "  "))


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent * 2, break_long_words=False, break_on_hyphens=False)
