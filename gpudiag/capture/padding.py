"""How much of a batch is padding, where the batch itself tells: a mask, lengths, labels that are ignored at the end of each row, or ids.

Only named fields and rows of whole numbers are looked at, in host memory, through numpy: no operator of torch runs. Padding stands at one
end of each row (the collators of Hugging Face pad on the right or on the left). What cannot be told apart from another use of the same name
is unknown: additive and causal masks, masks with holes, labels of masked language models or with a masked prompt. Conventions:

* attention_mask: not 0 is real (Hugging Face).
* padding_mask and the like: True is padding (torch.nn.Transformer, src_key_padding_mask), and no row begins with it.
* mask: both are in use. Only where no row begins with 0 it is told: 0 is padding then.
* lengths: one number for each sample; the batch is as long as the one length that its tensors have, at least the longest number. `length`
  may as well be what a model is to predict: it counts beside tokens or 3-D tensors only.
* tensors without names: a 2-D mask of 0 and 1 beside tokens of its shape, of which those under padding are all the same number and the
  others are not. That tells its sense too.
* labels: -100 is ignored (ignore_index of torch.nn.CrossEntropyLoss); padding where it stands only at the end of rows.
* tokens alone (Tails): one number that ends, or begins, rows of several lengths and stands nowhere else, in no batch of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from gpudiag.capture import batch_contents

MAX_ELEMENTS = 1 << 18
"""Elements of a mask looked at: counting so many takes about 0.3 ms, and a step of so many positions is far longer. Larger: unknown."""

IGNORED = -100

LEAST_PADDING = 4
"""Equal tokens that are taken for padding: fewer may be alike by chance."""

LEAST_LENGTH, LEAST_ENDED = 8, 3
"""Positions of a row of ids; rows that end in padding, and lengths among the rows, by which it is told from what a table may hold."""

Array = npt.NDArray[Any]
PaddingCount = tuple[int, int]
Turn = Callable[[Array], Array]

_TURNS: tuple[Turn, ...] = (lambda rows: rows, lambda rows: rows[:, ::-1], lambda rows: rows.T, lambda rows: rows.T[:, ::-1])
"""Padding on the right or the left; samples or positions first."""


_REAL = ("attention_mask",)
_PADDING = (
    "padding_mask", "key_padding_mask", "src_key_padding_mask", "encoder_padding_mask", "src_padding_mask", "pad_mask",
)  # fmt: skip
_LENGTHS = ("lengths", "length", "input_lengths", "seq_lens", "seq_lengths", "src_lengths")
_TYPES = {"bool": "|b1", "uint8": "|u1", "int8": "|i1", "int16": "<i2", "int32": "<i4", "int64": "<i8", "float32": "<f4", "float64": "<f8"}


class Tails:
    """Counts the padding of batches that hold token ids alone, as where the model makes its mask; keeps what pads the batches of a run."""

    def __init__(self) -> None:
        self._pad: tuple[int, Turn] | None = None
        self._refuted = False

    def count(self, arrays: list[Array], tensors: list[Any]) -> PaddingCount | None:
        """Return the count of the first ids among the 2-D `arrays`; None where they do not tell, or others of `tensors` outweigh them."""
        ids = (array for array in arrays if array.dtype in (np.int32, np.int64) and array.min() >= 0)
        tokens = None if self._refuted else next(ids, None)
        others = (item.numel() for item in tensors if item.is_floating_point())  # what the model works on
        if tokens is None or tokens.size < max(others, default=0):
            return None
        self._pad = self._pad or next(((pad, turn) for turn in _TURNS if (pad := _find_pad(turn(tokens))) is not None), None)
        if self._pad is None:
            return None
        pad, turn = self._pad
        set_ = turn(tokens) != pad
        self._refuted = not (set_[:, 0].all() and _is_one_sided(set_))
        return None if self._refuted else (set_.size, set_.size - int(np.count_nonzero(set_)))


def _find_pad(rows: Array) -> int | None:
    """Return the number that ends some of these rows of ids, and stands nowhere else; None where it may mean something."""
    ended = rows[:, -1] == rows[:, -2] if rows.shape[1] >= LEAST_LENGTH else rows[:0, 0]
    if np.count_nonzero(ended) < LEAST_ENDED:
        return None
    pad = int(rows[ended.argmax(), -1])
    set_ = rows != pad
    if not (set_[:, 0].all() and _is_one_sided(set_)):  # first: it refuses nearly all, and what follows sorts the whole batch
        return None
    lengths, steps = np.count_nonzero(set_, axis=1), np.diff(rows)
    varied = len(np.unique(lengths)) >= LEAST_ENDED and len(np.unique(rows)) > LEAST_PADDING
    return pad if varied and not (steps >= 0).all() and not (steps <= 0).all() else None


class BatchFields(NamedTuple):
    """What is looked at of a batch with named fields."""

    known: dict[str, Any]
    """Those that may tell its padding."""
    tensors: list[Any]
    """The plain tensors among the first fields."""

    def count_padding(self) -> PaddingCount | None:
        """Return the count of the first kind of field that is there; one that does not tell ends the search."""
        return next((count(self.known[name], name, self) for name, count in _COUNTERS if name in self.known), None)


def count_padding(batch: object, tails: Tails | None = None) -> PaddingCount | None:
    """Return (positions, of these padding) of a batch; None where it does not tell. Never raises, and runs nothing of the user's.

    `tails`: what is known of the batches before; with it ids alone may tell.
    """
    import torch

    with suppress(Exception), torch._C.DisableTorchFunction():  # whatever a batch of the user's own kind does: it is unknown then
        if type(batch) is dict and (mask := batch.get(_REAL[0])) is not None and (found := _count_mask(mask, real=True)) is not None:
            return found  # the commonest batch, and the first kind that is looked for
        several, fields = type(batch) in (list, tuple), None
        items = list(batch[:16]) if several else [batch]  # type: ignore[index]
        for item in items:
            if type(item) is not torch.Tensor:
                fields = _read_fields(item)
                found = _count_unpadded(item) if fields is None else fields.count_padding()
                if found is not None:
                    return found
        tensors = [item for item in items if type(item) is torch.Tensor] if several or fields is None else fields.tensors
        arrays = [array for tensor in tensors if (array := _read_array(tensor, 2)) is not None]
        found = _count_beside_tokens([array for array in arrays if array.dtype.kind in "biu"]) if several else None
        return tails.count(arrays, tensors) if found is None and tails is not None else found
    return None


def read_batch(batch: Any, tails: Tails) -> tuple[int | None, PaddingCount | None]:
    """Return (samples, padding) of a batch. Never raises, and runs nothing of the user's."""
    import torch

    if type(batch) is torch.Tensor:
        with suppress(Exception), torch._C.DisableTorchFunction():  # the commonest batch that has no padding, at once
            if batch.ndim != 2:
                return (int(batch.shape[0]) if batch.ndim else None), None
    return batch_contents.count_samples(batch), count_padding(batch, tails)


