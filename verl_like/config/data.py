"""`data.*`: which prompts, how they are tokenised and drawn."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from verl_like.config.base import (
    ConfigNode,
    above,
    at_least,
    between,
    key,
    minus_one_or_positive,
    require,
    section,
    such_that,
)

CHAT_TEMPLATES = ("native", "none", "chatml", "qwen2_5", "llama3", "gemma", "r1_zero")
_TEMPLATE = such_that(
    lambda name: name in CHAT_TEMPLATES or "/" in name or "." in name,
    f"choose one of {', '.join(CHAT_TEMPLATES)}, or give the path of a Jinja file",
)

_FINITE = such_that(lambda number: abs(number) < float("inf"), "must be a finite number")
_COUNTS = such_that(
    lambda pair: len(pair) == 2 and all(0 < count < float("inf") for count in pair), "give two numbers above 0"
)
_DRAWN = "sampler.class_path is set: it draws the prompts"


class Truncation(StrEnum):
    """Treatment of a prompt longer than data.max_prompt_length."""

    error = "error"
    left = "left"
    right = "right"
    middle = "middle"


class SpelledTokens(StrEnum):
    """Treatment of special tokens that somebody else's text spells out."""

    text = "text"
    keep = "keep"
    error = "error"


@dataclass(kw_only=True, slots=True)
class CustomClassConfig(ConfigNode):
    """A class of the user's, loaded from a file."""

    path: str | None = None
    """Python file that holds the class, or pkg://module, or with the class's name file.py:Name. Null: the built-in
    one."""
    name: str | None = key(None, idle="path is null")
    """Name of the class in that file."""
    kwargs: dict[str, Any] = key({}, idle="path is null")
    """Further keyword arguments of its constructor."""


@dataclass(kw_only=True, slots=True)
class SamplerConfig(ConfigNode):
    """A sampler of the user's (curriculum)."""

    class_path: str | None = None
    """Python file that holds the sampler class, or pkg://module, or with the class's name file.py:Name. Null: the
    built-in resumable sampler."""
    class_name: str | None = key(None, idle="class_path is null")
    """Name of the sampler class in that file."""
    kwargs: dict[str, Any] = key({}, idle="class_path is null")
    """Further keyword arguments of its constructor."""


_OFF = "enable is false"


@dataclass(kw_only=True, slots=True)
class CurriculumConfig(ConfigNode):
    """Prompts drawn by the probability that their group is mixed ([curriculum](curriculum.md))."""

    enable: bool = False
    """Skip prompts that are expected to teach little; drop solved and hopeless ones for a while."""
    metric: str | None = key(None, idle=_OFF)
    """Number of the reward function that says whether a response succeeds (acc). Null: the score."""
    success_above: float = key(0.5, _FINITE, idle=_OFF)
    """A response succeeds where that number is above this."""
    prior: list[float] = key([0.5, 0.5], _COUNTS, idle=_OFF)
    """Successes and failures that every prompt counts as having had, those of a prompt that is new alone."""
    memory: float = key(0.5, between(0, 1), idle=_OFF)
    """Weight that what was counted before keeps each time a prompt is scored again. 1: the policy does not change."""
    min_signal: float = key(0.25, between(0, 1), idle=_OFF)
    """A scored prompt is dropped below this share of the best probability of a mixed group. 0: none is."""
    revisit_epochs: float | None = key(2.0, above(0), unit="epochs", idle=_OFF)
    """Draws after which a dropped prompt comes back, in numbers of prompts of the data set. Null: it does not."""


