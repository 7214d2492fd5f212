"""Print how large and how deep the house is: `make size`. The table of a report is of one real trace beside the checkout, where there is
one."""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"gpudiag": "gpudiag", "dashboard": "gpudiag_dashboard"}
TRACE = ROOT.parent / "shared" / "traces" / "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz"
"""1.2 MB; any trace does, as long as it is the same one before and after."""

FAST_RUN = Path("v", "gpudiag", "fast_run_s")
"""Where pytest keeps how long the last whole fast part took (tests/conftest.py)."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """One source file."""

    name: str
    path: Path
    lines: list[str]
    tree: ast.Module

    def functions(self) -> Iterator[Function]:
        """List all functions, methods and inner ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


def read_modules(root: Path, below: str = "") -> list[Module]:
    """Read the sources of gpudiag/ and dashboard/, or of one folder of them."""
    modules = []
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            if not path.is_relative_to(root / below):
                continue
            text = path.read_text(encoding="utf-8")
            parts = (package, *path.relative_to(root / folder).with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules.append(Module(name, path, text.splitlines(), ast.parse(text)))
    return modules


def count_lines(modules: Sequence[Module]) -> Counter[str]:
    """Count the lines by kind; a line of an import or a docstring counts as that."""
    kinds: Counter[str] = Counter()
    for module in modules:
        kind_of = dict.fromkeys(
            _lines_of(node for node in ast.walk(module.tree) if isinstance(node, ast.Import | ast.ImportFrom)), "imports"
        )
        kind_of |= dict.fromkeys(_lines_of(_docstrings(module.tree)), "docstrings")
        for number, line in enumerate(module.lines, 1):
            text = line.strip()
            kinds[kind_of.get(number) or ("blank" if not text else "comments" if text.startswith("#") else "code")] += 1
    return kinds


def _lines_of(nodes: Iterator[Any]) -> set[int]:
    return {number for node in nodes for number in range(node.lineno, node.end_lineno + 1)}


def _docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    """List strings that stand alone: docstrings, and those of constants and fields."""
    return (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )


def count_statements(modules: Sequence[Module]) -> int:
    """Count statements, docstrings left out: what no formatter can change."""
    return sum(
        isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for module in modules
        for node in ast.walk(module.tree)
    )


def count_one_use_helpers(modules: Sequence[Module]) -> tuple[int, int]:
    """Return how many private functions are named exactly once in their module besides their definition, and how many there are."""
    once = total = 0
    for module in modules:
        names = Counter(node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name))
        names.update(node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute))
        private = [node.name for node in module.functions() if node.name.startswith("_") and not node.name.endswith("__")]
        total += len(private)
        once += sum(names[name] == 1 for name in private)
    return once, total


def count_importers(modules: Sequence[Module]) -> Counter[str]:
    """Count, for each module, the other modules that import it."""
    known = {module.name for module in modules}
    importers: Counter[str] = Counter()
    for module in modules:
        found = set[str]()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {full if (full := f"{node.module}.{alias.name}") in known else node.module for alias in node.names}
        importers.update((found & known) - {module.name})
    return importers


class Walk:
    """Count what a call runs of our own code: functions, files, changes of file, depth."""

    def __init__(self) -> None:
        self.functions = set[tuple[str, int]]()
        self.files = set[str]()
        self.changes = self.depth = self.deepest = 0
        self._ours = tuple(str(ROOT / folder) for folder in FOLDERS)

    def run(self, function: Any) -> None:
        """Call `function` and watch it."""
        sys.setprofile(self._hear)
        try:
            function()
        finally:
            sys.setprofile(None)

    def _hear(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(self._ours):
            return
        if event == "return":
            self.depth -= 1
            return
        new = (file, frame.f_code.co_firstlineno) not in self.functions
        if frame.f_code.co_name != "<module>":
            self.functions.add((file, frame.f_code.co_firstlineno))
        self.files.add(file)
        caller = frame.f_back.f_code.co_filename if frame.f_back else ""
        self.changes += new and caller.startswith(self._ours) and caller != file
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)