def _count_unpadded(item: object) -> PaddingCount | None:
    """Return the count of what has no padding by its kind: a packed sequence, a nested tensor."""
    import torch

    data: Any = None
    if _is_packed(item):
        data = batch_contents.list_contents(item, 1)[0]
    elif batch_contents.is_jagged(item):
        data = item._values  # type: ignore[attr-defined]
    return (int(data.shape[0]), 0) if type(data) is torch.Tensor else None


def _count_beside_tokens(arrays: list[Array]) -> PaddingCount | None:
    """Return the count of the first of these that is the mask of another; of a mask without padding, where there is none with some."""
    whole = None
    for mask in arrays:
        beside = [tokens for tokens in arrays if tokens is not mask and tokens.shape == mask.shape and tokens.dtype.kind != "b"]
        if not beside or mask.min() < 0 or mask.max() > 1:
            continue
        set_ = mask != 0
        if set_.all() or not set_.any():
            whole = whole or ((mask.size, 0) if beside[0].max() > 1 else None)
        elif _is_one_sided(set_):
            for tokens in beside:
                zeros, ones = tokens[~set_], tokens[set_]
                uniform = [part.size >= LEAST_PADDING and bool((part == part[0]).all()) for part in (zeros, ones)]
                if uniform[0] != uniform[1]:
                    return mask.size, zeros.size if uniform[0] else ones.size
    return whole


def _read_fields(item: object) -> BatchFields | None:
    """Return the named fields of a batch; None where it has none. No method of its class runs: some compute values on demand."""
    import torch

    values = batch_contents.read_mapping(item)
    kinds = batch_contents.list_classes(item)
    if values is None and type not in kinds:
        if tuple in kinds and not _is_packed(item):
            names = batch_contents.read_static_attribute(type(item), "_fields")
            if type(names) is tuple and all(type(name) is str for name in names):
                values = dict(zip(names, tuple.__iter__(item), strict=False))  # type: ignore[arg-type]
        if not values and type(batch_contents.read_static_attribute(type(item), "__dataclass_fields__")) is dict:
            values = batch_contents.read_attributes(item) or None  # none for one with slots
    if values is None:
        return None
    known = {name: value for name, _ in _COUNTERS if (value := dict.get(values, name)) is not None}
    return BatchFields(known, [value for value in batch_contents.list_contents(values) if type(value) is torch.Tensor])


def _is_packed(item: object) -> bool:
    from torch.nn.utils.rnn import PackedSequence

    return PackedSequence in batch_contents.list_classes(item)


