"""Rewrites the golden numbers from the real traces: `make golden`. Read the difference before you keep it."""

from __future__ import annotations

import sys

from golden import figures
from realtraces import SHARED


def main() -> int:
    folder = SHARED / "traces"
    if not folder.is_dir():
        sys.stderr.write(f"no real traces here: {folder} does not exist\n")
        return 2
    for name in figures.TRACES:
        (figures.FOLDER / f"{name}.json").write_text(figures.text(figures.numbers(folder / f"{name}.json.gz")))
        sys.stdout.write(f"tests/golden/{name}.json\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
