"""`actor_rollout_ref.rollout.*`: generation and the weight sync that feeds it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from verl_like.config.actor import not_both
from verl_like.config.base import (
    ConfigNode,
    above,
    at_least,
    between,
    key,
    minus_one_or_positive,
    one_of,
    reference,
    require,
    section,
    such_that,
)
from verl_like.config.data import CustomClassConfig
from verl_like.config.endpoint import EndpointConfig
from verl_like.config.engines import ENGINES, EngineKind
from verl_like.config.fsdp import DTYPES
from verl_like.config.outcomes import OutcomesConfig

_NO_EMPTY_STOP = such_that(all, "an empty text would end every response; leave it out")
_NO_EMPTY_WORD = such_that(all, "an empty text rules out everything; leave it out")
_TOKEN_IDS = such_that(lambda ids: all(i >= 0 for i in ids), "ids are 0 or more")


class RolloutName(StrEnum):
    """Engine that generates."""

    vllm = "vllm"
    sglang = "sglang"
    hf = "hf"
    auto = "auto"
    recorded = "recorded"
    openai = "openai"


class LoadFormat(StrEnum):
    """Route of trained weights to the rollout engine: tensor by tensor, or the full state dict first."""

    dummy_dtensor = "dummy_dtensor"
    dummy_hf = "dummy_hf"


@dataclass(kw_only=True, slots=True)
class ValKwargsConfig(ConfigNode):
    """`rollout.val_kwargs.*`: sampling during validation."""

    temperature: float = key(0.0, at_least(0), idle="do_sample is false")
    """Softmax temperature; 0: greedy."""
    top_p: float = key(1.0, above(0), between(0, 1), unit="probability", idle="do_sample is false")
    """Nucleus size."""
    top_k: int = key(-1, minus_one_or_positive(), unit="tokens", idle="do_sample is false")
    """Sample among the k most probable; -1: all."""
    min_p: float | None = key(None, between(0, 1), unit="share of the largest probability", idle="do_sample is false")
    """Tokens below are dropped. Null: as in training."""
    repetition_penalty: float | None = key(None, above(0))
    """Divides the logits of tokens seen. Null: as in training."""
    presence_penalty: float | None = key(None, between(-2, 2), unit="logit")
    """Taken off tokens of the response. Null: as in training."""
    frequency_penalty: float | None = key(None, between(-2, 2), unit="logit")
    """Taken off tokens of the response for each occurrence. Null: as in training."""
    bad_words: list[str] | None = key(None, _NO_EMPTY_WORD)
    """Texts that are never completed. Null: as in training."""
    ignore_eos: bool | None = None
    """Go on after the end-of-sequence token. Null: as in training."""
    max_tokens: int | None = key(None, at_least(1), unit="tokens")
    """Longest response, response_length at most. Null: response_length."""
    min_tokens: int | None = key(None, at_least(0), unit="tokens")
    """Nothing ends a shorter response. Null: as in training."""
    stop: list[str] | None = key(None, _NO_EMPTY_STOP)
    """Texts that end a response. Null: as in training."""
    stop_token_ids: list[int] | None = key(None, _TOKEN_IDS)
    """Token ids that end a response, besides the end-of-sequence tokens. Null: as in training."""
    n: int = key(1, at_least(1), unit="responses")
    """Responses per validation prompt."""
    do_sample: bool = False
    """Sample; false: greedy."""


@dataclass(kw_only=True, slots=True)
class EngineKwargsConfig(ConfigNode):
    """`rollout.engine_kwargs.*`: arguments passed to the engine's constructor as they are."""

    vllm: dict[str, Any] = key({})
    """Arguments of vLLM's engine."""
    sglang: dict[str, Any] = key({})
    """Arguments of SGLang's engine, for instance attention_backend or mem_fraction_static."""


