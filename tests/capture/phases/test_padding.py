"""What a batch tells of its padding, and what looks like padding and is none."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from gpudiag.capture import padding
from gpudiag.capture.host_marks import HostMarks, RunObserver
from gpudiag.capture.padding import Tails, count_padding

RIGHT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])  # 12 positions, 5 of them padding
LEFT = RIGHT.flip(1)


@dataclass
class Sample:
    x: Any
    attention_mask: Any


Named = namedtuple("Named", ["x", "padding_mask"])


class Lazy(dict):  # type: ignore[type-arg]
    """Computes its values when they are asked for."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError("asked for a value")

    get = items = values = __getitem__  # type: ignore[assignment]


@pytest.mark.parametrize("mask", [RIGHT, LEFT, RIGHT.bool(), RIGHT.float(), RIGHT.to(torch.uint8), RIGHT.t().contiguous().t(), RIGHT * 3])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda mask: {"attention_mask": mask},
        lambda mask: UserDict(input_ids=1, attention_mask=mask),
        lambda mask: [{"labels": None}, {"attention_mask": mask}],
        lambda mask: ({"attention_mask": mask}, 3),
        lambda mask: Sample(1, mask),
        lambda mask: Lazy(attention_mask=mask),
    ],
)
def test_an_attention_mask_tells_on_both_sides_in_every_container(mask: torch.Tensor, wrap: Any) -> None:
    assert count_padding(wrap(mask)) == (12, 5)


def test_a_hugging_face_batch_tells() -> None:
    tokenization = pytest.importorskip("transformers.tokenization_utils_base")
    assert count_padding(tokenization.BatchEncoding({"attention_mask": LEFT})) == (12, 5)


def test_in_a_padding_mask_true_is_padding() -> None:
    assert count_padding({"src_key_padding_mask": RIGHT == 0}) == (12, 5)
    assert count_padding(Named(torch.ones(3), RIGHT == 0)) == (12, 5)
    assert count_padding({"padding_mask": torch.zeros(2, 3, dtype=torch.bool)}) == (6, 0)
    assert count_padding({"padding_mask": RIGHT == 1}) is None  # 1 is real here: some models have it so


def test_a_field_called_mask_is_read_only_where_its_sense_is_plain() -> None:
    assert count_padding({"mask": RIGHT}) == (12, 5)
    assert count_padding({"mask": RIGHT == 0}) is None
    assert count_padding({"mask": LEFT}) is None
    assert count_padding({"mask": torch.tensor([[1, 0, 1, 0]])}) is None  # what a masked model is to restore


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(4, 4).tril(),  # causal: looks like right padding
        torch.zeros(2, 1, 4, 4),
        torch.tensor([[0.0, float("-inf")], [0.0, 0.0]]),
        torch.tensor([[0.0, -1e9], [0.0, 0.0]]),
        torch.tensor([[1, 0, 1, 1]]),
        torch.tensor([[1.0, 0.5, 0.2]]),
        torch.tensor([[1, -1]]),
        torch.ones(3),
        torch.ones(2, 2, dtype=torch.bfloat16),
        torch.ones(2, 2, device="meta"),
        torch.ones(2, 2).to_sparse(),
        torch.ones(0, 4),
        [[1, 1], [1, 0]],
        "mask",
    ],
)
def test_other_masks_are_unknown(mask: Any) -> None:
    assert count_padding({"attention_mask": mask}) is None


def test_a_causal_mask_of_the_other_convention_is_unknown() -> None:
    assert count_padding({"padding_mask": torch.ones(4, 4).triu(1).bool()}) is None


TOKENS = torch.tensor([[5, 6, 7, 8], [9, 6, 0, 0], [4, 0, 0, 0]])


@pytest.mark.parametrize("mask", [RIGHT, RIGHT.bool(), RIGHT == 0, (RIGHT == 0).int()])
def test_a_mask_without_a_name_is_told_by_the_tokens_beside_it(mask: torch.Tensor) -> None:
    """In either sense: the padding is where all tokens are one number."""
    assert count_padding([TOKENS, mask, torch.tensor([0, 1, 0])]) == (12, 5)
    assert count_padding((TOKENS, torch.zeros_like(TOKENS), mask)) == (12, 5)  # segments of one kind
    assert count_padding((TOKENS.flip(1), mask.flip(1))) == (12, 5)


