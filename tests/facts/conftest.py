"""Makes the hand-made analyses of tests/factories.py importable as `factories`: the tests run with --import-mode=importlib."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

NAME = "factories"

if NAME not in sys.modules:
    spec = importlib.util.spec_from_file_location(NAME, Path(__file__).parents[1] / "factories.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