def _read_array(value: Any, dimensions: int) -> Array | None:
    """Return a view of a tensor in host memory; None where it is anything else, or too large.

    Not Tensor.numpy(): that forbids the tensor to be resized for the rest of its life (torch/csrc/utils/tensor_numpy.cpp).
    """
    import torch

    if type(value) is not torch.Tensor or value.ndim != dimensions or not value.is_cpu or value.layout is not torch.strided:
        return None
    kind, size = _TYPES.get(str(value.dtype).removeprefix("torch.")), value.numel()
    if kind is None or not 0 < size <= MAX_ELEMENTS or value.is_quantized:
        return None
    width = int(kind[2:])
    memory = {"version": 3, "data": (value.data_ptr(), True), "shape": tuple(value.shape), "typestr": kind}  # read-only
    memory["strides"] = tuple(width * step for step in value.stride())
    return np.asarray(SimpleNamespace(__array_interface__=memory))


def _count_mask(value: Any, *, real: bool, only_left: bool = False) -> PaddingCount | None:
    """Return the count of a mask in which not 0 is real (else padding); `only_left`: unless a row begins with padding."""
    array = _read_array(value, 2)
    if array is None:
        return None
    set_ = array if array.dtype.kind == "b" else array != 0
    size, marked = array.size, int(np.count_nonzero(set_))  # quicker of booleans
    if marked == size and array.dtype.kind in "bu":
        return size, 0
    # Whether the values are those of a mask and not numbers to be added (0 and -inf), or weights
    if array.dtype.kind in "bu":
        plain_numbers = True
    else:
        plain_numbers = bool(((array == 0) | (array == 1)).all() if array.dtype.kind == "f" else array.min() >= 0)
    if not plain_numbers or not _is_one_sided(set_):
        return None
    rows, columns = set_.shape
    if rows == columns > 1 and ((set_ == (below := np.tri(rows, dtype=bool))).all() or (set_ != below).all()):
        return None  # the mask of a causal attention, in either convention
    if marked in (0, size):  # all real by either convention: a batch that is all padding does not exist
        return size, 0
    if not real and set_[:, 0].any():
        return None
    if only_left and not set_[:, 0].all():
        return None
    return size, size - marked if real else marked


def _is_one_sided(set_: Array) -> bool:
    changes = set_[:, 1:] != set_[:, :-1]
    # as many changes as rows with one: two small passes where a maximum of sums takes three
    return bool(np.count_nonzero(changes) == np.count_nonzero(np.logical_or.reduce(changes, axis=1)))


def _count_lengths(value: Any, name: str, fields: BatchFields) -> PaddingCount | None:
    """Return the count of samples of these lengths; None where it is not plain how long they are padded: they may be of joined sequences.

    Sequences are tokens (whole numbers, 2-D) and 3-D tensors. They must agree, or one must be as long as the longest sample. But for
    `length`, any other tensor will do that is exactly so long.
    """
    # Lengths in a list that are looked at: 0.3 ms
    if type(value) is list and len(value) <= 1 << 13 and all(type(item) is int for item in value):
        array: Array | None = np.asarray(value, dtype=np.int64)
    else:
        array = _read_array(value, 1)
    if array is None or array.dtype.kind not in "iu" or not array.size or array.min() < 0 or not array.max():
        return None
    samples, longest = array.size, int(array.max())
    found = set()
    for tensor in fields.tensors:
        length = _find_sequence_length(tensor, samples)
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        if length is None or length < longest or not (tensor.ndim == 3 or (tensor.ndim == 2 and whole)):
            continue  # not one of sequences for certain
        # channels may stand before time
        if not (tensor.ndim == 3 and tensor.shape[0] == samples and length > longest and tensor.shape[2] >= longest):
            found.add(length)
    if not found and name != "length" and any(_find_sequence_length(tensor, samples) == longest for tensor in fields.tensors):
        found.add(longest)
    if longest not in found and len(found) != 1:
        return None
    padded = longest if longest in found else found.pop()
    return samples * padded, samples * padded - int(array.sum())


def _find_sequence_length(tensor: Any, samples: int) -> int | None:
    if tensor.is_nested or tensor.ndim < 2:
        return None
    first, second = cast("tuple[int, int]", tuple(tensor.shape[:2]))
    return second if first == samples else first if second == samples else None


def _count_labels(value: Any) -> PaddingCount | None:
    array = _read_array(value, 2)
    if array is None or array.dtype.kind != "i":
        return None
    kept = array != IGNORED
    padded = math.prod(kept.shape) - int(np.count_nonzero(kept))
    if not padded or not kept[:, 0].all() or not _is_one_sided(kept):
        return None
    return array.size, padded


_Counter = Callable[[Any, str, BatchFields], PaddingCount | None]

_KINDS: tuple[tuple[tuple[str, ...], _Counter], ...] = (
    (_REAL, lambda value, *_: _count_mask(value, real=True)),
    (_PADDING, lambda value, *_: _count_mask(value, real=False)),
    (("mask",), lambda value, *_: _count_mask(value, real=True, only_left=True)),
    (_LENGTHS, _count_lengths),
    (("labels",), lambda value, *_: _count_labels(value)),
)
_COUNTERS = [(name, count) for names, count in _KINDS for name in names]