@pytest.mark.parametrize(
    "batch",
    [
        [TOKENS, torch.tensor([0, 1, 0])],
        [TOKENS + torch.arange(4), RIGHT],  # numbers differ under both: classes of tokens, segments
        [TOKENS, RIGHT[:2]],
        [TOKENS, torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])],
        [TOKENS, RIGHT * 2],
        [torch.randn(3, 4), RIGHT],
        [RIGHT],
        [torch.ones(3, 4, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.int64)],
    ],
)
def test_tensors_without_names_that_tell_nothing(batch: list[torch.Tensor]) -> None:
    assert count_padding(batch) is None


def test_a_mask_without_padding_counts_beside_tokens() -> None:
    assert count_padding([TOKENS, torch.ones_like(TOKENS)]) == (12, 0)


def test_lengths_count_where_a_padded_tensor_is_there() -> None:
    lengths = torch.tensor([4, 2, 1])
    assert count_padding({"x": torch.ones(3, 4, 8), "lengths": lengths}) == (12, 5)
    assert count_padding({"x": torch.ones(6, 3, 8), "input_lengths": [4, 2, 1]}) == (18, 11)  # time first, and longer than the longest
    assert count_padding({"x": torch.ones(7, 8), "lengths": lengths}) is None  # joined, not padded
    assert count_padding({"x": torch.ones(3, 4), "lengths": torch.tensor([-1, 2, 2])}) is None
    assert count_padding({"x": torch.ones(3, 4), "lengths": torch.tensor([1.0, 2.0, 2.0])}) is None


def test_lengths_count_up_to_the_length_that_the_tensors_have() -> None:
    lengths = torch.tensor([3, 10, 5, 2])
    assert count_padding({"x": torch.ones(4, 12, 8), "lengths": lengths}) == (48, 28)
    assert count_padding({"x": torch.ones(4, 12, dtype=torch.int64), "lengths": lengths}) == (48, 28)
    assert count_padding({"x": torch.ones(4, 12, 8), "y": torch.ones(4, 10, dtype=torch.int64), "lengths": lengths}) == (40, 20)
    assert count_padding({"x": torch.ones(4, 12, 8), "y": torch.ones(4, 14, 8), "lengths": lengths}) is None  # which of the two?
    assert count_padding({"x": torch.ones(4, 12, 80), "lengths": lengths}) is None  # or channels before time
    assert count_padding({"x": torch.ones(4, 12), "lengths": lengths}) is None  # or features
    assert count_padding({"x": torch.ones(4, 10), "lengths": lengths}) == (40, 20)


def test_a_length_may_be_what_a_model_predicts() -> None:
    length = torch.tensor([10, 20, 30, 15])
    assert count_padding({"x": torch.ones(4, 40), "length": length}) is None
    assert count_padding({"x": torch.ones(4, 30), "length": length}) is None
    assert count_padding({"x": torch.ones(4, 30, 8, 8), "length": length}) is None
    assert count_padding({"x": torch.ones(4, 40, dtype=torch.int64), "length": length}) == (160, 85)
    assert count_padding({"x": torch.ones(4, 40, 7), "length": length}) == (160, 85)


def test_labels_count_only_where_the_ends_of_rows_are_ignored() -> None:
    assert count_padding({"labels": torch.tensor([[5, 6, 7], [5, -100, -100]])}) == (6, 2)
    assert count_padding({"labels": torch.tensor([[-100, 6, 7], [5, 6, -100]])}) is None  # a masked prompt
    assert count_padding({"labels": torch.tensor([[5, -100, 7]])}) is None  # a masked language model
    assert count_padding({"labels": torch.tensor([[5, 6, 7]])}) is None
    assert count_padding({"labels": torch.tensor([3, 1])}) is None
    assert count_padding({"attention_mask": RIGHT, "labels": torch.tensor([[5, -100]])}) == (12, 5)


def test_packed_and_nested_batches_have_no_padding() -> None:
    packed = pack_sequence([torch.ones(4, 2), torch.ones(2, 2), torch.ones(1, 2)])
    assert count_padding(packed) == (7, 0)
    assert count_padding((packed, torch.ones(3))) == (7, 0)
    jagged = torch.nested.nested_tensor([torch.ones(4, 2), torch.ones(1, 2)], layout=torch.jagged)
    assert count_padding(jagged) == (5, 0)


@pytest.mark.parametrize("batch", [None, 3, "text", torch.ones(3), (torch.ones(2), torch.ones(2)), {}, {1: 2}, [], object(), Sample])
def test_other_batches_are_unknown(batch: Any) -> None:
    assert count_padding(batch) is None


class Raises:
    is_nested = True

    @property
    def _values(self) -> Any:
        raise RuntimeError("no")


