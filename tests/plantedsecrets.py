"""A token of its own in every place of a document or struct where a text can stand, to be looked for in what is made of it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec
from msgspec import inspect

Path: TypeAlias = tuple[str | int, ...]
TOKEN = re.compile(r"PLANTED\d{5}SECRET")


class Planter:
    """Hands out tokens and remembers where each was planted."""

    def __init__(self) -> None:
        self.places: dict[str, Path] = {}

    def token(self, place: Path) -> str:
        """Return a new token for `place`."""
        found = f"PLANTED{len(self.places):05d}SECRET"
        self.places[found] = place
        return found

    def standing_in(self, data: bytes) -> set[Path]:
        """Return the places of the tokens that stand in `data`."""
        return {self.places[found] for found in TOKEN.findall(data.decode("utf-8", "replace"))}


def places(value: Any, before: Path = ()) -> Iterator[Path]:
    """Yield where texts stand in a JSON value."""
    if isinstance(value, str):
        yield before
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*before, key))


def variants(planter: Planter, value: Any, name: str) -> Iterator[Any]:
    """Yield copies of an object: one for each text in it, which is a token there, and one with tokens as keys of each object in it.

    The places are (name, key, ...), numbers of list items left out.
    """
    for place in places(value):
        changed = copy.deepcopy(value)
        inner = changed
        for step in place[:-1]:
            inner = inner[step]
        inner[place[-1]] = planter.token((name, *(step for step in place if isinstance(step, str))))
        yield changed
    changed = copy.deepcopy(value)
    for inner in [changed, *(found for found in changed.values() if isinstance(found, dict))]:
        inner[planter.token((name, "<key>"))] = {planter.token((name, "<key>", "<key>")): [planter.token((name, "<value>"))]}
        inner["HF_TOKEN"] = planter.token((name, "HF_TOKEN"))
    yield changed


def filled(planter: Planter, kind: type) -> Any:
    """Return an instance of a struct in which every text that is not one of a few words is a token, also in what is optional."""
    return msgspec.convert(_filled(planter, inspect.type_info(kind), ()), kind)


def _filled(planter: Planter, kind: Any, place: Path) -> Any:
    match kind:
        case inspect.StructType():
            return {field.encode_name: _filled(planter, field.type, (*place, field.encode_name)) for field in kind.fields}
        case inspect.UnionType():
            text = [one for one in kind.types if isinstance(one, inspect.StrType)]  # where a text may stand, one is planted
            return _filled(planter, next(iter(text or [one for one in kind.types if not isinstance(one, inspect.NoneType)])), place)
        case inspect.DictType():
            return {planter.token((*place, "<key>")): _filled(planter, kind.value_type, place)}
        case inspect.VarTupleType() | inspect.ListType():
            return [_filled(planter, kind.item_type, place)]
        case inspect.EnumType():
            return next(iter(kind.cls)).value
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.StrType():
            return planter.token(place)
        case inspect.BoolType():
            return True
        case _:
            return 1
