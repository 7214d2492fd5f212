"""What torch.compile generated: the compiled graphs alive at the end, the kernels that they call, and what a kernel's text says.

Texts are read, never run. A kernel: torch/_inductor/codegen/triton.py (`triton_meta['signature']`, `xnumel = ...` in the body) and
codegen/cpp.py (loops `for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(512L); ...)`), torch 2.2 to 2.13.

A graph: torch/_inductor/codegen/wrapper.py, torch 2.2 to 2.13: kernels are `name = async_compile.triton(...)` or `.cpp_pybinding(...)` at
module level under a comment with their original operators, and are called in `call` (or in the `partition_*` functions beside it) with
buffers whose sizes stand in assert_size_stride, empty_strided* and reinterpret_tensor.

Nothing is hooked, logged or configured: `CompiledFxGraph` keeps the source text that Inductor wrote for it, also when it came from a cache
or was compiled before the recording began. Graphs that torch has thrown away by then (recompiled, torch._dynamo.reset) are not found.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpudiag.bundle.layout import inductor_name
from gpudiag.bundle.writer import write_atomic
from gpudiag.capture.environment.process import find_instances
from gpudiag.model.bundle import Access, CompiledGraph, GeneratedKernel, InductorCode, KernelBuffer
from gpudiag.model.ops import Shape

# Triton's and C++'s names of element types -> our short names. Sources: `_type_of` in torch/_inductor/utils.py, DTYPE_TO_CPP in
# codegen/cpp_utils.py.
_TRITON = {
    "fp64": "fp64", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8e4nv": "fp8", "fp8e5": "fp8", "fp8e4b8": "fp8", "fp8e5b16": "fp8",
    "fp8e4b15": "fp8", "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "i1": "bool", "u64": "uint64", "u32": "uint32",
    "u16": "uint16", "u8": "uint8",
}  # fmt: skip
_CPP = {
    "double": "fp64", "float": "fp32", "half": "fp16", "at::Half": "fp16", "bfloat16": "bf16", "at::BFloat16": "bf16",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "at::Float8_e4m3fn": "fp8", "at::Float8_e5m2": "fp8", "int64_t": "int64",
    "long": "int64", "int32_t": "int32", "int": "int32", "int16_t": "int16", "short": "int16", "int8_t": "int8", "signed char": "int8",
    "uint8_t": "uint8", "unsigned char": "uint8", "uint16_t": "uint16", "uint32_t": "uint32", "uint64_t": "uint64", "bool": "bool",
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
}  # fmt: skip

_SIZE = re.compile(r"(?:static_cast<\w+>\()?(-?\d{1,18})L{0,2}\)?")
_LOOP = re.compile(r"for\s*\(\s*(?:const )?(?:int64_t|int|long)\s+\w+\s*=\s*([^;]*);\s*\w+\s*<\s*([^;]*);")
_PARAMETER = re.compile(r"(const\s+)?([\w:<>][\w:<> ]*?)\s*\*\s*(?:__restrict__\s+)?(\w+)\s*(?=[,)])")
_ALIAS = re.compile(r"auto (\w+) = (\w+);")
_WORD = re.compile(r"\b[A-Za-z_]\w*\b")

# Buffers of Inductor's own: semaphores and scratch space, no tensors of the model.


class Parameter(NamedTuple):
    """One argument of a kernel, in the kernel's order; `dtype` None: a number, not a buffer."""

    name: str
    dtype: str | None
    access: Access
    accesses: int | None
    """Elements accessed at most; None: not known."""


class KernelText(NamedTuple):
    """What the text of a kernel says."""

    parameters: tuple[Parameter, ...]
    points: int | None
    reduction: int | None = None


def classify_access(name: str, *, mutated: bool = False) -> Access | None:
    """Return how Inductor's argument `name` is accessed; None for scratch space and for names that are not Inductor's."""
    if name.startswith("in_out_ptr"):
        return "both"
    if name.startswith(("in_ptr", "arg_")) or name in ("X", "W", "inp", "query", "key", "value"):
        return "both" if mutated else "read"
    return "write" if name.startswith(("out_ptr", "Y")) or name == "output" else None