def test_it_never_raises_and_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_padding(Raises()) is None
    monkeypatch.setattr(padding, "MAX_ELEMENTS", 11)
    assert count_padding({"attention_mask": RIGHT}) is None


def test_the_batch_stays_as_it_was() -> None:
    mask, before = RIGHT.clone(), RIGHT.clone()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert count_padding({"attention_mask": mask}) == (12, 5)
    assert not [event.key for event in profiler.key_averages() if event.key.startswith("aten::")]
    assert torch.equal(mask, before)
    mask.resize_(100)  # Tensor.numpy() would have forbidden it


def test_a_mask_that_needs_gradients_or_is_a_view_is_read_in_place() -> None:
    wide = torch.zeros(3, 9)
    wide[:, 2:6] = RIGHT
    assert count_padding({"attention_mask": wide[:, 2:6].requires_grad_()}) == (12, 5)


LENGTHS = torch.tensor([12, 7, 9, 3, 12, 5])  # of 6 x 12 positions 24 are padding


def draw_ids(pad: int, lengths: torch.Tensor = LENGTHS, longest: int = 12) -> torch.Tensor:
    """Return rows of ids from 10 to 29, padded on the right."""
    ids = torch.randint(10, 30, (len(lengths), longest), generator=torch.Generator().manual_seed(0))
    return torch.where(torch.arange(longest) < lengths[:, None], ids, pad)


@pytest.mark.parametrize("pad", [0, 3, 50256])
@pytest.mark.parametrize("turn", [lambda ids: ids, lambda ids: ids.flip(1), lambda ids: ids.t(), lambda ids: ids.int()])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda ids: ids,
        lambda ids: (ids, torch.zeros(6)),
        lambda ids: {"text": ids, "label": torch.zeros(6, dtype=torch.int64)},
        lambda ids: {"labels": ids.masked_fill(ids == ids.flatten()[0], -100), "ids": ids},
    ],
)
def test_ids_alone_tell_their_padding_by_the_number_that_ends_rows(pad: int, turn: Any, wrap: Any) -> None:
    tails = Tails()
    assert count_padding(wrap(turn(draw_ids(pad)))) is None
    assert count_padding(wrap(turn(draw_ids(pad))), tails) == (72, 24)
    full = turn(draw_ids(pad, torch.full((6,), 12)))
    assert count_padding(wrap(full), tails) == (72, 0)  # known by now
    assert count_padding(wrap(full), Tails()) is None


SPARSE = torch.tensor([[3, 0, 2, 1, 5, 1, 0, 0, 0, 0], [1, 4, 1, 2, 0, 0, 0, 0, 0, 0], [6, 2, 0, 3, 1, 0, 2, 0, 0, 0]])


@pytest.mark.parametrize(
    "batch",
    [
        SPARSE,  # counts: 0 stands within rows too
        torch.cat([draw_ids(0, torch.full((4,), 12)), draw_ids(0)[:2]]),  # two rows that end alike
        draw_ids(0, torch.full((6,), 7)),  # all of one length: columns of a table
        draw_ids(0)[:, :7],
        (torch.arange(12) < LENGTHS[:, None]).long(),  # a class by thresholds, or a mask
        draw_ids(0).sort(1, descending=True).values,  # counts in their order
        -draw_ids(3),
        draw_ids(0).float(),
        draw_ids(0).to(torch.uint8),  # pixels
        draw_ids(0)[:, None],
        {"image": torch.zeros(6, 3, 32, 32), "objects": draw_ids(0)},  # what a model of images is to find
        (torch.zeros(6, 400, 80), draw_ids(0)),
        [draw_ids(0).tolist()],
        "text",
        None,
    ],
)
def test_what_ends_alike_and_need_not_be_padding(batch: Any) -> None:
    assert count_padding(batch, Tails()) is None


def test_a_number_that_stands_within_rows_of_any_batch_is_no_padding() -> None:
    tails = Tails()
    assert count_padding(draw_ids(0), tails) == (72, 24)
    packed = draw_ids(0, torch.full((6,), 12))
    packed[:, 5] = 0  # documents with a 0 between them
    assert count_padding(packed, tails) is None
    assert count_padding(draw_ids(0), tails) is None


def test_the_padding_of_the_batches_of_a_step_is_summed(tmp_path: Path) -> None:
    seen, found = RunObserver(HostMarks(tmp_path)), []
    for batches in (2, 1, 0):
        for _ in range(batches):
            seen.batch_received(0, 0, {"attention_mask": RIGHT}, None)
        found.append(seen.take_padding())
    assert found == [(24, 10), (12, 5), None]
