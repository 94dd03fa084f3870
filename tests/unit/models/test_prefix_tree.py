"""Rows packed as a tree: each token once, on the path of every row that begins with it; equal to transformers row by
row in float64, values and gradients of all weights."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.unit.engine import tiny
from tests.unit.models.rows import sequences
from tests.unit.models.test_packed_forward import build
from tests.unit.models.test_state_layers import (
    assert_equal_gradients,
    gradients,
    in_float64,
    log_probs_row_by_row,
    packed_log_probs,
)
from verl_like.batch import Sequences
from verl_like.models import packing
from verl_like.models.prefix_tree import beginnings, shared_rows

CPU = torch.device("cpu")
Rows = list[tuple[list[int], list[int]]]  # prompt and response of each


@st.composite
def trees(draw: st.DrawFn) -> Rows:
    """Rows that go on from a beginning of an earlier one, some of them to the end; of few different tokens."""
    g = random.Random(draw(st.integers(0, 10**6)))
    rows: Rows = []
    for _ in range(draw(st.integers(1, 9))):
        before = [*itertools.chain(*g.choice(rows))] if rows and g.random() < 0.8 else []
        ids = before[: g.randint(0, len(before))] + [g.randrange(1, 4) for _ in range(g.randint(0, 12))] + [5]
        cut = g.randint(1, len(ids))
        rows.append((ids[:cut], ids[cut:]))
    return [*rows, ([1, 2], [3])]


def distinct_beginnings(rows: Rows) -> int:
    """Count the tokens that must be computed: one for each different beginning of rows without their last token."""
    whole = [(prompt + response)[: max(1, len(prompt + response) - 1)] for prompt, response in rows]
    return len({tuple(ids[: n + 1]) for ids in whole for n in range(len(ids))})


@settings(max_examples=80, deadline=None)
@given(rows=trees(), data=st.data())
def test_each_beginning_is_packed_once_and_on_every_path(rows: Rows, data: st.DataObject) -> None:
    batch = sequences(rows)
    wanted = packing.response_positions(batch, sampled_only=False)
    x = packing.pack(batch, wanted, CPU, share_prompts=True, notes_routes=True)
    assert x.input_ids.shape[1] == distinct_beginnings(rows)
    assert torch.equal(x.unpack(x.targets_N), batch.response_ids_T.long())
    assert x.places_S is not None and x.segments is not None
    for (prompt, response), places in zip(rows, x.places_S.split(batch.num_tokens_B().tolist()), strict=True):
        ids = prompt + response
        real = places[: max(1, len(ids) - 1)]  # a route of a place is that of each of its rows
        assert x.input_ids[0, real].tolist() == ids[: len(real)] and bool((places[len(real) :] == -1).all())
        assert x.position_ids[0, real].tolist() == list(range(len(real)))
    if x.segments.layout is not None:  # a row's own tokens are its last ones: what kernels of CUDA are told
        ends = torch.tensor(x.segments.lengths).cumsum(0).tolist()
        own = torch.cat([torch.arange(e - n, e) for e, n in zip(ends, x.segments.own_lengths, strict=True)])
        assert torch.equal(x.segments.layout.home_T, own)
        assert torch.equal(x.segments.layout.gather_K[own], torch.arange(x.input_ids.shape[1]))
    chosen = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, unique=True))
    some, lengths = [rows[i] for i in chosen], batch.num_tokens_B().tolist()
    ends = sum(len(p + r) > 1 for p, r in some)  # last tokens, which budgets count
    assert shared_rows(batch).total(chosen, lengths) == distinct_beginnings(some) + ends


def agents(turns: int = 4, forks: int = 3) -> Sequences:
    """Forks of an agent, a row for each turn with the whole context before it, and a group of another prompt."""
    g = random.Random(3)

    def words(count: int) -> list[int]:
        return [g.randrange(1, tiny.VOCAB) for _ in range(count)]

    rows, start = list[tuple[list[int], list[int]]](), words(9)
    for _ in range(forks):
        context = list(start)
        for _ in range(turns):
            context += words(3)
            rows.append((list(context), words(g.randint(1, 9))))
            context += rows[-1][1]
    rows += [([7, 8], [*rows[0][1], 4]), ([7, 8], [*rows[0][1], 5, 6]), rows[2], (rows[3][0], [])]
    return sequences(rows)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2}), ("mistral", {"sliding_window": 5})],
)
def test_trees_equal_transformers_row_by_row(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    model = build(tiny.model_folder(tmp_path, architecture, **changes), packed=True).double().train()
    reference: Any = AutoModelForCausalLM.from_config(copy.deepcopy(model.hf.config), attn_implementation="eager")
    reference.double().load_state_dict(model.hf.state_dict())

    def compare(rows: Sequences) -> None:
        with in_float64():
            expected = log_probs_row_by_row(reference, rows)
            wanted = gradients(reference, expected)
            found = packed_log_probs(model, rows, share=True)
            assert float((found - expected).detach().abs().max()) < 1e-10
            assert_equal_gradients(gradients(model, found), wanted)

    compare(agents())
    settings(max_examples=8, deadline=None)(given(rows=trees())(lambda rows: compare(sequences(rows))))()


def test_a_step_of_agents_in_float32_has_the_gradient_of_rows_apart(tmp_path: Path) -> None:
    path, rows = tiny.model_folder(tmp_path, initializer_range=0.02), agents(turns=6, forks=4)
    model = build(path, packed=True).train()
    found = [gradients(model, packed_log_probs(model, rows, share=share).double()) for share in (True, False)]
    squares = [
        sum(float(t.double().square().sum()) for t in each)
        for each in zip(*([found[0][name] - wanted, wanted] for name, wanted in found[1].items()), strict=True)
    ]
    assert (squares[0] / squares[1]) ** 0.5 < 1e-6


def test_rows_of_other_kinds_have_nothing_in_common() -> None:
    rows = sequences([([1, 2, 3], [4]), ([1, 2, 3], [5]), ([1, 2, 3], [6])])
    assert sorted(beginnings(rows).common) == [0, 3, 3]
    assert sorted(beginnings(rows, [1.0, 3.0, 1.0]).common) == [0, 0, 3]


def test_rows_share_up_to_another_route_and_routes_go_to_every_row() -> None:
    """Three rows of tokens 1 2 3 4, whose third was routed otherwise in the second; a fourth has nothing in common."""
    rows = sequences([([1, 2], [3, 4, 5]), ([1, 2], [3, 4, 6]), ([1, 2], [3, 4, 7]), ([8], [1, 1, 1, 1])])
    routes_T = torch.arange(20, dtype=torch.uint8).remainder(5).repeat_interleave(2).view(20, 1, 2)
    routes_T[7] = 9
    rows = rows.replace(routes_T=routes_T, routed_length_B=rows.num_tokens_B())
    x = packing.pack(
        rows, packing.response_positions(rows, sampled_only=False), CPU, share_prompts=True, notes_routes=True
    )
    assert x.routes is not None
    back = x.routes_of_rows([x.routes[:, 0]], torch.uint8, None).view(4, 5, 2)
    assert torch.equal(back[:, :4], routes_T.view(4, 5, 2)[:, :4])
    assert x.input_ids.tolist() == [[1, 2, 3, 4, 3, 4, 3, 4, 8, 1, 1, 1]]  # rows in between bound what others share
