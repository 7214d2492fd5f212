"""The text of one compiled graph: which generated kernels it calls, how often and with which buffers. Read as a syntax tree, never run.

Format: torch/_inductor/codegen/wrapper.py, torch 2.2 to 2.13: kernels are `name = async_compile.triton(...)` or `.cpp_pybinding(...)` at
module level under a comment with their original operators, and are called in `call` (or in the `partition_*` functions beside it) with
buffers whose sizes stand in assert_size_stride, empty_strided* and reinterpret_tensor.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpudiag.capture.kernel_text import KernelText, Parameter, read_cpp, read_triton
from gpudiag.model.inductor import GeneratedKernel, KernelBuffer
from gpudiag.model.signature import Shape

MAX_NODES = 64
"""Source nodes kept of a kernel."""

_CATEGORY = re.compile(r"triton_([a-z]{3})_")
_NODES = re.compile(r"Source Nodes: \[([^\]]*)\]")
_ATEN = re.compile(r"Original ATen: \[([^\]]*)\]")
_MAKES_TRITON = ("triton",)
_MAKES_CPP = ("cpp_pybinding", "cpp")
_CALLS = re.compile(r"call|partition_\d+")


class _Kernel(NamedTuple):
    category: str
    text: KernelText | None
    ops: tuple[str, ...] | None
    nodes: tuple[str, ...]


def read_graph(source: str) -> tuple[GeneratedKernel, ...]:
    """Return the kernels that the generated module `source` calls. Raises SyntaxError, ValueError or RecursionError for other text."""
    tree, lines = ast.parse(source), source.splitlines()
    kernels = {name: kernel for node in tree.body if (found := _definition(node, lines)) for name, kernel in [found]}
    counted: Counter[GeneratedKernel] = Counter()
    for function in _functions(tree):
        counted.update(_Calls(kernels).of(function))
    return tuple(
        GeneratedKernel(kernel.name, kernel.category, count, kernel.ops, kernel.nodes, kernel.buffers, kernel.points, kernel.reduction)
        for kernel, count in counted.items()
    )


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        yield from (item for item in inside if isinstance(item, ast.FunctionDef) and _CALLS.fullmatch(item.name))


def _definition(node: ast.stmt, lines: Sequence[str]) -> tuple[str, _Kernel] | None:
    """Return (name, kernel) of `name = async_compile.triton('name', '''text''', ...)` and its C++ kin."""
    if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call)):
        return None
    maker = node.value.func.attr if isinstance(node.value.func, ast.Attribute) else ""
    texts = [item.value for item in node.value.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    if maker not in (*_MAKES_TRITON, *_MAKES_CPP) or not texts:
        return None
    name = node.targets[0].id
    match = _CATEGORY.match(name)
    category = "cpp" if maker in _MAKES_CPP else match.group(1) if match else "user"
    text = _read(maker, texts)
    return name, _Kernel(category, text, *_comment(lines, node.lineno - 1))


def _read(maker: str, texts: Sequence[str]) -> KernelText | None:
    try:
        return read_triton(texts[-1], texts[0]) if maker in _MAKES_TRITON else read_cpp(texts[-1])
    except (SyntaxError, ValueError):
        return None


def _comment(lines: Sequence[str], row: int) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Return (original operators, source nodes) of the comment above line `row`; operators None without such a comment."""
    row -= 1
    while row >= 0 and (not lines[row].strip() or lines[row].startswith("#")):
        if "Original ATen:" in lines[row]:
            ops, nodes = _ATEN.search(lines[row]), _NODES.search(lines[row])
            return _listed(ops, "aten."), _listed(nodes)[:MAX_NODES]
        row -= 1
    return None, ()


def _listed(match: re.Match[str] | None, prefix: str = "") -> tuple[str, ...]:
    items = (item.strip().removeprefix(prefix) for item in match.group(1).split(",")) if match else ()
    return tuple(item for item in items if item)


class _Calls:
    """Walks one function in order, knows the shape of each buffer name, and collects the calls of kernels."""

    def __init__(self, kernels: dict[str, _Kernel]) -> None:
        self._kernels = kernels
        self._shapes: dict[str, Shape | None] = {}

    def of(self, function: ast.FunctionDef) -> list[GeneratedKernel]:
        """Return one GeneratedKernel for each call, in order."""
        found = []
        open_statements = list(reversed(function.body))
        while open_statements:
            statement = open_statements.pop()
            open_statements.extend(reversed(getattr(statement, "body", [])))  # `with`, `if`, `for`
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self._shapes[statement.targets[0].id] = self._shape(statement.value)
            call = getattr(statement, "value", None)
            if isinstance(call, ast.Call) and (kernel := self._call(call)):
                found.append(kernel)
        return found

    def _call(self, call: ast.Call) -> GeneratedKernel | None:
        function = call.func
        if isinstance(function, ast.Name):
            if function.id == "assert_size_stride" and len(call.args) > 1 and isinstance(call.args[0], ast.Name):
                self._shapes[call.args[0].id] = _sizes(call.args[1])
            return self._generated(function.id, call)
        if not isinstance(function, ast.Attribute):
            return None
        if function.attr == "run" and isinstance(function.value, ast.Name):
            return self._generated(function.value.id, call)
        path = ast.unparse(function)
        library = path.startswith(("extern_kernels.", "torch.ops.", "aten."))
        return GeneratedKernel(path.removeprefix("extern_kernels.").removeprefix("torch.ops."), "extern") if library else None

    def _generated(self, name: str, call: ast.Call) -> GeneratedKernel | None:
        kernel = self._kernels.get(name)
        if kernel is None:
            return None
        if kernel.text is None:
            return GeneratedKernel(name, kernel.category, 1, kernel.ops, kernel.nodes)
        pairs = zip(kernel.text.parameters, call.args, strict=False)
        buffers = tuple(self._buffer(parameter, value) for parameter, value in pairs if parameter.dtype is not None)
        return GeneratedKernel(name, kernel.category, 1, kernel.ops, kernel.nodes, buffers, kernel.text.points, kernel.text.reduction)

    def _buffer(self, parameter: Parameter, value: ast.expr) -> KernelBuffer:
        return KernelBuffer(parameter.name, parameter.dtype or "", parameter.access, self._shape(value), parameter.accesses)

    def _shape(self, value: ast.expr) -> Shape | None:
        """Return the shape of a buffer's expression; None where it is not known."""
        if isinstance(value, ast.Name):
            return self._shapes.get(value.id)
        if not isinstance(value, ast.Call):
            return None
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        at = {"reinterpret_tensor": 1, "_reinterpret_tensor": 1, "as_strided": 1, "alloc_from_pool": 3}.get(name)
        if at is None:
            at = 0 if name.startswith(("empty_strided", "empty")) else None
        return _sizes(value.args[at]) if at is not None and len(value.args) > at else None


def _sizes(node: ast.expr) -> Shape | None:
    """Return the sizes of a tuple of plain numbers; None where one is symbolic."""
    if not isinstance(node, (ast.Tuple, ast.List)):
        return None
    sizes = [item.value for item in node.elts if isinstance(item, ast.Constant) and type(item.value) is int]
    return tuple(sizes) if len(sizes) == len(node.elts) else None
