"""The small JSON files of a bundle, field by field: what gpudiag's own structs know, with their texts rewritten."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from gpudiag.api.scrub.names import Names
from gpudiag.api.scrub.sentences import own_words
from gpudiag.api.scrub.words import Words
from gpudiag.capture.environment.packages import KNOWN
from gpudiag.capture.environment.variables import variables
from gpudiag.capture.folder import trace_name
from gpudiag.model.bundle import Manifest
from gpudiag.model.inductor import InductorCode
from gpudiag.model.memory import Owners
from gpudiag.model.program import Program

_Kept = TypeVar("_Kept", Manifest, Program, Owners, InductorCode)

_VERSION = re.compile(r"\d[\w.+-]{0,39}", re.ASCII)
_DEVICE = re.compile(r"[\w .()@/+-]{0,100}", re.ASCII)
_CODE = re.compile(r"[\w.:]{1,500}", re.ASCII)

Rule = Callable[[str], str | None]
"""What becomes of the text of a field; None: it is rewritten as a sentence."""

_VERSIONS = ("tool_version", "python", "torch", "cuda", "driver", "compute_capability")
_DEVICES = ("name", "cpu", "id")
_DIGESTS = ("key", "device_key", "launch", "host")
_OF_CODE = ("sampler", "backend", "comm_hooks")


class Values:
    """Rewrites the texts of a decoded value; which rule holds is told by the name of the field, and by the struct it stands in."""

    def __init__(self, names: Names, words: Words) -> None:
        self._names, self._words = names, words
        self._of_manifest: dict[str, Rule] = {
            **dict.fromkeys(_VERSIONS, _version), **dict.fromkeys(_DEVICES, _device_name), **dict.fromkeys(_DIGESTS, names.text),
            **dict.fromkeys(_OF_CODE, self._code),
        }  # fmt: skip
        self._of_code: dict[str, Rule] = dict.fromkeys(("name", "ops", "nodes", "key"), self._code)

    def manifest(self, found: Manifest) -> Manifest:
        """Return a manifest without serial number, command and commit, its other texts rewritten."""
        self._without(found)
        bare = msgspec.structs.replace(
            found, command=None, program=None, machine=msgspec.structs.replace(found.machine, gpu_uuid=None),
            windows=tuple(msgspec.structs.replace(one, file=trace_name(one.rank, one.index)) for one in found.windows),
        )  # fmt: skip
        kept = self._rewritten(bare, self._of_manifest)
        return kept if found.program is None else msgspec.structs.replace(kept, program=self._program(found.program))

    def _program(self, found: Program) -> Program:
        """Return a program without its commit; packages and variables only as far as gpudiag records them."""
        packages = {name: text for name, text in found.packages.items() if name in KNOWN.values() and _VERSION.fullmatch(text)}
        said = variables({name: value for name, value in found.variables.items() if value is not None})
        unsaid = variables(dict.fromkeys(found.variables, "-"))  # "-" is no value that is kept
        bare = msgspec.structs.replace(found, code=None, packages={}, variables={})
        return msgspec.structs.replace(self._rewritten(bare, self._of_manifest), packages=packages, variables={**unsaid, **said})

    def _without(self, found: Manifest) -> None:
        """Note what the copy does not have."""
        for text in found.command or ():
            self._words.removed.note("words of the command line", text)
        if found.machine.gpu_uuid:
            self._words.removed.note("serial numbers", found.machine.gpu_uuid)
        if found.program is not None and found.program.code is not None:
            self._words.removed.note("commits", found.program.code.commit)

    def owners(self, found: Owners) -> Owners:
        """Return the owners of a rank's memory; the snapshot beside them is not copied."""
        return self._rewritten(msgspec.structs.replace(found, snapshot=False), self._of_code)

    def inductor(self, found: InductorCode) -> InductorCode:
        """Return what is known of a rank's compiled code; its keys stand in the trace too."""
        return self._rewritten(found, self._of_code)

    def sentence(self, text: str) -> str:
        """Return a text of gpudiag's with the words replaced that are not its own."""
        return self._words.known(text, own_words())

    def _rewritten(self, found: _Kept, rules: Mapping[str, Rule]) -> _Kept:
        return msgspec.convert(self._walk(msgspec.to_builtins(found), "", rules), type(found))

    def _walk(self, value: Any, field: str, rules: Mapping[str, Rule]) -> Any:
        if isinstance(value, str):
            found = rules[field](value) if field in rules else None
            return self.sentence(value) if found is None else found
        if isinstance(value, list | tuple):
            return [self._walk(item, field, rules) for item in value]
        if isinstance(value, dict):
            inner = self._of_code if "capturable" in value else rules  # an optimizer's name is a class
            return {self.sentence(key): self._walk(item, key, inner) for key, item in value.items()}
        return value

    def _code(self, text: str) -> str | None:
        return self._names.symbol(text) if _CODE.fullmatch(text) else None


def _version(text: str) -> str | None:
    return text if _VERSION.fullmatch(text) else None


def _device_name(text: str) -> str | None:
    return text if _DEVICE.fullmatch(text) else None
