"""Preparation before any engine is built: rows, the driver's shares of them, and the yardstick's answers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from verl_like.algorithms.kl import FULL_KL_KIND
from verl_like.batch import Rollouts
from verl_like.config import FSDPConfig, ModelConfig, PPOConfig
from verl_like.config.actor import RouterConfig, RouterReplayConfig
from verl_like.config.batch_plan import two_policies
from verl_like.config.menus import LOSSES
from verl_like.config.roles import needs_critic
from verl_like.kit.selfcheck.driver import Share, old_log_probs_of, shares_of
from verl_like.kit.selfcheck.material import (
    Material,
    OldLogProbs,
    long_lengths,
    material,
    random_rollouts,
    short_lengths,
)
from verl_like.kit.selfcheck.plain import Measured, PlainModel
from verl_like.kit.selfcheck.plain_adapters import outline, unchecked_adapters
from verl_like.kit.selfcheck.plain_loss import PlainPolicyLoss, PlainValueLoss
from verl_like.models.families import sees
from verl_like.models.loading import load_hf_config, load_tokenizer, num_positions

LONG_ROW = 600  # [tokens] longer than the attention's blocks (64) and than the rows it takes by products (512)
_BEYOND = 64  # [tokens] by which the longest row is longer than a sliding window
_FIRST = 2  # layers of a model that is too large
_SCORES_LIMIT = 4 * 2**30  # [bytes] of attention scores that the plain model may keep of one row


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One mini-batch of one role: what the driver made of it, and the yardstick's answer.

    shares: (rows, denominators) of every rank, by number of ranks.
    """

    name: str
    old: OldLogProbs
    material: Material
    column: Tensor  # the yardstick's log-probs (or values) [B, R]
    shares: dict[int, list[Share]]
    plain: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All of the check. `policy[0]` is the case that is computed in many ways."""

    policy: list[Case]
    critic: Case | None
    notes: list[str]
    vocab_size: int


def prepare(config: PPOConfig, *, num_rows: int, ranks: int) -> Work:
    """The yardstick's part and the driver's, which need no engine. `config`: that of `comparable`."""
    model, data, old = config.actor_rollout_ref.model, config.data, old_log_probs_of(config)
    vocab_size = len(load_tokenizer(data.tokenizer or model.path, model.trust_remote_code))
    hf_config = load_hf_config(model)
    longest, about_rows = longest_row(hf_config)
    key = config.actor_rollout_ref.actor.sample_weight.difficulty_key
    short = random_rollouts(short_lengths(num_rows), vocab_size, difficulty_key=key)
    long = random_rollouts(long_lengths(longest), vocab_size, difficulty_key=key)
    build = partial(
        PlainModel,
        vocab_size=vocab_size,
        seed=config.trainer.seed,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    frozen = config.actor_rollout_ref.actor.freeze_vision_tower
    plain = build(model, reference_scale=reference_scale(config), frozen_tower=frozen)
    given: OldLogProbs = "given" if old == "own" else old
    policy = [
        policy_case(config, plain, short, given, name="", ranks=ranks),
        policy_case(config, plain, long, given, name=f"a row of {longest} tokens: "),
    ]
    if old == "own":
        policy.append(policy_case(config, plain, short, old, name="old log-probs of the update itself: "))
    del plain
    critic = None
    if needs_critic(config.critic, config.algorithm):
        critic = critic_case(config, build(config.critic.model, critic=True), short, given)
    notes = [about_rows, about_objective(config), *left_out(config)]
    if sees(hf_config):
        notes.append("not checked in this part: images, which the two whole steps have")
    return Work(policy=policy, critic=critic, notes=notes, vocab_size=vocab_size)


def policy_case(
    config: PPOConfig, plain: PlainModel, rollouts: Rollouts, old: OldLogProbs, *, name: str, ranks: int = 1
) -> Case:
    """One mini-batch of the actor."""
    log_probs_BR = plain.column(rollouts, "log_probs")
    rows = material(rollouts, log_probs_BR, torch.zeros_like(log_probs_BR), old)
    shares = {count: shares_of(config, rows, old, ranks=count) for count in {1, ranks}}
    loss = PlainPolicyLoss(config=config, material=rows, old=old).selecting(shares[1][0][0].selected_BR)
    measured = plain.measure(loss)
    if measured.scale == 0:
        raise ValueError(
            "no row of the self-check has a loss under these settings, so there is nothing to compare: widen the "
            "bounds (algorithm.rollout_correction, actor_rollout_ref.actor.ratio_skip_threshold) for the check"
        )
    return Case(name=name, old=old, material=rows, column=log_probs_BR, shares=shares, plain=measured)


def critic_case(config: PPOConfig, plain: PlainModel, rollouts: Rollouts, old: OldLogProbs) -> Case:
    """One mini-batch of the critic: the rows of the actor's, with values and returns."""
    values_BR = plain.column(rollouts, "values")
    rows = material(rollouts, -values_BR.abs(), values_BR, old)
    shares = {1: shares_of(config, rows, old, ranks=1, critic=True)}
    loss = PlainValueLoss(config=config, material=rows, old=old)
    return Case(name="critic: ", old=old, material=rows, column=values_BR, shares=shares, plain=plain.measure(loss))


