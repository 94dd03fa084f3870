"""`reward_model.*`, `custom_reward_function.*`: where scores come from."""

from dataclasses import dataclass
from typing import Any

from verl_like.config.actor import not_both
from verl_like.config.base import ConfigNode, above, at_least, between, key, one_of, reference, section, such_that
from verl_like.config.engines import SERVERS
from verl_like.config.fsdp import DTYPES, FSDPConfig, Strategy
from verl_like.config.profiler import ProfilerConfig
from verl_like.config.reward_execution import JudgeConfig, SandboxConfig, SandboxFusionConfig
from verl_like.config.rollout import EngineKwargsConfig
from verl_like.config.shaping import LengthRewardConfig, OverlongBufferConfig
from verl_like.user_code import FORMS, is_reference


@dataclass(kw_only=True, slots=True)
class RewardRolloutConfig(ConfigNode):
    """`reward_model.rollout.*`."""

    name: str | None = key(None, one_of(*SERVERS))
    """Engine whose server the run starts and ends: vllm or sglang (CUDA). Null: there is none."""
    dtype: str = key("auto", one_of(*DTYPES))
    """Precision of the weights; auto: the model folder's."""
    tensor_model_parallel_size: int = key(1, at_least(1), unit="processes")
    """Devices that share one copy of the model; each group of them has a server."""
    gpu_memory_utilization: float = key(0.5, above(0), between(0, 1), unit="share of a GPU")
    """Memory of the server, held as long as the run."""
    free_cache_engine: bool = False
    """Give the memory back while others work: not available, responses are graded while others are sampled."""
    prompt_length: int = key(2048, at_least(1), unit="tokens", idle="max_model_len is set")
    """Longest question to the model."""
    response_length: int = key(2048, at_least(1), unit="tokens", idle="max_model_len is set")
    """Longest answer of the model."""
    max_model_len: int | None = key(None, at_least(1), unit="tokens")
    """Question and answer. Null: prompt_length + response_length."""
    max_num_batched_tokens: int = key(8192, at_least(1), unit="tokens")
    """Most tokens of one engine step."""
    max_num_seqs: int = key(1024, at_least(1), unit="sequences")
    """Most answers written at once."""
    enforce_eager: bool = True
    """Do not capture CUDA graphs."""
    cudagraph_capture_sizes: list[int] | None = key(None, unit="sequences", idle="enforce_eager is true")
    """Batch sizes to capture. Null: the engine's choice."""
    enable_chunked_prefill: bool = True
    """Cut long questions into several engine steps."""
    enable_prefix_caching: bool = True
    """Share the KV cache of equal beginnings, such as a prompt's template."""
    disable_log_stats: bool = True
    """Silence the engine's own statistics."""
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig)
    """Arguments of the server's command line, as {max_loras: 2} for --max-loras 2; true: a flag alone."""


REWARD_MANAGERS = ("naive", "batch", "prime", "dapo")
_SHARED = ("enable is false", "enable_resource_pool is false: the reward model runs in the policy's processes")


@dataclass(kw_only=True, slots=True)
class CustomRewardFunctionConfig(ConfigNode):
    """`custom_reward_function.*`: compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)."""

    path: str | None = None
    """Python file of the reward function. Null: the built-in graders."""
    name: str = key("compute_score", idle="path is not set")
    """Name of the function in that file."""
    reward_kwargs: dict[str, Any] = key({}, idle="path is not set")
    """Keyword arguments passed to every call."""
    timeout: float = key(60.0, above(0), unit="s")
    """A call that takes longer is stopped and counted as failed."""
    num_workers: int = key(1, at_least(1), unit="processes")
    """Processes that grade."""
    memory_limit_mb: int | None = key(None, at_least(256), unit="MB")
    """Address space of each of these processes; a call that needs more fails. Null: no limit."""
    max_pending: int = key(65536, at_least(1), unit="rows")
    """Most responses that wait for a process; generation is held up while there are more."""


