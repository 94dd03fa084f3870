"""Credit: from scored rollouts to what an update needs. Pure, on the driver, where the whole batch is.

Order: rows without a reward are dropped -> the response's reward (shaped: reward_shaping.py) goes on the last sampled
token -> KL penalty per token -> token shaping -> advantages, shaped -> metrics -> resampling (PF-PPO). Every statistic
is one of the whole batch; nothing here is computed per mini- or micro-batch.

An episode of several rows is joined to one response first (`batch.Episodes`), so that everything from the reward to the
advantages, an estimator of the user's own included, sees each episode once; its advantages then go back to the rows.
"""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch import Tensor

from verl_like.algorithms.advantages import AdvantageInputs, AdvantageOutputs, compute_advantages
from verl_like.algorithms.corrections import DriverCorrection, correct_on_driver
from verl_like.algorithms.groups import signal_metrics
from verl_like.algorithms.kl import FULL_KL_KIND, kl_penalty, mean_sequence_kl
from verl_like.algorithms.masked import masked_fill_zero, masked_mean, masked_var, token_spread
from verl_like.algorithms.reward_shaping import (
    pf_ppo_rows,
    reward_components,
    shape_advantages,
    shape_token_rewards,
    trainable_B,
)
from verl_like.algorithms.sample_weights import difficulties
from verl_like.algorithms.stepwise import check_numbering
from verl_like.batch import Episodes, Evaluated, Experience, Rollouts, Scores
from verl_like.config import ActorConfig, AlgorithmConfig
from verl_like.config.enums import STEP_ESTIMATORS

logger = logging.getLogger(__name__)


def make_experience(
    algorithm: AlgorithmConfig,
    actor: ActorConfig,
    rollouts: Rollouts,
    scores: Scores,
    evaluated: Evaluated,
    kl_coef: float,
    *,
    reward_B: Tensor | None = None,
    seed: int = 0,
) -> tuple[Experience, dict[str, float]]:
    """Rewards, advantages and corrections of a batch of responses, and metrics under verl's names.

    Rows whose reward failed (valid_B false) and rows in which the policy sampled no token are left out before any
    statistic, and counted; the rest keeps its order. Tokens that algorithm.rollout_correction rejects earn credit like
    all others, then leave response_mask_BR; rows without a token left stay, so that N_seq does not depend on them.
    `kl_coef` is the coefficient before this step's update. `reward_B` (`shape_rewards`) takes the place of the scores;
    `seed` draws the rows of PF-PPO. Without `evaluated.old_log_probs_BR` the update takes its own log-probs as
    the old ones (detach).
    Raises ValueError when no row is left, a score is not finite, or something the configuration needs is missing.
    """
    kept_B, metrics = trainable_rows(rollouts, scores)
    reward_B = (scores.score_B if reward_B is None else reward_B)[kept_B]
    rollouts, scores, evaluated = rollouts.select(kept_B), scores.select(kept_B), evaluated.select(kept_B)
    check_inputs(algorithm, actor, rollouts, scores, evaluated)
    corrected = correct_on_driver(algorithm.rollout_correction, actor, rollouts, evaluated)
    episodes = Episodes.of(rollouts)
    whole, graded, known = episodes.join(rollouts), episodes.join(scores), episodes.join(evaluated)
    mask_BR = whole.response_mask_BR
    token_rewards_BR = place_on_last_token(episodes.once(reward_B), mask_BR)
    if whole.step_rewards_BR is not None:
        token_rewards_BR = token_rewards_BR + masked_fill_zero(whole.step_rewards_BR, mask_BR)
    if algorithm.use_kl_in_reward:
        token_rewards_BR, kl_metrics = subtract_kl(token_rewards_BR, mask_BR, known, algorithm, kl_coef)
        metrics |= kl_metrics
    token_rewards_BR, shaping_metrics = shape_token_rewards(algorithm, token_rewards_BR, mask_BR)
    inputs = AdvantageInputs(
        token_rewards_BR=token_rewards_BR,
        response_mask_BR=mask_BR,
        group_B=whole.group_B,
        values_BR=known.values_BR,
        old_log_probs_BR=known.old_log_probs_BR,
        components=reward_components(algorithm, graded),
        step_BR=whole.step_BR,
        anchor_BR=whole.anchor_BR,
        sum_pi_squared_BR=known.sum_pi_squared_BR,
        importance_weights_BR=episodes.join_tokens(corrected.weights_BR),
        baseline_B=graded.baseline_B,
    )
    outputs = compute_advantages(inputs, algorithm)
    advantages_BR, advantage_metrics = shape_advantages(algorithm, outputs.advantages_BR, mask_BR)
    metrics |= corrected.metrics | shaping_metrics | advantage_metrics | outputs.metrics
    metrics |= reward_metrics(graded.score_B, inputs) | credit_metrics(inputs, outputs, advantages_BR)
    if known.entropy_BR is not None:
        metrics["actor/entropy"] = masked_mean(known.entropy_BR, mask_BR).item()
    width = rollouts.response_mask_BR.shape[1]
    outputs = dataclasses.replace(
        outputs,
        advantages_BR=episodes.cut(advantages_BR, width),
        returns_BR=episodes.cut(outputs.returns_BR, width),
    )
    experience = put_together(actor, rollouts, scores, evaluated, corrected, outputs)
    if algorithm.use_pf_ppo:
        drawn_E, resampling_metrics = pf_ppo_rows(graded.score_B, algorithm.pf_ppo, seed)
        experience, metrics = drawn_episodes(experience, drawn_E), metrics | resampling_metrics
    return experience.trim(), metrics


