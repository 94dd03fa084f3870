"""`reward_model.rollout.*`: the engine's own server for a reward model that writes text."""

from dataclasses import dataclass

from verl_like.config.base import ConfigNode, above, at_least, between, key, one_of, section
from verl_like.config.engines import SERVERS
from verl_like.config.fsdp import DTYPES
from verl_like.config.rollout import EngineKwargsConfig


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
