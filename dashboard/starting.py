"""What may be started from the dashboard: one fix that a finding names, on the program that the recording names, and nothing else."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import msgspec
from gpudiag_dashboard.library import Library

from gpudiag.api import offers
from gpudiag.api.growing import Growing
from gpudiag.api.recorded_command import recorded_words
from gpudiag.errors import GpudiagError, InputError

_PLACEHOLDER = ("train.py", "ARGS")


class Plan(msgspec.Struct, frozen=True):
    """One experiment as it would be started."""

    offer: offers.Offer
    arguments: tuple[str, ...] = ()
    """Of gpudiag; () where it cannot be started from here."""
    shown: str = ""
    """The same as a person types it; with placeholders where the program is not known."""
    why_not: str = ""
    """Why it cannot be started from here; '' where it can, as far as the recording is concerned."""
    hint: str = ""

    @property
    def argv(self) -> list[str]:
        """Return the command as a list of arguments."""
        return offers.argv(self.arguments)

    @property
    def digest(self) -> str:
        """Return a digest of the command: that which was shown is the one that is started. '' where there is none."""
        return offers.digest(self.arguments) if self.arguments else ""


def found_offers(library: Library, name: str) -> tuple[offers.Offer, ...]:
    """Return the fixes that the findings of an analysed recording name. Raises InputError where there is no such recording."""
    return offers.offers(library.report(name).data)


def plan(library: Library, name: str, fix: str) -> Plan:
    """Return how `fix` would be tried on the recording `name`. Raises InputError for a recording or a fix that is not to be had."""
    offer = offers.chosen(found_offers(library, name), fix)
    entry, path = library.entry(name), library.path(name)
    if entry.kind != "bundle":
        shown = shlex.join(["gpudiag", "ab", "--fix", str(offer.call), *_PLACEHOLDER])
        return Plan(offer, (), shown, "a trace does not tell which program it was recorded from", "type the command with your program")
    try:
        words = recorded_words(Growing(path).read().manifest)
    except GpudiagError as error:
        return Plan(offer, (), _shown(offer, path, ()), error.message, error.hint or "")
    if not words:
        return Plan(offer, (), _shown(offer, path, ()), offers.NOT_RECORDED, "type the command with your program")
    why, hint = _obstacle(entry.status, path, words)
    if why:
        return Plan(offer, (), _shown(offer, path, words), why, hint)
    arguments = offers.ab_words(offer.call, str(path), words, ceilings=offers.has_report(path))
    return Plan(offer, tuple(arguments), _shown(offer, path, words))


def _obstacle(status: str, path: Path, words: tuple[str, ...]) -> tuple[str, str]:
    """Return why nothing can be started, and what to do about it; ('', '') where it can."""
    if status == "live":
        return "the run still records: an experiment beside it would disturb both", "wait for its end"
    if (path / "experiments").is_symlink():
        return "the folder of its experiments is a link", "results are written into the recording itself"
    missing = offers.missing_here(words)
    return (missing, f"start the dashboard in the folder in which the program was run; this one is {os.getcwd()}") if missing else ("", "")


def _shown(offer: offers.Offer, path: Path, words: tuple[str, ...]) -> str:
    """Return the command as a person types it in this folder."""
    place = os.path.relpath(path)
    place = str(path) if place.startswith(os.pardir) else place
    known = offers.ab_words(offer.call, place, words or _PLACEHOLDER, ceilings=offers.has_report(path))
    return shlex.join(["gpudiag", *(word for word in known if word != "--" or _needed(words))])


def _needed(words: tuple[str, ...]) -> bool:
    """Return whether the program's name has to be told from an option, which only a person who reads it does not need."""
    return any(word == "--" for word in words)


def checked(library: Library, name: str, fix: str, digest: str) -> Plan:
    """Return the plan that a person has seen, to be started. Raises InputError where it cannot be, or is another by now."""
    made = plan(library, name, fix)
    if made.why_not:
        raise InputError(made.why_not, made.hint or None)
    if not digest or made.digest != digest:
        raise InputError("the recording has changed since the command was shown", "load the page anew, and look at the command again")
    return made
