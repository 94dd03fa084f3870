"""The rows of the check: what a loop holds before an update, random, with log-probs near those of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from verl_like.batch import PromptRow, Rollouts, Scores, pad_rows

# Noise by row of the old log-probs, whose second row has ratios beyond dual clip and skip threshold.
DRIFT = (0.2, 2.0, 0.02)
_MISMATCH = (2e-4, 5.0, -5.0, 0.05, 0.5)  # nats, see `mismatch`
# Logits of a long row's sampled tokens, and of another's: with many ids the head is most of all work.
_LOGITS, _SHORT = 2**23, 2**21
_PERIOD = 6  # of the rows that a loop treats in its own way
_FIRST_PART = 2  # of six rows the third and fourth are one episode, with a prompt each

OldLogProbs = Literal["given", "sampler", "own"]
"""Old log-probs of an update: computed before it ("given"), the rollout engine's (bypass mode, two policies), or the
update's own, detached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Scored rollouts with everything that an objective may read. Nothing here is masked yet."""

    rollouts: Rollouts  # with rollout_log_probs_BR
    scores: Scores
    advantages_BR: Tensor
    returns_BR: Tensor
    old_log_probs_BR: Tensor
    ref_log_probs_BR: Tensor
    values_BR: Tensor  # zeros where the run has no critic


def mismatch(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Sampler's log-probs less those that they are compared with, of some rows [B, R], in nats.

    By row: within any bound; far enough for every veto, and for every cap, each on one side alone, as these bounds
    are; near; and between, where the mean over a row is inside of bounds that its sum leaves. Of five rows, so that
    each kind also has rows with text that was not sampled (every third).
    """
    found_BR = torch.randn(shape, generator=generator)
    size_B1 = torch.tensor([_MISMATCH[row % len(_MISMATCH)] for row in range(shape[0])])[:, None]
    return size_B1 * torch.where(size_B1.abs() > 1, found_BR.abs(), found_BR)


def most_sampled(vocab_size: int) -> tuple[int, int]:
    """Tokens that a long row, and each short one, has from the policy: fewer where each has many logits."""
    return max(_LOGITS // vocab_size, 28), max(12, min(_SHORT // vocab_size, 28))


def short_lengths(count: int) -> list[tuple[int, int]]:
    """Draw (prompt, response) lengths of `count` rows of 5 to 40 tokens; two rows to a prompt."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 12, (count,), generator=generator).tolist()
    responses = torch.randint(3, 29, (count,), generator=generator).tolist()
    return [(prompts[row - row % 2], responses[row]) for row in range(count)]


def long_lengths(longest: int) -> list[tuple[int, int]]:
    """Choose a row of `longest` tokens, one of about half that which shares its prompt, and a short one."""
    prompt = longest // 4
    return [(prompt, longest - prompt), (prompt, longest // 5 + 7), (9, 20)]


def random_rollouts(lengths: Sequence[tuple[int, int]], vocab_size: int, *, difficulty_key: str) -> Rollouts:
    """Rows without log-probs; in every third one part of the response was not sampled (tool text).

    Of six rows the second hit its length limit, and the third and fourth are one episode whose history was rewritten.
    With many ids a long row's last tokens alone were sampled, and its first.
    Two responses to one prompt begin with the same two tokens, which are computed once as their prompt is.
    """
    generator = torch.Generator().manual_seed(len(lengths))

    def tokens(size: int) -> list[int]:
        return torch.randint(vocab_size, (size,), generator=generator).tolist()

    prompts = [tokens(prompt) for prompt, _ in lengths]
    prompts = [prompts[row if row % _PERIOD == _FIRST_PART + 1 else row - row % 2] for row in range(len(lengths))]
    responses = [tokens(response) for _, response in lengths]
    for row in range(1, len(responses)):
        if prompts[row] == prompts[row - 1]:
            responses[row][:2] = responses[row - 1][:2]
    response_ids_BR = pad_rows(responses, side="right", dtype=torch.int32)
    response_length_B = torch.tensor([response for _, response in lengths])
    mask_BR = torch.arange(response_ids_BR.shape[1])[None, :] < response_length_B[:, None]
    mask_BR[::3, 1:3] = False
    late_BR = torch.arange(mask_BR.shape[1])[None, :] >= response_length_B[:, None] - most_sampled(vocab_size)[0]
    mask_BR[:, 1:] &= late_BR[:, 1:]  # text that was not sampled fills a long row
    episodes = [row - (row % _PERIOD == _FIRST_PART + 1) for row in range(len(lengths))]
    difficulty = torch.rand(len(lengths), generator=generator).tolist()
    return Rollouts(
        prompt_ids_BP=pad_rows(prompts, side="left", dtype=torch.int32),
        prompt_length_B=torch.tensor([len(prompt) for prompt in prompts]),
        response_ids_BR=response_ids_BR,
        response_length_B=response_length_B,
        response_mask_BR=mask_BR,
        group_B=torch.arange(len(lengths)) // 2,
        episode_B=torch.tensor(episodes),
        weight_version_BR=torch.zeros_like(response_ids_BR),
        finish_reasons=["length" if row % _PERIOD == 1 else "stop" for row in range(len(lengths))],
        rows=[
            PromptRow(index=row, data_source="selfcheck", messages=[], extra_info={difficulty_key: difficulty[row]})
            for row in episodes
        ],
    )


def material(rollouts: Rollouts, log_probs_BR: Tensor, values_BR: Tensor, old: OldLogProbs) -> Material:
    """Old, reference and sampler's log-probs around those of the model: ratios away from 1, and three policies.

    The sampler is near the policy that it is compared with: the old one where that is known before the update. Of six
    rows the fifth has no advantage, and the sixth is not trained on though it stays in the batch. One token of the
    fourth row has no log-prob of the sampler's, unless those are the old ones.
    """
    generator = torch.Generator().manual_seed(1)
    count, mask_BR = len(rollouts), rollouts.response_mask_BR

    def noise() -> Tensor:
        return torch.randn(log_probs_BR.shape, generator=generator)

    drift_B1 = torch.tensor([DRIFT[row % 3] for row in range(count)])[:, None]
    old_BR = (log_probs_BR + drift_B1 * noise()) * mask_BR
    sampler_BR = ((old_BR if old == "given" else log_probs_BR) + mismatch(mask_BR.shape, generator)) * mask_BR
    if old != "sampler" and count > 3:
        sampler_BR[3, 0] = float("nan")
    place = torch.arange(count) % _PERIOD
    advantages_BR = noise() * (place != 4)[:, None]
    score_B = torch.rand(count, generator=generator).round()
    later_B = place == _FIRST_PART + 1
    score_B[later_B] = score_B[later_B.roll(-1)]  # an episode has one score
    return Material(
        rollouts=rollouts.replace(rollout_log_probs_BR=sampler_BR),
        scores=Scores(
            score_B=score_B,
            valid_B=torch.ones(count, dtype=torch.bool),
            extras=[{} for _ in range(count)],
            failures=[None] * count,
            trained_B=place != 5,
        ),
        advantages_BR=advantages_BR,
        returns_BR=noise(),
        old_log_probs_BR=old_BR,
        ref_log_probs_BR=(log_probs_BR + 0.3 * noise()) * mask_BR,
        values_BR=(values_BR + 0.4 * noise()) * mask_BR,
    )
