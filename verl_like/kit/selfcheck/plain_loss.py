"""The objectives of actor and critic written down once more, for one row at a time: the yardstick of the check.

Nothing here uses verl_like/algorithms, but for a loss of the user's own (`shared_loss`) and the tokens that clip_cov
and kl_cov select. Masks, denominators, weights, joining and all other terms are counted here; the loss of a token is in
plain_modes.py.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from verl_like.algorithms.kl import FULL_KL_KIND
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.algorithms.policy_losses import POLICY_LOSSES, PolicyBatch
from verl_like.config import PPOConfig
from verl_like.config.batch_plan import two_policies
from verl_like.config.correction import corrects
from verl_like.kit.selfcheck import plain_correction
from verl_like.kit.selfcheck.material import Material, OldLogProbs
from verl_like.kit.selfcheck.plain_modes import joined_by, mode_loss


@dataclass(slots=True, kw_only=True)
class Joining:
    """Aggregation of losses per token to one number: loss_agg_mode with the mini-batch's own counts."""

    num_tokens: int
    num_episodes: int
    constant: float  # of seq-mean-token-sum-norm

    def row(self, loss_R: Tensor, row: PlainRow, mode: str) -> Tensor:
        """One row's part of the loss."""
        divisor = {
            "token-mean": self.num_tokens,
            "token-sum": 1,
            "seq-mean-token-sum": self.num_episodes,
            "seq-mean-token-mean": self.num_episodes * max(row.episode_tokens, 1),
            "seq-mean-token-sum-norm": self.num_episodes * self.constant,
        }[mode]
        return loss_R[row.mask_R].sum() / max(divisor, 1)


@dataclass(slots=True, kw_only=True)
class PlainRow:
    """One row of the mini-batch; tensors [R] without padding."""

    number: int  # in the material
    episode: int
    mask_R: Tensor  # bool: tokens to train on
    weight_R: Tensor | None = None  # constants on the policy loss
    episode_tokens: int = 0  # to train on, in all rows of the episode
    sample_weight: float = 1.0
    selected_R: Tensor | None = None


