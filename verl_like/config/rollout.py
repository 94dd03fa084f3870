"""`actor_rollout_ref.rollout.*`: generation and the weight sync that feeds it."""

from dataclasses import dataclass, field
from typing import Any

from verl_like.config import enums
from verl_like.config.actor import not_both
from verl_like.config.base import (
    ConfigNode,
    above,
    at_least,
    between,
    minus_one_or_positive,
    one_of,
    reference_or_none,
    require,
)
from verl_like.config.data import CustomClassConfig
from verl_like.config.endpoint import EndpointConfig
from verl_like.config.engines import ENGINES, EngineKind
from verl_like.config.outcomes import OutcomesConfig


@dataclass(kw_only=True, slots=True)
class ValKwargsConfig(ConfigNode):
    """`rollout.val_kwargs.*`: sampling during validation."""

    temperature: float = 0.0
    """Softmax temperature; 0: greedy."""
    top_p: float = 1.0
    """[probability] Nucleus size."""
    top_k: int = -1
    """[tokens] Sample among the k most probable; -1: all."""
    min_p: float | None = None
    """[share of the largest probability] Tokens below are dropped. Null: as in training."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens seen. Null: as in training."""
    presence_penalty: float | None = None
    """[logit] Taken off tokens of the response. Null: as in training."""
    frequency_penalty: float | None = None
    """[logit] Taken off tokens of the response for each occurrence. Null: as in training."""
    bad_words: list[str] | None = None
    """Texts that are never completed. Null: as in training."""
    ignore_eos: bool | None = None
    """Go on after the end-of-sequence token. Null: as in training."""
    max_tokens: int | None = None
    """[tokens] Longest response, response_length at most. Null: response_length."""
    min_tokens: int | None = None
    """[tokens] Nothing ends a shorter response. Null: as in training."""
    stop: list[str] | None = None
    """Texts that end a response. Null: as in training."""
    stop_token_ids: list[int] | None = None
    """Token ids that end a response, besides the end-of-sequence tokens. Null: as in training."""
    n: int = 1
    """[responses] Responses per validation prompt."""
    do_sample: bool = False
    """Sample; false: greedy."""

    def check(self) -> None:
        check_sampling(self)
        at_least(self, 1, "max_tokens")
        at_least(self, 0, "min_tokens")
        check_ends(self)


def check_ends(node: "ValKwargsConfig | RolloutConfig") -> None:
    """Ranges of what ends a response, or never stands in one."""
    require(all(node.stop or ()), "stop", node.stop, "an empty text would end every response; leave it out")
    require(all(node.bad_words or ()), "bad_words", node.bad_words, "an empty text rules out everything; leave it out")
    ids = node.stop_token_ids or ()
    require(all(i >= 0 for i in ids), "stop_token_ids", node.stop_token_ids, "ids are 0 or more")


def check_sampling(node: ConfigNode) -> None:
    """Ranges of the sampling parameters that training and validation share."""
    at_least(node, 0, "temperature")
    above(node, 0, "top_p")
    between(node, 0, 1, "top_p")
    minus_one_or_positive(node, "top_k")
    between(node, 0, 1, "min_p")
    above(node, 0, "repetition_penalty")
    between(node, -2, 2, "presence_penalty", "frequency_penalty")
    at_least(node, 1, "n")


