"""The headline of experiments, the program as it is, the recipe, and the meaning of figures."""

from __future__ import annotations

import msgspec
import outcomes as made
import pytest

from gpudiag.model.experiment import ExperimentData, FixCall, Parity, Recipe
from gpudiag.report.console import split_code_lines
from gpudiag.report.experiment import summary


def headline(**changes: object) -> str:
    return summary.format_experiments_headline(made.experiments(**({"recipe": Recipe()} | changes)))


def test_a_proved_recipe_is_the_headline() -> None:
    assert headline(recipe=made.recipe()) == "bf16+channels-last: 1.83x faster (95 % CI 1.79 to 1.87), trains the same, p<1e-5; proved."


@pytest.mark.parametrize(
    ("parity", "expected"),
    [
        (
            Parity(kind="semantics", verdict="not_comparable"),
            "proved. It changes the batches (their order, size or random numbers), and whether it learns as well is unknown.",
        ),
        (
            Parity(kind="semantics", verdict="not_comparable", alike=True, steps=12),
            "It may change what is trained on, but losses and gradients over 12 steps are as close as two baseline runs.",
        ),
        (
            Parity(kind="semantics", verdict="not_comparable", alike=False, reason="loss of step 1 differs by 0.2 of its size"),
            "It changes the batches (their order, size or random numbers): loss of step 1 differs by 0.2 of its size, and "
            "whether it learns as well is unknown.",
        ),
        (Parity(kind="rounding", verdict="not_checked"), "proved. Parity was not checked."),
        (None, "proved. Parity was not checked."),
    ],
)
def test_a_recipe_says_what_it_leaves_open(parity: Parity | None, expected: str) -> None:
    assert headline(recipe=made.recipe(), experiments=(made.outcome("bf16+channels-last", parity=parity),)).endswith(expected)


def test_a_part_of_the_recipe_that_trained_otherwise_by_itself_is_named() -> None:
    alike = Parity(kind="semantics", verdict="not_comparable", alike=True, steps=12)
    stack = made.outcome("bf16+channels-last", parity=alike)
    wrong = made.outcome("bf16", parity=Parity(kind="low_precision", verdict="differs", reason="loss of step 2 differs"))
    said = headline(recipe=made.recipe(), experiments=(stack, wrong, made.outcome("channels-last")))
    assert said.endswith("are as close as two baseline runs. By itself, bf16 did not train the same.")


def test_a_recipe_that_is_not_proved_says_so() -> None:
    assert headline(recipe=made.recipe(proved=False)) == "bf16+channels-last looks 1.83 times as fast [1.79, 1.87], but that is not proved."
    assert "is unknown" in headline(recipe=made.recipe(ratio=None, interval=None))


def test_without_anything_proved_the_program_stays_as_it_is() -> None:
    useless = made.plain("a", verdict="no_difference", ratio=1.0, interval=(0.99, 1.01), pairs=4)
    screened = made.outcome("b", screening=True)
    failed = made.plain("c", verdict="failed")
    assert headline(experiments=(useless, screened, failed)) == (
        "a makes no difference: between x0.990 and x1.010 after 4 process pairs. The recipe is the baseline."
    )
    assert headline(experiments=(screened, failed)) == "Nothing is proved: 1 variant was only screened."
    assert headline(experiments=(failed, failed)) == "None of the 2 variants could be measured; the reasons are below."
    assert headline(experiments=(), baseline=None) == "Nothing was measured."


def test_what_is_faster_by_itself_and_not_in_the_recipe_is_told() -> None:
    useless = made.plain("a", verdict="no_difference", ratio=1.0, interval=(0.99, 1.01), pairs=4)
    assert headline(experiments=(made.outcome("bf16"), useless)) == "bf16 was faster by itself, but the recipe is empty."
    wrong = made.every_verdict()[1]
    assert headline(experiments=(wrong, useless)).endswith("the baseline. fp16 is faster, but not the same training.")
    variant = made.outcome("", variant="lr2")
    assert headline(experiments=(useless, variant)).startswith("variant lr2: 1.83x faster (95 % CI 1.79 to 1.87)")


def test_a_single_experiment_speaks_for_itself() -> None:
    said = "bf16: 1.83x faster (95 % CI 1.79 to 1.87), trains the same; proved on 6 process pairs."
    assert headline(experiments=(made.outcome("bf16"),)) == said


def test_a_probe_alone_tells_of_the_program() -> None:
    # 32 samples in 35 ms: 914 a second
    assert headline(experiments=()) == ("No variant was tried. The baseline takes 35.0 ms a step, 914 samples/s (32 a step).")


def test_what_is_missing_stands_beside_the_headline() -> None:
    data = made.experiments(experiments=(made.outcome(seconds=95.0), made.outcome(seconds=105.0), made.outcome(seconds=None)))
    missing, *others = summary.list_leads(data, "runs/a b")
    assert missing == "The plan is not complete: gpudiag ab --resume 'runs/a b' goes on."
    assert others == ["2 experiments in 3 min 20 s.", "the budget of 10 min was used up"]
    assert "2 experiments in 7 min 05 s." in summary.list_leads(msgspec.structs.replace(data, seconds=425.0)), "with recording and parity"
    assert "--resume BUNDLE goes on" in summary.list_leads(data)[0]
    assert summary.list_leads(ExperimentData()) == []


