"""Plain pickles are read as the standard library reads them; nothing else is, and no file unfolds to more than its limit."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpudiag.trace import memory_snapshot
from gpudiag.trace.memory_snapshot import NotPlainDataError, load_plain_data

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=300)
_VALUES = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner), max_leaves=20)


@settings(max_examples=60, deadline=None)
@given(value=_VALUES, protocol=st.integers(3, 5))
def test_plain_values_come_back(value: object, protocol: int) -> None:
    assert load_plain_data(pickle.dumps(value, protocol)) == value


def test_shared_lists_stay_shared() -> None:
    inner = [1]
    found = load_plain_data(pickle.dumps([inner, inner], 4))
    assert found[0] is found[1]


class _Calls:
    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self._told = function, args

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._told


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nothing_is_called(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "called"
    hostile = pickle.dumps({"segments": [_Calls(os.system, f"touch {mark}")]}, protocol)
    with pytest.raises(NotPlainDataError, match="refused"):
        load_plain_data(hostile)
    assert not mark.exists()


def test_names_without_a_call_are_refused_too() -> None:
    for value in (os.path.join, Path, {1, 2}, 1j, bytearray(b"x")):
        with pytest.raises(NotPlainDataError, match="refused"):
            load_plain_data(pickle.dumps(value, 5))


def test_a_memo_index_that_is_only_claimed_takes_no_memory() -> None:
    data = b"\x80\x04]" + b"r" + struct.pack("<I", 2**32 - 1) + b"."
    assert load_plain_data(data) == []


def test_a_length_that_is_only_claimed_takes_no_memory() -> None:
    for code in (b"X" + struct.pack("<I", 2**32 - 1), b"\x8d" + struct.pack("<Q", 2**62)):
        with pytest.raises(NotPlainDataError, match="damaged or cut short"):
            load_plain_data(b"\x80\x04" + code + b"abc.")


def test_containers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_snapshot, "MAX_CONTAINERS", 1000)
    with pytest.raises(NotPlainDataError, match="containers"):
        load_plain_data(b"\x80\x04(" + b"]" * 1001 + b"l.")


def test_operations_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_snapshot, "MAX_OPERATIONS", 1000)
    with pytest.raises(NotPlainDataError, match="operations"):
        load_plain_data(b"\x80\x04" + b"N" * 2000 + b".")


def test_deep_nesting_is_no_recursion() -> None:
    assert isinstance(load_plain_data(b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."), list)


def _nested(depth: int) -> bytes:
    return b")" + b"\x85" * depth


def _doubled(times: int) -> bytes:
    """t = (t, t), `times` times: a hash of it takes 2^times steps."""
    return b")" + b"".join(b"\x94h" + bytes([index]) + b"\x86" for index in range(times))


_WRITTEN = {"deep": _nested(200_000), "doubled": _doubled(40), "tuple": _nested(1), "bytes": b"C\x01x", "fraction": b"G" + bytes(8)}


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [b"%sNs", b"(%sNu", b"(X\x01\0\0\0aN%sNu"])
@pytest.mark.parametrize("key", _WRITTEN)
def test_keys_that_are_no_texts_or_small_numbers_are_refused_before_they_are_hashed(key: str, pairs: bytes) -> None:
    """In a process of its own: hashing the first ends the interpreter, hashing the second never ends."""
    data = b"\x80\x04}" + pairs.replace(b"%s", _WRITTEN[key]) + b"."
    script = (
        "import sys; from gpudiag.trace.memory_snapshot import NotPlainDataError, load_plain_data\n"
        "try: load_plain_data(sys.stdin.buffer.read())\n"
        "except NotPlainDataError as error: print(error)"
    )
    found = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, timeout=20, check=True)
    assert b"neither a text nor a small number" in found.stdout


def test_keys_whose_hashes_collide_are_refused() -> None:
    """All multiples of 2^61 - 1 have the hash 0 (sys.hash_info.modulus): n of them take n^2 comparisons."""
    with pytest.raises(NotPlainDataError, match="neither a text nor a small number"):
        load_plain_data(pickle.dumps(dict.fromkeys(number * sys.hash_info.modulus for number in range(100)), 4))


def test_small_numbers_and_none_are_keys() -> None:
    value = {0: "a", -1: "b", 65_536: "c", None: "d", "x": {True: 1}}
    assert load_plain_data(pickle.dumps(value, 4)) == value


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_one_error(tail: bytes) -> None:
    with suppress(NotPlainDataError):
        load_plain_data(b"\x80\x04" + tail)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_gives_a_value_or_one_error(place: int, value: int) -> None:
    data = bytearray(pickle.dumps({"segments": [{"address": 1, "blocks": [{"size": 512, "state": "inactive"}]}] * 3}, 4))
    data[place % len(data)] = value
    with suppress(NotPlainDataError):
        load_plain_data(bytes(data))
