"""Events of a trace, rewritten one by one: allowed keys in allowed forms. Works on JSON text, so that no number is changed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Raw

from gpudiag.api.scrub import forms
from gpudiag.api.scrub.forms import Form
from gpudiag.api.scrub.kept import ARGUMENTS, PHASES, PHASES_WITH_ARGUMENTS, FormName
from gpudiag.api.scrub.names import Names
from gpudiag.api.scrub.words import Words
from gpudiag.trace.categories import ALL_KINDS, CodeOf

_REMEMBERED = 200_000
"""Distinct values whose rewritten text is kept; a hostile file has more, and then waits longer."""

_LONGEST = 4_000
"""Bytes of a value that is worth remembering."""

_KEYS = frozenset(("ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "s", "bp", "args"))
_FLAGS = frozenset(('"p"', '"t"', '"g"', '"e"'))
"""Scope of an instant event and binding point of a flow (Trace Event Format)."""


def forms_by_name(names: Names) -> Mapping[FormName, Form]:
    """Return the forms of the allow-list that hold one value."""
    return {
        "number": forms.number, "numbers": forms.numbers, "address": forms.address, "version": forms.version, "types": forms.types,
        "arguments": forms.arguments, "words": forms.words(names), "symbol": forms.symbol(names), "device": forms.device_name,
    }  # fmt: skip


_WITHOUT_TEXTS = (forms.numbers, forms.types, forms.arguments)
"""Forms that leave out the texts in a value, and keep the rest."""


class Events:
    """Rewrites chunks of events; what is left out is noted in `words.removed`."""

    def __init__(self, names: Names, words: Words) -> None:
        self._names, self._words = names, words
        self._chunk = msgspec.json.Decoder(list[dict[str, Raw]])
        self._object = msgspec.json.Decoder(dict[str, Raw])
        known = forms_by_name(names)
        self._forms = {key: known[form] for key, form in ARGUMENTS.items()}
        self._begins = {key: b'"%b":' % key.encode() for key in (*ARGUMENTS, *_KEYS)}
        self._words_form = known["words"]
        self._plain: dict[tuple[str, bytes], bytes | None] = {}
        self._named: dict[tuple[int, bytes], bytes | None] = {}
        self._code_of = CodeOf()
        self._kinds: dict[bytes, int] = {}
        self._phases: dict[bytes, str] = {}

    def rewritten(self, text: memoryview | bytes) -> bytes:
        """Return the events of `text`, a JSON array, as objects on lines of their own."""
        return b",\n".join(map(self._event, self._chunk.decode(text)))

    def _event(self, event: dict[str, Raw]) -> bytes:
        letter = self._phase(bytes(event.get("ph", b"")))
        parts = [b'"ph":"%b"' % letter.encode()] if letter else []
        category = bytes(event.get("cat", b""))
        for key in event:
            if key not in _KEYS:
                self._words.removed.note("keys of events", key)
                forms.texts_in(event[key], self._words, "texts of events")
            elif key not in ("ph", "args"):
                value = self._field(key, bytes(event[key]), category)
                if value is not None:
                    parts.append(self._begins[key] + value)
        if "args" in event:
            parts.append(b'"args":' + self._arguments(event["args"], letter))
        return b"{" + b",".join(parts) + b"}"

    def _phase(self, raw: bytes) -> str:
        """Return the letter of an event's phase; '' for none that is known."""
        found = self._phases.get(raw)
        if found is None:
            value = forms.decoded(raw)
            found = value if isinstance(value, str) and value in PHASES else ""
            if len(self._phases) < _REMEMBERED:
                self._phases[raw] = found
        return found

    def _field(self, key: str, raw: bytes, category: bytes) -> bytes | None:
        """Return the value of a key of an event; None where it has no allowed form."""
        if key in ("ts", "dur") or not raw.startswith(b'"'):
            return forms.number(raw)
        if key == "name":
            return self._name(raw, category)
        if key in ("s", "bp"):
            return raw if raw.decode("utf-8", "replace") in _FLAGS else None
        return self._remembered(key, raw, self._words_form)

    def _name(self, raw: bytes, category: bytes) -> bytes | None:
        code = self._kind(category)
        if len(raw) > _LONGEST:
            return forms.text_by(self._names.of(ALL_KINDS[code]))(raw)
        found = self._named.get((code, raw), b"")
        if found == b"":
            if len(self._named) >= _REMEMBERED:
                self._named.clear()
            found = self._named[code, raw] = forms.text_by(self._names.of(ALL_KINDS[code]))(raw)
        return found

    def _kind(self, category: bytes) -> int:
        found = self._kinds.get(category)
        if found is None:
            value = forms.decoded(category)
            found = self._code_of[value if isinstance(value, str) else None]
            if len(self._kinds) < _REMEMBERED:
                self._kinds[category] = found
        return found

    def _remembered(self, key: str, raw: bytes, form: Form) -> bytes | None:
        if len(raw) > _LONGEST:
            return form(raw)
        found = self._plain.get((key, raw), b"")
        if found == b"":
            if len(self._plain) >= _REMEMBERED:
                self._plain.clear()
            found = self._plain[key, raw] = form(raw)
        return found

    def _arguments(self, raw: Raw, letter: str) -> bytes:
        try:
            args = self._object.decode(raw) if letter in PHASES_WITH_ARGUMENTS else {}
        except forms.JSON_ERRORS:
            args = {}
        if not args and bytes(raw) != b"{}":
            self._words.removed.note("arguments of events")
            forms.texts_in(raw, self._words, "texts of events")
        parts = []
        for key, value in args.items():
            found = self._argument(key, bytes(value))
            if found is not None:
                parts.append(self._begins[key] + found)
        return b"{" + b",".join(parts) + b"}"

    def _argument(self, key: str, raw: bytes) -> bytes | None:
        """Return the value of an argument: None where its key is not on the list, an empty text where its form is another."""
        form = self._forms.get(key)
        found = None if form is None else forms.number(raw) if form is forms.number else self._remembered(key, raw, form)
        if found != raw and (found is None or form in _WITHOUT_TEXTS):
            self._words.removed.note("arguments of events", key if form is None else None)
            forms.texts_in(raw, self._words, "texts of events")
        return b'""' if found is None and form is not None else found
