"""Credit: from scored rollouts to what an update needs. Pure, on the driver, where the whole batch is.

Order: rows without a reward are dropped -> the response's reward (shaped: reward_shaping.py) goes on the last sampled
token -> KL penalty per token -> token shaping -> advantages, shaped -> metrics -> resampling (PF-PPO). Every statistic
is one of the whole batch; nothing here is computed per mini- or micro-batch.

An episode of several rows is joined to one response first (`batch.Episodes`), so that everything from the reward to the
advantages, an estimator of the user's own included, sees each episode once; its advantages then go back to the rows.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from verl_like.algorithms.advantages import AdvantageInputs, AdvantageOutputs, compute_advantages
from verl_like.algorithms.completeness import complete
from verl_like.algorithms.corrections import DriverCorrection, correct_on_driver
from verl_like.algorithms.groups import signal_metrics
from verl_like.algorithms.kl import FULL_KL_KIND, kl_penalty, mean_sequence_kl
from verl_like.algorithms.masked import masked_fill_zero, masked_var, token_spread
from verl_like.algorithms.preparation import difficulties
from verl_like.algorithms.reward_shaping import (
    pf_ppo_rows,
    reward_components,
    shape_advantages,
    shape_token_rewards,
    trainable_B,
)
from verl_like.algorithms.stepwise import check_numbering
from verl_like.batch import Episodes, Evaluated, Experience, Rollouts, Scores
from verl_like.config import ActorConfig, AlgorithmConfig
from verl_like.config.actor import ReplayMode
from verl_like.flat_columns import last_true, on_rows, row_sums

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
    """Turn a batch of responses into an update's columns (rewards, advantages, corrections), and metrics.

    Rows whose reward failed (valid_B false) or lacks a value (`complete`), and rows in which the policy sampled no
    token, are left out before any statistic, and counted; the rest keeps its order. Tokens that
    algorithm.rollout_correction rejects earn credit like all others, then leave response_mask; rows without a token
    left stay, so that N_seq does not depend on them. Without `evaluated.old_log_probs_T` the update takes its own
    log-probs, detached, as the old ones. Metrics have verl's names.

    Args:
        algorithm: estimator, KL penalty, shaping and corrections.
        actor: options of the policy's update, such as its sample weights.
        rollouts: prompts and responses.
        scores: reward of each row.
        evaluated: log-probs and values of the trainer's models.
        kl_coef: coefficient of the KL penalty before this step's update.
        reward_B: shaped rewards (`shape_rewards`), which take the place of the scores.
        seed: draws the rows of PF-PPO.

    Raises ValueError when no row is left, a score is not finite, or something the configuration needs is missing.
    """
    scores = complete(scores, rollouts.rows, algorithm, actor=actor)
    if reward_B is not None:
        scores = scores.replace(valid_B=scores.valid_B & ~reward_B.isnan())
    kept_B, metrics = trainable_rows(rollouts, scores)
    reward_B = (scores.score_B if reward_B is None else reward_B)[kept_B]
    rollouts, scores, evaluated = rollouts.select(kept_B), scores.select(kept_B), evaluated.select(kept_B)
    check_inputs(algorithm, actor, rollouts, scores, evaluated)
    corrected = correct_on_driver(algorithm.rollout_correction, actor, rollouts, evaluated)
    episodes = Episodes.of(rollouts)
    whole, graded, known = episodes.join(rollouts), episodes.join(scores), episodes.join(evaluated)
    mask_T = whole.response_mask_T
    token_rewards_T = place_on_last_token(episodes.once(reward_B), mask_T, whole.response_length_B)
    if whole.step_rewards_T is not None:
        token_rewards_T = token_rewards_T + masked_fill_zero(whole.step_rewards_T, mask_T)
    if algorithm.use_kl_in_reward:
        token_rewards_T, kl_metrics = subtract_kl(token_rewards_T, mask_T, known, algorithm, kl_coef)
        metrics |= kl_metrics
    token_rewards_T, shaping_metrics = shape_token_rewards(algorithm, token_rewards_T, mask_T)
    inputs = AdvantageInputs(
        token_rewards_T=token_rewards_T,
        response_mask_T=mask_T,
        response_length_B=whole.response_length_B,
        group_B=whole.group_B,
        values_T=known.values_T,
        old_log_probs_T=known.old_log_probs_T,
        components=reward_components(algorithm, graded),
        step_T=whole.step_T,
        anchor_T=whole.anchor_T,
        sum_pi_squared_T=known.sum_pi_squared_T,
        importance_weights_T=episodes.join_tokens(corrected.weights_T),
        baseline_B=graded.baseline_B,
    )
    outputs = compute_advantages(inputs, algorithm)
    advantages_T, advantage_metrics = shape_advantages(algorithm, outputs.advantages_T, mask_T)
    metrics |= corrected.metrics | shaping_metrics | advantage_metrics | outputs.metrics
    # Per episode: the score as graded, what the estimator saw, groups without a signal
    metrics |= _spread("critic/score", graded.score_B) | _spread("critic/rewards", inputs.reward_B())
    metrics |= signal_metrics(graded.score_B, inputs.group_B) | credit_metrics(inputs, outputs, advantages_T)
    if known.entropy_T is not None:
        metrics["actor/entropy"] = token_spread(known.entropy_T, mask_T)[0]
    credit = (episodes.cut(advantages_T), episodes.cut(outputs.returns_T))
    experience = put_together(actor, rollouts, scores, evaluated, corrected, *credit)
    experience = experience.replace(rewards_T=episodes.cut(token_rewards_T))
    if algorithm.use_pf_ppo:
        drawn_E, resampling_metrics = pf_ppo_rows(graded.score_B, algorithm.pf_ppo, seed)
        experience, metrics = drawn_episodes(experience, drawn_E), metrics | resampling_metrics
    return experience, metrics


def drawn_episodes(experience: Experience, drawn_E: Tensor) -> Experience:
    """Collect all rows of the episodes at these positions; an episode that was drawn twice counts as two."""
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
    advantages_T: Tensor,
    returns_T: Tensor,
) -> Experience:
    """Assemble the columns of an update; tokens that are not trained on have advantage 0 and are not in the mask."""
    trained_T = corrected.mask_T
    if scores.trained_B is not None and not scores.trained_B.all():
        trained_T = trained_T & on_rows(scores.trained_B, rollouts.response_length_B)
    episodes = Episodes.of(rollouts)
    experience = Experience(
        prompt_ids_T=rollouts.prompt_ids_T,
        prompt_length_B=rollouts.prompt_length_B,
        response_ids_T=rollouts.response_ids_T,
        response_length_B=rollouts.response_length_B,
        response_mask_T=trained_T,
        media=rollouts.media,
        group_B=rollouts.group_B,
        episode_B=rollouts.episode_B,
        advantages_T=masked_fill_zero(advantages_T, trained_T),
        returns_T=None if evaluated.values_T is None else returns_T,
        old_log_probs_T=evaluated.old_log_probs_T,
        ref_log_probs_T=evaluated.ref_log_probs_T if actor.use_kl_loss else None,
        rollout_log_probs_T=corrected.rollout_log_probs_T,
        rollout_is_weights_T=corrected.weights_T,
        values_T=evaluated.values_T,
        teacher_B=evaluated.teacher_B,
        teacher_log_probs_T=evaluated.teacher_log_probs_T,
        teacher_ids_T=evaluated.teacher_ids_T,
        score_B=scores.score_B,
        truncated_B=episodes.of_rows(episodes.join(rollouts).cut_off_B),
        difficulty_B=difficulties(rollouts, actor.sample_weight),
    )
    experience = experience.with_routes(_routes(actor, rollouts, evaluated))
    experience.check()
    return experience


def _routes(actor: ActorConfig, rollouts: Rollouts, evaluated: Evaluated) -> Rollouts | Evaluated:
    """Choose where the routes that the update replays, or compares with its own, are. ValueError: they are lacking."""
    mode = actor.router_replay.mode
    source = evaluated if mode == ReplayMode.R2 else rollouts
    if mode != ReplayMode.disabled and source.routes_T is None:
        raise ValueError(
            f"actor_rollout_ref.actor.router_replay.mode={mode}: this batch has no routes (recorded steps have them "
            "where rollout.enable_rollout_routing_replay=True was set when they were sampled)"
        )
    return source


def trainable_rows(rollouts: Rollouts, scores: Scores) -> tuple[Tensor, dict[str, float]]:
    """Select the rows to train on (bool [B]), and count those left out by reason (an episode's reward once).

    Raises ValueError, with the first failure, when no row is left.
    """
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
    if algorithm.estimator.turns:
        check_numbering(algorithm.adv_estimator, rollouts)
    if algorithm.use_kl_in_reward and evaluated.old_log_probs_T is None:
        raise ValueError(
            "algorithm.use_kl_in_reward=True needs old log-probs on the driver: "
            f"set actor_rollout_ref.actor.old_log_probs=recompute (it is {str(actor.old_log_probs)!r})"
        )
    for key, kind, wanted in (
        ("algorithm.use_kl_in_reward", algorithm.kl_penalty, algorithm.use_kl_in_reward),
        ("actor_rollout_ref.actor.use_kl_loss", actor.kl_loss_type, actor.use_kl_loss),
    ):
        if wanted and kind != FULL_KL_KIND and evaluated.ref_log_probs_T is None:
            raise ValueError(f"{key}=True needs reference log-probs, but none were computed")
    if algorithm.use_kl_in_reward and algorithm.kl_penalty == FULL_KL_KIND and evaluated.full_kl_T is None:
        raise ValueError("algorithm.kl_penalty=full needs the KL of every token, but none was computed")
    for name in ("old_log_probs_T", "ref_log_probs_T", "full_kl_T", "values_T", "teacher_log_probs_T"):
        column_T = getattr(evaluated, name)
        if column_T is not None:
            _require_finite(name.removesuffix("_T"), column_T, rollouts)


def _require_finite(name: str, column_T: Tensor, rollouts: Rollouts) -> None:
    if column_T.sum().isfinite():  # without a token that is not; three times as fast as to look at each
        return
    bad_T = rollouts.response_mask_T & ~column_T.isfinite().view(len(column_T), -1).all(1)
    if bad_T.any():
        rows = row_sums(bad_T, rollouts.response_length_B).nonzero().flatten().tolist()
        raise ValueError(
            f"{name} is NaN or infinite at {int(bad_T.sum())} sampled tokens (rows {rows[:8]} of the kept ones). "
            "Rollout log-probs used as old ones may lack a token: actor.old_log_probs=recompute avoids that"
        )


def place_on_last_token(score_B: Tensor, mask_T: Tensor, length_B: Tensor) -> Tensor:
    """Token rewards, float32 [T]: the score on the last token of each row that the policy sampled, 0 elsewhere.

    Not simply on the last token of the response: tool text may follow, and credit on it would be lost.
    """
    rewards_T = torch.zeros(mask_T.shape, dtype=torch.float32, device=mask_T.device)
    last_B = last_true(mask_T, length_B)
    rewards_T[last_B[last_B >= 0]] = score_B.float()[last_B >= 0]
    return rewards_T


def subtract_kl(
    token_rewards_T: Tensor, mask_T: Tensor, evaluated: Evaluated, algorithm: AlgorithmConfig, kl_coef: float
) -> tuple[Tensor, dict[str, float]]:
    """reward_t - kl_coef * KL_t on every sampled token; critic/kl is what the controller is updated with."""
    if algorithm.kl_penalty == FULL_KL_KIND:
        assert evaluated.full_kl_T is not None
        kl_T = evaluated.full_kl_T
    else:
        assert evaluated.old_log_probs_T is not None and evaluated.ref_log_probs_T is not None
        kl_T = kl_penalty(evaluated.old_log_probs_T, evaluated.ref_log_probs_T, algorithm.kl_penalty)
    kl_T = masked_fill_zero(kl_T, mask_T)
    metrics = {"critic/kl": mean_sequence_kl(kl_T, mask_T, evaluated.response_length_B), "critic/kl_coeff": kl_coef}
    return token_rewards_T - kl_coef * kl_T, metrics


def credit_metrics(inputs: AdvantageInputs, outputs: AdvantageOutputs, advantages_T: Tensor) -> dict[str, float]:
    """critic/advantages, returns, values over sampled tokens, and how much of the returns the critic explains.

    critic/raw_advantages is there when shaping (whiten_advantages, advantage_clip) made `advantages_T` others.
    """
    mask_T, returns_T = inputs.response_mask_T, outputs.returns_T
    metrics = _token_spread("critic/advantages", advantages_T, mask_T)
    shaped = not torch.equal(advantages_T, outputs.advantages_T)
    if returns_T is outputs.advantages_T and not shaped:
        metrics |= {name.replace("advantages", "returns"): value for name, value in metrics.items()}
    else:
        metrics |= _token_spread("critic/returns", returns_T, mask_T)
    if shaped:
        metrics |= _token_spread("critic/raw_advantages", outputs.advantages_T, mask_T)
    if inputs.values_T is not None:
        unexplained = masked_var(returns_T - inputs.values_T, mask_T) / (masked_var(returns_T, mask_T) + 1e-5)
        metrics |= _token_spread("critic/values", inputs.values_T, mask_T)
        metrics["critic/vf_explained_var"] = (1 - unexplained).item()
    return metrics


def _spread(name: str, values: Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def _token_spread(name: str, values_T: Tensor, mask_T: Tensor) -> dict[str, float]:
    return dict(zip((f"{name}/mean", f"{name}/max", f"{name}/min"), token_spread(values_T, mask_T), strict=True))
