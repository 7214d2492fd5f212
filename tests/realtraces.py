"""Where the real third-party traces are, and the reference facts of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parents[2] / "shared"


def recordings(folder: Path) -> list[Path]:
    """Return the traces below `folder`."""
    return sorted(path for path in folder.rglob("*.json.gz") if path.is_file())


def reference(traces: Path, name: str) -> dict[str, Any]:
    """Return the reference facts of one trace (file name without .json.gz; '/' becomes '__')."""
    return json.loads((traces / "reference" / f"{name.replace('/', '__')}.json").read_text())
