"""What a `gpudiag ab` is to do: its options, the variants that were asked for, what goes on after an interruption."""

from __future__ import annotations

import os

import msgspec

from gpudiag.errors import InputError, UsageError
from gpudiag.experiment.design import Design, SandboxMode
from gpudiag.experiment.offers import find_named_fixes, load_report
from gpudiag.experiment.variant import Variant, check_call, check_combination
from gpudiag.model.experiment import FixCall


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How experiments are made; the options of `gpudiag ab`. Shares and seconds are plain numbers."""

    output: str = ""
    resume: str = ""
    report: str = ""
    """Report or bundle whose findings name the fixes and their ceilings."""
    combine: bool = False
    budget_s: float | None = None
    looks: tuple[int, ...] = (4, 6, 8, 12)
    min_effect: float = 0.01
    sandbox: SandboxMode = "auto"
    steady_malloc: bool = False
    shared_ok: bool = False
    wait: bool = False
    """For the end of another experiment on this machine, instead of refusing."""
    parity: bool = True
    parity_only: bool = False
    probe_only: bool = False
    aa: bool = False
    design: Design | None = None
    """A whole design in place of looks and min_effect, for callers that need other lengths of blocks and warm-up."""
    command_shown: tuple[str, ...] = ()
    """The command as a person typed it; () for the one that is run."""

    def build_design(self) -> Design:
        """Build the design of a comparison with these options."""
        given = self.design or Design(looks=self.looks, min_effect=self.min_effect)
        return msgspec.structs.replace(given, block_saves=self.sandbox != "off", sandbox=self.sandbox, shared_ok=self.shared_ok)


class Plan(msgspec.Struct, frozen=True, tag="planned"):
    """What was asked for: the first row of a file."""

    command: tuple[str, ...]
    fixes: tuple[FixCall, ...] = ()
    variants: tuple[Variant, ...] = ()
    auto: bool = False
    options: Options = Options()
    tool_version: str = ""
    cwd: str = ""
    locked: bool = False
    """Whether the process that writes the file holds its lock: whoever looks at it can then tell whether it still runs."""

    @property
    def is_search(self) -> bool:
        """Whether the fixes are those that findings name: a report alone says which, beside fixes it only lends their ceilings."""
        return self.auto or (bool(self.options.report) and not self.fixes and not self.variants)

    def check(self) -> None:
        """Raise UsageError or InputError for what does not go together, or cannot be tried."""
        options = self.options
        if not self.command:
            raise UsageError("nothing to run", "gpudiag ab --fix bf16 train.py ARGS")
        wanted = bool(self.fixes or self.variants)
        modes = [name for name, on in (("--auto", self.auto), ("--probe-only", options.probe_only), ("--aa", options.aa)) if on]
        if len(modes) > 1:
            raise UsageError(f"{' and '.join(modes)} exclude each other", "give one of them")
        if modes and wanted:
            raise UsageError(f"{modes[0]} takes no --fix and no --variant", f"leave {modes[0]} out, or the changes")
        if not modes and not wanted and not options.report:
            raise UsageError(
                "nothing to try", "give --fix ID, --variant NAME=..., --auto, --probe-only or --aa; `gpudiag fixes` lists the fixes"
            )
        if options.report:
            load_report(options.report)
        for call in self.fixes:
            check_call(call)
        self.list_variants()

    def list_variants(self) -> tuple[Variant, ...]:
        """List what is compared: each fix and each changed copy by itself, or all together; none of a search. Raises InputError."""
        fixes, changed = self.fixes, self.variants
        if self.is_search:
            return ()
        if not self.options.combine:
            variants = [*(Variant(fixes=(call,)) for call in fixes), *changed]
        elif len(changed) > 1:
            hint = "give all its changes under one name: --variant NAME=args:.. --variant NAME=env:.."
            raise InputError("--combine takes one variant", hint)
        else:
            check_combination(fixes)
            variants = [msgspec.structs.replace(one, fixes=fixes) for one in changed or ([Variant()] if fixes else [])]
        names = [one.name for one in variants]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InputError(f"two changes are named {twice}", "give the variant another name")
        if self.options.report:
            ceilings = {one.fix.id: one.ceiling_share for one in find_named_fixes(load_report(self.options.report))}
            variants = [
                msgspec.structs.replace(one, ceiling_share=ceilings.get(one.fixes[0].id)) if len(one.fixes) == 1 and not one.label else one
                for one in variants
            ]
        return tuple(variants)

    def resume(self, given: Plan) -> Plan:
        """Return this plan, as it goes on by the command `given`. Raises InputError where that is another one."""
        bundle = given.options.resume
        if self.cwd != os.getcwd():
            raise InputError(f"{bundle} was begun in {self.cwd}", f"cd {self.cwd}")
        plain = Plan(())
        own = [name for name in Options.__struct_fields__ if name not in ("output", "resume", "budget_s", "command_shown", "wait")]
        for name in ("command", "fixes", "variants", "auto", *own):
            structs = (plain.options, self.options, given.options) if name in own else (plain, self, given)
            default, before, now = (getattr(struct, name) for struct in structs)
            if now not in (default, before):  # what was not given again is as it was
                shown = f"--{name.replace('_', '-')}" if name in own else name
                hint = "leave it out, or start anew without --resume"
                raise InputError(f"{bundle} was begun with other {shown}: {before!r}, not {now!r}", hint)
        return msgspec.structs.replace(self, options=msgspec.structs.replace(self.options, budget_s=given.options.budget_s, resume=bundle))
