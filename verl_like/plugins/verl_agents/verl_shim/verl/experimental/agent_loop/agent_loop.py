"""verl.experimental.agent_loop.agent_loop: what agent loops inherit from, with the helpers of verl 0.5 to 0.9.

A loop lives in a worker, one object for each episode. It asks the policy by `server_manager.generate`, and returns
tokens with a mask. Text only.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, Field

from verl_like.plugins.verl_agents.policy import Policy
from verl_like.plugins.verl_agents.tokens import ContinuousTokens, Merged
from verl_like.user_code import accepted

from ...utils.chat_template import initialize_system_prompt

AsyncLLMServerManager = Policy
_agent_loop_registry: dict[str, type] = {}


class AgentLoopMetrics(BaseModel):
    """Seconds of one episode."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """Result of an agent loop: tokens, and a mask with 1 for each that the policy sampled."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_processor_output: Any = None


class DictConfigWrap:
    """Holder of the configuration as `config`."""

    def __init__(self, config: Any) -> None:
        self.config = config


class ToolListWrap:
    """Holder of the tools as `tools`."""

    def __init__(self, tools: list[Any]) -> None:
        self.tools = tools


def register(agent_name: str) -> Callable[[type], type]:
    """Note a class. Which loops a run has is what its YAML file lists."""

    def note(subclass: type) -> type:
        _agent_loop_registry[agent_name] = subclass
        return subclass

    return note


class AgentLoopBase(ABC):
    """Base of agent loops, whose `run` is an episode.

    config: the whole configuration, as an OmegaConf dictionary.
    """

    _class_initialized = False

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        dataset_config: Any = None,
        data_config: Any = None,
        hf_model_type: str | None = None,
        tools: Any = None,
        **kwargs: Any,
    ) -> None:
        given = {"config": trainer_config.config, "tokenizer": tokenizer, "processor": processor}
        self.init_class(**accepted(self.init_class, given | kwargs))
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.dataset_cls = dataset_cls
        self.dataset_config = self.data_config = self.config.data
        self.apply_chat_template_kwargs = dict(self.config.data.apply_chat_template_kwargs or {})
        self.mm_processor_kwargs: dict[str, Any] = {}
        self.loop = asyncio.get_running_loop()
        self._tokens = ContinuousTokens(tokenizer, self.config.data)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, **kwargs: Any) -> None:
        """Set up the state that all objects of the class share (verl 0.5, 0.6); called for each object."""
        cls._class_initialized = True

    @property
    def system_prompt(self) -> list[int]:
        """Tokens that the template puts before the first message of its own accord."""
        return initialize_system_prompt(self.tokenizer, **self.apply_chat_template_kwargs)

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return no media: loops are text only here."""
        return {}

    async def process_multi_modal_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return no media: loops are text only here."""
        return {}

    @staticmethod
    def build_sglang_video_payload(videos: Any, mm_inputs: Any) -> None:
        """Return None: loops are text only here."""
        return None

    def _get_mm_processor_kwargs(self, audio_data: Any = None) -> dict[str, Any]:
        return {}

    def _assert_mm_supported(self, has_multi_modal: bool) -> None:
        if has_multi_modal:
            raise ValueError("agent loops are text only here")

    async def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """The template's tokens, ready for an answer (verl 0.6 to 0.8)."""
        self._assert_mm_supported(bool(images or videos or kwargs.get("audios")))
        ids = await self.loop.run_in_executor(None, self._tokens.initial, messages, tools)
        return ids[len(self.system_prompt) :] if remove_system_prompt else ids

    async def ct_build_initial_tokens(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **media: Any
    ) -> list[int]:
        """The prompt; of a longer one than data.max_prompt_length the end."""
        self._assert_mm_supported(any(media.get(name) for name in ("images", "videos", "audios")))
        ids = await self.loop.run_in_executor(None, self._tokens.initial, messages, tools)
        return ids[-self.config.data.max_prompt_length :]

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: Sequence[int],
        assistant_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        assistant_logprobs: Sequence[float] | None = None,
    ) -> tuple[Merged, list[int], list[float] | None]:
        """Tokens, mask and log-probs with an answer behind them."""
        new = len(assistant_token_ids)
        merged = Merged([*runtime_token_ids, *assistant_token_ids])
        log_probs = None
        if response_logprobs is not None:
            log_probs = [*response_logprobs, *(assistant_logprobs or [0.0] * new)]
        return merged, [*response_mask, *[1] * new], log_probs

    async def ct_merge_context_msg(
        self,
        previous_messages: list[dict[str, Any]],
        updated_messages: list[dict[str, Any]],
        runtime_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> tuple[Merged, list[int], list[float] | None]:
        """Append the messages behind the answer to the tokens, with mask 0 and log-prob 0."""
        given = (previous_messages, updated_messages, runtime_token_ids, response_mask, tools)
        ids = await self.loop.run_in_executor(None, self._tokens.after_answer, *given)
        log_probs = None if response_logprobs is None else [*response_logprobs, *[0.0] * len(ids)]
        return Merged([*runtime_token_ids, *ids]), [*response_mask, *[0] * len(ids)], log_probs

    @abstractmethod
    async def run(self, *args: Any, **kwargs: Any) -> Any:
        """The episode: run(sampling_params, **row), or run(messages, sampling_params) as in verl 0.5."""
