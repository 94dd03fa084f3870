"""Sequence parallelism: two ranks on one sequence group, and four as two groups, against one rank with all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine import scenarios, tiny
from tests.unit.engine.tiny import build_engine
from verl_like.models import packing
from verl_like.parallel.dist import ProcessInfo
from verl_like.parallel.ulysses import SequenceRanks, repeated_key_heads


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(process: ProcessInfo, path: str) -> dict[str, Any]:
    return scenarios.sequence_parallel(process, path, 1)


@pytest.mark.parametrize(
    ("ranks", "size"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(4, 4, marks=pytest.mark.slow)]
)
def test_nothing_depends_on_the_slices(one: dict[str, Any], path: str, tmp_path: Path, ranks: int, size: int) -> None:
    """Gradients, log-probs, entropies, values, a reward model's scores; with one key head for several ranks."""
    many = tiny.spawn_ranks(ranks, scenarios.sequence_parallel, tmp_path, path, size)
    shares = ("checkpointed", *scenarios.SEQUENCE_MODELS, *(f"{name}_alone" for name in scenarios.SEQUENCE_MODELS))
    for rank, result in enumerate(many):
        for share in shares:
            for name, gradient in one[share].items():
                scale = float(gradient.abs().max()) + 1e-12
                gap = float((result[share][name] - gradient).abs().max()) / scale
                assert gap < 6e-6, f"rank {rank}, {share}, {name}: {gap:.1e}"
        index, groups = rank // size, ranks // size
        outputs = {**result["outputs"], "values": result["values"], "scores": result["scores"]}
        for name, whole in {**one["outputs"], "values": one["values"], "scores": one["scores"]}.items():
            torch.testing.assert_close(outputs[name], whole[index::groups], rtol=0, atol=1e-5)
        assert result["reports_loss"] == (rank % size == 0)  # its sum over ranks must count every row once
        assert result["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def test_slices_cover_every_wanted_token_once() -> None:
    """Ten tokens over three ranks: four each, two of padding at the end; targets cross the cut."""
    rows = tiny.experience(3, max_response=4)
    wanted_T = packing.response_positions(rows, sampled_only=False)
    whole = packing.pack(rows, wanted_T, torch.device("cpu"), notes_routes=True)
    groups = [SequenceRanks(group=None, size=3, rank=rank) for rank in range(3)]  # type: ignore[arg-type]
    slices = [packing.take_slice(whole, group) for group in groups]
    assert len({part.input_ids.shape for part in slices}) == 1
    total = whole.input_ids.shape[1]
    assert torch.equal(torch.cat([part.input_ids for part in slices], dim=1)[:, :total], whole.input_ids)
    assert torch.equal(torch.cat([part.position_ids for part in slices], dim=1)[:, :total], whole.position_ids)
    width = slices[0].input_ids.shape[1]
    chosen = torch.cat([part.select_N + rank * width for rank, part in enumerate(slices)])
    assert sorted(chosen.tolist()) == sorted(whole.select_N.tolist())
    assert sorted(torch.cat([p.targets_N for p in slices]).tolist()) == sorted(whole.targets_N.tolist())
    for part in slices:
        assert part.segments is not None and sum(part.segments.lengths) == 3 * width
    assert whole.places_S is not None
    places = torch.stack([part.places_S for part in slices]).T.tolist()  # type: ignore[misc]  # one slice has it, or none
    there = [[width * rank + place for rank, place in enumerate(row) if place >= 0] for row in places]
    assert there == [[place] if place >= 0 else [] for place in whole.places_S.tolist()]


def test_slices_of_shared_prompts() -> None:
    """The padding of the last slice has keys of its own, whatever rows share."""
    rows = tiny.experience(4, max_response=4, rows_per_prompt=2)
    wanted = packing.response_positions(rows, sampled_only=False)
    whole = packing.pack(rows, wanted, torch.device("cpu"), share_prompts=True)
    total = whole.input_ids.shape[1]
    size = next(n for n in (3, 4, 5, 7) if total % n)
    part = packing.take_slice(whole, SequenceRanks(group=None, size=size, rank=0))  # type: ignore[arg-type]
    assert whole.segments is not None and part.segments is not None
    filling = part.input_ids.shape[1] * size - total
    assert whole.segments.layout is not None and part.segments.layout is not None
    assert sum(part.segments.own_lengths) == total + filling == len(part.segments.layout.home_T)
    slots = part.segments.layout.gather_K.tolist()
    assert slots[: -filling or None] == whole.segments.layout.gather_K.tolist()
    assert slots[-filling:] == list(range(total, total + filling))


def test_head_counts() -> None:
    assert repeated_key_heads(8, 8, 4) == 1
    assert repeated_key_heads(8, 2, 4) == 2
    with pytest.raises(ValueError, match=r"ulysses_sequence_parallel_size=4 .* 14 attention heads.*\[1, 2, 7, 14\]"):
        repeated_key_heads(14, 2, 4)
    with pytest.raises(ValueError, match="4 neither divides the model's 3 key-value heads"):
        repeated_key_heads(12, 3, 4)


def test_padded_rows_are_refused(process: ProcessInfo, path: str) -> None:
    with pytest.raises(ValueError, match="use_remove_padding=True"):
        build_engine(process, path, ulysses=2, model={"use_remove_padding": False})
