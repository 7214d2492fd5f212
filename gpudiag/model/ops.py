"""One op call: its signature (shapes, dtypes, strides, plain arguments), what it costs, and how it is bound."""

from __future__ import annotations

import math
from itertools import chain, repeat
from typing import Any, Literal

import msgspec

Shape = tuple[int, ...]
Argument = bool | int | float | str | tuple["Argument", ...] | None

# Names that torch writes into "Input type" (torch 1.9 to 2.13) -> our short dtype name. Source: c10/core/ScalarType.h (the names of
# toString too, which some tools write; not Int, Double and Bool, which old torch writes for plain numbers) and caffe2::TypeMeta names;
# "Float8_e4m3fnuz" and "e5m2fnuz" are AMD's encodings.
DTYPES = {
    "float": "fp32",
    "double": "fp64",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
    "c10::Float8_e4m3fnuz": "fp8",
    "c10::Float8_e5m2fnuz": "fp8",
    "c10::Float8_e8m0fnu": "fp8",
    "c10::Float4_e2m1fn_x2": "fp4",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short": "int16",
    "short int": "int16",
    "unsigned short": "uint16",
    "unsigned short int": "uint16",
    "unsigned int": "uint32",
    "unsigned long": "uint64",
    "unsigned long int": "uint64",
    "int": "int32",
    "long": "int64",
    "long int": "int64",
    "__int64": "int64",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "Float": "fp32",
    "Half": "fp16",
    "BFloat16": "bf16",
    "Long": "int64",
    "Byte": "uint8",
    "Char": "int8",
}

ITEM_BYTES = {
    "fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "fp4": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2,
    "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


# c10::ScalarType as "Concrete Inputs" writes it (a number) -> our dtype name. Source: c10/core/ScalarType.h (torch 2.13).
SCALAR_TYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "fp16", 6: "fp32", 7: "fp64", 9: "complex64", 10: "complex128",
    11: "bool", 15: "bf16", 23: "fp8", 24: "fp8", 25: "fp8", 26: "fp8", 44: "fp8", 45: "fp4",
}  # fmt: skip


class NotModelledError(Exception):
    """Raised by a formula where the recorded inputs do not give a cost; `reason` says what is missing."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Input(msgspec.Struct, frozen=True):
    """One argument of an op: a tensor (`dtype` set), a list of tensors (`tensors` set) or a plain value."""

    dtype: str | None = None
    """Short dtype name of a tensor; None: not a tensor (or its dtype was not recorded)."""
    shape: Shape = ()
    strides: Shape | None = None
    value: Argument = None
    """Parsed 'Concrete Inputs' entry; None where it was not recorded."""
    tensors: tuple[Shape, ...] | None = None
    """Shapes of a tensor list (its dtypes are not recorded by torch)."""

    @property
    def is_tensor(self) -> bool:
        """Return whether this argument is a tensor with a known dtype."""
        return self.dtype is not None

    @property
    def numel(self) -> int:
        """Return the number of elements of the tensor (1 for a zero-dimensional one)."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Return the bytes per element (0 where this is no tensor)."""
        return ITEM_BYTES.get(self.dtype or "", 0)

    @property
    def distinct_bytes(self) -> int:
        """Return the bytes of the distinct elements: dimensions of stride 0 (expanded) count once."""
        if self.strides is None or len(self.strides) != len(self.shape):
            return self.numel * self.item_bytes
        sizes = (size for size, stride in zip(self.shape, self.strides, strict=True) if stride != 0 or size == 0)
        return math.prod(sizes) * self.item_bytes


class Signature(msgspec.Struct, frozen=True):
    """The inputs of an op call, in schema order.

    `need`, `integer` and their like raise NotModelledError where an argument was not recorded; `what` names it.
    """

    inputs: tuple[Input, ...]

    def tensor(self, index: int) -> Input | None:
        """Return input `index` where it is a tensor, else None."""
        if 0 <= index < len(self.inputs) and self.inputs[index].is_tensor:
            return self.inputs[index]
        return None

    def value(self, index: int, default: Argument = None) -> Argument:
        """Return the plain value of input `index`, or `default` where it was not recorded."""
        if 0 <= index < len(self.inputs) and self.inputs[index].value is not None:
            return self.inputs[index].value
        return default

    def tensors(self, *indices: int) -> list[Input]:
        """Return the tensors among `indices` (optional tensors that were given)."""
        return [found for index in indices if (found := self.tensor(index)) is not None]

    def need(self, index: int, what: str) -> Input:
        """Return the tensor at `index`."""
        found = self.tensor(index)
        if found is None:
            raise NotModelledError(f"shape or dtype of {what} was not recorded")
        return found

    def need_all(self, *names: str) -> tuple[Input, ...]:
        """Return the leading tensors, one for each of `names`."""
        return tuple(self.need(index, name) for index, name in enumerate(names))

    def integer(self, index: int, what: str) -> int:
        """Return the integer at `index`."""
        value = self.value(index)
        if type(value) is not int:
            raise NotModelledError(f"{what} was not recorded")
        return value

    def flag(self, index: int, what: str) -> bool:
        """Return the boolean at `index`."""
        value = self.value(index)
        if not isinstance(value, bool):
            raise NotModelledError(f"{what} was not recorded")
        return value

    def flags(self, index: int, what: str) -> tuple[bool, ...]:
        """Return the list of booleans at `index` (such as an output mask)."""
        value = self.value(index)
        if not isinstance(value, tuple) or not value or not all(isinstance(item, bool) for item in value):
            raise NotModelledError(f"{what} was not recorded")
        return tuple(bool(item) for item in value)

    def integers(self, index: int, what: str, rank: int | None = None) -> Shape:
        """Return the list of integers at `index`; with `rank`, one number stands for all dimensions, as in torch."""
        value = self.value(index)
        items = value if isinstance(value, tuple) else (value,)
        numbers = tuple(item for item in items if type(item) is int)
        if len(numbers) != len(items):
            raise NotModelledError(f"{what} was not recorded")
        if rank is not None and len(numbers) == 1:
            numbers *= rank
        if rank is not None and len(numbers) != rank:
            raise NotModelledError(f"{what} has {len(numbers)} entries for {rank} dimensions")
        return numbers

    def scalar_type(self, index: int, default: str) -> str:
        """Return the dtype that argument `index` (ScalarType) names, or `default` where it was None or not recorded."""
        value = self.value(index)
        return SCALAR_TYPES.get(value, default) if type(value) is int else default

    def output(self, functional: int) -> Input | None:
        """Return the tensor of an `out=` call: the last argument, behind the `functional` ones of the plain schema; None: a plain call."""
        last = len(self.inputs) - 1
        return self.tensor(last) if last >= functional else None

    @property
    def has_args(self) -> bool:
        """Return whether any plain value was recorded ('Concrete Inputs')."""
        return any(item.value is not None for item in self.inputs)


