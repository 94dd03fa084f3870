"""A whole step written down once more: models row by row, credit, mini-batches, losses, clipping and AdamW, in float64.

Nothing here goes through the engine, the workers or the driver. What has no formula of its own in this folder is
borrowed from verl_like/algorithms, and `PlainStep.notes` says which.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Transpose, revert_weight_conversion

from verl_like.algorithms.advantages import AdvantageInputs, compute_advantages
from verl_like.algorithms.corrections import correct_on_driver
from verl_like.algorithms.kl import FULL_KL_KIND
from verl_like.algorithms.minibatch import cut_minibatches
from verl_like.algorithms.preparation import prepare_minibatch
from verl_like.algorithms.reward_shaping import reward_components
from verl_like.batch import Denominators, Evaluated, Rollouts, Scores, whole_episodes
from verl_like.config import OptimConfig, PPOConfig
from verl_like.config.batch_plan import needs_sum_pi_squared
from verl_like.kit.selfcheck.driver import experience_of, old_log_probs_of
from verl_like.kit.selfcheck.material import Material
from verl_like.kit.selfcheck.plain import PlainModel, pieces
from verl_like.kit.selfcheck.plain_credit import (
    OWN_ESTIMATORS,
    PlainEpisode,
    clipped,
    credit,
    next_coefficient,
    place_reward,
    response_rewards,
    whitened,
)
from verl_like.kit.selfcheck.plain_loss import PlainPolicyLoss, PlainValueLoss, kl_term

ROUNDING = 1e-3  # of a tensor's largest gradient: from less than that Adam makes a whole step in any direction


@dataclass(slots=True, kw_only=True)
class Minibatch:
    """One optimizer step: what it computed. No gradient where no row had one."""

    denominators: Denominators  # tokens and episodes that are trained on
    terms: dict[str, float]  # of the loss, by the metric's name
    scale: float  # sum of the rows' magnitudes
    norm: float  # of the gradient, before clipping
    rate: float


@dataclass(kw_only=True)
class PlainOptimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) after clipping of the norm, over tensors by name."""

    optim: OptimConfig
    clip: float
    total_steps: int  # of training, for the schedule
    weights: dict[str, Tensor]
    _moments: dict[str, list[Tensor]] = field(default_factory=dict)
    _updates: int = 0
    steps_done: int = 0  # training steps

    def rate(self) -> float:
        """Learning rate of this training step: linear warm-up, then constant or cosine, as in verl."""
        optim = self.optim
        total = optim.total_training_steps if optim.total_training_steps > 0 else self.total_steps
        warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total)
        if optim.warmup_style == "constant":
            return optim.lr * (min(1.0, self.steps_done / warmup) if warmup else 1.0)
        floor = optim.min_lr_ratio or 0.0
        if self.steps_done < warmup:
            return optim.lr * (floor + (1 - floor) * self.steps_done / warmup)
        turn = math.cos(2 * math.pi * optim.num_cycles * (self.steps_done - warmup) / max(1, total - warmup))
        return optim.lr * max(floor, turn * (1 - floor) / 2 + (1 + floor) / 2)

    @torch.no_grad()
    def step(self, gradient: dict[str, Tensor]) -> tuple[float, float]:
        """Change the weights; return the norm before clipping, and the learning rate."""
        if self.optim.l2_coeff:
            weights = {name: self.weights[name].detach().to(whole.device) for name, whole in gradient.items()}
            gradient = {name: whole + self.optim.l2_coeff * weights[name] for name, whole in gradient.items()}
        norm = math.sqrt(sum(float(each.norm()) ** 2 for each in gradient.values()))
        shrink, rate, (first, second) = min(1.0, self.clip / (norm + 1e-6)), self.rate(), self.optim.betas
        self._updates += 1
        for name, whole in gradient.items():
            if name not in self._moments:
                self._moments[name] = [torch.zeros_like(whole, dtype=torch.float32) for _ in range(2)]
            for part, weight, mean_kept, square_kept in pieces(whole, self.weights[name], *self._moments[name]):
                clipped = part * shrink
                mean = first * mean_kept + (1 - first) * clipped
                square = second * square_kept + (1 - second) * clipped**2
                mean_kept.copy_(mean)
                square_kept.copy_(square)
                weight.mul_(1 - rate * self.optim.weight_decay)
                root = (square / (1 - second**self._updates)).sqrt() + self.optim.eps
                weight.sub_((rate * (mean / (1 - first**self._updates)) / root).to(weight.device))
        return norm, rate