def drawn_episodes(experience: Experience, drawn_E: Tensor) -> Experience:
    """All rows of the episodes at these positions; one that was drawn twice counts as two."""
    rows = Episodes.of(experience).rows()
    drawn = [rows[position] for position in drawn_E.tolist()]
    chosen = experience.select(torch.cat(drawn))
    if experience.episode_B is None:
        return chosen
    numbers = [number for number, part in enumerate(drawn) for _ in part]
    return chosen.replace(episode_B=torch.tensor(numbers))


def put_together(
    actor: ActorConfig,
    rollouts: Rollouts,
    scores: Scores,
    evaluated: Evaluated,
    corrected: DriverCorrection,
    outputs: AdvantageOutputs,
) -> Experience:
    """The columns of an update; tokens that are not trained on have advantage 0 and are not in the mask."""
    trained_BR = corrected.mask_BR
    if scores.trained_B is not None:
        trained_BR = trained_BR & scores.trained_B[:, None]
    episodes = Episodes.of(rollouts)
    cut_off_E = torch.tensor([reason == "length" for reason in episodes.join(rollouts).finish_reasons])
    experience = Experience(
        prompt_ids_BP=rollouts.prompt_ids_BP,
        prompt_length_B=rollouts.prompt_length_B,
        response_ids_BR=rollouts.response_ids_BR,
        response_length_B=rollouts.response_length_B,
        response_mask_BR=trained_BR,
        group_B=rollouts.group_B,
        episode_B=rollouts.episode_B,
        advantages_BR=masked_fill_zero(outputs.advantages_BR, trained_BR),
        returns_BR=None if evaluated.values_BR is None else outputs.returns_BR,
        old_log_probs_BR=evaluated.old_log_probs_BR,
        ref_log_probs_BR=evaluated.ref_log_probs_BR if actor.use_kl_loss else None,
        rollout_log_probs_BR=corrected.rollout_log_probs_BR,
        rollout_is_weights_BR=corrected.weights_BR,
        values_BR=evaluated.values_BR,
        score_B=scores.score_B,
        truncated_B=episodes.of_rows(cut_off_E),
        difficulty_B=difficulties(rollouts, actor.sample_weight),
    )
    experience.check()
    return experience


def trainable_rows(rollouts: Rollouts, scores: Scores) -> tuple[Tensor, dict[str, float]]:
    """Which rows to train on (bool [B]), and how many were left out for which reason (an episode's reward once)."""
    kept_B, episodes = trainable_B(rollouts, scores), Episodes.of(rollouts)
    valid_E = episodes.join(scores).valid_B
    num_failed, num_empty = int((~valid_E).sum()), int((episodes.of_rows(valid_E) & ~kept_B).sum())
    if not kept_B.any():
        failure = next((failure for failure in scores.failures if failure is not None), None)
        cause = f"; first failure: {failure.kind} ({failure.data_source}): {failure.message}" if failure else ""
        raise ValueError(
            f"none of the {len(valid_E)} responses can be trained on: {num_failed} without a reward, "
            f"{num_empty} without a sampled token{cause}"
        )
    if num_failed or num_empty:
        logger.warning("left out: %d rows without a reward, %d without a sampled token", num_failed, num_empty)
    return kept_B, {"training/rows_without_reward": float(num_failed), "training/rows_empty": float(num_empty)}


def check_inputs(
    algorithm: AlgorithmConfig, actor: ActorConfig, rollouts: Rollouts, scores: Scores, evaluated: Evaluated
) -> None:
    """Raise ValueError, naming the key, for a missing column or a number that would poison the batch."""
    if not scores.score_B.isfinite().all():
        raise ValueError(
            f"scores of valid rows must be finite, got {scores.score_B[~scores.score_B.isfinite()].tolist()}"
        )
    episodes = Episodes.of(rollouts)
    if not torch.equal(episodes.of_rows(episodes.once(scores.score_B)), scores.score_B):
        raise ValueError("rows of one episode have different scores: each must have the episode's")
    if algorithm.adv_estimator in STEP_ESTIMATORS:
        check_numbering(algorithm.adv_estimator, rollouts)
    if algorithm.use_kl_in_reward and evaluated.old_log_probs_BR is None:
        raise ValueError(
            "algorithm.use_kl_in_reward=True needs old log-probs on the driver: "
            f"set actor_rollout_ref.actor.old_log_probs=recompute (it is {str(actor.old_log_probs)!r})"
        )
    for key, kind, wanted in (
        ("algorithm.use_kl_in_reward", algorithm.kl_penalty, algorithm.use_kl_in_reward),
        ("actor_rollout_ref.actor.use_kl_loss", actor.kl_loss_type, actor.use_kl_loss),
    ):
        if wanted and kind != FULL_KL_KIND and evaluated.ref_log_probs_BR is None:
            raise ValueError(f"{key}=True needs reference log-probs, but none were computed")
    if algorithm.use_kl_in_reward and algorithm.kl_penalty == FULL_KL_KIND and evaluated.full_kl_BR is None:
        raise ValueError("algorithm.kl_penalty=full needs the KL of every token, but none was computed")
    for name in ("old_log_probs_BR", "ref_log_probs_BR", "full_kl_BR", "values_BR"):
        column = evaluated.columns().get(name)
        if isinstance(column, Tensor):
            _require_finite(name, column, rollouts.response_mask_BR)