@dataclass(kw_only=True, slots=True)
class EngineKwargsConfig(ConfigNode):
    """`rollout.engine_kwargs.*`: arguments passed to the engine's constructor as they are."""

    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's engine."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Arguments of SGLang's engine, for instance attention_backend or mem_fraction_static."""


@dataclass(kw_only=True, slots=True)
class MultiTurnConfig(ConfigNode):
    """`rollout.multi_turn.*`: tools and conversations."""

    enable: bool = False
    """Let the model call tools and go on: all rows but those whose agent_name is single_turn_agent."""
    max_turns: int | None = None
    """[turns] Bound of the model's turns (older name of max_assistant_turns; the smaller one counts)."""
    max_assistant_turns: int | None = None
    """[turns] Bound of the model's turns. Null: data.max_response_length alone, which counts tool text too."""
    max_user_turns: int | None = None
    """[turns] How often tools may answer."""
    max_parallel_calls: int = 1
    """[calls] Tool calls of one turn that run; the model is told that the others did not."""
    max_tool_response_length: int = 256
    """[characters] Longest tool response."""
    tool_response_truncate_side: str = "middle"
    """Which part of a long tool response is cut: left, middle, right."""
    tool_config_path: str | None = None
    """YAML file that lists the tools: verl's BaseTool classes."""
    function_tool_path: str | None = None
    """Python file whose functions with @function_tool are tools."""
    environment_path: str | None = None
    """file.py:Class of an environment: reset(**row), get_reward(), and public methods, which are the tools."""
    tool_timeout: float = 60.0
    """[s] Longest time of one tool call, of a simulated user's answer, and of an agent loop's own code between two
    requests to the policy; the process is killed then, and the episode left out of training."""
    tool_memory_limit_mb: int | None = None
    """[MB] Memory of one process that runs tools or agent loops."""
    tool_concurrency: int = 1
    """[calls] That one tool process works on at a time. More is for tools that await a network: what computes or blocks
    holds up the calls beside it."""
    turn_rewards: bool = False
    """What tools give for the calls of a turn (the reward of `execute`, of a function's or a method's tuple) stands on
    the turn's last token, beside the episode's score; likewise a simulated user's scores, and the turn_scores of an
    agent loop's extra_fields. False: graders alone see it, as in verl."""
    malformed_calls: str = "answer"
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
    tokenization_sanity_check_mode: str = "strict"
    """How strict that comparison is: disable, strict, ignore_strippable."""
    format: str = "hermes"
    """Syntax of tool calls."""

    def check(self) -> None:
        above(self, 0, "tool_timeout")
        at_least(self, 1, "tool_memory_limit_mb", "tool_concurrency")
        one_of(self, "malformed_calls", ("answer", "end"))
        at_least(self, 1, "max_turns", "max_assistant_turns", "max_user_turns", "max_parallel_calls")
        at_least(self, 1, "max_tool_response_length")
        one_of(self, "tool_response_truncate_side", ("left", "middle", "right"))
        one_of(self, "tokenization_sanity_check_mode", ("disable", "strict", "ignore_strippable"))


@dataclass(kw_only=True, slots=True)
class AgentConfig(ConfigNode):
    """`rollout.agent.*`: agent loops."""

    num_workers: int = 8
    """[processes] Processes that run tools, and as many that run agent loops of agent_loop_config_path."""
    default_agent_loop: str = "single_turn_agent"
    """Agent loop of rows that name none: one of agent_loop_config_path's; for other names rollout.multi_turn.enable
    decides between single_turn_agent and tool_agent."""
    agent_loop_config_path: str | None = None
    """YAML file that lists agent loops (verl's AgentLoopBase): name, _target_, and arguments of the class."""
    custom_async_server: CustomClassConfig = field(default_factory=CustomClassConfig)
    """A generation server class of the user's."""

    def check(self) -> None:
        at_least(self, 1, "num_workers")


@dataclass(kw_only=True, slots=True)
class GatewayConfig(ConfigNode):
    """`rollout.gateway.*`: programs that talk to a base URL ([gateway](gateway.md))."""

    path: str | None = None
    """file.py:function of `run(data, base_url, api_key, **more)`, a coroutine or a function, which returns the reward:
    all rows are its episodes."""
    command: str | None = None
    """A command line in its place, with URL and key in its environment; the reward is the last line it prints."""
    host: str = "127.0.0.1"
    """Address that the gateway listens on. Another than the loopback's lets programs on other machines in, who need an
    episode's key."""
    port: int = 0
    """[port] Port of the gateway; 0: any free one."""
    forced_tool_choice: str = "resample"
    """What becomes of a request that demands a tool call (tool_choice required, any, a named tool). resample: the
    policy answers up to four times until it has written one; HTTP 400 where it has not. auto: as if the choice were
    open."""

    def check(self) -> None:
        reference_or_none(self, "path")
        one_of(self, "forced_tool_choice", ("resample", "auto"))
        between(self, 0, 65535, "port")
        require(bool(self.host.strip()), "host", self.host, "name an address of this machine; 0.0.0.0 is all of them")