@dataclass(kw_only=True)
class PlainPolicyLoss:
    """Policy objective: rl_loss_coef * (policy loss + KL) - entropy bonus + imitation, as sums over rows."""

    config: PPOConfig
    material: Material
    old: OldLogProbs
    rows: list[PlainRow] = field(init=False)
    joining: Joining = field(init=False)
    terms: dict[str, float] = field(init=False, default_factory=dict)  # of the rows so far, by the metric's name

    def __post_init__(self) -> None:
        rollouts, scores, actor = self.material.rollouts, self.material.scores, self.config.actor_rollout_ref.actor
        assert rollouts.episode_B is not None
        rows = [
            PlainRow(number=row, episode=episode, mask_R=self.cut(rollouts.response_mask_BR, row))
            for row, episode in enumerate(rollouts.episode_B.tolist())
        ]
        if self.old == "given" and corrects(self.config.algorithm.rollout_correction):
            self.correct(rows)
        for row in rows:
            row.mask_R = row.mask_R & bool(scores.trained_B is None or scores.trained_B[row.number])
        if actor.mask_truncated:  # by how the episode ended, in the last of its rows
            ends = {row.episode: rollouts.finish_reasons[row.number] for row in rows}
            rows = [row for row in rows if ends[row.episode] != "length"]
        for row in rows:
            row.episode_tokens = sum(int(part.mask_R.sum()) for part in rows if part.episode == row.episode)
        self.rows = self.weighted(rows)
        self.count()

    def count(self) -> None:
        """Count the denominators of this mini-batch."""
        tokens, episodes = sum(int(row.mask_R.sum()) for row in self.rows), {row.episode for row in self.rows}
        constant = self.config.actor_rollout_ref.actor.loss_scale_factor or float(self.config.data.max_response_length)
        self.joining = Joining(num_tokens=tokens, num_episodes=len(episodes), constant=constant)

    def of(self, numbers: Sequence[int]) -> Self:
        """The loss of one mini-batch: some rows of the batch, with counts and weights of their own."""
        part = copy.copy(self)
        part.terms = {}
        by_number = {row.number: row for row in self.rows}
        part.rows = [by_number[number] for number in numbers if number in by_number]
        if self.config.actor_rollout_ref.actor.sample_weight.scope == "mini_batch":
            for row in part.rows:
                row.sample_weight = 1.0
            part.rows = part.weighted(part.rows)
        part.count()
        return part

    def cut(self, column_BR: Tensor, row: int) -> Tensor:
        """A row of a column, without padding."""
        return column_BR[row, : int(self.material.rollouts.response_length_B[row])]

    def correct(self, rows: list[PlainRow]) -> None:
        """Weights and rejections by the log-probs from before the update. Rows without a token left stay rows."""
        rule, found, known = self.config.algorithm.rollout_correction, [], []
        for row in rows:
            log_p, log_q, mask = (
                self.numbers(self.material.old_log_probs_BR, row),
                self.sampler(row),
                row.mask_R.tolist(),
            )
            row.mask_R = torch.tensor(plain_correction.kept_tokens(log_p, log_q, mask, rule))
            if rule.rollout_is is not None:
                found.append(plain_correction.weights(log_p, log_q, mask, rule))
                known.append([inside and math.isfinite(q) for inside, q in zip(mask, log_q, strict=True)])
        if found:
            tokens = [int(self.cut(self.material.rollouts.response_mask_BR, row.number).sum()) for row in rows]
            whole = [sum(n for n, part in zip(tokens, rows, strict=True) if part.episode == r.episode) for r in rows]
            shares = [n / max(total, 1) for n, total in zip(tokens, whole, strict=True)]
            mean = plain_correction.mean_weight(found, known, shares, by_token=rule.rollout_is == "token")
            for row, weights in zip(rows, found, strict=True):
                row.weight_R = torch.tensor(weights) / (mean if rule.rollout_is_batch_normalize else 1.0)

    def weighted(self, rows: list[PlainRow]) -> list[PlainRow]:
        """Weight the rows by actor.sample_weight, of mean 1 over the episodes."""
        options, rollouts = self.config.actor_rollout_ref.actor.sample_weight, self.material.rollouts
        lengths: dict[int, int] = {}
        for row in rows:
            lengths[row.episode] = lengths.get(row.episode, 0) + int(rollouts.response_length_B[row.number])
        shortest, longest = min(lengths.values(), default=0), max(lengths.values(), default=0)
        for row in rows:
            if options.difficulty:
                hard = float(rollouts.rows[row.number].extra_info[options.difficulty_key])
                row.sample_weight *= 0.5 + 1.5 * min(max(hard, 0.0), 1.0)
            if options.length:
                row.sample_weight *= 1.5 - (lengths[row.episode] - shortest) / max(longest - shortest, 1e-8)
        total = sum({row.episode: row.sample_weight for row in rows}.values())
        for row in rows:
            row.sample_weight *= len(lengths) / total
        return rows

    def selecting(self, selected_BR: Tensor | None) -> PlainPolicyLoss:
        """Take over the driver's choice of tokens (clip_cov, kl_cov), whose rows are these in the same order."""
        if selected_BR is not None:
            for row, selected_R in zip(self.rows, selected_BR, strict=True):
                row.selected_R = selected_R[: len(row.mask_R)]
        return self

    def add(self, name: str, part: Tensor) -> None:
        """Count a row's part of a term."""
        self.terms[name] = self.terms.get(name, 0.0) + part.item()

    def numbers(self, column_BR: Tensor, row: PlainRow) -> list[float]:
        return self.cut(column_BR, row.number).double().tolist()

    def sampler(self, row: PlainRow) -> list[float]:
        assert self.material.rollouts.rollout_log_probs_BR is not None
        return self.numbers(self.material.rollouts.rollout_log_probs_BR, row)

    def __call__(
        self, row: PlainRow, log_probs_R: Tensor, entropy_R: Tensor | None, full_kl_R: Tensor | None
    ) -> Tensor:
        """The row's part of the mini-batch's loss; the answers with a graph, under logits / temperature."""
        actor, material, mask_R = self.config.actor_rollout_ref.actor, self.material, row.mask_R
        old_R = log_probs_R.detach()
        if self.old != "own":
            column_BR = material.old_log_probs_BR if self.old == "given" else material.rollouts.rollout_log_probs_BR
            assert column_BR is not None
            old_R = self.cut(column_BR, row.number)
        ratio_R = (log_probs_R - old_R).clamp(-20, 20).exp()
        mean_ratio, skipped_above = float(ratio_R.detach()[mask_R].mean()), actor.ratio_skip_threshold
        if skipped_above is not None and mean_ratio > skipped_above:  # false for a row without tokens (NaN)
            return log_probs_R.sum() * 0.0
        mode = actor.loss_agg_mode or "token-mean"
        loss_R, joined = self.token_loss(row, log_probs_R, old_R)
        weight_R = self.update_weights(row, log_probs_R)
        if weight_R is not None:
            loss_R = loss_R * weight_R
        loss = self.joining.row(loss_R * row.sample_weight, row, joined)
        self.add("pg_loss", loss)
        if actor.use_kl_loss:
            kl_R = full_kl_R
            if kl_R is None or actor.kl_loss_type != FULL_KL_KIND:
                kl_R = kl_term(log_probs_R - self.cut(material.ref_log_probs_BR, row.number), str(actor.kl_loss_type))
            kl_R = kl_R * ratio_R if actor.use_unbiased_kl else kl_R
            kl = self.joining.row(kl_R, row, mode)
            self.add("kl_loss", kl)
            loss = loss + actor.kl_loss_coef * kl
        loss = actor.rl_loss_coef * loss
        if entropy_R is not None:
            loss = loss - actor.entropy_coeff * self.joining.row(entropy_R, row, mode)
        if actor.sft_loss_coef and float(material.scores.score_B[row.number]) > 0:
            loss = loss + actor.sft_loss_coef * self.joining.row(-log_probs_R, row, mode)
        return loss

    def token_loss(self, row: PlainRow, log_probs_R: Tensor, old_R: Tensor) -> tuple[Tensor, str]:
        """Loss of each token, and the mode that joins it."""
        actor = self.config.actor_rollout_ref.actor
        advantages_R = self.cut(self.material.advantages_BR, row.number)
        mode = actor.loss_agg_mode or "token-mean"
        if self.reinforces():
            return -advantages_R * log_probs_R, mode
        score = float(self.material.scores.score_B[row.number])
        found_R = mode_loss(actor, log_probs_R, old_R, advantages_R, row.mask_R, row.selected_R, score)
        if found_R is None:
            return self.shared_loss(row, log_probs_R, old_R, advantages_R)
        return found_R.expand_as(log_probs_R), joined_by(actor)

    def shared_loss(self, row: PlainRow, log_probs_R: Tensor, old_R: Tensor, gain_R: Tensor) -> tuple[Tensor, str]:
        """A loss of the user's own itself, on one row: not independent, and the table says so."""
        actor, names = self.config.actor_rollout_ref.actor, ("log_probs_BR", "old_log_probs_BR", "advantages_BR")
        columns = {name: each[None] for name, each in zip(names, (log_probs_R, old_R, gain_R), strict=True)}
        score_B = self.material.scores.score_B[row.number][None]
        batch = PolicyBatch(**columns, mask_BR=row.mask_R[None], score_B=score_B)
        loss_BR = POLICY_LOSSES.lookup(actor.policy_loss.loss_mode).function(batch, actor).loss_BR
        return loss_BR[0], PolicyObjective(actor).aggregation

    def reinforces(self) -> bool:
        """Bypass mode with loss_type=reinforce: -A * log_prob instead of the policy loss."""
        return self.two_policies() and self.config.algorithm.rollout_correction.loss_type == "reinforce"

    def two_policies(self) -> bool:
        """Bypass mode, or the sampler's log-probs as old ones by choice."""
        return two_policies(self.config.actor_rollout_ref.actor, self.config.algorithm.rollout_correction)

    def update_weights(self, row: PlainRow, log_probs_R: Tensor) -> Tensor | None:
        """Constants on the row's policy loss: from before the update, or by its own log-probs.

        In the update a rejected token has weight 0 and keeps its place in the denominators. With two policies PPO's
        ratio corrects already: only reinforce is weighted.
        """
        rule = self.config.algorithm.rollout_correction
        if self.old == "given" or not corrects(rule):
            return None if row.weight_R is None else self.joined_weight(row.weight_R, row.mask_R)
        log_p, log_q, mask = log_probs_R.detach().double().tolist(), self.sampler(row), row.mask_R.tolist()
        kept_R = torch.tensor(plain_correction.kept_tokens(log_p, log_q, mask, rule))
        if rule.rollout_is is None or (self.two_policies() and not self.reinforces()):
            return kept_R.float()
        weight_R = torch.tensor(plain_correction.weights(log_p, log_q, mask, rule))
        return kept_R * self.joined_weight(weight_R, kept_R)

    def joined_weight(self, weight_R: Tensor, kept_R: Tensor) -> Tensor:
        """Join a row's weights, each at least 1e-10, by their geometric mean: geo_mean's loss is one of the row."""
        if self.config.actor_rollout_ref.actor.policy_loss.loss_mode != "geo_mean" or self.reinforces():
            return weight_R
        logs_R = weight_R[kept_R].clamp(min=1e-10).log()
        return torch.full_like(weight_R, float(logs_R.mean().exp()) if len(logs_R) else 1.0)


