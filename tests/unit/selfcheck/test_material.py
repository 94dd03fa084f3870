"""The rows of the check."""

from __future__ import annotations

from verl_like.kit.selfcheck.material import random_rollouts, short_lengths
from verl_like.models.prefix_tree import beginnings


def test_responses_to_one_prompt_begin_alike() -> None:
    """A fault in trees that are deeper than prompts meets rows that have them."""
    rollouts = random_rollouts(short_lengths(12), 100, difficulty_key="difficulty")
    prompts = rollouts.prompt_length_B.tolist()
    deeper = [b for b, common in enumerate(beginnings(rollouts).repeated()) if common > prompts[b]]
    assert len(deeper) == 4  # of six pairs; two are an episode whose second part has a prompt of its own
