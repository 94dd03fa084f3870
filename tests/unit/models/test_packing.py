from __future__ import annotations

import pytest
import torch

from tests.unit.engine.tiny import experience
from verl_like.batch import Sequences
from verl_like.models import packing

CPU = torch.device("cpu")


def two_rows() -> Sequences:
    """Row 0: prompt 1 2 3, response 4 5. Row 1: prompt 6, response 7 8, of which 8 is not the policy's."""
    return Sequences(
        prompt_ids_BP=torch.tensor([[1, 2, 3], [0, 0, 6]], dtype=torch.int32),
        prompt_length_B=torch.tensor([3, 1]),
        response_ids_BR=torch.tensor([[4, 5], [7, 8]], dtype=torch.int32),
        response_length_B=torch.tensor([2, 2]),
        response_mask_BR=torch.tensor([[True, True], [True, False]]),
    )


def test_pack_by_hand() -> None:
    rows = two_rows()
    x = packing.pack(rows, packing.response_positions(rows, sampled_only=True), CPU)
    assert x.input_ids.tolist() == [[6, 7, 1, 2, 3, 4]]  # shortest first, last tokens left out
    assert x.position_ids.tolist() == [[0, 1, 0, 1, 2, 3]]
    assert x.segments is not None and x.segments.cu_seqlens.tolist() == [0, 2, 6]
    answers = torch.arange(6.0)[x.select_N]  # the index of the token each answer was read at
    assert x.unpack(answers).tolist() == [[4.0, 5.0], [0.0, 0.0]]  # 3 predicts 4, 4 predicts 5; 6 (at 0) predicts 7
    assert x.input_ids[0, x.select_N].tolist() == [6, 3, 4]
    assert x.targets_N.tolist() == [7, 4, 5]


def test_values_cover_the_whole_response() -> None:
    rows = two_rows()
    x = packing.pack(rows, packing.response_positions(rows, sampled_only=False), CPU)
    assert x.input_ids[0, x.select_N].tolist() == [6, 7, 3, 4]


def test_pad_by_hand() -> None:
    rows = two_rows()
    x = packing.pad(rows, packing.response_positions(rows, sampled_only=True), CPU)
    assert x.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert x.attention_mask is not None and x.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert x.input_ids.flatten()[x.select_N].tolist() == [3, 4, 6]


def test_every_answer_is_read_where_its_token_is_predicted() -> None:
    rows = experience(20)
    wanted = packing.response_positions(rows, sampled_only=True)
    x = packing.pack(rows, wanted, CPU)
    restored = x.unpack(x.targets_N.double())
    assert torch.equal(restored, rows.response_ids_BR.double() * wanted)
    assert x.input_ids.shape[1] == int((rows.num_tokens_B() - 1).sum())


def test_row_without_response_and_empty_selection() -> None:
    rows = two_rows().replace(response_length_B=torch.tensor([0, 0]))
    x = packing.pack(rows, packing.response_positions(rows, sampled_only=True), CPU)
    assert x.input_ids.tolist() == [[6, 1, 2]] and len(x.select_N) == 0
    assert x.unpack(torch.zeros(0)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_empty_prompt_is_refused() -> None:
    rows = two_rows().replace(prompt_length_B=torch.tensor([3, 0]))
    with pytest.raises(ValueError, match="needs a prompt token"):
        packing.pack(rows, packing.response_positions(rows, sampled_only=True), CPU)
