"""Facts about a run that its keys do not tell: tokenizer, model, data, device, the user's own code.

Each is loaded when somebody first reads it, and once. One that cannot be loaded raises the same error for whoever reads
it: so it is one problem in the list of a start (`start_checks`), and hides the checks that need it, no others.
"""

from __future__ import annotations

import dataclasses
import functools
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from verl_like.config import DataConfig, PPOConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.errors import raise_if_any
from verl_like.config.paths import DATA_FILES, Files
from verl_like.config.placement import has_further_pools
from verl_like.config.roles import ACTOR, REF, RoleConfig
from verl_like.data.chat import check_template
from verl_like.data.dataset import Dataset, make_encoder
from verl_like.data.foreign import build_dataset, check_files
from verl_like.data.loader import PromptLoader
from verl_like.data.sampler import ResumableSampler, Sampler
from verl_like.data.templates import SYSTEM_PROMPTS
from verl_like.episodes.episode import EpisodeRunner, SingleTurn, Toolbox
from verl_like.models.loading import end_token_ids, load_hf_config, load_tokenizer, num_positions, tell_positions
from verl_like.models.location import missing_places
from verl_like.models.vision import processor_of
from verl_like.registry import part
from verl_like.rewards.manager import RewardManager
from verl_like.trainer.costs import Forecast, ModelCosts
from verl_like.trainer.reward_models import load_reward_model

T = TypeVar("T")
_MODEL = "actor_rollout_ref.model.path"


class Fact(functools.cached_property[T]):
    """Attribute that is loaded when it is first read; its ValueError or OSError, too, is the same from then on."""

    def __get__(self, facts: Any, owner: type[Any] | None = None) -> T:  # pyright: ignore[reportIncompatibleMethodOverride]
        name = str(self.attrname)
        if name in facts.failed:
            raise facts.failed[name].with_traceback(None)  # each reader adds its own
        try:
            return super().__get__(facts, owner)
        except (ValueError, OSError) as error:
            facts.failed[name] = error
            raise


