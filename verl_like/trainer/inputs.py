"""What a run's data and model must be for each other, and what follows from both."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from verl_like.config import PPOConfig
from verl_like.data.dataset import Dataset, PromptDataset
from verl_like.user_code import is_reference


def refuse_media(dataset: Dataset, key: str, hf_config: PretrainedConfig) -> None:
    """ValueError for rows with images or videos: they are read and carried, but no model is trained on them yet."""
    if not dataset.num_media():
        return
    multimodal = hasattr(hf_config, "vision_config")
    what = "is a vision-language model, whose training is not available yet" if multimodal else "reads text only"
    raise ValueError(
        f"{key}: {dataset.num_media()} rows have images or videos (data.image_key, data.video_key), but the model "
        f"(model_type {hf_config.model_type}) {what}. Leave such rows out"
    )


def refuse_missing_answers(config: PPOConfig, dataset: Dataset) -> None:
    """ValueError for a file without reference answers where built-in graders compare with them."""
    reward, key = config.reward_model, config.data.ground_truth_key
    own = config.custom_reward_function.path is not None or reward.judge.url is not None
    parts = [name for table in reward.weights.values() for name in table]
    others = [reward.rule or "", *reward.rule_by_source.values(), reward.reward_manager, *parts]
    if own or (reward.enable and reward.rule_weight == 0) or any(map(is_reference, others)):
        return
    for file in dataset.files if type(dataset) is PromptDataset else ():  # a class of the user's may know answers
        if not file.has_ground_truth(key):
            raise ValueError(
                f"{file.path} has no column 'reward_model' with the reference answers (it has: "
                f"{', '.join(file.rows.columns)}); set data.ground_truth_key to their column, or grade without them: "
                "custom_reward_function.path"
            )


def end_token_ids(tokenizer: PreTrainedTokenizerBase, hf_config: PretrainedConfig) -> tuple[int, ...]:
    """Every id that ends a response: the tokenizer's and the model's (chat models often have two)."""
    ids: list[int] = []
    for value in (tokenizer.eos_token_id, hf_config.eos_token_id):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if not ids:
        raise ValueError(
            "neither the tokenizer nor the model's config.json names an end-of-sequence token (eos_token_id)"
        )
    return tuple(dict.fromkeys(ids))


def max_model_len(config: PPOConfig, hf_config: PretrainedConfig) -> int:
    """Tokens of prompt plus response that the rollout engine must hold, checked against what the model can."""
    rollout = config.actor_rollout_ref.rollout
    needed = config.data.max_prompt_length + config.data.max_response_length
    length = rollout.max_model_len or needed
    if length < needed:
        raise ValueError(
            f"actor_rollout_ref.rollout.max_model_len={length} is less than data.max_prompt_length + "
            f"data.max_response_length = {needed}; raise it or leave it null"
        )
    if length > hf_config.max_position_embeddings:
        raise ValueError(
            f"prompt plus response may have {length} tokens (data.max_prompt_length + data.max_response_length, or "
            f"rollout.max_model_len), but the model has {hf_config.max_position_embeddings} positions "
            "(max_position_embeddings); lower the lengths"
        )
    return length
