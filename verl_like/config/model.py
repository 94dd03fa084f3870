"""`actor_rollout_ref.model.*` and `critic.model.*`: the network."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from verl_like.config.base import ConfigNode, above, at_least, check_pattern, key, require, section
from verl_like.config.fsdp import ON_HOST, FSDPConfig


class Recompute(StrEnum):
    """Activations that gradient checkpointing computes again: all of a layer's, or all but its matrix products."""

    full = "full"
    selective = "selective"


class Experts(StrEnum):
    """Computation of a mixture's experts in transformers: its own choice, one by one, or in grouped products."""

    auto = "auto"
    eager = "eager"
    grouped_mm = "grouped_mm"
    batched_mm = "batched_mm"


class FusedBackend(StrEnum):
    """Implementation of the fused log-prob and entropy function."""

    torch = "torch"
    triton = "triton"


@dataclass(kw_only=True, slots=True)
class FusedKernelConfig(ConfigNode):
    """`model.fused_kernel_options.*`."""

    impl_backend: FusedBackend = FusedBackend.torch
    """Implementation of the fused log-prob and entropy function: torch or triton."""


@dataclass(kw_only=True, slots=True)
class LoraConfig(ConfigNode):
    """`model.lora.*`."""

    merge: bool = key(True, idle="actor_rollout_ref.model.lora_rank is 0")
    """Weight sync with LoRA: add the adapters into the weights before they are sent. False: base weights are sent once,
    then the adapters alone, which the rollout engine keeps apart."""


@dataclass(kw_only=True, slots=True)
class ModelConfig(ConfigNode):
    """`actor_rollout_ref.model.*`."""

    path: str = "~/models/deepseek-llm-7b-chat"
    """Folder of a Hugging Face causal language model, its name on the hub, or a URL (hdfs://, s3:// ...), which each
    machine fetches once into ~/.cache/verl_like/models. A folder with config.json but no weights is initialised
    randomly from trainer.seed."""
    custom_chat_template: str | None = None
    """Chat template (Jinja text) that replaces the tokenizer's own."""
    use_shm: bool = False
    """Copy the model's folder to /dev/shm and load the weights from there: once a machine, kept for the next start."""
    external_lib: str | None = None
    """Python package(s), separated by commas, imported first to register models with transformers."""
    override_config: dict[str, Any] = key({})
    """Overrides of the Hugging Face config, for instance attention_dropout."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, one more forward."""
    recompute_granularity: Recompute = key(Recompute.full, idle="enable_gradient_checkpointing is false")
    """With gradient checkpointing: full (recompute whole layers), or selective (keep the results of matrix products
    and attention, recompute the cheap rest)."""
    enable_activation_offload: bool = key(False, idle=ON_HOST)
    """CUDA: keep what the backward pass needs (with gradient checkpointing the inputs of layers) in CPU memory."""
    use_remove_padding: bool = True
    """Pack sequences without padding. False: the padded reference path."""
    share_prompts: bool = True
    """With packed sequences: what several rows of a micro-batch begin with is computed once, a prompt and all further
    tokens that they have in common (verl's actor.use_prefix_grouper, for prompts)."""
    use_liger: bool = False
    """CUDA, with the package liger-kernel: Liger's kernels for RMSNorm, rotary embedding and MLP."""
    use_lean_ops: bool = True
    """CPU, packed sequences: RMSNorm and rotary embedding of known models with few passes over memory. False:
    transformers' own."""
    use_fused_kernels: bool = True
    """Log-prob and entropy from hidden states in chunks. False: full logits, the reference path."""
    fused_kernel_options: FusedKernelConfig = section(FusedKernelConfig)
    """Options of the fused function."""
    experts_implementation: Experts = Experts.auto
    """How a mixture of experts computes them: auto (grouped_mm where the model offers it), eager (one expert after the
    other), grouped_mm or batched_mm (a copy of its experts' weights for every token: few tokens only)."""
    mm_processor_kwargs: dict[str, Any] = key({})
    """Vision-language models: settings of the folder's image processor, for instance max_pixels (verl's
    data.mm_processor_kwargs). min_pixels, max_pixels and size hold for videos too."""
    vision_max_patches_per_gpu: int = key(16384, at_least(1), unit="patches")
    """Vision-language models: the tower takes the images of a micro-batch in parts of at most so many."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    lora_rank: int = key(0, at_least(0))
    """Rank of LoRA adapters; 0: train all weights."""
    lora_alpha: float = key(16, at_least(0), idle="lora_rank is 0")
    """LoRA scale; the adapter's output is multiplied by lora_alpha / lora_rank."""
    lora_adapter_path: str | None = None
    """Folder of a LoRA adapter of the peft library (or its URL) that training goes on from; rank, scale and modules are
    the adapter's. The reference is the model without it. Null: a new one, where lora_rank asks for it."""
    lora: LoraConfig = section(LoraConfig)
    """More of LoRA."""
    target_modules: Any = key("all-linear", idle="lora_rank is 0")
    """Modules that get LoRA adapters: all-linear (experts and routers too), a pattern or a list of names."""
    exclude_modules: Any = key(None, idle="lora_rank is 0")
    """Modules that get none: a pattern or a list of names."""

    def check(self) -> None:
        if self.lora_rank > 0:
            above(0).check("lora_alpha", self.lora_alpha)
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            names = isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)
            legal = names or (isinstance(value, str) and value != "") or (value is None and name == "exclude_modules")
            require(legal, name, value, "give a pattern or a list of module names, for instance [q_proj,v_proj]")
            check_pattern(name, value if isinstance(value, str) else "")


@dataclass(kw_only=True, slots=True)
class CriticModelConfig(ModelConfig):
    """`critic.model.*`: the actor's keys and the critic's own sharding."""

    fsdp_config: FSDPConfig = section(FSDPConfig)
    """Sharding of the critic."""
