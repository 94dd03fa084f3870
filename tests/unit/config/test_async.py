"""What the asynchronous modes refuse, with the keys to set."""

from __future__ import annotations

import pytest

from verl_like.config.batch_plan import BatchPlan
from verl_like.config.errors import ConfigError
from verl_like.trainer.compose import compose, compose_with_warnings

CORRECTED = ["trainer.mode=colocate_async", "algorithm.rollout_correction.rollout_is=token"]
FILTER = "algorithm.filter_groups.enable=True"
R, C = "actor_rollout_ref.rollout", "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["trainer.mode=colocate_async", f"{C}.rollout_is=null"], f"set {C}.bypass_mode=true (the clipped ratio"),
        ([*CORRECTED, "trainer.mode=separate_async"], "processes of its own; set hybrid_engine=false with"),
        ([*CORRECTED, f"{R}.scheduler.additional_prompts.enable=True"], "leave additional_prompts out"),
        ([*CORRECTED, FILTER, f"{R}.scheduler.mode=batch"], "scheduler.mode=batch: groups are judged as they end"),
        ([*CORRECTED, FILTER, "reward_model.enable=True"], "reward_model.enable=True: groups are judged as they end"),
        ([*CORRECTED, "trainer.full_determinism=True"], "which groups a step trains depends on time"),
        ([*CORRECTED, f"{R}.skip_rollout=True"], "the responses of recorded steps are of another run's weights"),
        ([*CORRECTED, "async_training.over_sample_rate=0"], "async_training.over_sample_rate=0"),
        ([*CORRECTED, "async_training.beyond=skip"], "async_training.beyond='skip'"),
    ],
)  # fmt: skip
def test_what_is_refused(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(settings)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "rollout_is"),
    [
        (["trainer.mode=colocate_async"], "token"),
        (["trainer.v1.trainer_mode=colocate_async"], "token"),
        (["trainer.mode=colocate_async", f"{C}.rollout_is=sequence"], "sequence"),
        (["trainer.mode=colocate_async", f"{C}.bypass_mode=True"], None),
        (["trainer.mode=colocate_async", "actor_rollout_ref.actor.old_log_probs=rollout"], None),
        (["trainer.mode=colocate_async", f"{C}.rollout_rs=token_k1", f"{C}.rollout_rs_threshold=2"], None),
        (["trainer.mode=sync"], None),
        ([], None),
    ],
)  # fmt: skip
def test_stale_tokens_are_weighted_unless_something_else_is_said(settings: list[str], rollout_is: str | None) -> None:
    config, warnings = compose_with_warnings(settings)
    assert config.algorithm.rollout_correction.rollout_is == rollout_is
    told = [line for line in warnings if line.startswith(f"{C}.rollout_is=token, as trainer.mode=colocate_async")]
    assert len(told) == (rollout_is == "token")
    if rollout_is == "token":
        assert BatchPlan.build(config, 1).old_log_probs == "recompute"


def test_a_filter_that_masks_judges_nothing_early() -> None:
    masks = [FILTER, f"{R}.n=4", "algorithm.filter_groups.resample=False", f"{R}.scheduler.mode=batch"]
    assert compose([*CORRECTED, *masks]).asynchronous
