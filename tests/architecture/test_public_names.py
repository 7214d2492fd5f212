"""What users import: the names are frozen, and no submodule takes the place of one of them."""

from __future__ import annotations

import subprocess
import sys

import gpudiag

FROZEN = [
    "Applier",
    "ExperimentResult",
    "Fix",
    "NotAppliedError",
    "Report",
    "Task",
    "__version__",
    "ab",
    "ab_script",
    "calibrate",
    "check",
    "compare",
    "diagnose",
    "estimate_memory",
    "listen",
    "memory",
    "profile",
    "register_fix",
    "step",
    "whatif",
]
"""A name that is missing here breaks programs of users: take one away only with a release that says so."""

CALL_EACH = """
import importlib, pkgutil
import gpudiag

STARTS_SOMETHING = ("gpudiag.__main__", "gpudiag.capture.run_script.inject.sitecustomize")
for module in pkgutil.walk_packages(gpudiag.__path__, "gpudiag."):
    if module.name not in STARTS_SOMETHING:
        importlib.import_module(module.name)

from gpudiag.errors import InputError, UsageError
from gpudiag.model.experiment import ExperimentData

def refused(error, call, *given, **options):
    try:
        call(*given, **options)
    except error:
        return True
    return False

class Nothing(gpudiag.Applier):
    def install(self, site): pass
    def evidence(self, site): return ""

fix = gpudiag.Fix("nothing", "Change nothing", "exact", "pass")
called = {
    "Applier": Nothing("x").value == "x",
    "ExperimentResult": gpudiag.ExperimentResult(ExperimentData()).verdict is None,
    "Fix": fix.id == "nothing",
    "NotAppliedError": issubclass(gpudiag.NotAppliedError, Exception),
    "Report": "text" in dir(gpudiag.Report(None)),
    "Task": gpudiag.Task(None, None, [], print, print).loader == [],
    "ab": refused((InputError, UsageError), gpudiag.ab, print),
    "ab_script": refused((InputError, UsageError), gpudiag.ab_script, "no such script.py"),
    "calibrate": refused(UsageError, gpudiag.calibrate, "no such device"),
    "__version__": gpudiag.__version__[0].isdigit(),
    "check": refused(UsageError, gpudiag.check, "no such trace.json"),
    "compare": refused(InputError, gpudiag.compare, "no such trace.json", "nor this.json"),
    "listen": gpudiag.listen() is None,
    "memory": refused(InputError, gpudiag.memory, "no such trace.json"),
    "whatif": refused(InputError, gpudiag.whatif, "no such trace.json"),
    "diagnose": refused(InputError, gpudiag.diagnose, "no such trace.json"),
    "estimate_memory": refused(UsageError, gpudiag.estimate_memory, None, None, device="abacus"),
    "profile": gpudiag.profile("runs/x").path.name == "x",
    "register_fix": refused(InputError, gpudiag.register_fix, Nothing, gpudiag.Fix("compile", "", "exact", "")),
    "step": gpudiag.step() is None,
}
assert sorted(called) == sorted(gpudiag.__all__), set(called) ^ set(gpudiag.__all__)
print("wrong:", [name for name, right in called.items() if not right])
"""


def test_the_public_names_stay() -> None:
    assert sorted(gpudiag.__all__) == FROZEN


def test_dir_lists_the_public_names_alone() -> None:
    assert sorted(dir(gpudiag)) == FROZEN


def test_each_public_name_can_be_called_after_every_module_was_imported() -> None:
    done = subprocess.run([sys.executable, "-c", CALL_EACH], capture_output=True, text=True, check=False)
    assert done.stdout == "wrong: []\n", done.stdout + done.stderr
