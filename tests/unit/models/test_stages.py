"""Stages of pipeline parallelism: a later one takes the hidden states that it is handed as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.models import zoo
from tests.unit.models.rows import sequences
from tests.unit.models.test_packed_forward import build
from verl_like.models import packing

ROWS = sequences([([3, 4, 5], [6, 7]), ([8, 9], [3, 5, 7])])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("granite", {"embedding_multiplier": 3.0}),
        ("granitemoehybrid", {"embedding_multiplier": 3.0}),
        ("phi", {"embd_pdrop": 0.5}),
        ("starcoder2", {"embedding_dropout": 0.5, "residual_dropout": 0.0}),
    ],
)
def test_embeddings_are_scaled_and_dropped_of_once(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    model = build(zoo.folder(tmp_path, name, **changes), packed=True)
    x = packing.pack(ROWS, packing.response_positions(ROWS, sampled_only=False), torch.device("cpu"))
    whole = model.eval().hidden_states(x)
    scale = changes.get("embedding_multiplier", 1.0)
    handed_on = model.hf.get_input_embeddings()(x.input_ids) * scale
    model.train()
    assert torch.equal(model.hidden_states(x, received=handed_on), whole)
    again = model.hidden_states(x)  # from its own embedding, which is scaled, or dropped of, as before
    assert torch.equal(again, whole) is (scale != 1.0)