@dataclass(kw_only=True, slots=True)
class AdditionalPromptsConfig(ConfigNode):
    """`rollout.scheduler.additional_prompts.*`: more prompts than a step needs, of which the fastest are used."""

    enable: bool = False
    """A step takes the first data.train_batch_size groups that end, and aborts the others: no waiting for the longest
    responses, and shorter responses in the batch than the policy writes (scheduler/response_length/* shows it). Such a
    run does not resume bit for bit."""
    max: int = 16
    """[prompts] Prompts in flight beyond data.train_batch_size."""
    aborted: str = "drop"
    """What becomes of aborted prompts. drop: they are not trained on in this epoch (ROLL). wait: they come first in the
    next step, which waits for them; none is lost, and hardly any time is won."""

    def check(self) -> None:
        at_least(self, 1, "max")
        one_of(self, "aborted", enums.ABORTED_PROMPTS)


@dataclass(kw_only=True, slots=True)
class SchedulerConfig(ConfigNode):
    """`rollout.scheduler.*`: which requests run where and when (ROLL's scheduler)."""

    mode: str = "request"
    """request: each response is graded as it ends, and dynamic sampling starts another prompt for each group without a
    signal. batch: responses are graded when all have ended, and dynamic sampling works in whole draws."""
    max_running_requests: int | None = None
    """[requests] Most requests in each replica; others wait in the driver. Null: all, and the engine itself runs
    max_num_seqs of them."""
    expand_n: bool = False
    """The n responses of a prompt may be sampled by different replicas: loads are more even, and the prompt is computed
    by each. false: by one replica, which computes it once."""
    additional_prompts: AdditionalPromptsConfig = field(default_factory=AdditionalPromptsConfig)
    """More prompts than a step needs."""

    def check(self) -> None:
        one_of(self, "mode", enums.SCHEDULER_MODES)
        at_least(self, 1, "max_running_requests")