def _require_finite(name: str, column_BR: Tensor, mask_BR: Tensor) -> None:
    bad_BR = mask_BR & ~column_BR.isfinite()
    if bad_BR.any():
        rows = bad_BR.any(dim=1).nonzero().flatten().tolist()
        raise ValueError(
            f"{name} is NaN or infinite at {int(bad_BR.sum())} sampled tokens (rows {rows[:8]} of the kept ones). "
            "Rollout log-probs used as old ones may lack a token: actor.old_log_probs=recompute avoids that"
        )


def place_on_last_token(score_B: Tensor, mask_BR: Tensor) -> Tensor:
    """Token rewards, float32 [B, R]: the score on the last token that the policy sampled, 0 elsewhere.

    Not simply on the last token of the response: tool text may follow, and credit on it would be lost.
    """
    rewards_BR = torch.zeros(mask_BR.shape, dtype=torch.float32, device=mask_BR.device)
    rows = mask_BR.any(dim=1).nonzero().flatten()
    last = mask_BR.shape[1] - 1 - mask_BR.flip(1).to(torch.uint8).argmax(dim=1)  # the first of equal ones
    rewards_BR[rows, last[rows]] = score_B.float()[rows]
    return rewards_BR


def subtract_kl(
    token_rewards_BR: Tensor, mask_BR: Tensor, evaluated: Evaluated, algorithm: AlgorithmConfig, kl_coef: float
) -> tuple[Tensor, dict[str, float]]:
    """reward_t - kl_coef * KL_t on every sampled token; critic/kl is what the controller is updated with."""
    if algorithm.kl_penalty == FULL_KL_KIND:
        assert evaluated.full_kl_BR is not None
        kl_BR = evaluated.full_kl_BR
    else:
        assert evaluated.old_log_probs_BR is not None and evaluated.ref_log_probs_BR is not None
        kl_BR = kl_penalty(evaluated.old_log_probs_BR, evaluated.ref_log_probs_BR, algorithm.kl_penalty)
    kl_BR = masked_fill_zero(kl_BR, mask_BR)
    metrics = {"critic/kl": mean_sequence_kl(kl_BR, mask_BR), "critic/kl_coeff": kl_coef}
    return token_rewards_BR - kl_coef * kl_BR, metrics


def reward_metrics(score_B: Tensor, inputs: AdvantageInputs) -> dict[str, float]:
    """Per episode: critic/score (as graded), critic/rewards (what the estimator saw); groups without a signal."""
    return {
        **_spread("critic/score", score_B),
        **_spread("critic/rewards", inputs.reward_B()),
        **signal_metrics(score_B, inputs.group_B),
    }


def credit_metrics(inputs: AdvantageInputs, outputs: AdvantageOutputs, advantages_BR: Tensor) -> dict[str, float]:
    """critic/advantages, returns, values over sampled tokens, and how much of the returns the critic explains.

    critic/raw_advantages is there when shaping (whiten_advantages, advantage_clip) made `advantages_BR` others.
    """
    mask_BR = inputs.response_mask_BR
    metrics = {
        **_token_spread("critic/advantages", advantages_BR, mask_BR),
        **_token_spread("critic/returns", outputs.returns_BR, mask_BR),
    }
    if advantages_BR is not outputs.advantages_BR and not torch.equal(advantages_BR, outputs.advantages_BR):
        metrics |= _token_spread("critic/raw_advantages", outputs.advantages_BR, mask_BR)
    if inputs.values_BR is not None:
        residual_BR = outputs.returns_BR - inputs.values_BR
        unexplained = masked_var(residual_BR, mask_BR) / (masked_var(outputs.returns_BR, mask_BR) + 1e-5)
        metrics |= _token_spread("critic/values", inputs.values_BR, mask_BR)
        metrics["critic/vf_explained_var"] = (1 - unexplained).item()
    return metrics


def _spread(name: str, values: Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def _token_spread(name: str, values_BR: Tensor, mask_BR: Tensor) -> dict[str, float]:
    return dict(zip((f"{name}/mean", f"{name}/max", f"{name}/min"), token_spread(values_BR, mask_BR), strict=True))