def parse_argument(text: str) -> Argument:
    """Return the value of one 'Concrete Inputs' text by type: bool, None, int, float, list, else the text itself. Never evaluated."""
    text = text.strip()
    if text in ("", "None"):
        return None
    if text in ("True", "False"):
        return text == "True"
    if text[:1] + text[-1:] in ("[]", "()"):
        inner = text[1:-1].strip()
        if any(bracket in inner for bracket in "[]()"):
            return text
        return tuple(parse_argument(part) for part in inner.split(",")) if inner else ()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _decode(text: str | None) -> list[Any]:
    if text is None:
        return []
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):  # hostile nesting, half a surrogate pair
        return []
    return value if isinstance(value, list) else []


def _parse_ints(value: Any) -> Shape | None:
    return tuple(value) if isinstance(value, list) and set(map(type, value)) <= {int} and min(value, default=0) >= 0 else None


def _parse_input(shape: Any, dtype: Any, strides: Any, arg: Any) -> Input:
    value = parse_argument(arg) if isinstance(arg, str) else None
    sizes = _parse_ints(shape)
    if sizes is None:
        if isinstance(shape, list) and shape and all(_parse_ints(item) is not None for item in shape):
            return Input(tensors=tuple(tuple(item) for item in shape), value=value)
        return Input(value=value)
    if isinstance(dtype, str) and dtype in DTYPES:
        steps = tuple(strides) if isinstance(strides, list) and set(map(type, strides)) <= {int} else None
        return Input(dtype=DTYPES[dtype], shape=sizes, strides=steps, value=value)
    return Input(shape=sizes, value=value)


def parse_signature(shapes: str, dtypes: str | None, strides: str | None, args: str | None) -> Signature:
    """Return the inputs from the four JSON texts of a `signatures` row; what is malformed becomes a plain unknown input."""
    told = (chain(_decode(text), repeat(None)) for text in (dtypes, strides, args))
    return Signature(tuple(map(_parse_input, _decode(shapes), *told)))


Bound = Literal["compute", "memory", "overhead", "communication", "copy", "unknown"]
BOUNDS: tuple[Bound, ...] = ("compute", "memory", "overhead", "communication", "copy", "unknown")
Provenance = Literal["exact", "derived", "generic", "none"]

INEFFICIENT_BELOW = 0.3
SHORT_KERNEL_NS = 10_000
HOST_BOUND_BELOW_NS = 50_000
OVER_ROOF_ABOVE = 1.03
"""Above this share of a roof the peak or the count is wrong, not the hardware (devices.yaml's self-check rule)."""


class Cost(msgspec.Struct, frozen=True):
    """FLOPs by engine and compulsory bytes of one call. All zero is a real cost: a view moves and computes nothing."""

    matrix_flops: int = 0
    """FLOP on the tensor/matrix cores of `dtype` (2 per multiply-add)."""
    vector_flops: int = 0
    """FLOP on the vector units (fp32 peak)."""
    bytes: int = 0
    """Compulsory traffic: each distinct input element read once, each output element written once."""
    dtype: str = ""
    """Compute type of the matrix FLOPs, such as 'bf16'; '' where there are none."""
    provenance: Provenance = "exact"
    special: int = 0
    """Results of elementary functions (exp, tanh, erf, log, pow, sin ...), one a call: each takes a result of the special function units at
    least, or a polynomial on the vector units that takes longer."""
    draws: int = 0
    """Random numbers that are drawn: on a CPU one generator makes them one after the other."""
    recompute_flops: int = 0
    """Part of `matrix_flops` that repeats forward work within the op: a fused attention backward forms the scores again."""

    @property
    def flops(self) -> int:
        """Return matrix plus vector FLOP."""
        return self.matrix_flops + self.vector_flops

    @property
    def is_zero(self) -> bool:
        """Return whether the call neither computes nor moves anything (views, wrappers)."""
        return self.flops == 0 and self.bytes == 0


def format_signature(signature: Signature) -> str:
    """Return the tensors of a signature as people write them: '[141, 512] [512, 512] bf16'; '' where there is none."""
    words: list[str] = []
    dtypes: list[str] = []
    for item in signature.inputs:
        if item.is_tensor:
            words.append(str(list(item.shape)))
            dtypes.append(item.dtype or "")
        elif item.tensors is not None:
            words.append(f"{len(item.tensors)} tensor{'' if len(item.tensors) == 1 else 's'}")
    kinds = dict.fromkeys(dtypes)
    return " ".join([*words, "/".join(kinds)]).strip()