def test_why_a_change_is_slower_is_told_where_its_evidence_does_and_else_how_to_see_it() -> None:
    def told(fix: str, **changes: object) -> str:
        found = made.plain(fix, **({"verdict": "slower", "ratio": 0.8, "interval": (0.7, 0.9), "pairs": 4} | changes))
        return " ".join(summary.list_leads(made.experiments(experiments=(found,), notes=(), complete=True)))

    shown = told("bf16", slow_dtype="bfloat16")
    assert shown == "One reason why bf16 is slower: this processor has no instructions for products in bfloat16."
    looked = told("bf16+batch-size=x2")
    assert looked.startswith("Why bf16+batch-size=x2 is slower is unknown; two recordings show which ops changed: gpudiag run -o ")
    assert "; gpudiag run -o runs/after --fix bf16 --fix batch-size=x2 train.py --name 'a b'; gpudiag compare runs/before " in looked
    assert told("accumulation=2") == "Why accumulation=2 is slower is unknown."  # `gpudiag run` cannot apply it
    assert told("bf16", verdict="inconclusive") == told("bf16", screening=True) == told("bf16", over="blocks") == ""


@pytest.mark.parametrize(("seconds", "expected"), [(0.4, "0.4 s"), (85, "85 s"), (200, "3 min 20 s"), (3_900, "1 h 05 min")])
def test_durations(seconds: float, expected: str) -> None:
    assert summary.format_duration(seconds) == expected


def test_the_program_as_it_is() -> None:
    rows = dict(summary.build_baseline_rows(made.baseline()))
    assert rows["command"] == "python train.py --name 'a b'"
    assert rows["step"] == "35.0 ms a step, 914 samples/s (32 a step); steps are marked by the optimizer AdamW"
    assert rows["memory"] == "4.00 GB at the peak"
    assert rows["noise"] == "pairs of unchanged processes differ by 1.2 % (standard deviation)"
    bare = made.baseline(
        samples_per_step=None, steps_marked_by="", start_s=0.0, peak_bytes=None, side_effects=(), noise_share=None, notes=()
    )
    assert [topic for topic, _ in summary.build_baseline_rows(bare)] == ["command", "device", "step"]
    assert summary.build_baseline_rows(None) == []


def test_a_recipe_without_texts_of_its_own_shows_the_known_changes() -> None:
    (change,) = summary.list_recipe_changes(Recipe(fixes=(FixCall("tf32", "high"),)))
    assert (change.fix, change.title) == ("tf32=high", "TF32 for float32 matrix products")
    assert change.code == 'torch.set_float32_matmul_precision("high")'
    assert summary.list_variant_changes(made.recipe()) == []


def test_how_the_program_is_run_with_the_recipe() -> None:
    data = made.experiments()
    assert summary.build_recipe_command(data, "runs/a b").endswith("gpudiag run --recipe 'runs/a b/recipe.toml' train.py --name 'a b'")
    assert summary.build_recipe_command(made.experiments(baseline=None)).endswith("gpudiag run --recipe BUNDLE/recipe.toml train.py ARGS")
    torchrun = made.baseline(command=("/opt/bin/torchrun", "train.py"))
    assert summary.build_recipe_command(made.experiments(baseline=torchrun), "b").endswith(" b/recipe.toml /opt/bin/torchrun train.py")
    assert summary.build_recipe_command(made.experiments(recipe=made.recipe(proved=False))) == ""


def test_a_variant_that_was_proved_is_the_recipe() -> None:
    variant = made.outcome("", variant="lr2")
    proved = made.recipe(fixes=(), changes=("python train.py --lr 2",))
    assert headline(experiments=(variant, *made.every_verdict()[1:]), recipe=proved).startswith("variant lr2: 1.83x faster")
    assert summary.list_variant_changes(proved) == ["python train.py --lr 2"]
    assert summary.build_recipe_command(made.experiments(recipe=proved)) == ""  # it is no fix that gpudiag could apply


def test_code_keeps_its_spaces_and_loses_what_a_terminal_obeys() -> None:
    assert split_code_lines("if x:\n\ty  = 1 \x1b[31m\n-  old\u202e") == ["if x:", "    y  = 1", "-  old"]


def test_only_figures_that_occur_are_explained() -> None:
    told = " ".join(summary.format_experiments_legend(made.every_verdict()))
    assert all(word in told for word in ("with its 95 % interval", "Not proof", "Holm", "Rounding noise"))
    assert len(summary.format_experiments_legend((made.plain("x", verdict="slower", ratio=0.9, interval=(0.8, 0.95), pairs=4),))) == 1
    assert summary.format_experiments_legend((made.plain("x", verdict="failed"),)) == []


def test_an_interval_over_blocks_is_not_said_to_hold_the_ratio() -> None:
    blocks = made.outcome(over="blocks", pairs=1)
    assert not any("95 %" in line for line in summary.format_experiments_legend([blocks]))
    assert any("Not proof" in line for line in summary.format_experiments_legend([blocks]))
    assert any("95 %" in line for line in summary.format_experiments_legend([blocks, made.outcome()]))


def test_the_comparisons_that_are_corrected_together_are_counted() -> None:
    three = [made.outcome("a"), made.outcome("b"), made.outcome("c", screening=True), made.outcome("d", p=None)]
    assert any("these 2 comparisons together (Holm)" in line for line in summary.format_experiments_legend(three))
    assert not any("Holm" in line for line in summary.format_experiments_legend(three[:1]))
