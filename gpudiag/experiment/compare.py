"""Compares two arms by pairs of processes that are alive together and take turns, or run one after the other where memory has no room for
both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from gpudiag.errors import InputError
from gpudiag.experiment import gpu_state, memory
from gpudiag.experiment.arm import ArmError, BudgetError, EndedError, LiveArm, NotAppliedArmError
from gpudiag.experiment.design import Arm, Design, order_arms, schedule_turns, shorten_design
from gpudiag.experiment.gpu_state import GpuState
from gpudiag.experiment.isolation import catch_full_disk, open_experiment, wrap_in_sandbox
from gpudiag.experiment.stats import DECIDED, judge_pairs
from gpudiag.host_memory import measure_spare_bytes
from gpudiag.model.experiment import Comparison, Pair, Unit
from gpudiag.units import CountedProgress, Progress, format_bytes

MORE_MEMORY = "the program fails without any change too: measure again when more of the machine's memory is free"

MANY_FAULTS = 500.0
"""Page faults a step that deserve a word: with 2,421 the median step of the same program differed by 17 % (sd) between processes, with the
allocator's thresholds pinned and 8 faults by 2.1 %."""


def compare_arms(
    first: Arm,
    second: Arm,
    design: Design | None = None,
    *,
    progress: Progress | None = None,
    on_pair: Callable[[Pair], None] | None = None,
    done: Sequence[Pair] = (),
) -> Comparison:
    """Return how much faster `second` trains than `first`, as throughput.

    `on_pair` is given each pair as soon as it is measured; `done` are pairs of an earlier run, which are not measured again. An arm that
    fails makes the verdict `failed`, a fix without evidence `not_applied`; what was measured until then is kept. Raises InputError where a
    command cannot be started, or others compute on the GPU. Whatever happens, no process of an arm is left. Linux only (/proc).
    """
    design, tell, keep, given = design or Design(), progress or (lambda _: None), on_pair or (lambda _: None), (first, second)
    pairs, error, steady = list(done), None, all(pair.steady for pair in done)
    with open_experiment() as (scratch, mark):
        first, _ = wrap_in_sandbox(first, design, scratch, caches=scratch / "first")
        second, _ = wrap_in_sandbox(second, design, scratch, caches=scratch / "second")
        run = Pairs((first, second), design, scratch, mark)
        for number in range(len(pairs), design.looks[-1]):
            if len(pairs) in design.looks and judge_pairs(pairs, design, steady=steady).verdict in DECIDED:
                break
            tell(CountedProgress(f"pair {number + 1} of {design.looks[-1]} at most", number, design.looks[-1]))
            try:
                if design.deadline is not None and time.monotonic() >= design.deadline:
                    raise BudgetError(f"pair {number + 1}")
                with catch_full_disk(scratch):
                    pair = run.measure(number)
            except ArmError as failure:
                error = failure
                break
            pairs.append(pair)
            steady = steady and pair.steady
            keep(pair)
    shorter = _shorten_blocks(design, error)
    if shorter is not None:
        said = f"the script is short for so fast a change: a pair measures {shorter.blocks} blocks of {shorter.block_steps} steps"
        tell(said)
        found = compare_arms(*given, shorter, progress=progress, on_pair=on_pair, done=pairs)
        return msgspec.structs.replace(found, notes=(*found.notes, said))
    notes = run.finish_notes(pairs)
    if isinstance(error, BudgetError) and pairs:  # time that was over is no failure where there are pairs
        notes, error = (*notes, f"the time was over after {len(pairs)} pair{'s' * (len(pairs) > 1)}"), None
    if error is not None:
        alone = error.arm is first and error.reason in ("crash", "oom", "hang")
        why = [MORE_MEMORY if error.crowded else "the program fails without any change"] if alone else []
        notes = (*filter(None, (error.message, error.detail)), *notes, *why)
    found = Comparison(verdict="failed", notes=notes)
    if pairs:
        unsteady = () if steady else (f"steps were not steady after {design.warm_limit_s:.0f} s of warm-up",)
        judged = judge_pairs(pairs, design, steady=steady, notes=(*notes, *unsteady))
        found = msgspec.structs.replace(judged, evidence=run.evidence, slow_dtype=run.slow_dtype or msgspec.UNSET)
    if error is None:
        return found
    verdict = "not_applied" if isinstance(error, NotAppliedArmError) else "failed"
    failed = error.arm is first and verdict == "failed" and error.reason != "timeout" and not error.crowded
    return msgspec.structs.replace(found, verdict=verdict, reason=error.reason, baseline_failed=failed)


