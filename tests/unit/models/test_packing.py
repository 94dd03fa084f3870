from __future__ import annotations

import pytest
import torch

from tests.unit.engine.tiny import experience
from verl_like.batch import Sequences
from verl_like.models import packing
from verl_like.models.prefix_tree import path_layout, paths

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


def without_responses(rows: Sequences, empty: list[int]) -> Sequences:
    """The same, where these rows have no response."""
    length_B = rows.response_length_B.clone()
    length_B[empty] = 0
    ids_BR, mask_BR = rows.response_ids_BR, rows.response_mask_BR
    return rows.replace(response_ids_BR=ids_BR, response_mask_BR=mask_BR, response_length_B=length_B)


def test_pack_by_hand() -> None:
    rows = two_rows()
    x = packing.pack(rows, packing.response_positions(rows, sampled_only=True), CPU)
    assert x.input_ids.tolist() == [[6, 7, 1, 2, 3, 4]]  # shortest first, last tokens left out
    assert x.position_ids.tolist() == [[0, 1, 0, 1, 2, 3]]
    assert x.segments is not None and x.segments.cu_seqlens.tolist() == [0, 2, 6]
    answers = torch.arange(6.0)[x.select_N]  # the index of the token each answer was read at
    assert x.unpack(answers).tolist() == [4.0, 5.0, 0.0, 0.0]  # 3 predicts 4, 4 predicts 5; 6 (at 0) predicts 7
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
    assert torch.equal(restored, rows.response_ids_T.double() * wanted)
    assert x.input_ids.shape[1] == int((rows.num_tokens_B() - 1).sum())


def test_row_without_response_and_empty_selection() -> None:
    rows = without_responses(two_rows(), [0, 1])
    x = packing.pack(rows, packing.response_positions(rows, sampled_only=True), CPU)
    assert x.input_ids.tolist() == [[6, 1, 2]] and len(x.select_N) == 0
    assert x.unpack(torch.zeros(0)).tolist() == []


def test_empty_prompt_is_refused() -> None:
    rows = two_rows()
    rows = rows.replace(prompt_length_B=torch.tensor([3, 0]), prompt_ids_T=rows.prompt_ids_T[:3])
    with pytest.raises(ValueError, match="needs a prompt token"):
        packing.pack(rows, packing.response_positions(rows, sampled_only=True), CPU)


def three_rows_of_one_prompt() -> Sequences:
    """Prompt 1 2 3 with responses 4 5 6, 7 and 8 9; a fourth row has prompt 1 2 and response 3."""
    return Sequences(
        prompt_ids_BP=torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [0, 1, 2]], dtype=torch.int32),
        prompt_length_B=torch.tensor([3, 3, 3, 2]),
        response_ids_BR=torch.tensor([[4, 5, 6], [7, 0, 0], [8, 9, 0], [3, 0, 0]], dtype=torch.int32),
        response_length_B=torch.tensor([3, 1, 2, 1]),
        response_mask_BR=torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0]]).bool(),
    )


def test_shared_prompt_by_hand() -> None:
    rows = three_rows_of_one_prompt()
    x = packing.pack(rows, packing.response_positions(rows, sampled_only=True), CPU, share_prompts=True)
    assert x.input_ids.tolist() == [[1, 2, 3, 8, 4, 5]]  # row 3, what the prompt of rows 0 to 2 has more, what they add
    assert x.position_ids.tolist() == [[0, 1, 2, 3, 3, 4]]
    assert x.segments is not None and x.segments.layout is not None
    assert (x.segments.lengths, x.segments.own_lengths) == ((2, 3, 4, 5), (2, 1, 1, 2))
    assert x.segments.holders == (0, 0, 1, 1)
    assert x.segments.cu_own.tolist() == [0, 2, 3, 4, 6] and x.segments.cu_seqlens.tolist() == [0, 2, 5, 9, 14]
    spread = x.segments.layout.spread(x.input_ids[0, :, None])[:, 0]
    assert spread.tolist() == [1, 2, 1, 2, 3, 1, 2, 3, 8, 1, 2, 3, 4, 5]  # the keys of each row
    assert torch.equal(x.unpack(x.targets_N), rows.response_ids_T.long())
    read_at = rows.padded(
        x.unpack(x.select_N.double())
    ).tolist()  # the first token of rows 0 to 2 is predicted at one place
    assert read_at == [[2, 4, 5], [2, 0, 0], [2, 3, 0], [1, 0, 0]]


def test_rows_of_one_owner_are_neighbours() -> None:
    rows = three_rows_of_one_prompt()
    wanted, owner_B = packing.response_positions(rows, sampled_only=True), torch.tensor([1, 0, 1, 0])
    x = packing.pack(rows, wanted, CPU, owner_B=owner_B)
    assert x.input_ids.tolist() == [[1, 2, 1, 2, 3, 1, 2, 3, 8, 1, 2, 3, 4, 5]]  # rows 3 and 1, then 2 and 0
    assert torch.equal(x.unpack(x.targets_N), rows.response_ids_T.long())
    other = packing.pack(rows, wanted, CPU, owner_B=1 - owner_B)
    assert other.input_ids.tolist() == [[1, 2, 3, 8, 1, 2, 3, 4, 5, 1, 2, 1, 2, 3]]


def test_equal_prompts_stay_apart_without_sharing() -> None:
    rows = three_rows_of_one_prompt()
    x = packing.pack(rows, packing.response_positions(rows, sampled_only=True), CPU)
    assert x.input_ids.shape[1] == int((rows.num_tokens_B() - 1).sum())
    assert x.segments is not None and x.segments.layout is None and x.segments.cu_own is x.segments.cu_seqlens


def test_a_row_without_a_response_shares_all_that_it_has() -> None:
    rows = without_responses(three_rows_of_one_prompt(), [1])
    wanted = packing.response_positions(rows, sampled_only=True)
    x = packing.pack(rows, wanted, CPU, share_prompts=True)
    assert x.input_ids.tolist() == [[1, 2, 3, 8, 4, 5]]
    assert torch.equal(x.unpack(x.targets_N), (rows.response_ids_T * wanted).long())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_copies_add_up_in_float32(dtype: torch.dtype) -> None:
    """A prompt of 300 rows: one value of 256 and 299 of 1 are lost one by one in bfloat16, but not together."""
    shared_S = torch.tensor([0] + [1] * 299)
    layout = path_layout(paths(torch.full((300,), 2), shared_S, [0] * 300), shared_S.tolist())
    packed = torch.zeros(301, 1, dtype=dtype, requires_grad=True)
    slope = torch.ones(600, 1, dtype=dtype)
    slope[0] = 256
    layout.spread(packed).backward(slope)
    assert packed.grad is not None and float(packed.grad[0]) == float(torch.tensor(555.0).to(dtype))
