"""`*.fsdp_config.*`: sharding, offload and precision."""

from dataclasses import dataclass
from enum import StrEnum

from verl_like.config.base import ConfigNode, at_least, key, minus_one_or_positive, one_of, section

DTYPES = ("auto", "float32", "bfloat16", "float16")


class Strategy(StrEnum):
    """Framework that shards a model for training."""

    fsdp2 = "fsdp2"
    megatron = "megatron"


ON_HOST = "trainer.device is cpu: everything is in host memory"
_NO_STAGES = "pipeline_parallel_size is 1: no stages"


@dataclass(kw_only=True, slots=True)
class WrapPolicyConfig(ConfigNode):
    """`fsdp_config.wrap_policy.*`."""

    transformer_layer_cls_to_wrap: list[str] | None = None
    """Class names of the modules sharded as one unit. Null: the model's decoder layers."""
    min_num_params: int = key(
        0, at_least(0), unit="parameters", idle="transformer_layer_cls_to_wrap is not empty: it names the modules"
    )
    """Shard every module of at least this size instead of decoder layers; 0: decoder layers."""


@dataclass(kw_only=True, slots=True)
class MixedPrecisionConfig(ConfigNode):
    """`fsdp_config.mixed_precision.*`. Its `param_dtype` is another spelling of `fsdp_config.dtype`."""

    reduce_dtype: str = key("float32", one_of("float32", "bfloat16"))
    """Precision in which gradients are reduced over the processes: float32, bfloat16."""
    buffer_dtype: str | None = key(None, one_of("float32", "bfloat16"))
    """Precision of floating-point buffers (rotary frequencies): float32, bfloat16. Null: as the model keeps them."""


@dataclass(kw_only=True, slots=True)
class FSDPConfig(ConfigNode):
    """Sharding of one model."""

    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig)
    """Which modules are sharded as one unit."""
    param_offload: bool = key(False, idle=ON_HOST)
    """Keep parameters in CPU memory between uses."""
    grad_offload: bool = False
    """Keep gradients in CPU memory between updates (first release of verl)."""
    optimizer_offload: bool = key(False, idle=ON_HOST)
    """Keep optimizer states in CPU memory between updates."""
    offload_policy: bool = key(False, idle=ON_HOST)
    """FSDP2: keep parameters, gradients and optimizer in CPU memory also while training."""
    reshard_after_forward: bool = True
    """Free the gathered parameters after the forward pass and gather them again for the backward; False: keep them for
    all micro-batches of an update."""
    sync_every_micro_batch: bool = True
    """Add up gradients over the processes after each micro-batch (least memory). False: once an update, at the price of
    a whole float32 gradient in every process. A process alone does it once in any case."""
    fsdp_size: int = key(-1, minus_one_or_positive(), unit="processes")
    """Processes that share one copy of the model; -1: all of them."""
    tensor_parallel_size: int = key(1, at_least(1), unit="processes")
    """Neighbouring processes that split the matrices of every layer among them; 1: none. They get the same sequences,
    and count among the processes of fsdp_size."""
    context_parallel_size: int = key(1, at_least(1), unit="processes")
    """Neighbouring processes that share one sequence by chunks of its tokens, and gather the keys that these see; 1:
    none. Any number of heads goes; beside Ulysses each of its groups is one of these."""
    expert_parallel_size: int = key(1, at_least(1), unit="processes")
    """Neighbouring processes, out of those of fsdp_size, that hold some of every layer's experts each; tokens travel to
    them. 1: FSDP gathers all experts of a layer everywhere."""
    pipeline_parallel_size: int = key(1, at_least(1), unit="processes")
    """Neighbouring processes, out of those of fsdp_size, that hold the layers of one stage each and hand the same
    sequences on to each other; 1: none. The other sizes are then those of processes with the same stage."""
    virtual_pipeline_size: int = key(1, at_least(1), unit="pieces", idle=_NO_STAGES)
    """Pieces of layers that each stage has, which take turns: a micro-batch goes round the stages as many times, and at
    both ends of an update they wait for a piece's pass, not for a stage's."""
    pipeline_schedule: str = key("1f1b", one_of("1f1b", "gpipe", "zero_bubble"), idle=_NO_STAGES)
    """Order of the micro-batches' passes: 1f1b keeps the activations of as many micro-batches as there are stages,
    gpipe those of all; the bubble is the same. 1f1b with virtual_pipeline_size is what Megatron calls interleaved.
    zero_bubble: 1f1b with the gradients of linear layers' weights in passes of their own, where stages would wait: a
    third of the bubble, at the price of these gradients whole in every process of a stage."""
    forward_prefetch: bool = False
    """Ask for the next layer's parameters when a layer's forward starts, not only when it ends."""
    model_dtype: str = key("float32", one_of(*DTYPES[1:]))
    """Precision of the master weights and the optimizer: float32, bfloat16, float16."""
    dtype: str = key("auto", one_of(*DTYPES))
    """Precision of forward and backward; auto: bfloat16 on CUDA, float32 on CPU. float16: with loss scaling."""

    mixed_precision: MixedPrecisionConfig = section(MixedPrecisionConfig)
    """Precisions of the gradient reduction and of buffers."""


def sizes_of_mesh(fsdp: FSDPConfig) -> dict[str, int]:
    """Sizes by their names in `mesh.MeshSizes`: a role passes them on, whatever there is."""
    return {
        "fsdp_size": fsdp.fsdp_size,
        "context": fsdp.context_parallel_size,
        "tensor": fsdp.tensor_parallel_size,
        "expert": fsdp.expert_parallel_size,
        "pipe": fsdp.pipeline_parallel_size,
        "virtual": fsdp.virtual_pipeline_size,
    }


def resolve_dtype(name: str, device_type: str) -> str:
    """The precision behind `auto`: bfloat16 on CUDA, float32 elsewhere."""
    if name != "auto":
        return name
    return "bfloat16" if device_type == "cuda" else "float32"