@dataclass(kw_only=True, slots=True)
class MultiTurnConfig(ConfigNode):
    """`rollout.multi_turn.*`: tools and conversations."""

    enable: bool = False
    """Let the model call tools and go on: all rows but those whose agent_name is single_turn_agent."""
    max_turns: int | None = key(None, at_least(1), unit="turns")
    """Bound of the model's turns (older name of max_assistant_turns; the smaller one counts)."""
    max_assistant_turns: int | None = key(None, at_least(1), unit="turns")
    """Bound of the model's turns. Null: data.max_response_length alone, which counts tool text too."""
    max_user_turns: int | None = key(None, at_least(1), unit="turns")
    """How often tools may answer."""
    max_parallel_calls: int = key(1, at_least(1), unit="calls")
    """Tool calls of one turn that run; the model is told that the others did not."""
    max_tool_response_length: int = key(256, at_least(1), unit="characters")
    """Longest tool response."""
    tool_response_truncate_side: str = key("middle", one_of("left", "middle", "right"))
    """Which part of a long tool response is cut: left, middle, right."""
    tool_config_path: str | None = None
    """YAML file that lists the tools: verl's BaseTool classes."""
    function_tool_path: str | None = None
    """Python file whose functions with @function_tool are tools."""
    environment_path: str | None = None
    """file.py:Class of an environment: reset(**row), get_reward(), and public methods, which are the tools."""
    tool_timeout: float = key(60.0, above(0), unit="s")
    """Longest time of one tool call, of a simulated user's answer, and of an agent loop's own code between two requests
    to the policy; the process is killed then, and the episode left out of training."""
    tool_memory_limit_mb: int | None = key(None, at_least(1), unit="MB")
    """Memory of one process that runs tools or agent loops."""
    tool_concurrency: int = key(1, at_least(1), unit="calls")
    """That one tool process works on at a time. More is for tools that await a network: what computes or blocks holds
    up the calls beside it."""
    turn_rewards: bool = False
    """What tools give for the calls of a turn (the reward of `execute`, of a function's or a method's tuple) stands on
    the turn's last token, beside the episode's score; likewise a simulated user's scores, and the turn_scores of an
    agent loop's extra_fields. False: graders alone see it, as in verl."""
    malformed_calls: str = key("answer", one_of("answer", "end"))
    """What follows a call that cannot be read. answer: the model is told what is wrong, and goes on. end: the episode
    ends there, and is graded as it is."""
    interaction_config_path: str | None = None
    """YAML file that lists simulated users: verl's BaseInteraction classes. Rows choose one of them in
    extra_info.interaction_kwargs."""
    completion_callback: str | None = None
    """package.module.Class or file.py:Class of verl 0.5's CompletionCallback: called after each answer of all rows
    without an agent_name, it appends to the conversation and submits it again. Runs as an agent loop."""
    use_inference_chat_template: bool = False
    """Where the chat template rewrites what came before (strips earlier thinking, say), send the model what it writes:
    the episode goes on in a new row. False: history stays as the model wrote it."""
    enable_tokenization_sanity_check: bool = True
    """Compare turn-by-turn tokenisation with the whole conversation's."""
    tokenization_sanity_check_mode: str = key("strict", one_of("disable", "strict", "ignore_strippable"))
    """How strict that comparison is: disable, strict, ignore_strippable."""
    format: str = "hermes"
    """Syntax of tool calls."""


@dataclass(kw_only=True, slots=True)
class AgentConfig(ConfigNode):
    """`rollout.agent.*`: agent loops."""

    num_workers: int = key(8, at_least(1), unit="processes")
    """Processes that run tools, and as many that run agent loops of agent_loop_config_path."""
    default_agent_loop: str = "single_turn_agent"
    """Agent loop of rows that name none: one of agent_loop_config_path's; for other names rollout.multi_turn.enable
    decides between single_turn_agent and tool_agent."""
    agent_loop_config_path: str | None = None
    """YAML file that lists agent loops (verl's AgentLoopBase): name, _target_, and arguments of the class."""
    custom_async_server: CustomClassConfig = section(CustomClassConfig)
    """A generation server class of the user's."""


@dataclass(kw_only=True, slots=True)
class GatewayConfig(ConfigNode):
    """`rollout.gateway.*`: programs that talk to a base URL ([gateway](gateway.md))."""

    path: str | None = key(None, reference())
    """file.py:function of `run(data, base_url, api_key, **more)`, a coroutine or a function, which returns the reward:
    all rows are its episodes."""
    command: str | None = None
    """A command line in its place, with URL and key in its environment; the reward is the last line it prints."""
    host: str = key("127.0.0.1", such_that(str.strip, "name an address of this machine; 0.0.0.0 is all of them"))
    """Address that the gateway listens on. Another than the loopback's lets programs on other machines in, who need an
    episode's key."""
    port: int = key(0, between(0, 65535), unit="port")
    """Port of the gateway; 0: any free one."""
    forced_tool_choice: str = key("resample", one_of("resample", "auto"))
    """What becomes of a request that demands a tool call (tool_choice required, any, a named tool). resample: the
    policy answers up to four times until it has written one; HTTP 400 where it has not. auto: as if the choice were
    open."""


