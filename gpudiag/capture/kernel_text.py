"""The text of one generated kernel: its arguments, dtypes, loops and how often each argument is accessed. Read, never run.

Formats: torch/_inductor/codegen/triton.py (`triton_meta['signature']`, `xnumel = ...` in the body) and codegen/cpp.py (loops
`for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(512L); ...)`), torch 2.2 to 2.13.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from typing import NamedTuple

from gpudiag.model.inductor import Access

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
_SCRATCH = ("ws_ptr", "sem_ptr", "workspace")


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


def access_of(name: str, *, mutated: bool = False) -> Access | None:
    """Return how Inductor's argument `name` is accessed; None for scratch space and for names that are not Inductor's."""
    if name.startswith("in_out_ptr"):
        return "both"
    if name.startswith(("in_ptr", "arg_")) or name in ("X", "W", "inp", "query", "key", "value"):
        return "both" if mutated else "read"
    return "write" if name.startswith(("out_ptr", "Y")) or name == "output" else None


# -- Triton ------------------------------------------------------------------------------------------------------------


def read_triton(source: str, name: str) -> KernelText | None:
    """Return what the Triton source of kernel `name` says; None where it holds no such function. Raises SyntaxError."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    function = next((node for node in found if node.name == name), found[0] if len(found) == 1 else None)
    if function is None:
        return None
    signature, mutated = _signature(function)
    sizes = _numels(function)
    points, reduction = _triton_points(sizes)
    uses = Counter(node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    filled = _written_first(function)
    template = "triton_tem" in name
    parameters = []
    for index, argument in enumerate(function.args.args):
        kind = signature.get(argument.arg, signature.get(str(index), ""))
        dtype = _TRITON.get(kind[1:], "") if kind.startswith("*") else None
        access = access_of(argument.arg, mutated=argument.arg in mutated)
        if access is None:
            dtype = None if argument.arg.startswith(_SCRATCH) else dtype
            access = "both"
        if argument.arg in filled and access == "both":
            access = "write"
        bound = None if points is None or template else max(1, uses[argument.arg]) * points
        parameters.append(Parameter(argument.arg, dtype, access, bound))
    return KernelText(tuple(parameters), None if template else points, reduction)


def _written_first(function: ast.FunctionDef) -> set[str]:
    """Return the arguments that are stored to before they are loaded from, or never loaded: what was in them does not count."""
    order: list[tuple[int, int, str, bool]] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("load", "store") and node.args:
            names = (item.id for item in ast.walk(node.args[0]) if isinstance(item, ast.Name))
            order += [(node.lineno, node.col_offset, name, node.func.attr == "store") for name in names]
    first: dict[str, bool] = {}
    for _, _, name, stores in sorted(order):
        first.setdefault(name, stores)
    return {name for name, stores in first.items() if stores}


def _signature(function: ast.FunctionDef) -> tuple[dict[str, str], set[str]]:
    """Return (argument name or position -> Triton type, names of mutated arguments) from the decorator."""
    signature: dict[str, str] = {}
    mutated: set[str] = set()
    for decorator in function.decorator_list:
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
            meta = _entries(keyword.value)
            signature.update(_texts(_entries(meta.get("signature"))))
            names = meta.get("mutated_arg_names")
            if isinstance(names, (ast.List, ast.Tuple)):
                mutated |= {item.value for item in names.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)}
    return signature, mutated


def _entries(node: ast.expr | None) -> dict[str, ast.expr]:
    if not isinstance(node, ast.Dict):
        return {}
    pairs = zip(node.keys, node.values, strict=True)
    return {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}


def _texts(entries: dict[str, ast.expr]) -> dict[str, str]:
    return {key: value.value for key, value in entries.items() if isinstance(value, ast.Constant) and isinstance(value.value, str)}


def _numels(function: ast.FunctionDef) -> dict[str, int | None]:
    """Return the size of each loop by its name (xnumel, r0_numel, ...); None for one that only the run decides."""
    names = (argument.arg for argument in function.args.args)
    sizes: dict[str, int | None] = {name: None for name in names if name.endswith("numel")}
    for node in function.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant):
            name, value = node.targets[0].id, node.value.value
            if name.endswith("numel") and type(value) is int:
                sizes[name] = value
    if "r0_numel" in sizes:
        sizes.pop("rnumel", None)  # newer code also defines the product of the reduced dimensions
    return sizes


def _triton_points(sizes: dict[str, int | None]) -> tuple[int | None, int | None]:
    if not sizes or None in sizes.values():
        return None, None
    points, reduction = 1, 1
    for name, size in sizes.items():
        points *= size or 0
        reduction *= (size or 0) if name.startswith("r") else 1
    return points, reduction if any(name.startswith("r") for name in sizes) else None


# -- C++ ---------------------------------------------------------------------------------------------------------------


def read_cpp(source: str) -> KernelText | None:
    """Return what the C++ source of a kernel says; None where it holds no function `kernel`."""
    _, found, rest = source.partition("kernel(")
    if not found:
        return None
    inside, _, body = rest.partition("{")
    declared = _PARAMETER.findall(inside)
    counts, points, unbounded = _scan(body, {name for _, _, name in declared})
    filled = {pointer for alias, pointer in _ALIAS.findall(body) if alias.startswith("out_ptr")}
    parameters = []
    for const, kind, name in declared:
        access = access_of(name) or ("read" if const else "both")
        if name in filled:  # an intermediate result of this kernel, updated in place: what was in it does not count
            access = "write"
        bound = None if name in unbounded else counts[name] or None
        parameters.append(Parameter(name, _CPP.get(kind.strip(), ""), access, bound))
    return KernelText(tuple(parameters), points)


def _scan(body: str, names: set[str]) -> tuple[Counter[str], int | None, set[str]]:
    """Return (accesses a pointer, points of the largest nest, pointers accessed in loops whose length is not in the text)."""
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
            opened = _times(opened, _extent(*match.groups()))
        inner = _product(nest)
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


def _extent(first: str, last: str) -> int | None:
    begin, end = _SIZE.fullmatch(first.strip()), _SIZE.fullmatch(last.strip())
    return max(0, int(end.group(1)) - int(begin.group(1))) if begin and end else None


def _times(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left * right


def _product(sizes: list[int | None]) -> int | None:
    product: int | None = 1
    for size in sizes:
        product = _times(product, size)
    return product
