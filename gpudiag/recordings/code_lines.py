"""Lines of the program around what a report names: from files that are still those that were recorded, else from the bundle's report."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

import msgspec

from gpudiag.bundle.layout import REPORT_NAME
from gpudiag.files import digest_content, read_file
from gpudiag.model.bundle import UNREADABLE, Manifest
from gpudiag.model.finding import Where
from gpudiag.model.report import CodeLines

AROUND = 5
"""Lines that are kept on each side of a place."""

MOST_PLACES, LONGEST_LINE = 30, 200
_MOST_BYTES, _MOST_REPORT_BYTES = 1 << 20, 64 << 20


class _KeptReport(msgspec.Struct, frozen=True):
    """The one key of a report that is looked at."""

    code: tuple[CodeLines, ...] = ()


def read_code_lines(places: Iterable[Where], bundle: Path, manifest: Manifest) -> tuple[CodeLines, ...]:
    """Read the lines around the first places that lie in a file of the recorded program.

    A bundle is untrusted: of a file is shown only what has the digest in the manifest, which nobody knows who does not know the file.
    """
    sources = _get_sources(manifest)
    folders = list(_list_folders(bundle, manifest.command or ()))
    wanted = list(dict.fromkeys((place.file, place.line) for place in places if place.file and place.line)) if sources else []
    found: list[CodeLines] = []
    for file, line in wanted[:MOST_PLACES]:
        name = _find_source(str(file), sources)
        if name is not None:
            found.append(_read_place(CodeLines(file=str(file), line=int(line or 0)), folders, name, sources[name]))
    if all(one.lines for one in found):
        return tuple(found)
    kept = {(one.file, one.line): one for one in _read_kept_lines(bundle)}
    return tuple(
        msgspec.structs.replace(known, status=one.status) if not one.lines and (known := kept.get((one.file, one.line))) else one
        for one in found
    )


def find_program_file(word: str, bundle: Path, manifest: Manifest) -> Path | None:
    """Return where the script of a recorded command lies, where it is still the one that was recorded; None else."""
    sources = _get_sources(manifest)
    name = _find_source("/".join(PurePosixPath(word).parts[-2:]), sources)
    if name is None:
        return None
    return _find_file(_list_folders(bundle, manifest.command or ()), name, sources[name])[0]


def _get_sources(manifest: Manifest) -> dict[str, str]:
    return (manifest.program.sources if manifest.program else None) or {}


def _find_source(file: str, sources: Iterable[str]) -> str | None:
    """Return the one file of the program whose path ends as `file`, or of which `file` is more of the path; None for none or several."""
    found = [name for name in sources if f"/{name}".endswith(f"/{file}") or f"/{file}".endswith(f"/{name}")]
    return found[0] if len(found) == 1 else None


def _list_folders(bundle: Path, command: Sequence[str]) -> Iterator[Path]:
    """Yield where the program may lie: here, beside the bundle (by default runs/<time>), with its script, and where Python imports from."""
    script = next((word for word in command if word.endswith(".py")), "")
    for folder in (Path.cwd(), *bundle.resolve().parents[:2]):
        yield folder
        if script:
            yield folder / os.path.dirname(script)
    yield from (Path(entry) for entry in sys.path if entry)


def _read_place(place: CodeLines, folders: Iterable[Path], name: str, digest: str) -> CodeLines:
    path, text, there = _find_file(folders, name, digest)
    if path is not None:
        return _cut_lines(place, text)
    return msgspec.structs.replace(place, status="changed" if there else "missing")


def _find_file(folders: Iterable[Path], name: str, digest: str) -> tuple[Path | None, str, bool]:
    """Return the file of this name and digest with its text, None where there is none, and whether another one of the name is there."""
    path, there = PurePosixPath(name), False
    if path.is_absolute() or ".." in path.parts or path.suffix != ".py":
        return None, "", False
    for folder in dict.fromkeys(folders):
        with suppress(OSError, ValueError):
            data = read_file(folder / path, _MOST_BYTES)
            there = True
            if digest_content(data) == digest:
                return folder / path, data.decode("utf-8", "replace"), True
    return None, "", there


def _cut_lines(place: CodeLines, text: str) -> CodeLines:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # as Python counts them
    if not 0 < place.line <= len(lines):
        return place
    first = max(1, place.line - AROUND)
    around = lines[first - 1 : place.line + AROUND]
    return msgspec.structs.replace(place, first=first, lines=tuple(line.expandtabs(4)[:LONGEST_LINE] for line in around))


def _read_kept_lines(bundle: Path) -> tuple[CodeLines, ...]:
    """Return the lines in the report that `gpudiag run` wrote into the bundle, while the program was as it had been recorded."""
    path = bundle / REPORT_NAME
    with suppress(OSError, *UNREADABLE):
        if not path.is_symlink():
            kept = msgspec.json.decode(read_file(path, _MOST_REPORT_BYTES), type=_KeptReport).code
            return tuple(one for one in kept if 0 <= one.line - one.first < len(one.lines) <= 2 * AROUND + 1)
    return ()
