"""Documents of gpudiag's own, kept as what came of them: YAML takes forty times as long to read as the same values in msgpack.

One file a document, in the user's cache folder, with a digest of the bytes that it was made from. Never fails: what cannot be read is
made anew, what cannot be written is not kept.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from gpudiag.files import read_file, replace_file

MAX_BYTES = 16 << 20
"""Largest file that is read back: forty times what the built-in rules take."""


class _StoredDocument(msgspec.Struct, frozen=True):
    key: str
    values: Any


def find_cache_folder() -> Path | None:
    """Return gpudiag's folder in $XDG_CACHE_HOME (absolute, as the XDG base directory specification asks) or ~/.cache.

    None where there is no home folder. It may not exist.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "gpudiag"


def load_document(name: str, made_from: Iterable[bytes], make: Callable[[], Any]) -> Any:
    """Return the values that `make` returns, or those kept under `name` that were made from the same bytes: texts and what read them.

    Values are kept where they are those of JSON: others would come back as something else.
    """
    folder, digest = find_cache_folder(), hashlib.blake2b(digest_size=16)
    for piece in made_from:
        digest.update(len(piece).to_bytes(8, "little") + piece)
    key = digest.hexdigest()
    path = None if folder is None else folder / "parsed" / f"{name}.msgpack"
    if path is not None:
        with suppress(OSError, ValueError, RecursionError, msgspec.MsgspecError):
            kept = msgspec.msgpack.decode(read_file(path, MAX_BYTES), type=_StoredDocument)
            if kept.key == key:
                return kept.values
    values = make()
    if path is not None:
        with suppress(OSError, TypeError, ValueError, OverflowError, RecursionError):
            document = _StoredDocument(key, values)
            data = msgspec.msgpack.encode(document)
            if msgspec.msgpack.decode(data, type=_StoredDocument) == document:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, data)
    return values
