"""The command that `gpudiag run` wrote into a bundle. A bundle is untrusted: what it names is looked at before it is shown or run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import msgspec

from gpudiag.errors import InputError
from gpudiag.files import read_file
from gpudiag.model.bundle import MANIFEST_NAME, UNREADABLE, Manifest

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MOST_WORDS, _LONGEST = 500, 8_000


def read_recorded_script(paths: list[str]) -> str:
    """Read the program and its arguments as words of a shell; '' where `paths` are no bundle of `gpudiag run`.

    For a hint beneath a report that is printed already: what cannot be read here is no fault.
    """
    if len(paths) != 1:
        return ""
    try:
        # Of a manifest that is read for its command alone; one of eight windows has some ten thousand
        manifest = msgspec.json.decode(read_file(Path(paths[0], MANIFEST_NAME), 1 << 20), type=Manifest)
        return shlex.join(find_recorded_words(manifest))
    except (OSError, ValueError, InputError, *UNREADABLE):
        return ""


def find_recorded_words(manifest: Manifest) -> tuple[str, ...]:
    """Find the program and its arguments as `gpudiag run` was given them; () where they were not recorded.

    A manifest is untrusted: raises InputError for words that are no program with its arguments, such as options of gpudiag.
    """
    words = manifest.command or ()
    if not words:
        return ()
    if len(words) > _MOST_WORDS or sum(map(len, words)) > _LONGEST:
        raise InputError("the recorded command is too long to be looked at: it is not run from here")
    if not all(word.isprintable() for word in words):  # what is shown must be all that is run
        raise InputError("the recorded command holds characters that cannot be shown: it is not run from here")
    if words[0] == "-m":
        if len(words) < 2 or not _MODULE.fullmatch(words[1]):
            raise InputError("the recorded command names no module after -m: it is not run from here")
    elif not words[0] or words[0].startswith("-"):
        raise InputError("the recorded command begins with an option, not with a program: it is not run from here")
    return words