class PlainRole:
    """A model that is trained: its weights, optimizer, and what each optimizer step computed."""

    def __init__(self, model: PlainModel, optim: OptimConfig, clip: float, total_steps: int) -> None:
        self.model, self.minibatches = model, list[Minibatch]()
        self.seen = dict[str, Tensor]()  # by weight: where every step's gradient was more than rounding
        weights = {name: weight for name, weight in model.hf.named_parameters() if weight.requires_grad}
        if model.adapters is not None:
            weights = model.adapters.trained() | {n: w for n, w in weights.items() if n.startswith("score.")}
        self.optimizer = PlainOptimizer(optim=optim, clip=clip, total_steps=total_steps, weights=weights)

    def begin(self) -> None:
        """Forget the last step's optimizer steps."""
        self.minibatches, self.seen = [], {}

    def step(self, loss: PlainPolicyLoss) -> None:
        """Take one optimizer step over the rows of the loss; none where no token is trained on."""
        if loss.joining.num_tokens == 0:
            return
        found = self.model.measure(loss)
        for name, gradient in found.gradient.items():
            least = ROUNDING * max(float(gradient.max()), -float(gradient.min()))
            large = (gradient > least) | (gradient < -least)
            self.seen[name] = large & self.seen[name] if name in self.seen else large
        norm, rate = self.optimizer.step(found.gradient)
        if self.model.adapters is not None:
            self.model.adapters.merge(self.model.hf)
        by = Denominators(
            num_tokens=loss.joining.num_tokens,
            num_sequences=loss.joining.num_episodes,
            max_response_length=loss.config.data.max_response_length,
        )
        self.minibatches.append(Minibatch(denominators=by, terms=loss.terms, scale=found.scale, norm=norm, rate=rate))

    @torch.no_grad()
    def take(self, weights: dict[str, Tensor]) -> None:
        """Go on from the run's own weights, where all are trained: Adam makes steps of rounding, which would add up."""
        if self.model.adapters is not None:
            return
        named, copies = dict(self.model.hf.named_parameters()), list[str]()
        own = {weight.untyped_storage().data_ptr(): name for name, weight in named.items()}
        for name, weight in self.weights().items():  # mostly views of the model's own
            place = weight.untyped_storage().data_ptr()
            if place in own:
                weight.copy_(weights.get(name, weight))
                named.pop(own[place], None)
            else:
                copies.append(name)
        if copies:
            self._take_apart(named, {name: weights[name] for name in copies if name in weights})

    def _take_apart(self, named: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
        """Set parameters that files hold otherwise: the place of each number, stored as a number, tells where."""
        flat = torch.cat([weight.detach().flatten() for weight in named.values()])
        sizes = [weight.numel() for weight in named.values()]
        places = torch.arange(len(flat)).split(sizes)
        whole = {name: part.view(weight.shape) for (name, weight), part in zip(named.items(), places, strict=True)}
        found = self.stored(whole)
        for name, weight in weights.items():
            flat[found[name].flatten()] = weight.to(flat).flatten()
        for weight, part in zip(named.values(), flat.split(sizes), strict=True):
            weight.copy_(part.view(weight.shape))

    def weights(self) -> dict[str, Tensor]:
        """Every weight as checkpoints name and cut it, adapters added in; the next step changes them."""
        return self.stored({name: weight.detach() for name, weight in self.model.hf.named_parameters()})

    def stored(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Name and cut tensors of the model's weights as its checkpoints do, by transformers' own rules."""
        found = revert_weight_conversion(self.model.hf, whole)
        for rule in get_model_conversion_mapping(self.model.hf, add_legacy=False):
            for name in [name for name in found if _turned(rule) and re.search(rule.target_patterns[0], name)]:
                found[name] = found[name].transpose(1, 2)  # as the hub has them
        return found


def _turned(rule: Any) -> bool:
    """True for a rule of experts whose matrices are transposed in files where their shape says so."""
    return any(isinstance(each, Transpose) and each.check_dims for each in getattr(rule, "operations", ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRecord:
    """A step that was made plainly. Columns are float64 [B, R] by name; weights by role.

    before: float32. after: the plain model's own, until its next step. seen: by role and weight, where the gradient of
    each optimizer step was more than rounding.
    """

    kept: list[int]
    columns: dict[str, Tensor]
    used_log_probs_BR: Tensor
    kl: tuple[float, float] | None  # mean of the penalty's KL, and the next step's coefficient; None: there is none
    before: dict[str, dict[str, Tensor]]
    after: dict[str, dict[str, Tensor]]
    names: dict[str, set[str]]  # of all tensors of a role's model, those that are another one's included
    minibatches: dict[str, list[Minibatch]]
    seen: dict[str, dict[str, Tensor]]


@dataclass(kw_only=True)
class PlainStep:
    """The step of a configuration from rollouts and scores.

    `evaluate`, `credit` and `update` fill the columns, those of rows that are trained on (`kept`), in the rollouts'
    order. The first step is evaluated where it is made: what the sampler told follows from it.
    """

    config: PPOConfig
    rollouts: Rollouts
    scores: Scores
    actor: PlainRole
    critic: PlainRole | None
    reference: PlainModel | None
    notes: list[str] = field(default_factory=list)
    number: int = 0  # of the step, from 1
    columns: dict[str, Tensor] = field(default_factory=dict)  # [B, R] by name

    def __post_init__(self) -> None:
        self.kept = [row for row in range(len(self.rollouts)) if self._trainable(row)]
        self.kl_coef, self.mean_kl = self.config.algorithm.kl_ctrl.kl_coef, 0.0
        self.rewards_so_far = list[float]()

    @property
    def trained(self) -> dict[str, PlainRole]:
        """The roles with an optimizer."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    def run(self) -> PlainRecord:
        """Compute the next step from the same rows."""
        self.number += 1
        for role in self.trained.values():
            role.begin()
        before = {
            name: {weight: whole.to("cpu", torch.float32, copy=True) for weight, whole in role.weights().items()}
            for name, role in self.trained.items()
        }
        if self.number > 1:
            self.evaluate()
        self.credit()
        self.update()
        return PlainRecord(
            kept=self.kept,
            columns=dict(self.columns),
            used_log_probs_BR=self.used_log_probs(),
            kl=(self.mean_kl, self.kl_coef) if self.config.algorithm.use_kl_in_reward else None,
            before=before,
            after={name: role.weights() for name, role in self.trained.items()},
            names={name: set(role.stored(role.model.hf.state_dict())) for name, role in self.trained.items()},
            minibatches={name: role.minibatches for name, role in self.trained.items()},
            seen={
                name: role.stored(role.seen) if role.model.adapters is None else {}
                for name, role in self.trained.items()
            },
        )

    def evaluate(self) -> None:
        """Log-probs of old policy and reference, entropy and values of all rows."""
        actor, found = self.actor.model, self.columns
        names = ["log_probs", "entropy"]
        names += ["sum_pi_squared"] if needs_sum_pi_squared(self.config.algorithm) else []
        names += ["full_kl"] if actor.reference is not None else []
        found |= actor.columns(self.rollouts, names)
        found["old_log_probs"] = found.pop("log_probs")
        if self.reference is not None and "ref_log_probs" not in found:  # it stays as it is
            found["ref_log_probs"] = self.reference.column(self.rollouts, "log_probs")
            self.reference = None
        if self.critic is not None:
            found["values"] = self.critic.model.column(self.rollouts, "values")

    def used_log_probs(self) -> Tensor:
        """The old log-probs that credit and loss see: recomputed, or the sampler's."""
        sampled_BR = self.rollouts.rollout_log_probs_BR
        assert sampled_BR is not None
        return sampled_BR.double() if old_log_probs_of(self.config) == "sampler" else self.columns["old_log_probs"]

    def credit(self) -> None:
        """Rewards and advantages of the kept rows. What has no formula here is borrowed, on what this step has made."""
        algorithm, rollouts = self.config.algorithm, self.rollouts
        episodes, means = self._episodes(), []
        rewards = response_rewards(episodes, self.config, self.rewards_so_far)
        for one, reward in zip(episodes, rewards, strict=True):
            penalty = self._penalty(one)
            place_reward(one, reward, penalty, self.kl_coef)
            inside = [each for each, ok in zip(penalty, one.mask, strict=True) if ok]
            means.append(sum(inside) / len(inside))
        if algorithm.use_kl_in_reward:
            count = len(whole_episodes(rollouts, self.scores)[0])
            self.mean_kl = sum(means) / len(means)
            self.kl_coef = next_coefficient(algorithm.kl_ctrl, self.kl_coef, self.mean_kl, count)
        rewards = clipped([each.rewards for each in episodes], algorithm.token_reward_clip)
        rewards = whitened(episodes, rewards) if algorithm.whiten_rewards else rewards
        for one, shaped in zip(episodes, rewards, strict=True):
            one.rewards = shaped
        self._write("rewards", episodes, rewards)
        if algorithm.adv_estimator in OWN_ESTIMATORS:
            found = credit(episodes, algorithm)
        else:
            self.notes.append(f"credit: shared formula (algorithm.adv_estimator={algorithm.adv_estimator})")
            found = self._borrowed(episodes)
        advantages = [each for each, _ in found]
        advantages = whitened(episodes, advantages) if algorithm.whiten_advantages else advantages
        advantages = clipped(advantages, algorithm.advantage_clip)
        self._write("advantages", episodes, advantages)
        self._write("returns", episodes, [returns for _, returns in found])

    def _trainable(self, row: int) -> bool:
        return bool(self.scores.valid_B[row]) and bool(self.rollouts.response_mask_BR[row].any())

    def _episodes(self) -> list[PlainEpisode]:
        """The episodes of the kept rows, in the order of their first one."""
        found: dict[int, PlainEpisode] = {}
        baseline_B = self.scores.baseline_B
        for row in self.kept:
            number = row if self.rollouts.episode_B is None else int(self.rollouts.episode_B[row])
            if number not in found:
                baseline = 0.0 if baseline_B is None else float(baseline_B[row])
                group, score = int(self.rollouts.group_B[row]), float(self.scores.score_B[row])
                asked, extras = self.rollouts.rows[row], self.scores.extras[row]
                found[number] = PlainEpisode(group=group, asked=asked, extras=extras, score=score, baseline=baseline)
            found[number].rows.append(row)
            found[number].cut = bool(self.rollouts.cut_off_B[row])  # its last row's
        for one in found.values():
            one.mask = [bool(inside) for inside in self._of(one, self.rollouts.response_mask_BR)]
            one.rewards = [0.0] * len(one.mask)
            one.values = self._of(one, self.columns["values"]) if "values" in self.columns else one.rewards
        return list(found.values())

    def _of(self, episode: PlainEpisode, column_BR: Tensor) -> list[float]:
        """A column's numbers for all tokens of an episode."""
        lengths = self.rollouts.response_length_B
        return [number for row in episode.rows for number in column_BR[row, : int(lengths[row])].tolist()]

    def _borrowed(self, episodes: list[PlainEpisode]) -> list[tuple[list[float], list[float]]]:
        """Advantages and returns by the run's own estimator."""
        config, rollouts = self.config, self.rollouts

        def column(values: list[list[float]], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor([number for each in values for number in each], dtype=dtype)

        def known(column_BR: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return None if column_BR is None else column([self._of(each, column_BR) for each in episodes], dtype)

        first, lengths = torch.tensor([each.rows[0] for each in episodes]), [len(each.mask) for each in episodes]
        inputs = AdvantageInputs(
            token_rewards_T=column([each.rewards for each in episodes]),
            response_mask_T=column([[float(ok) for ok in each.mask] for each in episodes], torch.bool),
            response_length_B=torch.tensor(lengths),
            group_B=torch.tensor([each.group for each in episodes]),
            values_T=known(self.columns.get("values")),
            old_log_probs_T=known(self.used_log_probs()),
            components=reward_components(config.algorithm, self.scores.select(first)),
            step_T=known(rollouts.step_BR if rollouts.step_T is not None else None, torch.int32),
            anchor_T=known(rollouts.anchor_BR if rollouts.anchor_T is not None else None, torch.int64),
            sum_pi_squared_T=known(self.columns.get("sum_pi_squared")),
            importance_weights_T=known(self._importance_weights()),
            baseline_B=torch.tensor([each.baseline for each in episodes]),
        )
        outputs = compute_advantages(inputs, config.algorithm)
        parts = zip(outputs.advantages_T.split(lengths), outputs.returns_T.split(lengths), strict=True)
        return [(advantages.tolist(), returns.tolist()) for advantages, returns in parts]

    def _importance_weights(self) -> Tensor | None:
        """Weights of algorithm.rollout_correction [B, R], where an estimator asks for them before the update."""
        if "sum_pi_squared" not in self.columns:
            return None
        kept, config = torch.tensor(self.kept), self.config
        rows = self.rollouts.select(kept)
        known = Evaluated(
            response_length_B=rows.response_length_B, old_log_probs_BR=self._kept(self.used_log_probs()).float()
        )
        weights = correct_on_driver(config.algorithm.rollout_correction, config.actor_rollout_ref.actor, rows, known)
        if weights.weights_T is None:
            return None
        found_BR = torch.zeros(self.rollouts.response_mask_BR.shape)
        padded_BR = rows.padded(weights.weights_T)
        found_BR[self.kept, : padded_BR.shape[1]] = padded_BR.float()
        return found_BR

    def _kept(self, column_BR: Tensor) -> Tensor:
        """A column of the kept rows, as wide as these are."""
        return column_BR[self.kept, : int(self.rollouts.response_length_B[self.kept].max())]

    def _write(self, name: str, episodes: list[PlainEpisode], found: list[list[float]]) -> None:
        """Put a number of each of the episodes' tokens back on their rows, as a column."""
        column_BR = torch.zeros(self.rollouts.response_mask_BR.shape, dtype=torch.float64)
        for episode, values in zip(episodes, found, strict=True):
            begun = 0
            for row in episode.rows:
                length = int(self.rollouts.response_length_B[row])
                column_BR[row, :length] = torch.tensor(values[begun : begun + length]).double()
                begun += length
        self.columns[name] = column_BR

    def _penalty(self, episode: PlainEpisode) -> list[float]:
        """KL of every token of an episode, by algorithm.kl_penalty."""
        algorithm = self.config.algorithm
        if not algorithm.use_kl_in_reward:
            return [0.0] * len(episode.mask)
        if algorithm.kl_penalty == FULL_KL_KIND:
            return self._of(episode, self.columns["full_kl"])
        gap_BR = self.used_log_probs() - self.columns["ref_log_probs"]
        return kl_term(torch.tensor(self._of(episode, gap_BR)), str(algorithm.kl_penalty)).tolist()

    def update(self) -> None:
        """Take all optimizer steps of critic and actor over the kept rows."""
        config, old = self.config, old_log_probs_of(self.config)
        material = self._material()
        if self.critic is not None:
            whole = PlainValueLoss(config=config, material=material, old=old)
            for _, rows in self._minibatches(config.critic, material):
                self.critic.step(whole.of(rows))
            self.critic.optimizer.steps_done += 1
        if config.trainer.critic_warmup == 0:
            whole = PlainPolicyLoss(config=config, material=material, old=old)
            for place, rows in self._minibatches(config.actor_rollout_ref.actor, material):
                self.actor.step(whole.of(rows).selecting(self._selected(material, rows, place)))
            self.actor.optimizer.steps_done += 1

    def _material(self) -> Material:
        """The columns of the kept rows."""
        empty = torch.zeros(self.rollouts.response_mask_BR.shape, dtype=torch.float64)
        return Material(
            rollouts=self.rollouts.select(torch.tensor(self.kept)),
            scores=self.scores.select(torch.tensor(self.kept)),
            advantages_BR=self._kept(self.columns["advantages"]),
            returns_BR=self._kept(self.columns["returns"]),
            old_log_probs_BR=self._kept(self.columns["old_log_probs"]),
            ref_log_probs_BR=self._kept(self.columns.get("ref_log_probs", empty)),
            values_BR=self._kept(self.columns.get("values", empty)),
        )

    def _selected(self, material: Material, rows: list[int], place: tuple[int, int]) -> Tensor | None:
        """The tokens that clip_cov and kl_cov choose, [rows of the mini-batch's loss, R]: the driver's own choice."""
        actor = self.config.actor_rollout_ref.actor
        if actor.policy_loss.loss_mode not in ("clip_cov", "kl_cov"):
            return None
        experience = experience_of(self.config, material, old_log_probs_of(self.config))
        chosen = prepare_minibatch(experience.select(rows), actor, (self.config.trainer.seed, self.number, *place))
        return chosen.selected_BR

    def _minibatches(self, role: Any, material: Material) -> Iterator[tuple[tuple[int, int], list[int]]]:
        """(Epoch, number) and rows of each optimizer step: whole groups by their first row, epoch after epoch."""
        group_B = material.rollouts.group_B
        groups = list(dict.fromkeys(group_B.tolist()))
        for epoch in range(role.ppo_epochs):
            if role.shuffle:  # the order that is drawn is the driver's to choose
                size, seed = role.ppo_mini_batch_size, self.config.trainer.seed + self.number
                cut = cut_minibatches(group_B, prompts_per_mini_batch=size, shuffle=True, seed=seed, epoch=epoch)
                yield from (((epoch, number), rows.tolist()) for number, rows in enumerate(cut))
                continue
            for start in range(0, len(groups), role.ppo_mini_batch_size):
                chosen = groups[start : start + role.ppo_mini_batch_size]
                rows = [row for group in chosen for row, own in enumerate(group_B.tolist()) if own == group]
                yield (epoch, start // role.ppo_mini_batch_size), rows
