"""trainer.parity=exact: in a real run the sampler's log-probs are the trainer's, and every first ratio is 1.0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import metrics_of, overrides, write_task
from torch import Tensor

from verl_like.algorithms.objectives import PolicyObjective
from verl_like.config import PPOConfig
from verl_like.kit.selfcheck import parity
from verl_like.kit.selfcheck.check import SelfCheck
from verl_like.models import exact
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train

SETTINGS = {
    "trainer.parity": "exact",
    "trainer.total_training_steps": 2,
    "data.max_response_length": 20,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 200,
    "actor_rollout_ref.rollout.max_num_seqs": 24,
    "actor_rollout_ref.rollout.temperature": 0.7,
}


def settings(folder: Path, model: Path, **more: Any) -> PPOConfig:
    return compose(overrides(write_task(folder), model, folder / "out", **SETTINGS, **more))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_log_prob_of_a_run(dtype: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ratios, own = list[Tensor](), PolicyObjective.__call__

    def seen(self: PolicyObjective, outputs: Any, experience: Any, *given: Any) -> Any:
        assert experience.old_log_probs_BR is not None
        ratio_BR = (outputs["log_probs"].detach() - experience.old_log_probs_BR).exp()
        ratios.append(ratio_BR[experience.response_mask_BR])
        return own(self, outputs, experience, *given)

    monkeypatch.setattr(PolicyObjective, "__call__", seen)
    precision = {f"actor_rollout_ref.{key}.dtype": dtype for key in ("actor.fsdp_config", "rollout")}
    train(settings(tmp_path, tiny_model, **precision))
    records = metrics_of(tmp_path / "out")[-2:]
    assert [record["rollout_corr/log_prob_gap_max"] for record in records] == [0.0] * 2
    assert all(record["parity/pass_cost"] > 0 and "timing_s/old_log_prob" not in record for record in records)
    first = int((torch.stack([(r == 1).all() for r in ratios]) == 0).nonzero()[0])
    assert sum(map(len, ratios[:first])) > 200  # a mini-batch has several micro-batches
    assert "are the engine's to the last bit" in (tmp_path / "out" / "verl_like.log").read_text()


def test_an_engine_with_another_order_does_not_start(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = exact.padded_attention

    def rounded(*arguments: Any) -> Tensor:
        return own(*arguments).bfloat16().float()

    monkeypatch.setattr(exact, "padded_attention", rounded)
    with pytest.raises(ValueError, match=r"trainer\.parity=exact: \d+ of \d+ sampled tokens have other log-probs"):
        train(settings(tmp_path, tiny_model))


def test_a_step_that_differs_ends_the_run(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = exact.in_blocks

    def other_where_one_token_asks(*given: Any) -> Tensor:
        return own(*given).mul(1.0 if given[-1].shape[1] > 1 else 1.0001)

    def unproved(*_: Any) -> float:
        monkeypatch.setattr(exact, "in_blocks", other_where_one_token_asks)
        return 1.0

    monkeypatch.setattr(parity, "prove_at_start", unproved)
    with pytest.raises(RuntimeError, match=r"trainer\.parity=exact: in step 1 the trainer's log-probs differ .* up to"):
        train(settings(tmp_path, tiny_model))


def test_the_self_check_proves_it(tmp_path: Path, tiny_model: Path) -> None:
    findings, _ = SelfCheck(config=settings(tmp_path, tiny_model), num_rows=4).run(ranks=1)
    (found,) = [each for each in findings if each.name == "rollout engine: log-probs"]
    assert found.difference == 0.0 and all(each.passed for each in findings)