@dataclass(kw_only=True, slots=True)
class RewardNetworkConfig(ConfigNode):
    """`reward_model.model.*`: a sequence classifier that scores."""

    path: str | None = None
    """Folder of a Hugging Face model: a sequence classifier with one label, or one that writes text (model_type)."""
    input_tokenizer: str | None = None
    """Folder of the policy's tokenizer when the reward model has a tokenizer or chat template of its own: responses are
    then decoded and written with that. Null: the reward model reads the policy's tokens."""
    external_lib: str | None = None
    """Python package imported first; follows actor_rollout_ref.model.external_lib."""
    use_shm: bool = False
    """Copy the model's folder to /dev/shm and load the weights from there."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    use_remove_padding: bool = True
    """Pack sequences without padding. False: the padded reference path."""
    use_fused_kernels: bool = False
    """Of the language-model head, which a reward model does not have."""
    fsdp_config: FSDPConfig = section(FSDPConfig)
    """Sharding of the reward model."""


@dataclass(kw_only=True, slots=True)
class RewardModelConfig(ConfigNode):
    """`reward_model.*`."""

    enable: bool = False
    """Score with a reward model (`model.path`)."""
    model_type: str | None = key(None, one_of("discriminative", "generative"), idle="enable is false")
    """discriminative: a sequence classifier, which scores in the trainer's processes. generative: it writes text, on a
    server of rollout.name; custom_reward_function asks it, or else judge.* does. Null: generative where there are both
    rollout.name and custom_reward_function.path, as in verl."""
    rollout: RewardRolloutConfig = section(RewardRolloutConfig, idle="enable is false")
    """The server of a reward model that writes text."""
    model_weight: float = key(1.0, unit="reward", idle="enable is false")
    """Factor of the reward model's score."""
    rule_weight: float = key(0.0, unit="reward", idle="enable is false")
    """Factor of the rule-based reward that is added to it. 0: rules do not grade where a reward model does."""
    enable_resource_pool: bool = key(False, idle="enable is false")
    """Give the reward model processes of its own (n_gpus_per_node x nnodes)."""
    n_gpus_per_node: int = key(0, at_least(0), unit="processes", idle=_SHARED)
    """Size of that pool per node."""
    nnodes: int = key(0, at_least(0), unit="nodes", idle=_SHARED)
    """Nodes of that pool."""
    strategy: Strategy = key(Strategy.fsdp2, idle="enable is false")
    """Sharding backend."""
    model: RewardNetworkConfig = section(RewardNetworkConfig, idle="enable is false")
    """Reward model."""
    worker_class: str | None = key(None, reference(), idle="enable is false")
    """A class of your own, file.py:Name, that scores texts in the worker processes in place of the built-in one. Null:
    the built-in one."""
    micro_batch_size: int | None = key(None, at_least(1), unit="sequences, all processes", idle="enable is false")
    """Deprecated: divided by the data-parallel size. Use micro_batch_size_per_gpu."""
    micro_batch_size_per_gpu: int | None = key(None, at_least(1), unit="sequences", idle="enable is false")
    """Sequences of one forward. Null: the critic's, where micro-batches are not cut by tokens."""
    max_length: int | None = key(None, at_least(1), unit="tokens", idle="enable is false")
    """Texts are cut on the right at this length before they are scored. Null: never."""
    use_dynamic_bsz: bool | None = key(None, idle="enable is false")
    """Cut micro-batches by tokens; follows the critic's. Null: by tokens, unless micro_batch_size_per_gpu is given."""
    forward_max_token_len_per_gpu: int = key(32768, at_least(1), unit="tokens", idle="enable is false")
    """Token budget of one forward; follows the critic's."""
    ulysses_sequence_parallel_size: int = key(1, at_least(1), unit="processes", idle="enable is false")
    """Processes that share one sequence."""
    reward_manager: str = key(
        "naive",
        such_that(
            lambda name: name in REWARD_MANAGERS or is_reference(name),
            f"choose one of {', '.join(REWARD_MANAGERS)}, or a class of your own: {FORMS}",
        ),
    )
    """How reward functions are called: naive and dapo (row by row), prime (the same in as many processes as there are
    CPU cores, if num_workers is 1), batch (one call with lists for a whole batch), or a class of your own around the
    function, as file.py:Name or pkg://module:Name."""
    weights: dict[str, Any] = key({})
    """Several rewards for a row, added up: {data_source or pattern: {part: weight}}. A part is the name of a built-in
    grader, custom (custom_reward_function) or judge."""
    failure_penalty: float | None = key(
        None, such_that(lambda score: abs(score) < 3.4e38, "a score is finite, also as a 32-bit float")
    )
    """Score of a row whose reward could not be computed. Null: the row is left out of training."""
    max_failure_fraction: float = key(0.5, between(0, 1), unit="share")
    """A batch of which more rows failed stops the run, unless failure_penalty scores them. 1: only one without any
    score does."""
    judge: JudgeConfig = section(JudgeConfig)
    """A language model as judge."""
    rule: str | None = None
    """Grader of every row: a built-in one by name ([rewards](rewards.md)), or your own, file.py:name. Null: by
    data_source."""
    rule_by_source: dict[str, Any] = key({})
    """Graders by data_source: {name or pattern with *: grader}. Comes before `rule`."""
    rule_kwargs: dict[str, Any] = key({})
    """Options of `rule`; under a grader's name, a dictionary with options of that grader."""
    launch_reward_fn_async: bool = key(
        False,
        idle="algorithm.filter_groups.enable is true: it chooses groups by their scores, so grading ends before "
        "log-probs are computed",
    )
    """Do not wait for the last rewards before log-probs and values are computed, only before advantages are. Grading
    starts as each response ends either way."""
    sandbox: SandboxConfig = section(SandboxConfig, idle="sandbox_fusion.url is set: programs run there")
    """Programs of responses, run on this machine."""
    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig, idle="sandbox_fusion.url is not set")
    """Programs of responses, run in a remote sandbox."""
    overlong_buffer: OverlongBufferConfig = section(OverlongBufferConfig)
    """Soft punishment of long responses."""
    length_reward: LengthRewardConfig = section(LengthRewardConfig)
    """Reward for length."""
    reward_kwargs: dict[str, Any] = key({})
    """Keyword arguments of a reward manager of your own."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Profiling of the reward model."""

    def check(self) -> None:
        not_both(self, "micro_batch_size", "micro_batch_size_per_gpu")
