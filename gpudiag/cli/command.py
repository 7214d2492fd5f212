"""How commands are run: hints for mistaken words, an orderly end on a signal, or with the dashboard."""

from __future__ import annotations

import os
import re
import shlex
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from gpudiag.errors import UsageError


class _PlainHelp:
    def get_short_help_str(self, limit: int = 45) -> str:
        # Characters of the first sentence of a command in the list of commands: it is shown whole, on lines of its own where it is long
        return str(super().get_short_help_str(max(limit, 200)))  # type: ignore[misc]


class PlainCommand(_PlainHelp, TyperCommand):
    """A command that knows the options of other tools."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError for wrong ones, and for an option that other tools have, with what does the same here."""
        check_format(self.name, args)
        with _say_in_one_line(ctx):
            return super().parse_args(ctx, args)


class PlainGroup(_PlainHelp, TyperGroup):
    """A group of commands, as PlainCommand, listed by what they are for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of `args`. Raises UsageError for a script, a recording or a rule there, with the call that was meant."""
        check_command(None if ctx.parent is None else self.name, args, self.commands)
        with _say_in_one_line(ctx):
            return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, those of one purpose (rich_help_panel) under its name."""
        listed = [(name, command) for name in self.list_commands(ctx) if (command := self.commands[name]) and not command.hidden]
        width = max((len(name) for name, _ in listed), default=0)
        panels = {name: getattr(command, "rich_help_panel", None) for name, command in listed}
        for panel in dict.fromkeys(panels.values()):
            rows = [(name.ljust(width), command.get_short_help_str()) for name, command in listed if panels[name] == panel]
            with formatter.section(panel if isinstance(panel, str) else "Commands"):
                formatter.write_dl(rows)


START = """Usage: gpudiag COMMAND [ARGS]

  gpudiag run train.py            record a training script as it is, and report
  gpudiag report trace.json.gz    report on a recording that you have
  gpudiag ab --auto train.py      measure which changes make it faster

No script at hand: gpudiag demo. All commands: gpudiag --help"""


class StartGroup(PlainGroup):
    """The group of all commands: alone it shows the first ones to try."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; without any, print START and end."""
        if not args and not ctx.resilient_parsing:
            typer.echo(START)
            raise typer.Exit
        with _say_in_one_line(ctx):
            return super().parse_args(ctx, args)


_MISTAKE: Any = typer.BadParameter.__base__
"""typer's usage error, wherever this version has it."""
_VALUE = re.compile(r"^Invalid value for '?([^':]+)'?: (?:Value error, )?")


@contextmanager
def _say_in_one_line(ctx: Any) -> Iterator[None]:
    """Raise typer's usage errors as UsageError, in one line and without the words of the libraries below it."""
    try:
        yield
    except _MISTAKE as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        text = (
            _VALUE.sub(r"\1: ", error.format_message())
            .replace("Input should be", "it should be")
            .replace("a valid integer", "a whole number")
        )
        text = text.partition(", unable to parse")[0].rstrip(".")
        text = text if text[:2].isupper() else text[:1].lower() + text[1:]  # PID stays as it is
        of_script = type(error).__name__ == "NoSuchOption" and not ctx.allow_interspersed_args
        hint = f"options of the script stand behind its name; {ctx.command_path} --help" if of_script else f"{ctx.command_path} --help"
        raise UsageError(text, hint) from None


_RECORDING_SUFFIXES = (".json", ".json.gz", ".json.zst", ".gz", ".zst", ".sqlite", ".nsys-rep", ".qdrep")
_LAUNCHERS = ("python", "python3", "torchrun", "accelerate", "deepspeed")
_RULE_ID = re.compile(r"[A-Za-z]{3}-?\d{1,2}")
_FORMAT_OPTIONS = {"--html": ".html", "--md": ".md", "--markdown": ".md", "--json": ".json", "--format": ".html", "--pdf": ".html"}
"""Options of other tools that choose a format -> the suffix that does so here."""


def check_command(group: str | None, words: Sequence[str], known: Iterable[str]) -> None:
    """Raise UsageError where the first of `words` is no command of `group` but what a command takes, with the call that was meant."""
    if not words or words[0] in known:
        return
    word, call, meant = words[0], shlex.join(words), ""
    readable = word.lower().endswith(_RECORDING_SUFFIXES) or os.path.exists(word)
    if group is None and word == "help":
        meant = "--help, or gpudiag COMMAND --help"
    elif group is None and (word.lower().endswith(".py") or word in _LAUNCHERS):
        meant = f"run {call}"
    elif group is None and readable:
        meant = f"report {call}"
    elif group == "rules" and _RULE_ID.fullmatch(word):
        meant = f"rules show {call}"
    elif group == "export" and readable:
        meant = f"export perfetto {shlex.quote(word)} -o timeline.json.gz"
    if meant:
        raise UsageError(f"{word} is no command", f"gpudiag {meant}")


def check_format(command: str | None, words: Sequence[str]) -> None:
    """Raise UsageError where `words` choose the format of a report by an option: here the name of the file does."""
    for word in words if command == "report" else ():
        name = word.partition("=")[0]
        if name in _FORMAT_OPTIONS:
            raise UsageError(f"no such option: {name}", f"the name of the file says the format: -o report{_FORMAT_OPTIONS[name]}")


SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""How schedulers, `timeout` and `kill` end a program, and how a terminal that is closed does. Windows has no SIGHUP."""

SIGNAL_EXIT_CODE = 128
"""Exit code of a program that a signal ended, less the number of the signal, as shells count."""


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, and make each the exit code 128 + its number.

    Only the first does: schedulers and terminals send several, and what is being brought into order is not to be interrupted (Ctrl-C still
    does). A signal that was to be ignored, as by nohup, stays so.
    """
    number = signal.SIGINT

    def stop(received: int, _frame: FrameType | None) -> None:
        nonlocal number
        number = signal.Signals(received)
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {one: signal.getsignal(one) for one in SIGNALS if signal.getsignal(one) is signal.SIG_DFL}
    for one in before:
        signal.signal(one, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(SIGNAL_EXIT_CODE + number) from None
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def end_with_starter(every_s: float = 1.0) -> None:
    """Interrupt this process, as Ctrl-C does, when the dashboard that started it is gone, however that ended."""
    from gpudiag.experiment.offers import STARTED_BY

    starter = os.environ.get(STARTED_BY)

    def watch() -> None:
        while str(os.getppid()) == starter:
            time.sleep(every_s)
        os.kill(os.getpid(), signal.SIGINT)

    if starter is not None:
        threading.Thread(target=watch, daemon=True).start()