@dataclass(kw_only=True, slots=True)
class AdditionalPromptsConfig(ConfigNode):
    """`rollout.scheduler.additional_prompts.*`: more prompts than a step needs, of which the fastest are used."""

    enable: bool = False
    """A step takes the first data.train_batch_size groups that end, and aborts the others: no waiting for the longest
    responses, and shorter responses in the batch than the policy writes (scheduler/response_length/* shows it). Such a
    run does not resume bit for bit."""
    max: int = key(16, at_least(1), unit="prompts", idle="enable is false")
    """Prompts in flight beyond data.train_batch_size."""
    aborted: str = key("drop", one_of("wait", "drop"), idle="enable is false")
    """What becomes of aborted prompts. drop: they are not trained on in this epoch (ROLL). wait: they come first in the
    next step, which waits for them; none is lost, and hardly any time is won."""


@dataclass(kw_only=True, slots=True)
class SchedulerConfig(ConfigNode):
    """`rollout.scheduler.*`: which requests run where and when (ROLL's scheduler)."""

    mode: str = key("request", one_of("request", "batch"))
    """request: each response is graded as it ends, and dynamic sampling starts another prompt for each group without a
    signal. batch: responses are graded when all have ended, and dynamic sampling works in whole draws."""
    max_running_requests: int | None = key(None, at_least(1), unit="requests")
    """Most requests in each replica; others wait in the driver. Null: all, and the engine itself runs max_num_seqs of
    them."""
    expand_n: bool = False
    """The n responses of a prompt may be sampled by different replicas: loads are more even, and the prompt is computed
    by each. false: by one replica, which computes it once."""
    additional_prompts: AdditionalPromptsConfig = section(AdditionalPromptsConfig)
    """More prompts than a step needs."""


