"""What a scrubbed copy keeps: keys of keep_list.yaml, each with the form of its values; names of ops, kernels, libraries; known words."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import msgspec
import polars as pl

from gpudiag.attribution.call_sites import LIBRARY_PATH, OWN_FOLDERS

KEEP_LIST = files("gpudiag.scrub").joinpath("keep_list.yaml").read_text("utf-8")
Form = str | Mapping[str, Any]
"""The form of a value (keep_list.yaml says which there are); of an object, or of a list of objects, the forms of its keys."""


def _read_forms(section: Mapping[str, Any]) -> dict[str, Form]:
    forms: dict[str, Form] = {key: form for form, keys in section.items() if form != "objects" for key in keys}
    return forms | {key: _read_forms(inner) for key, inner in section.get("objects", {}).items()}


_LIST: dict[str, Any] = msgspec.yaml.decode(KEEP_LIST)
WORDS = frozenset(_LIST.pop("vocabulary").split())
HEADERS, EVENT_KEYS, ARGUMENTS, BUNDLE_FIELDS = (_read_forms(_LIST[name]) for name in ("header", "event", "args", "bundle"))

NAME_FORMS = {"op": "operator", "kernel": "symbol", "launch": "symbol", "frame": "frame"}
"""Form of the name by the kind of event; those of other kinds are words."""

MAX_NUMBER = 7
"""Digits of a number that may stand in a text: a layer, a step, a process (up to 4,194,304 on Linux); no account."""

MAX_TEXTS = 100_000
"""Removed texts that are remembered for the check of the copy."""

_LONG_CHARACTERS = 9
"""Shorter texts are not looked for in the copy: they stand in it by chance."""

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_PIECE = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}(?![\w.])|[^\W_]+")
"""A word, or the address of a host."""
_PART = re.compile(r"[1-3][dD](?![a-z])|\d+|[A-Z]?[a-z]+|[A-Z]+(?![a-z])|.", re.DOTALL)
_CLASS = re.compile(r"(?:[A-Z]+[a-z]+|[A-Z]{2,4}|\d{1,2}[dD]?)+")
_SHORT = re.compile(r"[A-Za-z]?\d{0,3}|\d{1,3}[FBIW]\d{1,3}", re.ASCII)
"""A letter, also with a number: the kind of an event, a stage; a stage of a pipeline, the pass, a microbatch."""
_ODD = re.compile(r"[^ -~]")
"""What is neither a letter nor printable ASCII: control characters, emoji."""

_OPERATOR = re.compile(r"(?:autograd::engine::evaluate_function: )?[A-Za-z_][\w.]{0,199}(?:::[\w.:~<>&*(), ]{1,500})?|\[memory\]", re.ASCII)
_TIMED = re.compile(r"[\w.<>]{1,100} \(dynamo_timed\)", re.ASCII)  # functions of torch._dynamo
_VERSION = re.compile(r"\d[\w.+-]{0,39}", re.ASCII)
_DEVICE = re.compile(r"[\w .()@/+-]{0,100}", re.ASCII)
_SECRET = re.compile(
    r"\w://|[\w.+-]@[\w-]{1,64}\.\w|(?<![\w<])[/\\](?:home|root|Users|mnt|data|scratch|nfs|tmp|var|opt|workspace)[/\\]"
    r"|\b(?:hf|ghp|gho|ghs|github_pat|glpat|xox[abp]|sk|pk|AKIA|ASIA|AIza|eyJ)[-_A-Za-z0-9]{16,}"
    r"|\b[A-Z][A-Z0-9_]{3,}=\S"
)
"""URLs, e-mail addresses, absolute paths, access tokens by their usual beginnings, variables with their value."""
_BUILTIN = re.compile(
    r"<built-in (?:function|method) [\w.]{0,200}(?: of (?:type |module )?[\w.:]{0,200}(?: object)?(?: at 0x[0-9a-fA-F]{1,16})?)?>", re.ASCII
)
_FRAME = re.compile(r"(?:[\w.+-]{1,100}/)*(?:[\w-][\w.-]{0,99}|<frozen [\w.]{1,100}>)\((?:\d{1,9}|\?)\): [\w.<>]{1,200}", re.ASCII)
_INSTALLED = re.compile(
    rf"(?:.*/)?((?:(?:site-packages|dist-packages|lib/python\d[\d.]*)/|gpudiag/(?:{OWN_FOLDERS})\b"
    r"|torch/(?:_\w|accelerator|amp|ao|autograd|backends|compiler|cpu|cuda|distribut|export|func|fx|jit|librar|multiproc|nn|ops|optim"
    r"|overrides|profiler|random|serializ|sparse|storage|tensor|utils|xpu)).*)",
    re.DOTALL,
)
"""From the folder of an installed package on; a folder named torch is also one of a user's, so it counts with what torch has in it."""
_PUBLIC = re.compile(
    r"(?:vllm|sglang|xfuser|aiter|triton_kernels|flashinfer|megatron|nemo|torchtitan|torchao|torchtune|axolotl|unsloth|liger_kernel|fla"
    r"|mamba_ssm|causal_conv1d|tensordict|torchrl|gymnasium|detectron2|mmcv|mmengine|mmdet|ultralytics|nvidia|cutlass|jax|flax)/"
)
"""Further packages whose folders say nothing about the user."""


