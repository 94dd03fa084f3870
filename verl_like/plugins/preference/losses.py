"""Preference losses, as functions of what a model says of all answers of a batch. Pure; on the driver.

DPO arXiv 2305.18290, conservative DPO (label smoothing) 2306.02561, offset (margin) 2402.10571, IPO 2310.12036 with
log-probs by token as its authors confirmed to TRL, KTO 2402.01306, ORPO 2403.07691, SimPO 2405.14734, reward models
2204.05862 with the margin of Llama 2 (2307.09288). Letters: I items of S answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl_like.config.preference import PreferenceConfig
from verl_like.flat_columns import on_rows
from verl_like.plugins.preference.pairs import Pairs

_CERTAIN = 1e-9  # -log p that float32 rounds to 0; the odds of certainty are infinite, and their slope is no number


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Statements of a model, and of the reference, on the answers: float64, log-probs summed over an answer's tokens.

    A reward model gives `policy_IS` its rewards. imitated_I2: of the good answers, with their prompts where these are
    measured too, the log-prob and the number of tokens.
    """

    policy_IS: Tensor
    reference_IS: Tensor
    length_IS: Tensor  # tokens of the answers
    good_IS: Tensor  # bool
    unrelated_IS: Tensor  # bool
    margin_I: Tensor
    imitated_I2: Tensor

    @classmethod
    def of(cls, pairs: Pairs, values_T: Tensor) -> Measured:
        """Add up the values of each answer's tokens. Differentiable."""
        num_items, num_slots = int(pairs.item_B.max()) + 1, int(pairs.slot_B.max()) + 1
        where_B = pairs.item_B * num_slots + pairs.slot_B
        zeros = torch.zeros(num_items * num_slots, dtype=torch.float64)
        where_T, mask_T = on_rows(where_B, pairs.response_length_B), pairs.answer_mask_T.double()

        def sums(values: Tensor, where: Tensor) -> Tensor:
            return zeros.index_add(0, where, values).view(num_items, num_slots)

        margin_I = torch.zeros(num_items, dtype=torch.float64)
        good_T = (pairs.response_mask_T & on_rows(pairs.good_B, pairs.response_length_B)).double()
        return cls(
            policy_IS=sums(values_T.double() * mask_T, where_T),
            reference_IS=sums(pairs.reference_B, where_B),
            length_IS=sums(mask_T, where_T),
            good_IS=sums(pairs.good_B.double(), where_B) > 0,
            unrelated_IS=sums(pairs.unrelated_B.double(), where_B) > 0,
            margin_I=margin_I.index_copy(0, pairs.item_B, pairs.margin_B),
            imitated_I2=torch.stack([sums(each, where_T).sum(1) for each in (values_T.double() * good_T, good_T)], 1),
        )

    @classmethod
    def joined(cls, parts: Sequence[Measured]) -> Measured:
        """Put the items of several batches one behind the other."""
        return cls(**{each.name: torch.cat([getattr(part, each.name) for part in parts]) for each in fields(cls)})

    def of_items(self, chosen_I: Tensor) -> Measured:
        """Keep some items."""
        return Measured(**{each.name: getattr(self, each.name)[chosen_I] for each in fields(self)})

    @property
    def ratio_IS(self) -> Tensor:
        """Logarithm of the policy's probability over the reference's."""
        return self.policy_IS - self.reference_IS

    @property
    def mean_IS(self) -> Tensor:
        """Mean log-prob of an answer's token."""
        return self.policy_IS / self.length_IS


Found = tuple[Tensor, Tensor]  # the loss, and the reward of each answer [I, S], for metrics


def _smoothed(logit_I: Tensor, share: float) -> Tensor:
    return -(1 - share) * logsigmoid(logit_I) - share * logsigmoid(-logit_I)


def _gap(values_IS: Tensor) -> Tensor:
    return values_IS[:, 0] - values_IS[:, 1]


def _dpo(config: PreferenceConfig, m: Measured) -> Found:
    reward_IS = config.beta * m.ratio_IS
    return _smoothed(_gap(reward_IS) - config.margin - m.margin_I, config.label_smoothing).mean(), reward_IS


def _ipo(config: PreferenceConfig, m: Measured) -> Found:
    gap_I = _gap(m.ratio_IS / m.length_IS)
    return (gap_I - 1 / (2 * config.beta)).square().mean(), config.beta * m.ratio_IS


def _simpo(config: PreferenceConfig, m: Measured) -> Found:
    reward_IS = config.beta * m.mean_IS
    return _smoothed(_gap(reward_IS) - config.margin - m.margin_I, config.label_smoothing).mean(), reward_IS