@dataclass(kw_only=True, slots=True)
class RolloutConfig(ConfigNode):
    """`actor_rollout_ref.rollout.*`."""

    name: enums.RolloutName = enums.RolloutName.vllm
    """Engine: vllm, hf (transformers) or sglang; recorded: none, all steps come from skip_dump_dir; openai: a model
    behind rollout.openai.url, for `verl-like eval` alone."""
    server: bool = False
    """Give the engine a process of its own beside the worker: it shares no interpreter lock with the trainer, and its
    end is not the worker's. SGLang always has one."""
    skip_rollout: bool = False
    """Take the responses and scores of each step that skip_dump_dir has from there; sample the others, and record them
    there."""
    skip_dump_dir: str | None = None
    """Folder of recorded steps, as trainer.record_freq writes them. Null: <log_dir>/recorded."""
    mode: str = "sync"
    """sync or async: both mean the same here, the engine always works request by request."""
    n: int = 1
    """[responses] Responses per prompt; the group of grpo."""
    n_redundant: int = 0
    """[responses] So many more are begun for each prompt, and the first n that end well are its group; the others are
    aborted. Saves the wait for slow or stuck environments; favours short ones (redundancy/*), and does not
    resume bit for bit."""
    temperature: float = 1.0
    """Softmax temperature of training rollouts."""
    top_p: float = 1.0
    """[probability] Nucleus size."""
    top_k: int = -1
    """[tokens] Sample among the k most probable; -1: all."""
    do_sample: bool = True
    """Sample; false: greedy."""
    use_fire_sampling: bool = False
    """FIRE: the first token of each training response at temperature 30 among the top_k (16 if that is off) likeliest,
    the others as ever."""
    min_p: float = 0.0
    """[share of the largest probability] Drop tokens less probable than that; 0: none."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in prompt and response are divided by it, negative ones multiplied; 1: off."""
    presence_penalty: float = 0.0
    """[logit] Taken off the logits of tokens that are in the response, -2 to 2."""
    frequency_penalty: float = 0.0
    """[logit] Taken off the logits of tokens in the response, times their number there, -2 to 2."""
    bad_words: list[str] = field(default_factory=list)
    """Texts that are never completed, at the start of a word or inside."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token until response_length."""
    min_tokens: int = 0
    """[tokens] No end-of-sequence token, stop token or stop text ends a shorter response."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response; it keeps the token that completes one."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a response, besides the end-of-sequence tokens; also with ignore_eos."""
    limit_images: int | None = None
    """[images] Most images of one prompt; more are an error. Null: any number."""
    prompt_length: int = 512
    """[tokens] Longest prompt; follows data.max_prompt_length."""
    response_length: int = 512
    """[tokens] Longest response; follows data.max_response_length."""
    dtype: str = "auto"
    """Precision of the rollout weights; auto: bfloat16 on CUDA, float32 on CPU."""
    quantization: str | None = None
    """Precision of the matrices that responses are sampled with, quantised at each weight sync: fp8 (vLLM, on GPUs) or
    int8 (hf: weights alone, a scale for each row). Null: dtype."""
    gpu_memory_utilization: float = 0.5
    """[share of a GPU] Memory of the rollout engine: weights and KV cache."""
    enforce_eager: bool = False
    """Do not compile the model, nor capture CUDA graphs: starts sooner, samples slower."""
    cudagraph_capture_sizes: list[int] | None = None
    """[sequences] Batch sizes to capture. Null: the engine's choice."""
    free_cache_engine: bool = True
    """Free the engine's weights and KV cache while training."""
    sleep_level: int = 1
    """What becomes of the freed weights. 1: they go to host memory; 2: nothing stays, and they are synced again."""
    load_format: enums.LoadFormat = enums.LoadFormat.dummy_dtensor
    """Weight sync: dummy_dtensor (tensor by tensor) or dummy_hf (full state dict first)."""
    layered_summon: bool = False
    """Gather LoRA weights layer by layer."""
    update_weights_bucket_megabytes: int = 512
    """[MB] Size of one bucket of weights on their way to another process; within one, tensors go one by one."""
    nnodes: int = 0
    """[nodes] Machines of the rollout engine's own pool (actor_rollout_ref.hybrid_engine=false)."""
    n_gpus_per_node: int = 0
    """[processes] Size of that pool per node."""
    tensor_model_parallel_size: int = 1
    """[processes] Processes that hold one copy of the rollout model."""
    max_num_batched_tokens: int = 8192
    """[tokens] Most tokens of one engine step."""
    max_model_len: int | None = None
    """[tokens] Longest sequence of the engine. Null: prompt_length + response_length."""
    max_num_seqs: int = 1024
    """[sequences] Most sequences decoded at once."""
    enable_chunked_prefill: bool = True
    """Cut long prompts into several engine steps."""
    enable_prefix_caching: bool = True
    """Share the KV cache of equal prompt beginnings; emptied at every weight sync."""
    disable_log_stats: bool = True
    """Silence the engine's own statistics."""
    log_prob_micro_batch_size: int | None = None
    """[sequences, all processes] Deprecated: divided by the data-parallel size. Use the per_gpu key."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """[sequences] Sequences of one forward of the old log-probs. Null: the actor's, where micro-batches are not cut by
    tokens."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Cut the old log-probs' micro-batches by tokens; follows the actor's. Null: unless a size is given here, or else
    the actor's way."""
    log_prob_max_token_len_per_gpu: int = 16384
    """[tokens] Token budget of one forward of the old log-probs; follows the actor's."""
    calculate_log_probs: bool = False
    """Report the difference between the sampler's and the trainer's probabilities."""
    seed_per_request: bool = True
    """A seed for each request, from trainer.seed, the prompt's draw, sample and turn: responses do not depend on
    batching."""
    sync_probe: bool = True
    """At each weight sync compare checksums of the trainer's shards, of what is sent and of what the engine holds, and
    log-probs of probe prompts."""
    sync_probe_tolerance: float | None = None
    """[nats] Mean difference of the probe that passes. Null: 10x the first proved sync's, between 1e-4 and 1e-3
    (float32) or 2e-2 and 1e-1 (bfloat16)."""
    engine_kwargs: EngineKwargsConfig = field(default_factory=EngineKwargsConfig)
    """Arguments passed to the engine as they are."""
    openai: EndpointConfig = field(default_factory=EndpointConfig)
    """The model of rollout.name=openai."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Which requests run where and when."""
    val_kwargs: ValKwargsConfig = field(default_factory=ValKwargsConfig)
    """Sampling during validation."""
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    """Tools and conversations."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Agent loops."""
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    """Programs that talk to a base URL."""
    outcomes: OutcomesConfig = field(default_factory=OutcomesConfig)
    """What becomes of episodes, by how they end."""

    def check(self) -> None:
        check_sampling(self)
        at_least(self, 1, "prompt_length", "response_length", "tensor_model_parallel_size", "max_num_batched_tokens")
        between(self, 0, self.response_length, "min_tokens")
        check_ends(self)
        above(self, 0, "temperature", "gpu_memory_utilization", "sync_probe_tolerance")
        between(self, 0, 1, "gpu_memory_utilization")
        at_least(self, 1, "limit_images")
        at_least(self, 1, "max_model_len", "max_num_seqs", "update_weights_bucket_megabytes")
        at_least(self, 1, "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu")
        at_least(self, 1, "log_prob_max_token_len_per_gpu")
        at_least(self, 0, "nnodes", "n_gpus_per_node", "n_redundant")
        one_of(self, "mode", enums.ROLLOUT_MODES)
        one_of(self, "dtype", enums.DTYPES)
        between(self, 1, 2, "sleep_level")
        if self.quantization is not None:
            one_of(self, "quantization", ("fp8", "int8"))
        not_both(self, "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu")
        needed = self.prompt_length + self.response_length
        fits = self.max_model_len is None or self.max_model_len >= needed
        fix = f"must hold prompt_length + response_length = {needed}, or be null"
        require(fits, "max_model_len", self.max_model_len, fix)

    @property
    def engine(self) -> EngineKind:
        """The row of `name`: what the engine is and can."""
        return ENGINES[self.name]


