from __future__ import annotations

import pytest
import torch

from verl_like.batch import Evaluated, Sequences
from verl_like.trainer.dispatch import join_rows, rows_per_rank, split_rows


def sequences(lengths: list[int]) -> Sequences:
    width = max(lengths)
    mask = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    ids = torch.arange(len(lengths) * width, dtype=torch.int32).reshape(len(lengths), width) * mask
    return Sequences(
        prompt_ids_BP=torch.ones(len(lengths), 2, dtype=torch.int32),
        prompt_length_B=torch.full((len(lengths),), 2),
        response_ids_BR=ids,
        response_length_B=torch.tensor(lengths),
        response_mask_BR=mask,
    )


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_split_and_join_give_back_every_row_in_its_place(balance: bool, num_ranks: int) -> None:
    batch = sequences([3, 9, 1, 4, 6])
    shares = rows_per_rank(batch.num_tokens_B().tolist(), num_ranks, balance=balance)
    assert sorted(row for share in shares for row in share) == list(range(5))
    # A worker answers with a value that tells the row it belongs to.
    answers = [
        Evaluated(response_length_B=part.response_length_B, old_log_probs_BR=part.response_ids_BR.float() * -1)
        for part in split_rows(batch, shares)
    ]
    joined = join_rows(answers, shares)
    assert torch.equal(joined.old_log_probs_BR, -batch.response_ids_BR.float())
    assert torch.equal(joined.response_length_B, batch.response_length_B)


def test_balanced_shares_have_close_token_counts() -> None:
    tokens = [100, 1, 1, 1, 97, 1, 1, 1]
    shares = rows_per_rank(tokens, 2, balance=True)
    sums = [sum(tokens[row] for row in share) for share in shares]
    assert max(sums) - min(sums) <= 3
    unbalanced = rows_per_rank([100, 97, 1, 1], 2, balance=False)
    assert unbalanced == [[0, 1], [2, 3]]


def test_a_rank_without_rows_is_skipped_when_joining() -> None:
    batch = sequences([2])
    shares = rows_per_rank(batch.num_tokens_B().tolist(), 2, balance=True)
    parts = split_rows(batch, shares)
    assert sorted(len(part) for part in parts) == [0, 1]
    answers = [Evaluated(response_length_B=p.response_length_B, values_BR=p.response_ids_BR.float()) for p in parts]
    assert torch.equal(join_rows(answers, shares).values_BR, batch.response_ids_BR.float())


def test_rows_are_balanced_by_cost_where_attention_makes_long_rows_dear() -> None:
    """By tokens 100 equals 10 x 10; by a quadratic cost it is worth all the others together."""
    tokens = [100, *[10] * 10]
    by_tokens = rows_per_rank(tokens, 2, balance=True)
    by_square = rows_per_rank([n * n for n in tokens], 2, balance=True)
    assert sorted(len(share) for share in by_tokens) == [1, 10]
    assert [0] in by_square
    tokens = [60, 60, *[20] * 6]
    square = rows_per_rank([n * n for n in tokens], 2, balance=True)
    assert sorted(sum(tokens[i] for i in share) for share in square) == [120, 120]
    assert all(sum(i < 2 for i in share) == 1 for share in square)  # one long row each
