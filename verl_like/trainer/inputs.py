"""Checks of a run's data and model against each other, and values that follow from both."""

from __future__ import annotations

import logging

import torch
from transformers import PretrainedConfig

from verl_like.config import DataConfig, PPOConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.roles import RoleConfig, generates, needs_critic
from verl_like.data.dataset import Dataset, PromptDataset
from verl_like.data.foreign import ForeignDataset
from verl_like.data.loader import PromptLoader
from verl_like.data.media import DEFAULT_MEDIA_KEYS
from verl_like.data.sampler import ResumableSampler, Sampler
from verl_like.models.families import frozen_tower, refuse_vision, sees
from verl_like.models.loading import build_meta_model
from verl_like.models.lora import adapters_apart, attach, load_adapter
from verl_like.registry import part
from verl_like.user_code import is_reference

logger = logging.getLogger(__name__)


def refuse_media(dataset: Dataset, key: str, hf_config: PretrainedConfig) -> None:
    """Refuse rows with images or videos that the model, or the data set's class, has no use for (ValueError)."""
    if not dataset.num_media():
        return
    if not sees(hf_config):
        raise ValueError(
            f"{key}: {dataset.num_media()} rows have images or videos (data.image_key, data.video_key), but the model "
            f"(model_type {hf_config.model_type}) reads text only. Leave such rows out"
        )
    if isinstance(dataset, ForeignDataset):
        raise ValueError(
            f"{key}: the class of data.custom_cls gives pixels (multi_modal_data), which are not available: derive it "
            "from PromptDataset, whose rows name their images"
        )


def refuse_media_keys(data: DataConfig, hf_config: PretrainedConfig) -> None:
    """Refuse columns of images or videos that were named for a model which reads text only (ValueError)."""
    for kind, column in (("image", data.image_key), ("video", data.video_key)):
        if column not in (None, DEFAULT_MEDIA_KEYS[kind]) and not sees(hf_config):
            raise ValueError(
                f"data.{kind}_key={column}: the model (model_type {hf_config.model_type}) reads text only; set the key "
                "to null, or choose a model that sees"
            )


def check_vision(config: PPOConfig, hf_config: PretrainedConfig) -> None:
    """Refuse options that a vision-language model cannot have, before anything heavy is started (ValueError)."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    if not sees(hf_config):
        return
    if adapters_apart(model):
        refuse_vision(hf_config, "model.lora.merge=False", "set it to True")
    if actor.use_torch_compile:
        refuse_vision(hf_config, "actor_rollout_ref.actor.use_torch_compile=True", "set it to False")
    if needs_critic(config.critic, config.algorithm):
        refuse_vision(hf_config, "a critic", "use an estimator without one, for instance algorithm.adv_estimator=grpo")


def check_adapter(role: RoleConfig, hf_config: PretrainedConfig) -> None:
    """Check that the tensors of a role's model.lora_adapter_path are those that its model would get.

    Raises ValueError otherwise.
    """
    if role.optim is None or role.model.lora_adapter_path is None:
        return
    hf = build_meta_model(role.model, hf_config, kind=role.kind).hf
    tower = frozen_tower(hf, frozen=role.freeze_vision_tower)
    attach(hf, role.model, dtype=torch.float32, seed=0, left_out=tower)
    load_adapter(hf, role.model)


def refuse_missing_answers(config: PPOConfig, dataset: Dataset) -> None:
    """Refuse a file without reference answers where built-in graders compare with them (ValueError).

    Warns of a file in which some rows have none.
    """
    reward = config.reward_model
    own = config.custom_reward_function.path is not None or reward.judge.url is not None
    parts = [name for table in reward.weights.values() for name in table]
    others = [reward.rule or "", *reward.rule_by_source.values(), reward.reward_manager, *parts]
    own = own or generates(reward, config.custom_reward_function)
    if own or (reward.enable and reward.rule_weight == 0) or any(map(is_reference, others)):
        return
    if type(dataset) is not PromptDataset:  # a class of the user's may know answers
        return
    for file, missing, used in dataset.without_ground_truth():
        rows = ", ".join(map(str, missing[:5])) + ", ..." * (len(missing) > 5)
        told = f"{file.path}: {len(missing):,} of {used:,} rows have no reference answer (null or empty): row {rows}"
        if len(missing) > reward.max_failure_fraction * used:
            raise ValueError(
                f"{told} (it has the columns {', '.join(file.rows.columns)}); set data.ground_truth_key to the column "
                "with the answers, or grade without them: custom_reward_function.path"
            )
        if missing:
            logger.warning("%s. Their responses get no reward: leave these rows out", told)


def max_model_len(config: PPOConfig, hf_config: PretrainedConfig) -> int:
    """Count the tokens of prompt plus response that the rollout engine must hold, checked against the model's limit."""
    rollout = config.actor_rollout_ref.rollout
    needed = config.data.max_prompt_length + config.data.max_response_length
    length = rollout.max_model_len or needed
    if length < needed:
        raise ValueError(
            f"actor_rollout_ref.rollout.max_model_len={length} is less than data.max_prompt_length + "
            f"data.max_response_length = {needed}; raise it or leave it null"
        )
    positions = hf_config.get_text_config().max_position_embeddings
    if length > positions:
        raise ValueError(
            f"prompt plus response may have {length} tokens (data.max_prompt_length={config.data.max_prompt_length} + "
            f"data.max_response_length={config.data.max_response_length}, or rollout.max_model_len), but the model has "
            f"{positions} positions (max_position_embeddings); lower the lengths"
        )
    return length


def train_loader(config: PPOConfig, dataset: Dataset, plan: BatchPlan) -> PromptLoader:
    """Load the training prompts from the first one on, in the order of `train_sampler`."""
    size = plan.prompts_per_draw
    return PromptLoader(dataset, train_sampler(config, dataset, size), size, drop_last=not plan.draws_until_full)


def train_sampler(config: PPOConfig, dataset: Dataset, batch_size: int) -> Sampler:
    """Build the user's sampler, or one of rows by data.domain_weights, or of all rows alike.

    The seed is data.seed, or else trainer.seed.
    """
    data = config.data
    if data.sampler.class_path is not None:
        return part("sampler", "own")(data, dataset)
    seed = config.trainer.seed if data.seed is None else data.seed
    if not data.domain_weights:
        shuffle = data.shuffle and not config.env.train.tags  # groups take turns, and their starts are random as it is
        return ResumableSampler(len(dataset), shuffle=shuffle, seed=seed, identity=dataset.identity())
    weights, identity = data.domain_weights, dataset.identity()
    weighted = part("sampler", "weighted")
    sampler = weighted(dataset.domains(), weights, shuffle=data.shuffle, seed=seed, identity=identity)
    sampler.check_batch(batch_size)
    return sampler
