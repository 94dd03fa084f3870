"""`reward_model.rollout.*`: the engine's own server for a reward model that writes text."""

from dataclasses import dataclass, field

from verl_like.config.base import ConfigNode, above, at_least, between, one_of
from verl_like.config.enums import DTYPES
from verl_like.config.rollout import EngineKwargsConfig


@dataclass(kw_only=True, slots=True)
class RewardRolloutConfig(ConfigNode):
    """`reward_model.rollout.*`."""

    name: str | None = None
    """Engine whose server the run starts and ends: vllm or sglang (CUDA). Null: there is none."""
    dtype: str = "auto"
    """Precision of the weights; auto: the model folder's."""
    tensor_model_parallel_size: int = 1
    """[processes] Devices that share one copy of the model; each group of them has a server."""
    gpu_memory_utilization: float = 0.5
    """[share of a GPU] Memory of the server, held as long as the run."""
    free_cache_engine: bool = False
    """Give the memory back while others work: not available, responses are graded while others are sampled."""
    prompt_length: int = 2048
    """[tokens] Longest question to the model."""
    response_length: int = 2048
    """[tokens] Longest answer of the model."""
    max_model_len: int | None = None
    """[tokens] Question and answer. Null: prompt_length + response_length."""
    max_num_batched_tokens: int = 8192
    """[tokens] Most tokens of one engine step."""
    max_num_seqs: int = 1024
    """[sequences] Most answers written at once."""
    enforce_eager: bool = True
    """Do not capture CUDA graphs."""
    cudagraph_capture_sizes: list[int] | None = None
    """[sequences] Batch sizes to capture. Null: the engine's choice."""
    enable_chunked_prefill: bool = True
    """Cut long questions into several engine steps."""
    enable_prefix_caching: bool = True
    """Share the KV cache of equal beginnings, such as a prompt's template."""
    disable_log_stats: bool = True
    """Silence the engine's own statistics."""
    engine_kwargs: EngineKwargsConfig = field(default_factory=EngineKwargsConfig)
    """Arguments of the server's command line, as {max_loras: 2} for --max-loras 2; true: a flag alone."""

    def check(self) -> None:
        if self.name is not None:
            one_of(self, "name", ("vllm", "sglang"))
        one_of(self, "dtype", DTYPES)
        above(self, 0, "gpu_memory_utilization")
        between(self, 0, 1, "gpu_memory_utilization")
        at_least(self, 1, "tensor_model_parallel_size", "prompt_length", "response_length", "max_model_len")
        at_least(self, 1, "max_num_batched_tokens", "max_num_seqs")
