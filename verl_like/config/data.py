"""`data.*`: which prompts, how they are tokenised and drawn."""

from dataclasses import dataclass, field
from typing import Any

from verl_like.config.base import ConfigNode, above, at_least, minus_one_or_positive, require
from verl_like.config.enums import Truncation


@dataclass(kw_only=True, slots=True)
class CustomClassConfig(ConfigNode):
    """A class of the user's, loaded from a file."""

    path: str | None = None
    """Python file that holds the class. Null: the built-in one."""
    name: str | None = None
    """Name of the class in that file."""


@dataclass(kw_only=True, slots=True)
class SamplerConfig(ConfigNode):
    """A sampler of the user's (curriculum)."""

    class_path: str | None = None
    """Python file that holds the sampler class. Null: the built-in resumable sampler."""
    class_name: str | None = None
    """Name of the sampler class in that file."""


@dataclass(kw_only=True, slots=True)
class DataConfig(ConfigNode):
    """`data.*`."""

    tokenizer: str | None = None
    """Folder of the tokenizer. Null: actor_rollout_ref.model.path."""
    use_shm: bool = False
    """Copy data files to shared memory before reading."""
    train_files: list[str] = field(default_factory=lambda: ["~/data/rlhf/gsm8k/train.parquet"])
    """Training files (parquet); one path or a list."""
    val_files: list[str] = field(default_factory=lambda: ["~/data/rlhf/gsm8k/test.parquet"])
    """Validation files; one path or a list. An empty list: no validation."""
    train_max_samples: int = -1
    """[prompts] Use only this many training rows; -1: all."""
    val_max_samples: int = -1
    """[prompts] Use only this many validation rows; -1: all."""
    prompt_key: str = "prompt"
    """Column with the chat messages."""
    reward_fn_key: str = "data_source"
    """Column that selects the reward function of a row."""
    prompt_id_key: str | None = None
    """Column with a prompt's id (first release of verl)."""
    max_prompt_id_length: int | None = None
    """[tokens] Longest tokenised prompt id (first release of verl)."""
    max_prompt_length: int = 512
    """[tokens] Longest prompt."""
    max_response_length: int = 512
    """[tokens] Longest response."""
    train_batch_size: int = 1024
    """[prompts] Prompts of one training step; each is answered rollout.n times."""
    gen_batch_size: int | None = None
    """[prompts] Prompts of one draw of dynamic sampling (algorithm.filter_groups). Null: train_batch_size."""
    val_batch_size: int | None = None
    """[prompts] Validation rows generated at a time. Null: all at once."""
    return_raw_input_ids: bool = False
    """Also return the prompt tokens without the chat template."""
    return_raw_chat: bool = False
    """Also return the chat messages."""
    return_full_prompt: bool = False
    """Also return the prompt text with the chat template."""
    shuffle: bool = True
    """Draw training prompts in a random order, a new one each epoch."""
    seed: int | None = None
    """Seed of the sampler. Null: trainer.seed."""
    validation_shuffle: bool = False
    """Shuffle validation rows."""
    dataloader_num_workers: int = 8
    """[processes] Background processes that load and tokenise."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than max_prompt_length when loading."""
    filter_overlong_prompts_workers: int = 1
    """[processes] Processes that measure prompt lengths for the filter."""
    truncation: Truncation = Truncation.error
    """What to do with a prompt that is too long: error, left (keep the end), right (keep the start), middle."""
    image_key: str = "images"
    """Column with images."""
    video_key: str = "videos"
    """Column with videos."""
    trust_remote_code: bool = False
    """Run Python code that comes with the tokenizer."""
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
    """A dataset class of the user's."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """A sampler class of the user's."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the tokenizer's apply_chat_template, for instance enable_thinking."""

    def check(self) -> None:
        at_least(self, 1, "max_prompt_length", "max_response_length", "train_batch_size", "gen_batch_size")
        at_least(self, 1, "val_batch_size", "filter_overlong_prompts_workers", "max_prompt_id_length")
        at_least(self, 0, "dataloader_num_workers", "seed")
        above(self, 0, "max_prompt_length")
        minus_one_or_positive(self, "train_max_samples", "val_max_samples")
        require(len(self.train_files) > 0, "train_files", self.train_files, "give at least one training file")
