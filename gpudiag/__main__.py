"""`python -m gpudiag` is the `gpudiag` command."""

from __future__ import annotations

import sys

from gpudiag.cli import main

if __name__ == "__main__":
    sys.exit(main())
