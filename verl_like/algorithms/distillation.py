"""Losses of distillation: the distance of the policy from a row's teacher at each sampled token.

distillation.distillation_loss.loss_mode chooses the distance d_t: an estimate by the sampled token (kl.py), the forward
KL over the teacher's likeliest tokens, or a divergence over the whole vocabulary, which the engine sums. It is the loss
itself (GKD, arXiv 2306.13649), or -d_t is the advantage of the sampled token in a policy loss (use_policy_gradient;
thinkingmachines.ai/blog/on-policy-distillation). Formulas and order of clamps are verl's (trainer/distillation).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from verl_like.algorithms.kl import kl_penalty
from verl_like.algorithms.masked import masked_fill_zero
from verl_like.algorithms.policy_losses import POLICY_LOSSES, PolicyBatch, TokenLoss
from verl_like.batch import Experience
from verl_like.config import ActorConfig
from verl_like.config.distillation import FULL, TOP_K, DistillationLossConfig

CHOSEN = "chosen_log_probs"
_DUAL_CLIP = 3.0  # verl's, whatever the actor's is
Taught = tuple[TokenLoss, dict[str, Tensor]]
_LEAST_TAIL = 1e-6  # probability: under it float32 sums of the others are rounding


class Distillation:
    """Distance from the teachers as a loss of each token. Raises ValueError on an unknown policy loss."""

    def __init__(self, actor: ActorConfig, loss: DistillationLossConfig) -> None:
        self.loss = loss
        mode = loss.loss_mode
        self.wants = frozenset({CHOSEN} if mode == TOP_K else {FULL[mode]} if mode in FULL else ())
        self.policy_loss = POLICY_LOSSES.lookup(loss.policy_loss_mode)
        self.coefficient = loss.distillation_loss_coef if loss.use_task_rewards else 1.0
        self._actor = dataclasses.replace(
            actor,
            clip_ratio=loss.clip_ratio,
            clip_ratio_low=loss.clip_ratio_low,
            clip_ratio_high=loss.clip_ratio_high,
            clip_ratio_c=_DUAL_CLIP,
            policy_loss=dataclasses.replace(actor.policy_loss, loss_mode=loss.policy_loss_mode),
        )

    def __call__(self, outputs: dict[str, Tensor], batch: PolicyBatch, experience: Experience) -> Taught:
        """Compute the loss of each token of a micro-batch, what is shown as a mean over tokens, and what as extremes.

        Args:
            outputs: the engine's, of `wants`.
            batch: log-probs of the sampled tokens; its advantages are not read.
            experience: the teachers' columns.
        """
        distance_BR, means, extremes = self._distance(outputs, batch, experience)
        distance_BR = masked_fill_zero(distance_BR, batch.mask_BR)
        extremes["loss"] = distance_BR.detach()
        means["abs_loss"] = distance_BR.detach().abs()
        if self.loss.loss_max_clamp is not None:
            distance_BR = distance_BR.clamp(-self.loss.loss_max_clamp, self.loss.loss_max_clamp)
        if not self.loss.use_policy_gradient:
            return TokenLoss(loss_BR=distance_BR, metrics_BR=means), extremes
        drawn = dataclasses.replace(batch, advantages_BR=-distance_BR.detach())
        token_loss = self.policy_loss.function(drawn, self._actor)
        return dataclasses.replace(token_loss, metrics_BR=means | token_loss.metrics_BR), extremes

    def _distance(
        self, outputs: dict[str, Tensor], batch: PolicyBatch, experience: Experience
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        mode = self.loss.loss_mode
        if mode in FULL:
            return outputs[FULL[mode]], {}, {}
        teacher = experience.teacher_log_probs_BR
        if teacher is None:
            raise ValueError("distillation needs the teachers' log-probs, but the batch has none")
        if mode == TOP_K:
            return forward_kl_topk(outputs[CHOSEN], teacher, self.loss)
        student_BR = masked_fill_zero(batch.log_probs_BR, batch.mask_BR)
        return kl_penalty(student_BR, masked_fill_zero(teacher, batch.mask_BR), mode), {}, {}


def forward_kl_topk(
    student_BRK: Tensor, teacher_BRK: Tensor, loss: DistillationLossConfig
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Sum over the teacher's likeliest tokens of p (log p - log q), with p the teacher's; not below 0.

    With add_tail the probability of all other tokens is one more outcome: then it is a KL divergence, and a lower bound
    of that over the whole vocabulary. Returns it with the masses of both models and the tail's term, to be shown.

    Args:
        student_BRK: log-probs of the policy at the teacher's K likeliest ids, with a graph.
        teacher_BRK: the teacher's own.
        loss: clamp and tail.
    """
    student_mass_BR, teacher_mass_BR = student_BRK.exp().sum(-1), teacher_BRK.exp().sum(-1)
    tails = [(1.0 - mass_BR).clamp(min=_LEAST_TAIL) for mass_BR in (student_mass_BR, teacher_mass_BR)]
    tail_kl_BR = tails[1] * (tails[1].log() - tails[0].log())
    if loss.log_prob_min_clamp is not None:
        student_BRK, teacher_BRK = (each.clamp(min=loss.log_prob_min_clamp) for each in (student_BRK, teacher_BRK))
    kl_BR = (teacher_BRK.exp() * (teacher_BRK - student_BRK)).sum(-1)
    masses = {"student_mass": student_mass_BR.detach(), "teacher_mass": teacher_mass_BR}
    kl_BR = kl_BR + tail_kl_BR if loss.add_tail else kl_BR
    return torch.clamp(kl_BR, min=0.0), {**masses, "tail_kl": tail_kl_BR.detach()}, masses