def longest_row(hf_config: PretrainedConfig) -> tuple[int, str]:
    """Tokens of the longest row, beyond the sliding window where its attention scores fit, and what the table says."""
    text, wanted, note = hf_config.get_text_config(), LONG_ROW, ""
    window = (text.sliding_window or None) if "sliding_window" in text else None  # Qwen2-MoE without has 0
    if window is not None and window + _BEYOND > wanted:
        needed = 12 * text.num_hidden_layers * text.num_attention_heads * (window + _BEYOND) ** 2
        reached = needed <= _SCORES_LIMIT
        wanted = window + _BEYOND if reached else wanted
        note = "" if reached else f"; too short for the sliding window of {window} tokens, which is NOT checked"
    elif window is not None:
        note = f"; the sliding window has {window}"
    if "max_position_embeddings" in text and num_positions(hf_config) < wanted:
        wanted, note = num_positions(hf_config), f"{note}; the model has no more positions"
    return wanted, f"longest row: {wanted} tokens{note}"


def about_objective(config: PPOConfig) -> str:
    """Tell which parts of the objective the yardstick computes on its own."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    mode = actor.policy_loss.loss_mode
    if two_policies(actor, correction) and correction.loss_type == "reinforce":
        mode = "reinforce"
    line = f"objective: {mode}, old log-probs {_OLD_TEXT[old_log_probs_of(config)]}"
    if mode in LOSSES or mode == "reinforce":
        return f"{line}; all of it is computed again on its own"
    return f"{line}; the loss of a token is verl_like's own {mode} on both sides, all else is computed again on its own"


_OLD_TEXT = {"given": "recomputed", "sampler": "of the sampler", "own": "of the update itself"}


_OF_ROWS = ("context_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")


def left_out(config: PPOConfig) -> list[str]:
    """List the parts of the configuration that are not checked."""
    policy, lines = config.actor_rollout_ref, []
    sizes = policy.actor.ulysses_sequence_parallel_size, *(getattr(policy.actor.fsdp_config, name) for name in _OF_ROWS)
    if max(sizes) > 1:
        lines.append("not checked: ranks that share rows (Ulysses, context, tensor and pipeline parallelism)")
    if policy.actor.fsdp_config.expert_parallel_size > 1:
        lines.append("not checked: experts handed out to ranks (expert_parallel_size)")
    return lines + unchecked_adapters(policy.model)


def unchecked_routers(config: PPOConfig) -> list[str]:
    """Say which settings of actor.router are off in both checks: the plain model knows no losses of routers."""
    router = config.actor_rollout_ref.actor.router
    return ["not checked: actor.router's losses and bias, off here"] if router.counts_tokens else []


def reference_scale(config: PPOConfig) -> float | None:
    """Return the factor on the policy's weights that makes the reference, for kl_loss_type=full.

    With LoRA the reference is the base itself.
    """
    actor, lora = config.actor_rollout_ref.actor, config.actor_rollout_ref.model.lora_rank > 0
    if not (actor.use_kl_loss and actor.kl_loss_type == FULL_KL_KIND):
        return None
    return 1.0 if lora else 1.1


def comparable(config: PPOConfig) -> PPOConfig:
    """The settings in float32, without dropout and replayed routes: all differences are rounding or errors."""
    policy, critic = config.actor_rollout_ref, config.critic
    off: Any = {"router": RouterConfig(), "router_replay": RouterReplayConfig()}
    policy = dataclasses.replace(
        policy,
        model=_without_dropout(policy.model),
        actor=dataclasses.replace(policy.actor, fsdp_config=float32(policy.actor.fsdp_config), **off),
        ref=dataclasses.replace(policy.ref, fsdp_config=float32(policy.ref.fsdp_config)),
    )
    model = _without_dropout(critic.model) if needs_critic(critic, config.algorithm) else critic.model
    model = dataclasses.replace(model, fsdp_config=float32(model.fsdp_config))
    return dataclasses.replace(config, actor_rollout_ref=policy, critic=dataclasses.replace(critic, model=model))


def float32(fsdp: FSDPConfig) -> FSDPConfig:
    """Copy with everything computed and kept in float32."""
    return dataclasses.replace(fsdp, dtype="float32", model_dtype="float32")


def with_rows_apart(config: PPOConfig) -> PPOConfig:
    """Copy without context, tensor, pipeline and expert parallelism."""
    policy, critic = config.actor_rollout_ref, config.critic
    alone = [
        dataclasses.replace(each, **dict.fromkeys(_OF_ROWS, 1), expert_parallel_size=1)
        for each in (policy.actor.fsdp_config, critic.model.fsdp_config)
    ]
    policy = dataclasses.replace(policy, actor=dataclasses.replace(policy.actor, fsdp_config=alone[0]))
    critic = dataclasses.replace(critic, model=dataclasses.replace(critic.model, fsdp_config=alone[1]))
    return dataclasses.replace(config, actor_rollout_ref=policy, critic=critic)


Model = TypeVar("Model", bound=ModelConfig)


def with_first_layers(config: PPOConfig, bytes_each: int, memory: int) -> tuple[PPOConfig, list[str]]:
    """Cut the models to their first two layers where a step of them has no room in half of the memory; and say so.

    bytes_each: of a weight. Raises ValueError where the two layers have no room in all of it.
    """
    policy, text = config.actor_rollout_ref, load_hf_config(config.actor_rollout_ref.model).get_text_config()
    count = _num_weights(policy.model)
    if count * bytes_each <= memory // 2:
        return config, []
    if text.num_hidden_layers <= _FIRST or "num_hidden_layers" not in load_hf_config(policy.model):
        _refuse_large(count, bytes_each, memory)
        return config, []
    fewer: dict[str, Any] = {"num_hidden_layers": _FIRST}
    if "layer_types" in text and text.layer_types is not None:
        fewer["layer_types"] = text.layer_types[:_FIRST]

    def cut(model: Model) -> Model:
        return dataclasses.replace(model, override_config=model.override_config | fewer)

    critic = config.critic
    if needs_critic(critic, config.algorithm):
        critic = dataclasses.replace(critic, model=cut(critic.model))
    policy = dataclasses.replace(policy, model=cut(policy.model))
    _refuse_large(_num_weights(policy.model), bytes_each, memory)
    room_for = f"{count:,} weights of {bytes_each} bytes have no room here"
    note = f"the first {_FIRST} of {text.num_hidden_layers} layers: {room_for}"
    return dataclasses.replace(config, actor_rollout_ref=policy, critic=critic), [note]


def _num_weights(model: ModelConfig) -> int:
    return sum(weight.numel() for weight in outline(model).parameters())


def _refuse_large(count: int, bytes_each: int, memory: int) -> None:
    if count * bytes_each > memory:
        raise ValueError(
            f"a proof of whole steps with the model's first layers needs about {count * bytes_each / 2**30:.1f} GiB "
            f"({count:,} weights), {memory / 2**30:.1f} GiB are free: free memory, or set trainer.prove_step=False"
        )


def _without_dropout(model: Model) -> Model:
    """Copy the model with every rate of dropout in its config set to 0, as masks differ from cut to cut."""
    rates = {
        key: 0.0
        for key, value in load_hf_config(model).to_dict().items()
        if isinstance(value, float) and value > 0 and ("dropout" in key or key.endswith("_pdrop"))
    }
    return dataclasses.replace(model, override_config=model.override_config | rates)