class Facts:
    """Facts of one run.

    config: the run.
    stack: ends what is started for them: graders, tools, agent loops.
    trains: False where the validation set alone is answered, and stands for the training set too.
    """

    def __init__(self, config: PPOConfig, stack: ExitStack, *, trains: bool = True) -> None:
        self.config, self.trains, self._stack = config, trains, stack
        self.failed: dict[str, Exception] = {}

    def known(self, name: str) -> Any:
        """A fact by its name; None where it cannot be loaded, which another check tells."""
        try:
            return getattr(self, name)
        except (ValueError, OSError):
            return None

    world = Fact(lambda facts: resolve_world(facts.config))
    """Device, and ranks per node."""

    @property
    def device(self) -> str:
        """Type of the device: cuda, cpu."""
        return self.world[0]

    missing = Fact(lambda facts: missing_places(facts.config, *(DATA_FILES if facts.trains else DATA_FILES[1:])))
    """Problems with the places of models, tokenizers and data, by (key, path)."""

    def _require(self, path: str) -> None:
        raise_if_any([text for (_, place), text in self.missing.items() if place == path])

    data = Fact(lambda facts: with_system_prompt(facts.config))
    """Section data, with the system prompt that data.system_prompt=auto means."""

    @Fact
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the policy."""
        model, data = self.config.actor_rollout_ref.model, self.config.data
        self._require(data.tokenizer or model.path)
        trust, key = model.trust_remote_code or data.trust_remote_code, "data.tokenizer" if data.tokenizer else _MODEL
        try:
            tokenizer = load_tokenizer(data.tokenizer or model.path, trust, key)
        except ValueError as error:
            if key == _MODEL and "config.json" in str(error):
                _ = self.hf_config  # whose words are the right ones, where that file is at fault
            raise
        if model.custom_chat_template:
            tokenizer.chat_template = model.custom_chat_template
        if data.chat_template == "native":
            check_template(tokenizer, f"{key}={data.tokenizer or model.path}")
        return tokenizer

    @Fact
    def hf_config(self) -> PretrainedConfig:
        """Hugging Face config of the policy."""
        self._require(self.config.actor_rollout_ref.model.path)
        return load_hf_config(self.config.actor_rollout_ref.model, _MODEL)

    def hf_config_of(self, role: RoleConfig) -> PretrainedConfig:
        """Hugging Face config of a role's model."""
        if role.name in (ACTOR, REF):
            return self.hf_config
        self._require(role.model.path)
        return load_hf_config(role.model, role.path_key)

    @Fact
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a response."""
        return end_token_ids(self.tokenizer, self.hf_config, self.config.actor_rollout_ref.model.path, _MODEL)

    vision = Fact(lambda facts: processor_of(facts.config.actor_rollout_ref.model, facts.hf_config))
    """Processor of a model that looks at images."""
    reward_tokenizers = Fact(lambda facts: load_reward_model(facts.config))
    """Tokenizers of the policy's texts and of the reward model, where these differ."""
    room = Fact(lambda facts: None)
    """Room for the processes that filter prompts: start_checks tells where there is none."""
    toolbox: Fact[Toolbox | None] = Fact(lambda facts: part("tools", "open")(facts.config, facts._stack))
    """Tools and environments; None where the run has none."""

    def tool_usage(self) -> dict[str, float]:
        """Metrics of the tools since the last time."""
        return {} if self.toolbox is None else self.toolbox.take_usage()

    @Fact
    def _of_environments(self) -> tuple[Dataset, Dataset | None]:
        return part("environments", "datasets")(self.config, make_encoder(self.data, self.tokenizer))

    @Fact
    def train(self) -> Dataset:
        """Training set."""
        return required(self._dataset("train", self.data.train_files) if self.trains else self.val)

    @Fact
    def val(self) -> Dataset | None:
        """Validation set, where there is one."""
        return self._dataset("val", self.data.val_files)

    def _dataset(self, split: str, files: Files) -> Dataset | None:
        if self.config.env.train.tags:
            return self._of_environments[split == "val"]
        if split == "val" and not files:
            return None
        try:
            tools = () if self.toolbox is None else self.toolbox.schemas
            needs: dict[str, Any] = {"data": self.data, "tokenizer": self.tokenizer, "vision": self.vision}
            _ = self.room
        except (ValueError, OSError):
            check_files(self.config.data, files, split)  # whose own faults are told all the same
            raise
        limit, seed = self.config.actor_rollout_ref.rollout.limit_images, self.config.trainer.seed
        return build_dataset(files=files, split=split, seed=seed, tools=tools, limit_images=limit, **needs)

    @Fact
    def plan(self) -> BatchPlan:
        """Sizes of the run; without its lengths where the training set is not known."""
        rows = len(self.train) if self.known("train") else None
        return BatchPlan.build(self.config, self.config.trainer.nnodes * self.world[1], rows)

    @Fact
    def max_model_len(self) -> int:
        """Tokens of prompt plus response that the rollout engine must hold, at most as many as the model can."""
        data, rollout = self.config.data, self.config.actor_rollout_ref.rollout
        needed = data.max_prompt_length + data.max_response_length
        length = rollout.max_model_len or needed
        if length < needed:
            raise ValueError(
                f"actor_rollout_ref.rollout.max_model_len={length} is less than data.max_prompt_length + "
                f"data.max_response_length = {needed}; raise it or leave it null"
            )
        if length > num_positions(self.hf_config):
            raise ValueError(
                f"prompt plus response may have {length} tokens (data.max_prompt_length={data.max_prompt_length} + "
                f"data.max_response_length={data.max_response_length}, or rollout.max_model_len), but "
                f"{tell_positions(self.hf_config)}; lower the lengths"
            )
        return length

    costs = Fact(lambda facts: ModelCosts.of(facts.config, facts.plan))
    """Operations and bytes of the models' passes."""

    @Fact
    def memory(self) -> Forecast:
        """Forecast of each phase's memory, which is logged."""
        processes = self.plan.pools[0].world_size, self.world[1]
        return part("forecast", "memory")(self.config, self.hf_config, self.costs, self.device, *processes)

    @Fact
    def rewards(self) -> RewardManager:
        """Graders of the run, started; without a tokenizer, where there is none, they can only be looked at."""
        sections = (self.config.custom_reward_function, self.config.reward_model, self.config.data)
        return self._stack.enter_context(RewardManager(*sections, self.known("tokenizer")))

    @Fact
    def runner(self) -> EpisodeRunner:
        """Runner that makes episodes of prompts, in training and in validation; agent loops are started."""
        config, tools, ids = self.config, self.toolbox, (self.tokenizer, self.eos_ids)
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


def train_loader(config: PPOConfig, dataset: Dataset, plan: BatchPlan) -> PromptLoader:
    """Load the training prompts from the first one on, in the order of `train_sampler`.

    Raises ValueError for a sampler that cannot be used in this run.
    """
    size = plan.prompts_per_draw
    loader = PromptLoader(dataset, train_sampler(config, dataset, size), size, drop_last=not plan.draws_until_full)
    if config.asynchronous and loader.learns and config.data.sampler.class_path is not None:
        raise ValueError(
            f"trainer.mode={config.trainer.mode} with a data.sampler that learns from each batch: prompts are drawn "
            "before the batches that it would learn from; set trainer.mode=sync"
        )
    return loader


def train_sampler(config: PPOConfig, dataset: Dataset, batch_size: int) -> Sampler:
    """Build the user's sampler, or one of rows by data.domain_weights or data.curriculum, or of all rows alike.

    The seed is data.seed, or else trainer.seed.
    """
    data = config.data
    if data.sampler.class_path is not None:
        return part("sampler", "own")(data, dataset)
    seed = config.trainer.seed if data.seed is None else data.seed
    if data.curriculum.enable:
        order, n = {"shuffle": data.shuffle, "seed": seed}, config.actor_rollout_ref.rollout.n
        return part("sampler", "difficulty")(data.curriculum, len(dataset), n, identity=dataset.identity(), **order)
    if not data.domain_weights:
        shuffle = data.shuffle and not config.env.train.tags  # groups take turns, and their starts are random as it is
        return ResumableSampler(len(dataset), shuffle=shuffle, seed=seed, identity=dataset.identity())
    weights, identity = data.domain_weights, dataset.identity()
    weighted = part("sampler", "weighted")
    sampler = weighted(dataset.domains(), weights, shuffle=data.shuffle, seed=seed, identity=identity)
    sampler.check_batch(batch_size)
    return sampler
