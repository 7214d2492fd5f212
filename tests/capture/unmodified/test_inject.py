"""The injector, seen from fresh interpreters: what a script sees of it, and that other sitecustomize modules and importers still work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpudiag.capture.run_script.inject.sitecustomize import PLAN, SHADOWED
from gpudiag.capture.run_script.plan import INJECT_FOLDER, Plan

SEEN = """
import json, os, sys
try:
    import sitecustomize
    custom = sitecustomize.__file__
except ImportError as error:
    custom = str(error)
heavy = sorted({"torch", "json", "msgspec", "numpy", "gpudiag"} & before)
print(json.dumps({"path": sys.path, "environ": dict(os.environ), "custom": custom, "argv": sys.argv, "heavy": heavy, "name": __name__}))
"""


def python(*arguments: str | Path, cwd: Path, plan: Plan | None = None, path: str | None = None, injected: bool = True) -> str:
    """Return the stdout of a Python that finds the injector as `gpudiag run` lets it; fails where it writes to stderr."""
    environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "KINETO_LOG_LEVEL"}}
    if path is not None:
        environ["PYTHONPATH"] = path
    if injected:
        if plan is not None:
            environ[PLAN] = plan.text()
            if path is not None:
                environ[SHADOWED] = path
        environ["PYTHONPATH"] = f"{INJECT_FOLDER}{os.pathsep}{path}" if path else str(INJECT_FOLDER)
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def script(tmp_path: Path) -> Path:
    target = tmp_path / "seen.py"
    target.write_text("import sys\nbefore = set(sys.modules)\n" + SEEN)
    return target


@pytest.mark.parametrize("path", [None, "", "first:second"])
def test_a_script_sees_what_it_would_see_without(tmp_path: Path, script: Path, path: str | None) -> None:
    plan = Plan(str(tmp_path / "run"))
    bare = python(script, "--flag", "x", cwd=tmp_path, path=path, injected=False)
    assert python(script, "--flag", "x", cwd=tmp_path, plan=plan, path=path) == bare
    assert json.loads(bare)["heavy"] == []


def test_without_a_plan_it_is_inert(tmp_path: Path, script: Path) -> None:
    seen = json.loads(python(script, cwd=tmp_path))
    assert str(INJECT_FOLDER) not in seen["path"]
    assert seen["custom"] == "No module named 'sitecustomize'"
    assert seen["heavy"] == []


def test_the_sitecustomize_that_it_shadows_runs(tmp_path: Path, script: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__ + '\\n')")
    seen = json.loads(python(script, cwd=tmp_path, plan=Plan(str(tmp_path / "run")), path=str(other)))
    assert seen["custom"] == str(other / "sitecustomize.py")
    assert (tmp_path / "ran").read_text() == "sitecustomize\n"


def test_children_inherit_it_whether_python_starts_them_or_a_shell(tmp_path: Path) -> None:
    code = "import os, subprocess, sys; assert 'GPUDIAG_RUN' not in os.environ; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = "import sys; print(type(sys.meta_path[0]).__name__, sys.path[1:2])"
    plan = Plan(str(tmp_path / "run"))
    assert python("-c", code, child, cwd=tmp_path, plan=plan, path="mine") == f"Finder ['{tmp_path / 'mine'}']\n"
    shell = "import os, sys; os.system(f'{sys.executable} -c \"{sys.argv[1]}\"')"
    assert python("-c", shell, child, cwd=tmp_path, plan=plan).startswith("Finder")


def test_a_launcher_that_copies_the_environment_hands_it_on(tmp_path: Path) -> None:
    package = tmp_path / "accelerate" / "commands"
    package.mkdir(parents=True)
    for name in (package.parent / "__init__.py", package / "__init__.py", package / "launch.py"):
        name.write_text("")
    tell = "print('GPUDIAG_RUN' in os.environ)"
    code = f"import os, accelerate.commands; {tell}; import accelerate.commands.launch; {tell}"
    assert python("-c", code, cwd=tmp_path, plan=Plan(str(tmp_path / "run"))) == "False\nTrue\n"


def _fake(tmp_path: Path, torch: str) -> None:
    """Put a torch and a gpudiag.capture.run_script.watch of our own where the interpreter finds them first."""
    (tmp_path / "torch.py").write_text(textwrap.dedent(torch))
    home = tmp_path / "gpudiag" / "capture" / "run_script"
    home.mkdir(parents=True)
    for folder in (home.parents[1], home.parent, home):
        (folder / "__init__.py").write_text("")
    (home / "watch.py").write_text("def watch(text):\n    print('watching', getattr(__import__('torch'), 'ready', None), flush=True)\n")


def test_torch_is_watched_once_it_is_imported(tmp_path: Path) -> None:
    _fake(tmp_path, "ready = True")
    plan = Plan(str(tmp_path / "run"))
    again = "import torch, importlib; importlib.reload(torch); import torch"
    code = f"print('start'); {again}; print(torch.__spec__.loader is torch.__loader__)"
    assert python("-c", code, cwd=tmp_path, plan=plan) == "start\nwatching True\nTrue\n"
    assert python("-c", "print('no torch')", cwd=tmp_path, plan=plan) == "no torch\n"


def test_an_import_of_torch_that_fails_is_tried_again(tmp_path: Path) -> None:
    _fake(tmp_path, "import os\nif 'LATE' not in os.environ: raise ImportError('a library is missing')\nready = True")
    code = """
        import os
        for _ in range(2):
            try:
                import torch
            except ImportError as error:
                print(error)
        os.environ["LATE"] = "1"
        import torch
        """
    out = python("-c", textwrap.dedent(code), cwd=tmp_path, plan=Plan(str(tmp_path / "run")))
    assert out == "a library is missing\n" * 2 + "watching True\n"


def test_importers_other_than_the_path_are_asked(tmp_path: Path) -> None:
    _fake(tmp_path, "raise ImportError('not this one')")
    code = """
        import sys, types
        from importlib.machinery import ModuleSpec
        class Elsewhere:
            def find_spec(self, name, path=None, target=None):
                return ModuleSpec(name, self) if name == "torch" else None
            def create_module(self, spec):
                return types.ModuleType(spec.name)
            def exec_module(self, module):
                module.ready = "from elsewhere"
        sys.meta_path.insert(1, Elsewhere())
        import torch
        """
    assert python("-c", textwrap.dedent(code), cwd=tmp_path, plan=Plan(str(tmp_path / "run"))) == "watching from elsewhere\n"


def test_a_python_without_gpudiag_runs_the_script_as_ever(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    code = "import sys; sys.modules['gpudiag'] = None; import torch; print('ran')"
    assert python("-c", code, cwd=tmp_path, plan=Plan(str(tmp_path / "run"))) == "ran\n"


def test_a_script_called_gpudiag_runs_once(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    script = tmp_path / "gpudiag.py"
    script.write_text("import torch; print('ran')")
    assert python(script, cwd=tmp_path, plan=Plan(str(tmp_path / "run"))) == "ran\n"


@pytest.mark.parametrize("flag", ["-S", "-I", "-E"])
def test_pythons_that_cannot_be_watched_are_not_disturbed(tmp_path: Path, flag: str) -> None:
    assert python(flag, "-c", "print('ran')", cwd=tmp_path, plan=Plan(str(tmp_path / "run"))) == "ran\n"


COPIES = {
    "subprocess": "import subprocess; subprocess.run([sys.executable, '-c', child], env=env)",
    "positional": "import subprocess; subprocess.Popen([sys.executable, '-c', child], -1, *[None] * 5, True, False, None, env).wait()",
    "without closing files": "import subprocess; subprocess.run([sys.executable, '-c', child], close_fds=False)",
    "execve": "os.execve(sys.executable, [sys.executable, '-c', child], env)",
    "execvpe": "os.execvpe(sys.executable, [sys.executable, '-c', child], env=env)",
    "posix_spawn": "os.waitpid(os.posix_spawn(sys.executable, [sys.executable, '-c', child], env), 0)",
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_the_environment_hands_it_on(tmp_path: Path, way: str) -> None:
    code = "import os, sys; child = sys.argv[1]; env = dict(os.environ, MORE='1'); before = dict(env); " + COPIES[way]
    child = "import os, sys; print(type(sys.meta_path[0]).__name__, os.environ.get('PYTHONPATH'), 'GPUDIAG_RUN' in os.environ)"
    assert python("-c", code + "; assert env == before", child, cwd=tmp_path, plan=Plan(str(tmp_path / "run")), path="mine") == (
        "Finder mine False\n"
    )


@pytest.mark.parametrize("env", ["{}", "{'PATH': os.environ['PATH']}", "dict(os.environ, PYTHONPATH='other')"])
def test_an_environment_that_is_no_copy_stays_what_it_is(tmp_path: Path, env: str) -> None:
    code = f"import os, subprocess; subprocess.run(['/usr/bin/env'], env={env})"
    bare = python("-c", code, cwd=tmp_path, injected=False)
    assert python("-c", code, cwd=tmp_path, plan=Plan(str(tmp_path / "run"))) == bare


def test_a_program_that_cannot_be_started_raises_as_without(tmp_path: Path) -> None:
    code = "import subprocess, traceback\ntry: subprocess.run(['/no/such'], env={})\nexcept OSError: print(traceback.format_exc())"
    told = python("-c", code, cwd=tmp_path, plan=Plan(str(tmp_path / "run")))
    if sys.version_info >= (3, 13):  # subprocess may call os.posix_spawn itself, which raises through our frame
        told = re.sub(r"  File .*sitecustomize.py.*\n.*return original.*\n(?: +[~^]+\n)?", "", told)
    assert told == python("-c", code, cwd=tmp_path, injected=False)