def reads_text(rollout: RolloutConfig) -> bool:
    """Whether texts may end a response, which an engine needs the tokenizer for."""
    return bool(rollout.stop or rollout.val_kwargs.stop)


def runs_agent_loops(rollout: RolloutConfig) -> bool:
    """Whether some rows may be coroutines of the user's."""
    return rollout.agent.agent_loop_config_path is not None or rollout.multi_turn.completion_callback is not None


def runs_programs(rollout: RolloutConfig) -> bool:
    """Whether episodes are programs behind the gateway."""
    return rollout.gateway.path is not None or rollout.gateway.command is not None


def distortions(rollout: RolloutConfig) -> list[str]:
    """Settings, as key=value, with which the sampler draws from another distribution than the trainer computes, which
    knows the temperature alone. Cuts of the tail (top_p, top_k) come first."""
    rows = (  # key, value, the value that changes nothing
        ("top_p", rollout.top_p, 1),
        ("top_k", rollout.top_k if rollout.top_k > 0 else -1, -1),
        ("min_p", rollout.min_p, 0),
        ("repetition_penalty", rollout.repetition_penalty, 1),
        ("presence_penalty", rollout.presence_penalty, 0),
        ("frequency_penalty", rollout.frequency_penalty, 0),
        ("min_tokens", rollout.min_tokens, 0),
        ("bad_words", rollout.bad_words, []),
        ("use_fire_sampling", rollout.use_fire_sampling, False),
    )
    return [f"{key}={value}" for key, value, neutral in rows if value != neutral]