@dataclass(kw_only=True, slots=True)
class DataConfig(ConfigNode):
    """`data.*`."""

    tokenizer: str | None = None
    """Folder of the tokenizer. Null: actor_rollout_ref.model.path."""
    use_shm: bool = False
    """Copy data files to shared memory (/dev/shm) before reading; removed at the end of the run."""
    cache_dir: str | None = None
    """Folder where remote files (hdfs://, s3:// ...) are kept. Null: ~/.cache/verl_like/data."""
    train_files: list[str] = key(["~/data/rlhf/gsm8k/train.parquet"], such_that(len, "give at least one training file"))
    """Training files (parquet, json, jsonl, csv, arrow; local or remote); one path or a list."""
    val_files: Any = key(
        ["~/data/rlhf/gsm8k/test.parquet"],
        such_that(
            lambda it: isinstance(it, str | list | dict), "give a path, a list of paths or a dictionary {name: path}"
        ),
    )
    """Validation files: one path, a list, or a dictionary {name: path} whose sets are reported apart. An empty list:
    no validation."""
    train_max_samples: int = key(-1, minus_one_or_positive(), unit="prompts")
    """Use only this many training rows; -1: all."""
    val_max_samples: int = key(-1, minus_one_or_positive(), unit="prompts")
    """Use only this many validation rows; -1: all."""
    prompt_key: str = "prompt"
    """Column with the prompt: a text or chat messages."""
    messages_key: str | None = None
    """Column with chat messages, or with one message (Colossal-RL), in place of prompt_key."""
    ground_truth_key: str | None = None
    """Column with the reference answer. Null: reward_model, or else gt_answer, test_cases, ground_truth."""
    tools_key: str | None = None
    """Column with the tool schemas that a prompt offers; they go to the chat template."""
    reward_fn_key: str = "data_source"
    """Column that selects the reward function of a row."""
    default_data_source: str = "unknown"
    """Data source of the rows of files without the column reward_fn_key."""
    domain_weights: dict[str, float] = key({}, idle=_DRAWN)
    """Data source -> weight: the share of each source in every training batch, whatever the size of its files. Empty:
    all rows alike."""
    prompt_id_key: str | None = None
    """Column with a prompt's id; it reaches the reward function and the sample files."""
    max_prompt_id_length: int | None = key(None, at_least(1), unit="tokens", idle="prompt_id_key is not set")
    """Longest tokenised prompt id; a longer one is an error. Null: the ids are not tokenised."""
    max_prompt_length: int = key(512, at_least(1), unit="tokens")
    """Longest prompt."""
    max_response_length: int = key(512, at_least(1), unit="tokens")
    """Longest response."""
    train_batch_size: int = key(1024, at_least(1), unit="prompts")
    """Prompts of one training step; each is answered rollout.n times."""
    gen_batch_size: int | None = key(
        None,
        at_least(1),
        unit="prompts",
        idle=(
            "algorithm.filter_groups.enable is false: only dynamic sampling draws more than once a step",
            "algorithm.filter_groups.resample is false: prompts are drawn once a step",
        ),
    )
    """Prompts of one draw of dynamic sampling (algorithm.filter_groups). Null: train_batch_size."""
    val_batch_size: int | None = key(None, at_least(1), unit="prompts")
    """Validation rows generated at a time. Null: all at once."""
    return_raw_input_ids: bool = False
    """Give the reward function the prompt's tokens without the chat template: extra_info["raw_input_ids"]."""
    return_raw_chat: bool = False
    """Give the reward function the chat messages: extra_info["raw_prompt"]."""
    return_full_prompt: bool = False
    """Give the reward function the prompt's text with the chat template: extra_info["full_prompts"]."""
    shuffle: bool = key(True, idle=_DRAWN)
    """Draw training prompts in a random order, a new one each epoch."""
    seed: int | None = key(None, at_least(0), idle="shuffle is false")
    """Seed of the sampler. Null: trainer.seed."""
    validation_shuffle: bool = False
    """Shuffle validation rows."""
    dataloader_num_workers: int = key(8, at_least(0), unit="processes")
    """Background processes that load and tokenise."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than max_prompt_length when loading."""
    filter_overlong_prompts_workers: int = key(1, at_least(1), unit="processes")
    """Processes that measure prompt lengths for the filter, or encode all rows before a supervised run starts."""
    truncation: Truncation = Truncation.error
    """What to do with a prompt that is too long: error, left (keep the end), right (keep the start), middle."""
    image_key: str | None = "images"
    """Column with images, one for each <image> in the prompt. Null: none, and <image> in a prompt is plain text."""
    video_key: str | None = "videos"
    """Column with videos, one for each <video> in the prompt. Null: none, and <video> in a prompt is plain text."""
    max_image_megapixels: float = key(64.0, above(0), unit="millions of pixels")
    """A larger image or frame is an error (before the processor makes it smaller)."""
    trust_remote_code: bool = False
    """Run Python code that comes with the tokenizer."""
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    """A dataset class of the user's."""
    sampler: SamplerConfig = section(SamplerConfig)
    """A sampler class of the user's."""
    curriculum: CurriculumConfig = section(CurriculumConfig)
    """Draws by expected signal."""
    extra: dict[str, Any] = key({})
    """Keys of your own for your data set or sampler, which finds them as config.<name>; +data.<name>=value on the
    command line sets one."""
    apply_chat_template_kwargs: dict[str, Any] = key({})
    """Keyword arguments of the tokenizer's apply_chat_template, for instance enable_thinking."""
    continue_final_message: bool = True
    """Go on with a row's last message if it is an assistant's; graders read both. False: another turn begins (verl)."""
    chat_template: str = key("native", _TEMPLATE)
    """How messages become text: native (the tokenizer's template), none (one user message as it is), chatml, qwen2_5,
    llama3, gemma, r1_zero, or the path of a Jinja file."""
    special_tokens_in_text: SpelledTokens = SpelledTokens.text
    """What becomes of special tokens (<|im_end|> ...) that messages, tools or environments spell out: text (they stay
    text), keep (they become the tokens, as in verl), error."""
    system_prompt: str | None = None
    """System message of prompts that have none: a text, one of think_answer_tags, boxed, code (what the grader of that
    name asks for), or auto: that of reward_model.rule."""
    self_check_rows: int = key(0, at_least(0), unit="rows")
    """Rows of each data source whose reference answer is graded before training starts; 0: none."""

    def check(self) -> None:
        ours = {"add_generation_prompt", "continue_final_message", "conversation", "messages", "tokenize", "tools"}
        ours &= {*self.apply_chat_template_kwargs}
        require(not ours, "apply_chat_template_kwargs", ours, "the trainer sets these; see data.continue_final_message")
        for name, weight in self.domain_weights.items():
            legal = isinstance(weight, int | float) and 0 <= weight < float("inf")
            require(legal, f"domain_weights.{name}", weight, "must be a number of at least 0")
        some = not self.domain_weights or sum(self.domain_weights.values()) > 0
        require(some, "domain_weights", self.domain_weights, "one weight must be above 0")
