"""Facts about a run that its keys do not tell: tokenizer, model, data, device, the user's own code.

Each is loaded when somebody first reads it, and once. One that cannot be loaded raises the same error for whoever reads
it: so it is one problem in the list of a start (`start_checks`), and hides the checks that need it, no others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from verl_like.config import DataConfig, PPOConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.doctor_paths import DATA_FILES
from verl_like.config.errors import raise_if_any
from verl_like.config.placement import has_further_pools
from verl_like.config.roles import CRITIC, REWARD, RoleConfig, reward_network
from verl_like.data.dataset import Dataset, make_encoder
from verl_like.data.foreign import build_dataset
from verl_like.data.templates import SYSTEM_PROMPTS
from verl_like.episodes.episode import EpisodeRunner, SingleTurn, Toolbox
from verl_like.models.loading import end_token_ids, load_hf_config, load_tokenizer
from verl_like.models.location import missing_places
from verl_like.models.vision import VisionProcessor, processor_of
from verl_like.registry import part
from verl_like.rewards.manager import RewardManager
from verl_like.trainer.inputs import max_model_len
from verl_like.trainer.reward_models import load_reward_model

T = TypeVar("T")
_MODEL = "actor_rollout_ref.model.path"


def fact(load: Callable[[Any], T]) -> functools.cached_property[T]:
    """Make a method a fact: an attribute that is loaded once, whose ValueError or OSError stays what it is."""
    name = load.__name__

    @functools.wraps(load)
    def loaded(facts: Facts) -> T:
        if name in facts.failed:
            raise facts.failed[name]
        try:
            return load(facts)
        except (ValueError, OSError) as error:
            facts.failed[name] = error
            raise

    return functools.cached_property(loaded)


class Facts:
    """Facts of one run.

    config: the run.
    stack: ends what is started for them: graders, tools, agent loops.
    trains: False where the validation set alone is answered, and stands for the training set too.
    """

    def __init__(self, config: PPOConfig, stack: ExitStack, *, trains: bool = True) -> None:
        self.config, self.trains = config, trains
        self.failed: dict[str, Exception] = {}
        self._stack = stack

    def known(self, name: str) -> Any:
        """A fact by its name; None where it cannot be loaded, which another check tells."""
        try:
            return getattr(self, name)
        except (ValueError, OSError):
            return None

    @fact
    def world(self) -> tuple[str, int]:
        """Device, and ranks per node."""
        return resolve_world(self.config)

    @property
    def device(self) -> str:
        """Type of the device: cuda, cpu."""
        return self.world[0]

    @fact
    def missing(self) -> dict[tuple[str, str], str]:
        """What is wrong with the places of models, tokenizers and data, by (key, path)."""
        return missing_places(self.config, *(DATA_FILES if self.trains else DATA_FILES[1:]))

    def _require(self, path: str) -> None:
        raise_if_any([text for (_, place), text in self.missing.items() if place == path])

    @fact
    def data(self) -> DataConfig:
        """data.*, with the system prompt that data.system_prompt=auto means."""
        return with_system_prompt(self.config)

    @fact
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the policy."""
        model, data = self.config.actor_rollout_ref.model, self.config.data
        self._require(data.tokenizer or model.path)
        trust = model.trust_remote_code or data.trust_remote_code
        tokenizer = load_tokenizer(data.tokenizer or model.path, trust, "data.tokenizer" if data.tokenizer else _MODEL)
        if model.custom_chat_template:
            tokenizer.chat_template = model.custom_chat_template
        return tokenizer

    @fact
    def hf_config(self) -> PretrainedConfig:
        """Hugging Face config of the policy."""
        self._require(self.config.actor_rollout_ref.model.path)
        return load_hf_config(self.config.actor_rollout_ref.model, _MODEL)

    @fact
    def critic_config(self) -> PretrainedConfig:
        """Hugging Face config of the critic."""
        self._require(self.config.critic.model.path)
        return load_hf_config(self.config.critic.model, "critic.model.path")

    @fact
    def reward_config(self) -> PretrainedConfig:
        """Hugging Face config of a reward model that gives numbers."""
        self._require(self.config.reward_model.model.path or "")
        return load_hf_config(reward_network(self.config.reward_model), "reward_model.model.path")

    def hf_config_of(self, role: RoleConfig) -> PretrainedConfig:
        """Hugging Face config of a role's model."""
        return getattr(self, {CRITIC: "critic_config", REWARD: "reward_config"}.get(role.name, "hf_config"))

    @fact
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a response."""
        return end_token_ids(self.tokenizer, self.hf_config, self.config.actor_rollout_ref.model.path, _MODEL)

    @fact
    def vision(self) -> VisionProcessor | None:
        """Processor of a model that looks at images."""
        return processor_of(self.config.actor_rollout_ref.model, self.hf_config)

    @fact
    def reward_tokenizers(self) -> tuple[Any, Any] | None:
        """Tokenizers of the policy's texts and of the reward model, where these differ."""
        if self.config.reward_model.enable:
            self._require(self.config.reward_model.model.path or "")
            self._require(self.config.reward_model.model.input_tokenizer or "")
        return load_reward_model(self.config)

    @fact
    def toolbox(self) -> Toolbox | None:
        """Tools and environments of the run; None where it has none."""
        return part("tools", "open")(self.config, self._stack)

    def tool_usage(self) -> dict[str, float]:
        """Metrics of the tools since the last time."""
        return {} if self.toolbox is None else self.toolbox.take_usage()

    @fact
    def _of_environments(self) -> tuple[Dataset, Dataset | None]:
        return part("environments", "datasets")(self.config, make_encoder(self.data, self.tokenizer))

    @fact
    def train(self) -> Dataset:
        """Training set."""
        if self.config.env.train.tags:
            return self._of_environments[0]
        return self._dataset("train") if self.trains else required(self.val)

    @fact
    def val(self) -> Dataset | None:
        """Validation set, where there is one."""
        if self.config.env.train.tags:
            return self._of_environments[1]
        return self._dataset("val") if self.config.data.val_files else None

    def _dataset(self, split: str) -> Dataset:
        options: dict[str, Any] = {"seed": self.config.trainer.seed, "vision": self.vision}
        options["tools"] = () if self.toolbox is None else self.toolbox.schemas
        options["limit_images"] = self.config.actor_rollout_ref.rollout.limit_images
        files = self.data.train_files if split == "train" else self.data.val_files
        return build_dataset(self.data, files, self.tokenizer, split=split, **options)

    @fact
    def plan(self) -> BatchPlan:
        """Sizes of the run; without its lengths where the training set is not known."""
        train: Dataset | None = self.known("train")
        rows = None if train is None else len(train)
        return BatchPlan.build(self.config, self.config.trainer.nnodes * self.world[1], rows)

    @fact
    def max_model_len(self) -> int:
        """Most tokens of a prompt with its response."""
        return max_model_len(self.config, self.hf_config)

    @fact
    def rewards(self) -> RewardManager:
        """Graders of the run, started; without a tokenizer, where there is none, they can only be looked at."""
        sections = (self.config.custom_reward_function, self.config.reward_model, self.config.data)
        return self._stack.enter_context(RewardManager(*sections, self.known("tokenizer")))

    @fact
    def runner(self) -> EpisodeRunner:
        """How a prompt becomes an episode, in training and in validation; agent loops are started."""
        config, ids = self.config, (self.tokenizer, self.eos_ids)
        tools = self.toolbox
        own = SingleTurn() if tools is None else part("tools", "runner")(config, *ids, tools, self.vision)
        encoder = make_encoder(self.data, self.tokenizer)
        return part("loops", "runner")(config, own, encoder, self.hf_config.model_type, self.eos_ids, self._stack)


