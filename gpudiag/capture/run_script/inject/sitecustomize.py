"""Loaded by each Python that finds this folder first on PYTHONPATH (https://docs.python.org/3/library/site.html), as in `gpudiag run`.

It takes the folder off sys.path, lets the sitecustomize that it shadows run, and waits for torch to be imported. Launchers, DataLoader
workers and compile workers load it too, so it imports next to nothing, never torch, prints nothing, and does nothing without a plan.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing itself is too slow an import for here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PLAN = "GPUDIAG_RUN"
"""Environment variable: the plan of the recording, as text (gpudiag.capture.run_script.plan.Plan; a watcher has its own)."""

SHADOWED = "GPUDIAG_RUN_PYTHONPATH"
"""Environment variable: PYTHONPATH as it was for `gpudiag run`; not set where there was none."""

WATCHER = "GPUDIAG_RUN_WATCHER"
"""Environment variable: the module whose watch(plan) is called; not set where the script is recorded."""

_PATH = "PYTHONPATH"

_OURS = (PLAN, SHADOWED, WATCHER, _PATH)

_ENV, _ENV_OF_FORK_EXEC = 2, 5
"""Places of the environment among the arguments of os.execve and os.posix_spawn, and of _posixsubprocess.fork_exec."""

_LAUNCHERS = {
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.elastic.multiprocessing.subprocess_handler",
    "lightning.fabric.strategies.launchers.subprocess_script",
    "lightning.pytorch.strategies.launchers.subprocess_script",
    "lightning_fabric.strategies.launchers.subprocess_script",
    "pytorch_lightning.strategies.launchers.subprocess_script",
    "accelerate.commands.launch",
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
}
"""Modules that show their own copy of os.environ to the ranks that they start, and may change PYTHONPATH in it on the way."""


class Environment:
    """Our variables: handed on to child processes, but not seen in os.environ by the script (nor by what prints or stores it)."""

    def __init__(self) -> None:
        self._ours = {name: os.environ[name] for name in _OURS if name in os.environ}

    def hide(self) -> None:
        """Show the script PYTHONPATH as it was; the process environment, which children inherit, keeps our values."""
        before = self._ours.get(SHADOWED)
        for name in _OURS:
            os.environ.pop(name, None)
        if before is not None:
            os.environ[_PATH] = before
        for name, value in self._ours.items():
            os.putenv(name, value)

    def show(self) -> None:
        """Put our values into os.environ, for a launcher that copies it."""
        os.environ.update(self._ours)

    def added(self, environ: Any) -> Any:
        """Return `environ` for a new process, with our variables where it is a copy of os.environ (half of the names tell)."""
        try:
            alike = environ is not None and 2 * sum(name in environ for name in os.environ) >= len(os.environ)
            if not alike or PLAN in environ or environ.get(_PATH) != self._ours.get(SHADOWED):
                return environ
            return {**environ, **self._ours}
        except Exception:  # noqa: BLE001 - whatever the script gives there is for the one that it calls to judge
            return environ

    def follow(self) -> None:
        """Hand our variables on in an environment that the script gives to a new process itself, a copy of os.environ more often than not.

        os.execle and os.execvpe work by os.execve. subprocess is followed where it leaves Python, by _posixsubprocess.fork_exec: a wrapper
        round Popen would stand in the traceback of a program that cannot be started.
        """
        for name in ("execve", "posix_spawn", "posix_spawnp"):
            self._wrap(os, name, _ENV, self.added)
        try:
            import _posixsubprocess
        except ImportError:  # Windows
            return

        def add_to_list(entries: Any) -> Any:
            try:  # a list of b"NAME=value"
                before = dict(os.fsdecode(entry).split("=", 1) for entry in entries)
                after = self.added(before)
                return entries if after is before else [os.fsencode(f"{name}={value}") for name, value in after.items()]
            except Exception:  # noqa: BLE001 - None (the process environment, which has them), or a form that is not known
                return entries

        self._wrap(_posixsubprocess, "fork_exec", _ENV_OF_FORK_EXEC, add_to_list)

    def _wrap(self, module: Any, name: str, place: int, added: Callable[[Any], Any]) -> None:
        original = getattr(module, name, None)
        if original is None:
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > place:
                args = (*args[:place], added(args[place]), *args[place + 1 :])
            elif "env" in kwargs:
                kwargs["env"] = added(kwargs["env"])
            return original(*args, **kwargs)

        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(call, attribute, getattr(original, attribute, None))
        call.__wrapped__ = original  # type: ignore[attr-defined]  # for inspect.signature, as functools.wraps sets it
        setattr(module, name, call)
        if original in os.supports_fd:
            os.supports_fd.add(call)


class Finder:
    """A finder on sys.meta_path that calls `actions[name]()` once the module of that name has been imported by the other finders."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self._actions = actions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the other finders' spec with a loader that tells us; None (not ours) for all other modules."""
        if name not in self._actions:
            return None
        spec: Any = None
        finders: tuple[Any, ...] = tuple(sys.meta_path)
        for finder in finders:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                break
        loader: Any = None if spec is None else spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return spec

        def exec_module(module: Any) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)  # where it raises, the next import is followed again
            action = self._actions.pop(name, None)
            if action is not None:
                action()

        try:  # noqa: SIM105 - next to nothing is imported here
            loader.exec_module = exec_module
        except AttributeError:  # a loader without attributes of its own: its modules are not followed
            pass
        return spec


def _chain(folder: str) -> bool:
    """Return whether there is another sitecustomize; it has then been run in our place, and what it raises is raised."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
    sys.path_importer_cache.pop(folder, None)
    ours = sys.modules.pop(__name__, None)
    try:
        __import__(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
        if ours is not None:
            sys.modules[__name__] = ours
        return False
    return True


def _install() -> None:
    plan = os.environ.get(PLAN)
    if not plan:
        return
    watcher = os.environ.get(WATCHER) or "gpudiag.capture.run_script.watch"

    def watch() -> None:
        try:
            from importlib.util import find_spec  # torch has loaded it

            spec = find_spec(watcher.partition(".")[0])
            if spec is None or spec.submodule_search_locations is None:
                return  # no package: a script called gpudiag.py would run a second time
            __import__(watcher)
            sys.modules[watcher].watch(plan)
        except Exception:  # noqa: BLE001, S110 - without gpudiag in this Python the script runs as ever; `gpudiag run` says that nothing came
            pass

    environment = Environment()
    environment.hide()
    environment.follow()
    actions: dict[str, Callable[[], None]] = dict.fromkeys(_LAUNCHERS, environment.show)
    actions["torch"] = watch
    sys.meta_path.insert(0, Finder(actions))


if __name__ == "sitecustomize":
    _install()
    if not _chain(os.path.dirname(os.path.abspath(__file__))):
        # site takes this for "there is none" and says nothing: so `import sitecustomize` fails in the script as it would without us
        raise ImportError("No module named 'sitecustomize'", name=__name__)