def walk_report(trace: Path) -> Walk:
    """Run `gpudiag report` on `trace` in this process, to the printed text, the loading of modules included."""
    sys.argv = ["gpudiag", "report", "--no-cache", str(trace)]
    walk = Walk()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        walk.run(_main)
    return walk


def _main() -> None:
    from gpudiag import cli

    with contextlib.suppress(SystemExit):
        cli.main()


class _FirstBlock(BaseException):
    """Raised where the first block of an experiment would be measured."""


def count_calls_to_first_block() -> int:
    """Return how many of our functions are on the stack when `gpudiag ab` asks for its first measured block; 0 where it came to none."""
    from gpudiag.experiment.arm import Control

    depth = 0

    def stop(*_: Any, **__: Any) -> None:
        nonlocal depth
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            depth += frame.f_code.co_filename.startswith(str(ROOT / "gpudiag"))
            frame = frame.f_back
        raise _FirstBlock

    with tempfile.TemporaryDirectory() as name:
        script = Path(name, "train.py")
        script.write_text(_TRAINING, encoding="utf-8")
        give, Control.give = Control.give, stop  # type: ignore[method-assign]
        sys.argv = ["gpudiag", "ab", "--fix", "foreach-optimizer", "-o", str(Path(name, "out")), str(script)]
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(_FirstBlock):
                _main()
        finally:
            Control.give = give  # type: ignore[method-assign]
    return depth


_TRAINING = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10_000):
    optimizer.zero_grad()
    model(torch.ones(8, 8)).sum().backward()
    optimizer.step()
"""


def print_table(root: Path, below: str) -> None:
    """Print the table; figures that could not be had say so."""
    modules = read_modules(root, below)
    kinds = count_lines(modules)
    lengths = sorted((node.end_lineno or node.lineno) - node.lineno + 1 for module in modules for node in module.functions())
    once, private = count_one_use_helpers(modules)
    importers = count_importers(modules)
    described = sum(ast.get_docstring(node) is not None for module in modules for node in module.functions())
    rows = [
        ("lines", f"{kinds.total():,} in {len(modules)} files"),
        ("", ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())),
        ("statements (AST)", f"{count_statements(modules):,}"),
        ("function length, median / p90", f"{statistics.median(lengths):g} / {lengths[int(0.9 * len(lengths))]}"),
        ("private helpers with one use", f"{once:,} of {private:,} ({once / private:.0%})"),
        ("modules with one importer", f"{sum(count == 1 for count in importers.values())} of {len(modules)}"),
        ("functions with a docstring", f"{described / len(lengths):.0%}"),
        ("lines of tests", f"{sum(len(path.read_text(encoding='utf-8').splitlines()) for path in (root / 'tests').rglob('*.py')):,}"),
    ]
    if root == ROOT and not below:
        rows += [
            ("one report", _report_row()),
            ("calls to the first block of ab", str(count_calls_to_first_block() or "unknown")),
            ("fast tests, last whole run", _fast_row()),
        ]
    for label, value in rows:
        print(f"{label:32}{value}")


def _report_row() -> str:
    if not TRACE.is_file():
        return f"unknown: {TRACE.name} is not here (third-party data)"
    walk = walk_report(TRACE)
    return f"{len(walk.functions):,} functions, {len(walk.files)} files, {walk.changes} changes of file, {walk.deepest} frames deep"


def _fast_row() -> str:
    try:
        return f"{json.loads((ROOT / '.pytest_cache' / FAST_RUN).read_text()):.0f} s"
    except (OSError, ValueError):
        return "unknown: `make test` has not run whole here"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout: the static figures alone")
    parser.add_argument("--folder", default="", help="one folder, such as gpudiag/report: the static figures alone")
    asked = parser.parse_args()
    print_table(asked.root.resolve(), asked.folder)