def with_system_prompt(config: PPOConfig) -> DataConfig:
    """Return data.*, with data.system_prompt=auto replaced by the prompt that belongs to reward_model.rule."""
    data, rule = config.data, config.reward_model.rule
    if data.system_prompt != "auto":
        return data
    if rule not in SYSTEM_PROMPTS:
        raise ValueError(
            f"data.system_prompt=auto with reward_model.rule={rule}: there is a default prompt for "
            f"{', '.join(SYSTEM_PROMPTS)} only; set data.system_prompt to a text, or to null"
        )
    return dataclasses.replace(data, system_prompt=rule)


def resolve_world(config: PPOConfig) -> tuple[str, int]:
    """Resolve (device, ranks per node) of this run: trainer.device and trainer.n_gpus_per_node, with auto filled in."""
    settings = config.trainer
    device = str(settings.device)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available() and config.ray_init.address is None:
        raise ValueError("trainer.device=cuda, but torch sees no CUDA device here; set trainer.device=cpu or auto")
    if settings.n_gpus_per_node != "auto":
        return device, int(settings.n_gpus_per_node)
    if device == "cuda" and has_further_pools(config):
        raise ValueError(
            "trainer.n_gpus_per_node=auto takes every GPU of a machine, and there are further pools: set it to what is "
            "left for the main pool"
        )
    return device, torch.cuda.device_count() if device == "cuda" else 1


def required(known: T | None) -> T:
    """Return a value that is known in this case: a length that a plan built with the size of the data has, say."""
    assert known is not None
    return known
