"""Rules: schema, loader, expressions, engine, self-test. Loaded on first use, as the facts that they judge are."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpudiag.diagnosis.engine import Judgement as Judgement
    from gpudiag.diagnosis.engine import judge as judge
    from gpudiag.diagnosis.loader import load_rules as load_rules
    from gpudiag.diagnosis.rule_check import self_test as self_test

_MODULES = {"Judgement": "engine", "judge": "engine", "load_rules": "loader", "self_test": "rule_check"}


def __getattr__(name: str) -> Any:
    """Return one of the public names. Raises AttributeError for another one."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
