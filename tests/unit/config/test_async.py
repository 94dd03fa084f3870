"""What the asynchronous modes refuse, with the keys to set."""

from __future__ import annotations

import pytest

from verl_like.config.errors import ConfigError
from verl_like.trainer.compose import compose

CORRECTED = ["trainer.mode=colocate_async", "algorithm.rollout_correction.rollout_is=token"]
FILTER = "algorithm.filter_groups.enable=True"
R = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["trainer.mode=colocate_async"], "set algorithm.rollout_correction.rollout_is=token"),
        ([*CORRECTED, "trainer.mode=separate_async"], "set actor_rollout_ref.hybrid_engine=false with"),
        ([*CORRECTED, f"{R}.scheduler.additional_prompts.enable=True"], "leave additional_prompts out"),
        ([*CORRECTED, FILTER, f"{R}.scheduler.mode=batch"], "scheduler.mode=batch gives scores to whole batches"),
        ([*CORRECTED, FILTER, "reward_model.enable=True"], "reward_model.enable=True gives scores to whole batches"),
        ([*CORRECTED, "trainer.full_determinism=True"], "which groups a step trains depends on time"),
        ([*CORRECTED, f"{R}.skip_rollout=True"], "their responses are of another run's weights"),
        ([*CORRECTED, "async_training.over_sample_rate=0"], "async_training.over_sample_rate=0"),
        ([*CORRECTED, "async_training.beyond=skip"], "async_training.beyond='skip'"),
    ],
)  # fmt: skip
def test_what_is_refused(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(settings)
    assert told in str(caught.value)


def test_a_filter_that_masks_judges_nothing_early() -> None:
    masks = [FILTER, f"{R}.n=4", "algorithm.filter_groups.resample=False", f"{R}.scheduler.mode=batch"]
    assert compose([*CORRECTED, *masks]).asynchronous