class Names:
    """Rewrites names and texts of one run, and finds what was removed in what was written.

    Words are replaced by a digest under a key that nobody keeps: equal words stay equal, and no list of guesses finds them out.
    `keep_names`: the user's annotations, folders, files and functions keep their names.
    """

    def __init__(self, *, keep_names: bool = False) -> None:
        self._keep, self._key = keep_names, secrets.token_bytes(16)
        self._known: dict[tuple[str, str], str] = {}
        self.removed: Counter[str] = Counter()
        """How often something was taken out, by kind."""
        self._removed_texts: set[str] = set()
        self._written: set[bytes] = set()

    def note(self, kind: str, *values: Any) -> None:
        """Count one removal; remember the texts in its values that are long enough to be told from others, 1,000 characters of each."""
        self.removed[kind] += 1
        stack = list(values)
        while stack:
            value = stack.pop()
            if isinstance(value, dict):
                stack += [*value, *value.values()]
            elif isinstance(value, list | tuple):
                stack += value
            elif isinstance(value, str) and len(value) >= _LONG_CHARACTERS and len(self._removed_texts) < MAX_TEXTS:
                self._removed_texts.add(value[:1_000])

    def watch(self, text: bytes) -> bytes:
        """Return a JSON text that is written to the copy; its strings are searched by `find_left_texts`."""
        self._written.update(_STRING.findall(text))
        return text

    def find_left_texts(self) -> tuple[int, set[str], bool]:
        """Return how many removed texts that no known word explains were looked for, those that were written, and whether it were all."""
        wanted = [text for text in self._removed_texts if not consists_of_known_words(text)]
        written = pl.Series(msgspec.json.decode(b"[%b]" % b",".join(self._written), type=list[str]), dtype=pl.String)
        found = written.str.extract_many(wanted, overlapping=True).explode().drop_nulls().to_list() if wanted else []
        return len(wanted), set(found), len(self._removed_texts) < MAX_TEXTS

    def rewrite(self, form: str, name: str) -> str:
        """Return a name or text in its form; one that does not have it as the words that are known."""
        found = self._known.get((form, name))
        if found is None:
            found = self._rewrite(form, name)
            if len(name) < 4_000:  # longer ones do not come again
                if len(self._known) >= 200_000:  # a hostile file has more, and then waits longer
                    self._known.clear()
                self._known[form, name] = found
        return found

    def _rewrite(self, form: str, name: str) -> str:
        if form in ("version", "device", "text"):
            kept = {"version": _VERSION, "device": _DEVICE}.get(form)
            return name if kept is not None and kept.fullmatch(name) else self._replace_words(name)
        if form == "frame":
            return self._rewrite_frame(name.replace("\\", "/"))
        if self._keep or form == "symbol" or _TIMED.fullmatch(name) or (form == "operator" and _OPERATOR.fullmatch(name)):
            return self._keep_symbol(name)
        return self._replace_words(name)  # old schemas file annotations under ops

    def _rewrite_frame(self, name: str) -> str:
        """Return a Python frame: of a library as it is, from its folder on; of the user the words that are known."""
        installed = _INSTALLED.fullmatch(name)
        if installed is not None and installed.start(1):
            self.note("paths shortened", name[: installed.start(1)].strip("/"))
        found = name if installed is None else installed[1]
        public = installed is not None or LIBRARY_PATH.match(name) or _PUBLIC.match(name) or name.startswith("<frozen ")
        if _BUILTIN.fullmatch(name) or (public and _FRAME.fullmatch(found)):
            return self._keep_symbol(found)
        return self._keep_symbol(found.lstrip("/")) if self._keep else self._replace_words(found)

    def _keep_symbol(self, name: str) -> str:
        if _SECRET.search(name) is None:
            return name
        self.note("names that look like a secret", name)
        return self._digest(name, "removed-")

    def _replace_words(self, text: str) -> str:
        unknown: list[str] = []

        def replace(match: re.Match[str]) -> str:
            piece = match.group()
            if is_known_word(piece):
                return piece
            unknown.append(piece)
            if not _CLASS.fullmatch(piece):
                return self._digest(piece)
            return "".join(part if is_known_word(part) else self._digest(part) for part in _PART.findall(piece))

        found = _ODD.sub("?", _PIECE.sub(replace, text))
        if found != text:
            self.note("names changed", *(name for name in (text, *unknown) if len(name) >= 16 or any(map(str.isdigit, name))))
        return found

    def _digest(self, text: str, letter: str = "x") -> str:
        """Return the word that stands for `text`, without digits: numbers in names count the steps."""
        found = hashlib.blake2s(text.encode("utf-8", "surrogatepass"), key=self._key, digest_size=4).hexdigest()
        return letter + found.translate(str.maketrans("0123456789abcdef", "bcdfghjklmnpqrst"))


def is_known_word(piece: str) -> bool:
    """Return whether letters and digits without a gap consist of known words and short numbers."""
    if piece.lower() in WORDS or _SHORT.fullmatch(piece):
        return True
    return piece.isascii() and all(part.lower() in WORDS or (part.isdigit() and len(part) <= MAX_NUMBER) for part in _PART.findall(piece))


def consists_of_known_words(text: str) -> bool:
    """Return whether a text says nothing of its own."""
    return all(map(is_known_word, _PIECE.findall(text)))