@dataclass(kw_only=True, slots=True)
class SpeculativeConfig(ConfigNode):
    """`rollout.speculative.*`: tokens guessed ahead, checked several at a time; they never change what is sampled."""

    method: str = key("none", one_of("none", "ngram", "history"))
    """Where guesses come from. ngram: what followed a response's last tokens before, in prompt and response; history
    (name=hf or vllm): also in the responses of its group under way, and in those of the same row in earlier epochs.
    none: no guesses."""
    max_tokens: int = key(8, between(1, 128), unit="tokens", idle="method is none")
    """Most tokens guessed ahead of each row."""
    min_similarity: float = key(0.3, above(0), between(0, 1), unit="probability", idle="method is none")
    """Guess on while the chance to be right, by what was right before, is at least so much."""
    history_megabytes: int = key(256, at_least(1), unit="MB", idle="method is not history")
    """Memory for earlier responses, in the driver and in checkpoints; the oldest go first."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig(ConfigNode):
    """`actor_rollout_ref.rollout.*`."""

    name: RolloutName = RolloutName.vllm
    """Engine: vllm, hf (transformers) or sglang; auto: the first of those installed that can do what other keys and the
    model ask, of vllm, sglang (CUDA) and hf, of hf and vllm on a CPU for a local model of at most 64 MiB; recorded:
    none, all steps come from skip_dump_dir; openai: a model behind rollout.openai.url, for `verl-like eval` alone."""
    server: bool = False
    """Give the engine a process of its own beside the worker: it shares no interpreter lock with the trainer, and its
    end is not the worker's. SGLang always has one."""
    skip_rollout: bool = False
    """Take the responses and scores of each step that skip_dump_dir has from there; sample the others, and record them
    there."""
    skip_dump_dir: str | None = None
    """Folder of recorded steps, as trainer.record_freq writes them. Null: <log_dir>/recorded."""
    mode: str = key("sync", one_of("sync", "async"))
    """sync or async: both mean the same here, the engine always works request by request."""
    n: int = key(1, at_least(1), unit="responses")
    """Responses per prompt; the group of grpo."""
    n_redundant: int = key(
        0, at_least(0), unit="responses", idle="name is recorded: the responses of each group are there"
    )
    """So many more are begun for each prompt, and the first n that end well are its group; the others are aborted.
    Saves the wait for slow or stuck environments; favours short ones (redundancy/*), and does not resume bit for
    bit."""
    temperature: float = key(1.0, at_least(0), above(0))
    """Softmax temperature of training rollouts."""
    top_p: float = key(1.0, above(0), between(0, 1), unit="probability")
    """Nucleus size."""
    top_k: int = key(-1, minus_one_or_positive(), unit="tokens")
    """Sample among the k most probable; -1: all."""
    do_sample: bool = True
    """Sample; false: greedy."""
    use_fire_sampling: bool = False
    """FIRE: the first token of each training response at temperature 30 among the top_k (16 if that is off) likeliest,
    the others as ever."""
    min_p: float = key(0.0, between(0, 1), unit="share of the largest probability")
    """Drop tokens less probable than that; 0: none."""
    repetition_penalty: float = key(1.0, above(0))
    """Positive logits of tokens in prompt and response are divided by it, negative ones multiplied; 1: off."""
    presence_penalty: float = key(0.0, between(-2, 2), unit="logit")
    """Taken off the logits of tokens that are in the response, -2 to 2."""
    frequency_penalty: float = key(0.0, between(-2, 2), unit="logit")
    """Taken off the logits of tokens in the response, times their number there, -2 to 2."""
    bad_words: list[str] = key([], _NO_EMPTY_WORD)
    """Texts that are never completed, at the start of a word or inside."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token until response_length."""
    min_tokens: int = key(0, unit="tokens")
    """No end-of-sequence token, stop token or stop text ends a shorter response."""
    stop: list[str] = key([], _NO_EMPTY_STOP)
    """Texts that end a response; it keeps the token that completes one."""
    stop_token_ids: list[int] = key([], _TOKEN_IDS)
    """Token ids that end a response, besides the end-of-sequence tokens; also with ignore_eos."""
    limit_images: int | None = key(None, at_least(1), unit="images")
    """Most images of one prompt; more are an error. Null: any number."""
    prompt_length: int = key(512, at_least(1), unit="tokens")
    """Longest prompt; follows data.max_prompt_length."""
    response_length: int = key(512, at_least(1), unit="tokens")
    """Longest response; follows data.max_response_length."""
    dtype: str = key("auto", one_of(*DTYPES))
    """Precision of the rollout weights; auto: bfloat16 on CUDA, float32 on CPU."""
    quantization: str | None = key(None, one_of("fp8", "int8"))
    """Precision of the matrices that responses are sampled with, quantised at each weight sync: fp8 (vLLM, on GPUs) or
    int8 (hf: weights alone, a scale for each row). Null: dtype."""
    gpu_memory_utilization: float = key(0.5, above(0), between(0, 1), unit="share of a GPU")
    """Memory of the rollout engine: weights and KV cache."""
    enforce_eager: bool = False
    """Do not compile the model, nor capture CUDA graphs: starts sooner, samples slower."""
    cudagraph_capture_sizes: list[int] | None = key(None, unit="sequences")
    """Batch sizes to capture. Null: the engine's choice."""
    free_cache_engine: bool = True
    """Free the engine's weights and KV cache while training."""
    sleep_level: int = key(1, between(1, 2))
    """What becomes of the freed weights. 1: they go to host memory; 2: nothing stays, and they are synced again."""
    load_format: LoadFormat = LoadFormat.dummy_dtensor
    """Weight sync: dummy_dtensor (tensor by tensor) or dummy_hf (full state dict first)."""
    layered_summon: bool = False
    """Gather LoRA weights layer by layer."""
    update_weights_bucket_megabytes: int = key(512, at_least(1), unit="MB")
    """Size of one bucket of weights on their way to another process; within one, tensors go one by one."""
    nnodes: int = key(0, at_least(0), unit="nodes")
    """Machines of the rollout engine's own pool (actor_rollout_ref.hybrid_engine=false)."""
    n_gpus_per_node: int = key(0, at_least(0), unit="processes")
    """Size of that pool per node."""
    tensor_model_parallel_size: int = key(1, at_least(1), unit="processes")
    """Processes that hold one copy of the rollout model."""
    max_num_batched_tokens: int = key(8192, at_least(1), unit="tokens")
    """Most tokens of one engine step."""
    max_model_len: int | None = key(None, at_least(1), unit="tokens")
    """Longest sequence of the engine. Null: prompt_length + response_length."""
    max_num_seqs: int = key(1024, at_least(1), unit="sequences")
    """Most sequences decoded at once."""
    enable_chunked_prefill: bool = True
    """Cut long prompts into several engine steps."""
    enable_prefix_caching: bool = True
    """Share the KV cache of equal prompt beginnings; emptied at every weight sync."""
    disable_log_stats: bool = True
    """Silence the engine's own statistics."""
    log_prob_micro_batch_size: int | None = key(None, at_least(1), unit="sequences, all processes")
    """Deprecated: divided by the data-parallel size. Use the per_gpu key."""
    log_prob_micro_batch_size_per_gpu: int | None = key(None, at_least(1), unit="sequences")
    """Sequences of one forward of the old log-probs. Null: the actor's, where micro-batches are not cut by tokens."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Cut the old log-probs' micro-batches by tokens; follows the actor's. Null: unless a size is given here, or else
    the actor's way."""
    log_prob_max_token_len_per_gpu: int = key(16384, at_least(1), unit="tokens")
    """Token budget of one forward of the old log-probs; follows the actor's."""
    calculate_log_probs: bool = False
    """Report the difference between the sampler's and the trainer's probabilities."""
    seed_per_request: bool = True
    """A seed for each request, from trainer.seed, the prompt's draw, sample and turn: responses do not depend on
    batching."""
    enable_rollout_routing_replay: bool = False
    """Record the experts that the engine chose for each token, layers x top-k bytes (two each above 255 experts):
    actor.router_replay.mode=R3 replays them; with disabled router/differing_share compares them with the trainer's."""
    sync_probe: bool = True
    """At each weight sync compare checksums of the trainer's shards, of what is sent and of what the engine holds, and
    log-probs of probe prompts."""
    sync_probe_tolerance: float | None = key(None, above(0), unit="nats", idle="sync_probe is false")
    """Mean difference of the probe that passes. Null: 10x the first proved sync's, between 1e-4 and 1e-3 (float32) or
    2e-2 and 1e-1 (bfloat16)."""
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig)
    """Arguments passed to the engine as they are."""
    openai: EndpointConfig = section(EndpointConfig, idle="name is not openai")
    """The model of rollout.name=openai."""
    speculative: SpeculativeConfig = section(SpeculativeConfig)
    """Tokens guessed ahead."""
    scheduler: SchedulerConfig = section(SchedulerConfig)
    """Which requests run where and when."""
    val_kwargs: ValKwargsConfig = section(ValKwargsConfig)
    """Sampling during validation."""
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)
    """Tools and conversations."""
    agent: AgentConfig = section(AgentConfig)
    """Agent loops."""
    gateway: GatewayConfig = section(GatewayConfig)
    """Programs that talk to a base URL."""
    outcomes: OutcomesConfig = section(OutcomesConfig)
    """What becomes of episodes, by how they end."""

    def check(self) -> None:
        between(0, self.response_length).check("min_tokens", self.min_tokens)
        not_both(self, "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu")
        needed = self.prompt_length + self.response_length
        fits = self.max_model_len is None or self.max_model_len >= needed
        keys = "prompt_length + response_length (data.max_prompt_length + data.max_response_length)"
        fix = f"must hold {keys} = {needed}, or be null"
        require(fits, "max_model_len", self.max_model_len, fix)

    @property
    def engine(self) -> EngineKind:
        """The row of `name`: what the engine is and can."""
        return ENGINES[self.name]

    @property
    def own_drafts(self) -> Any:
        """Settings of vLLM's speculative path, as it spells them; None: it guesses nothing."""
        if self.engine.proposer is None:
            return None
        if self.speculative.method == "none":
            return self.engine_kwargs.vllm.get("speculative_config")
        most = self.speculative.max_tokens
        return {"method": "custom_class", "model": self.engine.proposer, "num_speculative_tokens": most}


def reads_text(rollout: RolloutConfig) -> bool:
    """Return True where texts may end a response, for which an engine needs the tokenizer."""
    return bool(rollout.stop or rollout.val_kwargs.stop)


def runs_agent_loops(rollout: RolloutConfig) -> bool:
    """Return True where some rows may be coroutines of the user's."""
    return rollout.agent.agent_loop_config_path is not None or rollout.multi_turn.completion_callback is not None


def runs_programs(rollout: RolloutConfig) -> bool:
    """Return True where episodes are programs behind the gateway."""
    return rollout.gateway.path is not None or rollout.gateway.command is not None


# Settings of sampling -> values with which it draws from the distribution that the trainer computes, which knows the
# temperature alone. Cuts of the tail come first
NEUTRAL: dict[str, Any] = {
    **{"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0},
    **{"min_tokens": 0, "bad_words": [], "use_fire_sampling": False},
}


def distortions(rollout: RolloutConfig) -> list[str]:
    """Settings, as key=value, with which the sampler draws from another distribution than the trainer computes."""
    values = {name: getattr(rollout, name) for name in NEUTRAL}
    return [f"{name}={value}" for name, value in values.items() if value != NEUTRAL[name]]
