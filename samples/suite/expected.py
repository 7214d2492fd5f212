"""What a sample expects of the report on it: its expected.toml."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from gpudiag.errors import InputError, suggest_nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REQUIREMENTS = ("cuda", "cuda:2", "cpu", "bf16-matmul", "cxx")
CONTROL = "control_"


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of expected.toml. Rule ids may be patterns such as MEM-*."""

    title: str
    """What is planted."""
    requires: tuple[str, ...] = ()
    first: str = ""
    """The finding that must be first; '' for a healthy control, in which nothing may fire above info."""
    must: tuple[str, ...] = ()
    """Must be there, anywhere, folded under another one too."""
    may: tuple[str, ...] = ()
    """May follow above info."""
    never: tuple[str, ...] = ()
    """Must not be there, at any severity."""


class Sample(msgspec.Struct, frozen=True):
    """One sample: a folder with train.py and expected.toml."""

    name: str
    folder: Path
    expected: Expected

    @property
    def script(self) -> Path:
        """Return the training script."""
        return self.folder / "train.py"

    @property
    def control(self) -> bool:
        """Return whether it is healthy, with nothing planted and no twin."""
        return self.name.startswith(CONTROL)


def read_expected(path: Path) -> Expected:
    """Return what the file says. Raises InputError that names file and key."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {error}") from None
    for key in found:
        if key not in Expected.__struct_fields__:
            near = suggest_nearest(key, Expected.__struct_fields__)
            raise InputError(f"{path}: no key {key!r}{near}", None if near else ", ".join(Expected.__struct_fields__))
    try:
        expected = msgspec.convert(found, Expected)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: {error}") from None
    _check(path, expected)
    return expected


def _check(path: Path, expected: Expected) -> None:
    for name in expected.requires:
        if name not in REQUIREMENTS:
            raise InputError(f"{path}: requires: no such requirement {name!r}", f"there are {', '.join(REQUIREMENTS)}")
    if path.parent.name.startswith(CONTROL) != (not expected.first):
        raise InputError(f"{path}: first: a control ({CONTROL}...) has none, every other sample has one")


def find_samples(folder: Path, names: tuple[str, ...] = ()) -> list[Sample]:
    """Return the samples below `folder`, planted ones first. `names`: only these. Raises InputError for a name that is none."""
    found = [Sample(path.parent.name, path.parent, read_expected(path)) for path in sorted(folder.glob("*/expected.toml"))]
    known = [sample.name for sample in found]
    for name in names:
        if name not in known:
            near = suggest_nearest(name, known)
            raise InputError(f"no sample {name!r}{near}", None if near else f"there are {', '.join(known)}")
    chosen = [sample for sample in found if not names or sample.name in names]
    return sorted(chosen, key=lambda sample: (sample.control, sample.name))
