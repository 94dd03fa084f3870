"""Each loss of the menu through the engine: packing, micro-batches and number of processes change no gradient."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine import loss_scenarios as losses
from tests.unit.engine import scenarios, tiny
from tests.unit.engine.tiny import wide_engine
from verl_like.batch import Metric, merge_metrics
from verl_like.parallel.dist import ProcessInfo
from verl_like.parallel.fsdp import gather

NAMES = [name for name, _ in losses.LOSSES]  # of losses.chosen()
PLAIN = {"use_remove_padding": False, "use_fused_kernels": False}


@pytest.fixture(scope="module", autouse=True)
def wide() -> Iterator[None]:
    with losses.wide():
        yield


@pytest.fixture(scope="module")
def work(process: ProcessInfo, path: str) -> list[losses.Job]:
    return losses.jobs(wide_engine(process, path))


@pytest.fixture(scope="module")
def reference(process: ProcessInfo, path: str, work: list[losses.Job]) -> list[Any]:
    """Padded forward, full logits, one micro-batch, one process: the path without any trick."""
    return losses.run(wide_engine(process, path, model=PLAIN), process, work, losses.WHOLE, "even")


@pytest.fixture(scope="module")
def packed(process: ProcessInfo, path: str, work: list[losses.Job]) -> list[Any]:
    return losses.run(wide_engine(process, path), process, work, scenarios.RULE, "even")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, path: str, work: list[losses.Job]) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    torch.save(work, folder / "work.pt")
    return tiny.spawn_ranks(2, losses.on_rank, folder, path, str(folder / "work.pt"))


def assert_same(expected: Any, found: Any) -> None:
    scale = float(expected[0].abs().max())
    assert scale > 0
    gap = float((expected[0] - found[0]).abs().max()) / scale
    assert gap <= 1e-12, f"relative difference of gradients {gap:.1e}"
    assert {n: v for n, (v, _) in found[1].items()} == pytest.approx(
        {n: v for n, (v, _) in expected[1].items()}, rel=1e-6, abs=1e-7
    )


def joined(parts: list[Any]) -> Any:
    """Gradients are the same on all ranks; metrics are joined as the driver joins them."""
    assert torch.equal(parts[0][0], parts[1][0])
    merged = merge_metrics([{n: Metric(value=v, reduction=r) for n, (v, r) in part[1].items()} for part in parts])
    return parts[0][0], {name: (metric.value, metric.reduction) for name, metric in merged.items()}


@pytest.mark.parametrize("job", range(len(NAMES)), ids=[f"{i}-{name}" for i, name in enumerate(NAMES)])
def test_packing_micro_batches_and_ranks_change_nothing(
    job: int, reference: list[Any], packed: list[Any], two: list[dict[str, Any]]
) -> None:
    assert_same(reference[job], packed[job])
    assert_same(reference[job], joined([rank["even"][job] for rank in two]))
    assert_same(reference[job], joined([rank["first"][job] for rank in two]))


def test_coupled_l2_is_added_before_the_norm(
    process: ProcessInfo, path: str, work: list[losses.Job], reference: list[Any], two: list[dict[str, Any]]
) -> None:
    engine = wide_engine(process, path)
    flat = torch.cat([gather(p, engine.device, torch.float64).flatten() for p in engine.model.parameters()])
    expected = float((reference[0][0] + losses.L2 * flat).norm())
    assert expected != pytest.approx(float(reference[0][0].norm()), rel=1e-2)
    assert losses.norm_with_l2(process, path, work[0]) == pytest.approx(expected, rel=1e-10)
    assert [rank["l2"] for rank in two] == pytest.approx([expected] * 2, rel=1e-10)


def test_every_loss_and_many_options_take_part() -> None:
    actors = [combination.actor for combination in losses.chosen()]
    corrections = [combination.correction for combination in losses.chosen()]
    assert {actor.policy_loss.loss_mode for actor in actors} == {name for name, _ in losses.LOSSES}
    assert len({actor.loss_agg_mode for actor in actors}) >= 4
    assert len({(actor.use_kl_loss, actor.kl_loss_type) for actor in actors}) >= 6
    assert len({(correction.rollout_is, correction.rollout_rs) for correction in corrections}) >= 6
    for name in ("mask_truncated", "use_unbiased_kl"):
        assert {getattr(actor, name) for actor in actors} == {True, False}