def kl_term(difference_R: Tensor, kind: str) -> Tensor:
    """Estimate of the KL divergence per token from log_prob - ref_log_prob."""
    name = kind.removesuffix("+")
    if name in ("kl", "k1"):
        value_R = difference_R
    elif name == "abs":
        value_R = difference_R.abs()
    elif name in ("mse", "k2"):
        value_R = difference_R**2 / 2
    else:
        bounded_R = difference_R.clamp(-20, 20)
        value_R = ((-bounded_R).exp() + bounded_R - 1).clamp(-10, 10)
    if not kind.endswith("+"):
        return value_R
    slope_R = difference_R**2 / 2
    return value_R.detach() + slope_R - slope_R.detach()


class PlainValueLoss(PlainPolicyLoss):
    """The critic's clipped squared error on the same rows; none is left out for its length."""

    def __post_init__(self) -> None:
        self.config = without_length_rule(self.config)
        super().__post_init__()

    def value_loss(self, row: PlainRow, values_R: Tensor) -> Tensor:
        """The row's part of the mini-batch's loss."""
        critic, material = self.config.critic, self.material
        old_R, returns_R = (self.cut(column, row.number) for column in (material.values_BR, material.returns_BR))
        bounded_R = old_R + (values_R - old_R).clip(-critic.cliprange_value, critic.cliprange_value)
        loss_R = torch.maximum((values_R - returns_R) ** 2, (bounded_R - returns_R) ** 2) / 2
        joining = dataclasses.replace(self.joining, constant=float(self.config.data.max_response_length))
        loss = joining.row(loss_R, row, critic.loss_agg_mode or "token-mean")
        self.add("vf_loss", loss)
        return loss


def without_length_rule(config: PPOConfig) -> PPOConfig:
    """Copy the configuration without actor.mask_truncated, which does not concern the critic."""
    policy = config.actor_rollout_ref
    actor = dataclasses.replace(policy.actor, mask_truncated=False)
    return dataclasses.replace(config, actor_rollout_ref=dataclasses.replace(policy, actor=actor))
