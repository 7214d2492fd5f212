"""What a shell offers for the word that is being typed: recordings, scripts, fixes, rules, devices."""

from __future__ import annotations

import os
from collections.abc import Iterator

RECORDINGS = (".json", ".json.gz", ".json.zst", ".sqlite", ".nsys-rep")


def complete_recording(incomplete: str) -> list[str]:
    """List the folders and recordings that begin with `incomplete`."""
    return list(_list_files(incomplete, RECORDINGS))


def complete_script(incomplete: str) -> list[str]:
    """List the folders and Python scripts that begin with `incomplete`."""
    return list(_list_files(incomplete, (".py",)))


def _list_files(incomplete: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    folder, begun = os.path.split(incomplete)
    try:
        entries = sorted(os.scandir(folder or "."), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(begun) and (begun or not entry.name.startswith(".")):
            if entry.is_dir():
                yield os.path.join(folder, entry.name, "")
            elif entry.name.endswith(suffixes):
                yield os.path.join(folder, entry.name)


def complete_fix(incomplete: str) -> list[tuple[str, str]]:
    """List the fixes whose id begins with `incomplete`, with their titles."""
    from gpudiag.fixes import FIXES

    return [(fix.id, fix.title) for fix in FIXES if fix.id.startswith(incomplete)]


def complete_rule(incomplete: str) -> list[tuple[str, str]]:
    """List the rules whose id begins with `incomplete`, with their titles."""
    from gpudiag.diagnosis import load_rules

    return [(rule.id, rule.file.title) for rule in load_rules() if rule.id.startswith(incomplete)]


def complete_device(incomplete: str) -> list[tuple[str, str]]:
    """List the devices of the device table whose id begins with `incomplete`, or whose name holds it, with their names."""
    from gpudiag.hardware.attained import list_device_names

    begun = incomplete.lower()
    devices = list_device_names()
    return [each for each in devices if each[0].startswith(begun)] or [each for each in devices if begun in each[1].lower()]
