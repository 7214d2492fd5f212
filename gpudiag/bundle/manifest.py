"""The manifest of a bundle, read and written; of the first edition too, which had words where codes stand now."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from gpudiag.bundle.layout import MAX_MANIFEST_BYTES
from gpudiag.errors import InputError
from gpudiag.files import read_file
from gpudiag.model.bundle import BUNDLE_VERSION, UNREADABLE, Manifest
from gpudiag.model.notices import Notice, NoticeCode, make_notice

_PLACE = re.compile(r" - at `(\$[\w.\[\]]+)`$")


class _Version(msgspec.Struct):
    bundle_version: int = 0


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as it stands in the bundle: JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in the file `path`. Raises InputError for one that cannot be read, or of a newer version."""
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise InputError(f"{path}: larger than {MAX_MANIFEST_BYTES >> 20} MB, this is no manifest", "give a bundle written by gpudiag")
        data = read_file(path, MAX_MANIFEST_BYTES)
        version = msgspec.json.decode(data, type=_Version).bundle_version
        if version > BUNDLE_VERSION:
            raise InputError(
                f"{path}: bundle version {version}, this gpudiag reads up to version {BUNDLE_VERSION}", "pip install --upgrade gpudiag"
            )
        # `manifest` with what its telemetry notes, as codes; bundles of the first edition have words alone, read only here
        manifest = msgspec.json.decode(data, type=Manifest)
        info = manifest.telemetry
        if info is None or info.notices or not info.notes:
            return manifest
        xids = " ".join(_XID.findall(info.notes.get("xid_events", "")))
        found = [make_notice(NoticeCode.XID_ERRORS, numbers=xids)] if xids else []
        if any("whole board" in words for words in info.notes.values()):
            found.append(make_notice(NoticeCode.BOARD_SHARED))
        if "averaged" in info.notes.get("power_w", ""):
            found.append(make_notice(NoticeCode.POWER_AVERAGED))
        return msgspec.structs.replace(manifest, telemetry=msgspec.structs.replace(info, notices=tuple(found)))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})", "check the path and its permissions") from error
    except UNREADABLE as error:
        # where the fault is, without what stands there: msgspec's own message may quote a value of the file
        place = _PLACE.search(str(error)) if isinstance(error, msgspec.ValidationError) else None
        fault = f"an unexpected value at {place.group(1)}" if place else "no valid JSON object of its kind"
        raise InputError(f"{path}: not the manifest of a bundle ({fault})", "give a bundle written by gpudiag") from None


_XID = re.compile(r"Xid (\d{1,4})")

_FIRST_EDITION = (
    ("recording was switched off", NoticeCode.RECORDING_SWITCHED_OFF),
    ("was switched off", NoticeCode.PART_SWITCHED_OFF),
    ("another torch profiler", NoticeCode.OTHER_PROFILER),
    ("the training loop ended with", NoticeCode.LOOP_ENDED_BY_ERROR),
    ("steps recorded (", NoticeCode.WINDOW_SHORT),
    ("the run ended before", NoticeCode.RUN_ENDED_EARLY),
    ("were not begun", NoticeCode.WINDOWS_NOT_BEGUN),
)
"""Words of warnings in manifests of the first edition, which noted no codes -> their codes."""


def read_manifest_notices(manifest: Manifest) -> tuple[Notice, ...]:
    """Return what the session noted, with codes; those of a bundle of the first edition are known by its words, here and nowhere else."""
    coded = {notice.params.get("text"): notice.code for notice in manifest.notices}
    first = {text: next((code for words, code in _FIRST_EDITION if words in text), None) for text in manifest.warnings if text not in coded}
    return tuple(make_notice(coded.get(text) or first[text] or NoticeCode.FROM_MANIFEST, text=text) for text in manifest.warnings)
