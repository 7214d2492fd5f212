"""Measures one pair of arms: alive together and taking turns, or one after the other where they do not fit into memory together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gpudiag.errors import InputError
from gpudiag.experiment import gpu_state, memory
from gpudiag.experiment.arm import ArmError, LiveArm
from gpudiag.experiment.design import Arm, Design, count_block_steps, order_arms, schedule_turns
from gpudiag.experiment.gpu_state import GpuState
from gpudiag.experiment.trial.protocol import Block, Warmed
from gpudiag.model.experiment import Pair, Unit
from gpudiag.units import format_bytes

MANY_FAULTS = 500.0
"""Page faults a step that deserve a word: with 2,421 the median step of the same program differed by 17 % (sd) between processes, with the
allocator's thresholds pinned and 8 faults by 2.1 %."""


class CrowdedError(Exception):
    """The arms do not fit into memory together. The message says why."""


class ArmRun:
    """One live arm in one pair, warmed up: what it told, its blocks in their order, and the device in each."""

    def __init__(self, live: LiveArm, row: Warmed, start_s: float, design: Design) -> None:
        self.live, self.row, self.start_s = live, row, start_s
        self.steps = count_block_steps(design, row.step_ns, row.prefetched)
        self.blocks: list[Block] = []
        self.states: list[GpuState] = []

    def turn(self, gpu: gpu_state.GpuWatch, at: int) -> None:
        """Measure block `at`; one that was measured before is replaced. The arm is frozen before and after."""
        self.live.thaw()
        gpu.begin()
        block = self.live.measure_block(self.steps)
        state = gpu.end()
        self.live.freeze()
        self.blocks[at : at + 1], self.states[at : at + 1] = [block], [state]

    @property
    def peak_bytes(self) -> int | None:
        """Return the most memory that tensors held on the device (CPU: the most resident memory of the processes)."""
        if self.row.device == "cuda":
            return max((block.peak_bytes for block in self.blocks if block.peak_bytes is not None), default=self.row.peak_bytes)
        return self.live.resident_bytes or None

    @property
    def held_bytes(self) -> int | None:
        """Return the memory that this arm keeps from another one beside it."""
        return self.row.peak_bytes if self.row.device == "cuda" else self.live.resident_bytes or None

    @property
    def faults(self) -> float | None:
        """Return the page faults of a step; None where they are not known of a block, or there is no step."""
        known = [block.faults for block in self.blocks if block.faults is not None]
        steps = sum(block.steps for block in self.blocks)
        return sum(known) / steps if steps and len(known) == len(self.blocks) else None

    def samples(self, block: Block) -> float | None:
        """Return the samples of a block: those that a loader gave, else those that the model was given in the warm-up."""
        if block.samples is not None:
            return float(block.samples)
        return None if self.row.samples_per_step is None else self.row.samples_per_step * block.steps

    def amount(self, block: Block, unit: Unit) -> float:
        """Return what was trained on in a block."""
        return (self.samples(block) or 0.0) if unit == "samples" else float(block.steps)

    def rates(self, unit: Unit) -> tuple[float, ...]:
        """Return the throughput of the blocks."""
        return tuple(self.amount(block, unit) / block.wall_ns * 1e9 if block.wall_ns > 0 else 0.0 for block in self.blocks)

    def energy_j(self, unit: Unit) -> float | None:
        """Return the energy for one unit; None where the device does not tell."""
        known = [(state.energy_j, block) for state, block in zip(self.states, self.blocks, strict=True) if state.energy_j is not None]
        amount = sum(self.amount(block, unit) for _, block in known)
        return sum(energy for energy, _ in known) / amount if amount > 0 else None


def is_void(pair: Pair) -> bool:
    """Return whether a block of the pair holds nothing: the pair is then no measurement."""
    return not pair.first or not all(rate > 0 for rate in (*pair.first, *pair.second))