def _orpo(config: PreferenceConfig, m: Measured) -> Found:
    mean_IS = m.mean_IS.clamp(max=-_CERTAIN)
    log_odds_IS = mean_IS - torch.log(-torch.expm1(mean_IS))
    return -config.beta * logsigmoid(_gap(log_odds_IS)).mean(), config.beta * m.mean_IS


def _kto(config: PreferenceConfig, m: Measured) -> Found:
    kl, ratio_IS = distance(m), m.ratio_IS
    sign_IS = torch.where(m.good_IS, 1.0, -1.0)
    weight_IS = torch.where(m.good_IS, config.desirable_weight, config.undesirable_weight)
    loss_IS = weight_IS * (1 - torch.sigmoid(config.beta * sign_IS * (ratio_IS - kl)))
    return loss_IS[~m.unrelated_IS].mean(), config.beta * ratio_IS


def _reward(config: PreferenceConfig, m: Measured) -> Found:
    loss = -logsigmoid(_gap(m.policy_IS) - config.margin - m.margin_I).mean()
    return loss + config.center_coef * m.policy_IS.sum(1).square().mean(), m.policy_IS


def distance(m: Measured) -> Tensor:
    """KTO's reference point: the KL to the reference over the batch, by answers of other prompts; a constant."""
    return m.ratio_IS[m.unrelated_IS].mean().clamp(min=0).detach()


LOSSES: dict[str, Callable[[PreferenceConfig, Measured], Found]] = {
    "dpo": _dpo,
    "ipo": _ipo,
    "kto": _kto,
    "orpo": _orpo,
    "simpo": _simpo,
    "reward": _reward,
}


def referenced(config: PreferenceConfig) -> bool:
    """Return True where the loss compares the policy with what it began as."""
    return config.loss in ("dpo", "ipo", "kto") and not config.reference_free


def imitation(config: PreferenceConfig) -> tuple[float, bool]:
    """Weight of the good answers' own loss, and whether it counts their prompts."""
    orpo = config.loss == "orpo"
    coef = float(orpo) if config.sft_loss_coef is None else config.sft_loss_coef
    prompt = orpo if config.sft_prompt is None else config.sft_prompt
    return (coef, prompt) if coef and config.loss not in ("kto", "reward") else (0.0, False)


def loss_of(config: PreferenceConfig, m: Measured) -> tuple[Tensor, dict[str, float]]:
    """Compute the loss of a batch, differentiable as `m` is, and metrics by the end of their names."""
    loss, reward_IS = LOSSES[config.loss](config, m)
    found, (coef, _) = _metrics(config, m, reward_IS.detach()), imitation(config)
    if coef:
        log_prob, count = m.imitated_I2.sum(0)
        imitated = -log_prob / count
        loss = loss + coef * imitated
        found["sft_loss"] = float(imitated.detach())
    return loss, {"loss": float(loss.detach()), **found}


def carried(config: PreferenceConfig, pairs: Pairs, values_T: Tensor) -> tuple[Pairs, dict[str, float]]:
    """Put the loss's derivative by each token's value on the rows that are trained; and the metrics of `loss_of`.

    values_T: the model's log-probs of the rows' response tokens, or a reward model's rewards.
    """
    values_T = values_T.detach().clone().requires_grad_()
    loss, metrics = loss_of(config, Measured.of(pairs, values_T))
    (slope_T,) = torch.autograd.grad(loss, values_T)
    return pairs.replace(advantages_T=slope_T).select(~pairs.unrelated_B), metrics


def measured(config: PreferenceConfig) -> list[str]:
    """List the names of what `loss_of` tells of answers of both kinds."""
    names = ["loss", "accuracy", "kl" if config.loss == "kto" else "margin", "chosen_reward", "rejected_reward"]
    names += [] if config.loss == "reward" else ["chosen_log_prob", "rejected_log_prob"]
    return [*names, "sft_loss"] if imitation(config)[0] else names


def _metrics(config: PreferenceConfig, m: Measured, reward_IS: Tensor) -> dict[str, float]:
    chosen, others = reward_IS[m.good_IS], reward_IS[~m.good_IS & ~m.unrelated_IS]
    found = {"chosen_reward": chosen, "rejected_reward": others}
    if config.loss == "kto":
        found |= {"accuracy": torch.cat([chosen > 0, others < 0]).double(), "kl": distance(m)[None]}
    else:
        gap_I = _gap(reward_IS)
        found |= {"accuracy": (gap_I > 0).double(), "margin": gap_I}
    if config.loss != "reward":
        per_token_IS = m.mean_IS.detach()
        found["chosen_log_prob"] = per_token_IS[m.good_IS]
        found["rejected_log_prob"] = per_token_IS[~m.good_IS & ~m.unrelated_IS]
    return {name: float(values.mean()) for name, values in found.items() if values.numel()}