def read_triton(source: str, name: str) -> KernelText | None:
    """Return what the Triton source of kernel `name` says; None where it holds no such function. Raises SyntaxError."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    function = next((node for node in found if node.name == name), found[0] if len(found) == 1 else None)
    if function is None:
        return None
    signature, mutated = _read_signature(function)
    points, reduction = _count_triton_points(function)
    uses = Counter(node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    order: list[tuple[int, int, str, bool]] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("load", "store") and node.args:
            names = (item.id for item in ast.walk(node.args[0]) if isinstance(item, ast.Name))
            order += [(node.lineno, node.col_offset, name, node.func.attr == "store") for name in names]
    stored_first: dict[str, bool] = {}  # or never loaded from: what was in them does not count
    for _, _, argument_name, stores in sorted(order):
        stored_first.setdefault(argument_name, stores)
    template = "triton_tem" in name
    parameters = []
    for index, argument in enumerate(function.args.args):
        kind = signature.get(argument.arg, signature.get(str(index), ""))
        dtype = _TRITON.get(kind[1:], "") if kind.startswith("*") else None
        access = classify_access(argument.arg, mutated=argument.arg in mutated)
        if access is None:
            dtype = None if argument.arg.startswith(("ws_ptr", "sem_ptr", "workspace")) else dtype
            access = "both"
        if access == "both" and stored_first.get(argument.arg):
            access = "write"
        bound = None if points is None or template else max(1, uses[argument.arg]) * points
        parameters.append(Parameter(argument.arg, dtype, access, bound))
    return KernelText(tuple(parameters), None if template else points, reduction)


def _read_signature(function: ast.FunctionDef) -> tuple[dict[str, str], set[str]]:
    signature: dict[str, str] = {}
    mutated: set[str] = set()
    for decorator in function.decorator_list:
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
            meta = _read_entries(keyword.value)
            kinds = _read_entries(meta.get("signature")).items()
            signature.update((key, kind.value) for key, kind in kinds if isinstance(kind, ast.Constant) and isinstance(kind.value, str))
            names = meta.get("mutated_arg_names")
            if isinstance(names, (ast.List, ast.Tuple)):
                mutated |= {item.value for item in names.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)}
    return signature, mutated


def _read_entries(node: ast.expr | None) -> dict[str, ast.expr]:
    if not isinstance(node, ast.Dict):
        return {}
    pairs = zip(node.keys, node.values, strict=True)
    return {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}


def _count_triton_points(function: ast.FunctionDef) -> tuple[int | None, int | None]:
    names = (argument.arg for argument in function.args.args)
    sizes: dict[str, int | None] = {name: None for name in names if name.endswith("numel")}
    for node in function.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant):
            name, value = node.targets[0].id, node.value.value
            if name.endswith("numel") and type(value) is int:
                sizes[name] = value
    if "r0_numel" in sizes:
        sizes.pop("rnumel", None)  # newer code also defines the product of the reduced dimensions
    if not sizes or None in sizes.values():
        return None, None
    reduced = [size for name, size in sizes.items() if name.startswith("r")]
    return _multiply(sizes.values()), _multiply(reduced) if reduced else None


def read_cpp(source: str) -> KernelText | None:
    """Return what the C++ source of a kernel says; None where it holds no function `kernel`."""
    _, found, rest = source.partition("kernel(")
    if not found:
        return None
    inside, _, body = rest.partition("{")
    declared = _PARAMETER.findall(inside)
    counts, points, unbounded = _scan_loops(body, {name for _, _, name in declared})
    filled = {pointer for alias, pointer in _ALIAS.findall(body) if alias.startswith("out_ptr")}
    parameters = []
    for const, kind, name in declared:
        access = classify_access(name) or ("read" if const else "both")
        if name in filled:  # an intermediate result of this kernel, updated in place: what was in it does not count
            access = "write"
        bound = None if name in unbounded else counts[name] or None
        parameters.append(Parameter(name, _CPP.get(kind.strip(), ""), access, bound))
    return KernelText(tuple(parameters), points)


def _scan_loops(body: str, names: set[str]) -> tuple[Counter[str], int | None, set[str]]:
    alias: dict[str, str] = {}
    counts: Counter[str] = Counter()
    unbounded: set[str] = set()
    nest: list[int | None] = []
    opened: int | None = 1
    largest: int | None = 1
    for line in body.splitlines():
        if (match := _ALIAS.search(line)) and match.group(2) in names:
            alias[match.group(1)] = match.group(2)
            continue
        if match := _LOOP.search(line):
            begin, end = (_SIZE.fullmatch(text.strip()) for text in match.groups())
            opened = _multiply([opened, max(0, int(end.group(1)) - int(begin.group(1))) if begin and end else None])
        inner = _multiply(nest)
        used = [alias.get(word, word) for word in _WORD.findall(line)]
        for name in (word for word in used if word in names):
            if inner is None:
                unbounded.add(name)
            else:
                counts[name] += inner
            largest = None if inner is None or largest is None else max(largest, inner)
        for mark in line:
            if mark == "{":
                nest.append(opened)
                opened = 1
            elif mark == "}" and nest:
                nest.pop()
    return counts, largest, unbounded


def _multiply(sizes: Collection[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


_CATEGORY = re.compile(r"triton_([a-z]{3})_")
_NODES = re.compile(r"Source Nodes: \[([^\]]*)\]")
_ATEN = re.compile(r"Original ATen: \[([^\]]*)\]")
_MAKES_TRITON = ("triton",)
_MAKES_CPP = ("cpp_pybinding", "cpp")
_CALL_NAMES = re.compile(r"call|partition_\d+")

_Definition = tuple[GeneratedKernel, tuple[Parameter, ...]]
"""A kernel as it is defined: nothing is known of its buffers but what each of its parameters is."""


def read_graph(source: str) -> tuple[GeneratedKernel, ...]:
    """Return the kernels that the generated module `source` calls. Raises SyntaxError, ValueError or RecursionError for other text."""
    tree, lines = ast.parse(source), source.splitlines()
    kernels = {found[0].name: found for node in tree.body if (found := _read_definition(node, lines))}
    counted: Counter[GeneratedKernel] = Counter()
    bodies = [item for node in tree.body for item in (node.body if isinstance(node, ast.ClassDef) else [node])]
    for function in bodies:
        if not isinstance(function, ast.FunctionDef) or not _CALL_NAMES.fullmatch(function.name):
            continue
        shapes: dict[str, Shape | None] = {}  # of each buffer's name, followed in the order of the statements
        open_statements = list(reversed(function.body))
        while open_statements:
            statement = open_statements.pop()
            open_statements.extend(reversed(getattr(statement, "body", [])))  # `with`, `if`, `for`
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                shapes[statement.targets[0].id] = _find_shape(statement.value, shapes)
            call = getattr(statement, "value", None)
            if isinstance(call, ast.Call) and (kernel := _read_call(call, kernels, shapes)):
                counted[kernel] += 1
    return tuple(msgspec.structs.replace(kernel, calls=count) for kernel, count in counted.items())


def _read_definition(node: ast.stmt, lines: Sequence[str]) -> _Definition | None:
    if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call)):
        return None
    maker = node.value.func.attr if isinstance(node.value.func, ast.Attribute) else ""
    texts = [item.value for item in node.value.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    if maker not in (*_MAKES_TRITON, *_MAKES_CPP) or not texts:
        return None
    name = node.targets[0].id
    match = _CATEGORY.match(name)
    category = "cpp" if maker in _MAKES_CPP else match.group(1) if match else "user"
    try:
        text = read_triton(texts[-1], texts[0]) if maker in _MAKES_TRITON else read_cpp(texts[-1])
    except (SyntaxError, ValueError):
        text = None
    kernel = GeneratedKernel(name, category)
    row = node.lineno - 2
    while row >= 0 and (not lines[row].strip() or lines[row].startswith("#")):  # the comment above
        if "Original ATen:" in lines[row]:
            lists = (match.group(1).split(",") if (match := form.search(lines[row])) else () for form in (_ATEN, _NODES))
            ops, nodes = ([item.strip() for item in items] for items in lists)
            ops = [op for item in ops if (op := item.removeprefix("aten."))]
            nodes = [item for item in nodes if item][:64]  # source nodes kept of a kernel
            kernel = GeneratedKernel(name, category, ops=tuple(ops), nodes=tuple(nodes))
            break
        row -= 1
    if text is None:
        return kernel, ()
    return msgspec.structs.replace(kernel, points=text.points, reduction=text.reduction), text.parameters


def _read_call(call: ast.Call, kernels: Mapping[str, _Definition], shapes: dict[str, Shape | None]) -> GeneratedKernel | None:
    function = call.func
    if isinstance(function, ast.Name):
        name = function.id
        if name == "assert_size_stride" and len(call.args) > 1 and isinstance(call.args[0], ast.Name):
            shapes[call.args[0].id] = _read_sizes(call.args[1])
    elif not isinstance(function, ast.Attribute):
        return None
    elif function.attr == "run" and isinstance(function.value, ast.Name):
        name = function.value.id
    else:
        path = ast.unparse(function)
        library = path.startswith(("extern_kernels.", "torch.ops.", "aten."))
        return GeneratedKernel(path.removeprefix("extern_kernels.").removeprefix("torch.ops."), "extern") if library else None
    if name not in kernels:
        return None
    kernel, parameters = kernels[name]
    buffers = (
        KernelBuffer(parameter.name, parameter.dtype, parameter.access, _find_shape(value, shapes), parameter.accesses)
        for parameter, value in zip(parameters, call.args, strict=False)
        if parameter.dtype is not None
    )
    return msgspec.structs.replace(kernel, buffers=tuple(buffers))


def _find_shape(value: ast.expr, shapes: Mapping[str, Shape | None]) -> Shape | None:
    if isinstance(value, ast.Name):
        return shapes.get(value.id)
    if not isinstance(value, ast.Call):
        return None
    name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
    at = {"reinterpret_tensor": 1, "_reinterpret_tensor": 1, "as_strided": 1, "alloc_from_pool": 3}.get(name)
    if at is None:
        at = 0 if name.startswith(("empty_strided", "empty")) else None
    return _read_sizes(value.args[at]) if at is not None and len(value.args) > at else None


def _read_sizes(node: ast.expr) -> Shape | None:
    if not isinstance(node, (ast.Tuple, ast.List)):
        return None
    sizes = [item.value for item in node.elts if isinstance(item, ast.Constant) and type(item.value) is int]
    return tuple(sizes) if len(sizes) == len(node.elts) else None


_HOMES = ("torch._inductor.output_code", "torch._inductor.codecache")
"""Where the class is: since torch 2.6, and before."""


def collect_generated_code() -> tuple[InductorCode | None, str]:
    """Return (what is known of the generated code, why some of it is not: ''). None where torch.compile generated nothing."""
    classes = [vars(module).get("CompiledFxGraph") for home in _HOMES if (module := sys.modules.get(home)) is not None]
    graphs = find_instances({cls: "graph" for cls in classes if isinstance(cls, type)}).get("graph", []) if classes else []
    if not graphs:
        return None, ""
    budget, unread, found = 64 << 20, 0, []  # source text read at most; parsing takes about 0.1 s a megabyte
    for graph in graphs:
        key, source = getattr(graph, "_fx_graph_cache_key", None), getattr(graph, "source_code", None)
        text = source if isinstance(source, str) else ""
        budget -= len(text)
        kernels = None
        if text and budget >= 0:
            with suppress(SyntaxError, ValueError, RecursionError, MemoryError, AttributeError, TypeError):  # another format
                kernels = read_graph(text)
        unread += kernels is None
        if kernels:
            found.append(CompiledGraph(key if isinstance(key, str) else "", kernels))
    problem = f"the generated code of {unread} of {len(graphs)} compiled graphs could not be read" if unread else ""
    return InductorCode(graphs=tuple(found)), problem


def write_generated_code(path: Path, rank: int, warn: Callable[[str, BaseException | None], None]) -> None:
    """Write what `collect` finds into the bundle at `path`; whatever fails is one warning, the rest of the bundle is whole."""
    try:
        code, problem = collect_generated_code()
        if problem:
            warn(problem, None)
        if code is not None:
            target = path / inductor_name(rank)
            target.parent.mkdir(exist_ok=True)
            write_atomic(target, msgspec.json.encode(code) + b"\n")
    except Exception as error:  # noqa: BLE001 - torch's internals may differ
        warn("the code that torch.compile generated could not be read", error)