class Pairs:
    """Measures pair after pair of the same two arms. `notes`: what a reader has to know; `evidence`: what the fixes had to show."""

    def __init__(self, arms: tuple[Arm, Arm], design: Design, scratch: Path, mark: str, *, gpu: gpu_state.GpuWatch | None = None) -> None:
        self.together = True
        self.evidence: tuple[str, ...] = ()
        self.notes: list[str] = []
        self._arms, self._design, self._scratch, self._mark = arms, design, scratch, mark
        self._gpu = gpu or gpu_state.GpuWatch()
        self._started = 0
        self._held: dict[int, int | None] = {}
        self._clocks: list[tuple[GpuState, GpuState]] = []

    def measure(self, number: int) -> Pair:
        """Return pair `number`, counted from 0. Raises ArmError; InputError where others compute on the GPU."""
        pair = self._measure_pair(number)
        if not is_void(pair):
            return pair
        self._add_note(f"a block of pair {number + 1} held no steps: the pair was measured again")
        pair = self._measure_pair(number)
        if is_void(pair):
            raise ArmError("no_steps", f"a block of pair {number + 1} held no steps, twice")
        return pair

    def last_notes(self, pairs: Sequence[Pair]) -> tuple[str, ...]:
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

    def _measure_pair(self, number: int) -> Pair:
        crowded = ""
        if self.together:
            try:
                return self._measure_together(number)
            except CrowdedError as error:
                self.together, crowded = False, str(error)
        # Measure the arms one after the other, the one that is first alternating as ever
        runs: dict[int, ArmRun] = {}
        for arm in order_arms(number):
            with self._start_arm(number, arm) as run:
                for at in range(self._design.blocks):
                    run.turn(self._gpu, at)
                run.live.end()
            runs[arm] = run
        pair = self._finish_pair(runs, number)
        if crowded:  # where an arm fails by itself too, that is all that there is to say
            self._add_note(f"one arm at a time, so that the interval is wider: {crowded}")
        return pair

    def _measure_together(self, number: int) -> Pair:
        with ExitStack() as alive:
            one, two = order_arms(number)
            runs = {one: alive.enter_context(self._start_arm(number, one))}
            # the other arm is taken to need what it did before, else as much as this one
            first, second = runs[one].held_bytes, self._held.get(two) or runs[one].held_bytes
            left = runs[one].row.free_bytes if runs[one].row.device == "cuda" else memory.measure_spare_bytes()
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
                run.live.end()
            return self._finish_pair(runs, number)

    def _measure_blocks(self, runs: dict[int, ArmRun], number: int) -> None:
        order = schedule_turns(number, self._design.blocks)
        for at in range(self._design.blocks):
            self._take_turns(runs, order, at)
        wrong = gpu_state.find_disturbed_blocks([(runs[0].states[at], runs[1].states[at]) for at in range(self._design.blocks)])
        again = [at for at, why in enumerate(wrong) if why is not None]
        for at in again[: gpu_state.count_allowed_repeats(self._design.blocks)]:
            self._add_note(f"pair {number + 1}: two blocks were measured again, for {wrong[at]}")
            self._take_turns(runs, order, at)
        for at in again[gpu_state.count_allowed_repeats(self._design.blocks) :]:
            self._add_note(f"pair {number + 1}: {wrong[at]} in a block that was kept")

    def _take_turns(self, runs: dict[int, ArmRun], order: list[int], at: int) -> None:
        for arm in order[2 * at : 2 * at + 2]:
            runs[arm].turn(self._gpu, at)

    def _finish_pair(self, runs: dict[int, ArmRun], number: int) -> Pair:
        self._clocks += zip(runs[0].states, runs[1].states, strict=True)
        self._held = {arm: run.held_bytes for arm, run in runs.items()}
        self.evidence = self.evidence or tuple(f"{row.fix}: {row.found}" for row in runs[1].live.evidence)
        unit: Unit = "samples" if all(run.samples(block) for run in runs.values() for block in run.blocks) else "steps"
        first, second = runs[0], runs[1]
        return Pair(
            first.rates(unit),
            second.rates(unit),
            unit,
            first.row.step_ns,
            second.row.step_ns,
            first.start_s,
            second.start_s,
            first.peak_bytes,
            second.peak_bytes,
            first.energy_j(unit),
            second.energy_j(unit),
            first.faults,
            second.faults,
            first.row.steady and second.row.steady,
            self.together,
        )

    # -- an arm ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _start_arm(self, number: int, arm: int) -> Iterator[ArmRun]:
        """Start an arm, and freeze it once it is warm: one after the other, for what one compiles would disturb the other."""
        self._started += 1
        name = f"{number}-{arm}-{self._started}"
        live = LiveArm(self._arms[arm], self._design, self._scratch / name, f"{self._mark}.{name}", looked=self._gpu.look)
        try:
            row, start_s = live.wait_until_warm()
            live.freeze()
            self._gpu.follow(row.gpu)
            if strangers := self._gpu.strangers:
                who = ", ".join(map(str, sorted(strangers)))
                if not self._design.shared_ok:
                    hint = "wait for them, choose another GPU with CUDA_VISIBLE_DEVICES, or measure all the same with --shared-ok"
                    raise InputError(f"other processes compute on this GPU (as the driver counts them: {who})", hint)
                self._add_note(f"other processes computed on this GPU ({who})")
            yield ArmRun(live, row, start_s, self._design)
        finally:
            live.kill()