def _shorten_blocks(design: Design, error: ArmError | None) -> Design | None:
    """Return the design with blocks of as many steps as a script has room for that ended before its trial; None: it has none.

    Usual blocks take a time, in which a fast arm may make more steps than the script has.
    """
    if not (isinstance(error, EndedError) and error.warmed and design.block_s):
        return None
    return shorten_design(design, error.steps, error.warmed.steps, error.warmed.prefetched)


class CrowdedError(Exception):
    """The arms do not fit into memory together. The message says why."""


class Pairs:
    """Measures pair after pair of the same two arms. `notes`: what a reader has to know; `evidence`: what the fixes had to show."""

    def __init__(self, arms: tuple[Arm, Arm], design: Design, scratch: Path, mark: str, *, gpu: gpu_state.GpuWatch | None = None) -> None:
        self.together = True
        self.evidence: tuple[str, ...] = ()
        self.slow_dtype = ""
        self.notes: list[str] = []
        self._arms, self._design, self._scratch, self._mark = arms, design, scratch, mark
        self._gpu = gpu or gpu_state.GpuWatch()
        self._started = 0
        self._held: dict[int, int | None] = {}
        self._clocks: list[tuple[GpuState, GpuState]] = []

    def measure(self, number: int) -> Pair:
        """Return pair `number`, counted from 0. Raises ArmError; InputError where others compute on the GPU."""
        for _ in range(2):
            pair, crowded = None, ""
            if self.together:
                try:
                    pair = self._measure_together(number)
                except CrowdedError as error:
                    self.together, crowded = False, str(error)
            if pair is None:  # the arms one after the other, the one that is first alternating as ever
                runs: dict[int, LiveArm] = {}
                for arm in order_arms(number):
                    with self._start_arm(number, arm) as run:
                        for at in range(self._design.blocks):
                            with self._name_arm(arm):
                                run.measure_block(self._gpu, at)
                        run.end()
                    runs[arm] = run
                pair = self._finish_pair(runs, number)
            if crowded:  # where an arm fails by itself too, that is all that there is to say
                self._add_note(f"one arm at a time, so that the interval is wider: {crowded}")
            if pair.first and all(rate > 0 for rate in (*pair.first, *pair.second)):
                return pair
            self._add_note(f"a block of pair {number + 1} held no steps: the pair was measured again")
        raise ArmError("no_steps", f"a block of pair {number + 1} held no steps, twice")

    def finish_notes(self, pairs: Sequence[Pair]) -> tuple[str, ...]:
        """Return all notes, with those on the pairs as a whole."""
        faults = max((pair.first_faults or 0.0 for pair in pairs), default=0.0)
        if faults >= MANY_FAULTS:
            self._add_note(
                f"{faults:,.0f} page faults a step: memory goes back to the system and is fetched again, and processes differ by it; "
                "`--fix malloc` tries to keep it, `--steady-malloc` keeps it in both arms"
            )
        clock = gpu_state.describe_clock_change(self._clocks)
        if clock is not None:
            self._add_note(clock)
        return tuple(self.notes)

    def _add_note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # -- a pair ---------------------------------------------------------------------------------------------------------

    def _measure_together(self, number: int) -> Pair:
        with ExitStack() as alive:
            one, two = order_arms(number)
            runs = {one: alive.enter_context(self._start_arm(number, one))}
            # the other arm is taken to need what it did before, else as much as this one
            first, second = runs[one].held_bytes, self._held.get(two) or runs[one].held_bytes
            left = runs[one].warmed.free_bytes if runs[one].warmed.device == "cuda" else measure_spare_bytes()
            if left is not None and not memory.fit_together(first, second, left + (first or 0)):
                room = format_bytes(left + (first or 0))
                raise CrowdedError(f"{format_bytes(first)} and {format_bytes(second)} of memory do not fit into {room}")
            try:
                runs[two] = alive.enter_context(self._start_arm(number, two))
                self._measure_blocks(runs, number)
            except ArmError as error:
                if not error.crowded:
                    raise
                raise CrowdedError(error.message) from None
            for run in runs.values():
                run.end()
            return self._finish_pair(runs, number)

    def _measure_blocks(self, runs: dict[int, LiveArm], number: int) -> None:
        """Have both arms take turns; blocks in which the device was disturbed have a second turn, as many as are allowed."""
        blocks, order = self._design.blocks, schedule_turns(number, self._design.blocks)
        turns = [(at, order[2 * at : 2 * at + 2]) for at in range(blocks)]
        for at, arms in turns:
            for arm in arms:
                with self._name_arm(arm):
                    runs[arm].measure_block(self._gpu, at)
        wrong = gpu_state.find_disturbed_blocks(list(zip(runs[0].states, runs[1].states, strict=True)))
        again = [(at, arms, why) for (at, arms), why in zip(turns, wrong, strict=True) if why is not None]
        for repeats, (at, arms, why) in enumerate(again):
            if repeats >= int(gpu_state.MAX_REPEATED_SHARE * blocks):
                self._add_note(f"pair {number + 1}: {why} in a block that was kept")
                continue
            self._add_note(f"pair {number + 1}: two blocks were measured again, for {why}")
            for arm in arms:
                with self._name_arm(arm):
                    runs[arm].measure_block(self._gpu, at)

    def _finish_pair(self, runs: dict[int, LiveArm], number: int) -> Pair:
        first, second = runs[0], runs[1]
        self._clocks += zip(first.states, second.states, strict=True)
        self._held = {arm: run.held_bytes for arm, run in runs.items()}
        self.evidence = self.evidence or tuple(f"{row.fix}: {row.found}" for row in second.evidence)
        self.slow_dtype = self.slow_dtype or next((row.slow_dtype for row in second.evidence if row.slow_dtype), "")
        unit: Unit = "samples" if all((*first.list_samples(), *second.list_samples())) else "steps"
        (first_rates, first_energy_j), (second_rates, second_energy_j) = (run.compute_throughput(unit) for run in (first, second))
        return Pair(
            first_rates,
            second_rates,
            unit,
            first.warmed.step_ns,
            second.warmed.step_ns,
            first.start_s,
            second.start_s,
            first.peak_bytes,
            second.peak_bytes,
            first_energy_j,
            second_energy_j,
            first.faults,
            second.faults,
            first.warmed.steady and second.warmed.steady,
            self.together,
        )

    # -- an arm ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _name_arm(self, arm: int) -> Iterator[None]:
        """Have what ends the arm meanwhile say which one it was: the other may be alive beside it."""
        try:
            yield
        except ArmError as error:
            error.arm = self._arms[arm]
            raise

    @contextmanager
    def _start_arm(self, number: int, arm: int) -> Iterator[LiveArm]:
        """Start an arm, and wait until it is warm: one after the other, for what one compiles would disturb the other."""
        self._started += 1
        name = f"{number}-{arm}-{self._started}"
        live = LiveArm(self._arms[arm], self._design, self._scratch / name, f"{self._mark}.{name}", gpu=self._gpu)
        try:
            with self._name_arm(arm):
                live.wait_until_warm()
            self._gpu.follow(live.warmed.gpu)
            if strangers := self._gpu.strangers:
                who = ", ".join(map(str, sorted(strangers)))
                if not self._design.shared_ok:
                    hint = "wait for them, choose another GPU with CUDA_VISIBLE_DEVICES, or measure all the same with --shared-ok"
                    raise InputError(f"other processes compute on this GPU (as the driver counts them: {who})", hint)
                self._add_note(f"other processes computed on this GPU ({who})")
            yield live
        finally:
            live.kill()
