"""Stages of pipeline parallelism: which part of a model belongs to which, and which models can have them.

A stage is what the Hugging Face model computes where the other stages' layers hand their input on (`Absent`): embedding
with the first, final norm and output head with the last, layers in equal numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from transformers import PretrainedConfig

from verl_like.models import families
from verl_like.models.heads import TokenModel

if TYPE_CHECKING:
    from verl_like.config import FSDPConfig

# Of the types that are tested, those whose backbone is not embedding, layers and norm, one after the other, with layers
# that give hidden states alone.
WHOLE = ("bamba", "falcon_h1")
_STAGES, _PIECES = "pipeline_parallel_size", "virtual_pipeline_size"


def check_stages(config: PretrainedConfig, fsdp: FSDPConfig, key: str) -> None:
    """Check that the model can be cut into the stages asked for.

    Raises ValueError, naming `key`, where it cannot.
    """
    size, pieces = fsdp.pipeline_parallel_size, fsdp.virtual_pipeline_size
    if size == 1:
        return
    if why := why_whole(config, fsdp):
        layers = getattr(config, "num_hidden_layers", size * pieces)  # a vision-language model has none of its own
        fix = "use as many stages at most" if size > layers else "set it to 1"
        if size <= layers < size * pieces:
            key, size, fix = key.replace(_STAGES, _PIECES), pieces, f"use {layers // size} at most"
        raise ValueError(f"{key}={size}: {why}; {fix}")


def why_whole(config: PretrainedConfig, fsdp: FSDPConfig) -> str:
    """Say why a model is not cut into the stages asked for; empty where it can be."""
    if config.model_type not in families.FAMILIES or config.model_type in WHOLE:
        return f"a {config.model_type!r} model is not cut into stages (docs/models.md says which are)"
    size, pieces = fsdp.pipeline_parallel_size, fsdp.virtual_pipeline_size
    if size * pieces > config.num_hidden_layers:
        return f"the model has {config.num_hidden_layers} layers" + f" for {size} stages" * (pieces > 1)
    if fsdp.wrap_policy.transformer_layer_cls_to_wrap or fsdp.wrap_policy.min_num_params:
        return "stages are cut between decoder layers, not where fsdp_config.wrap_policy says"
    return ""


def parts(model: TokenModel, count: int) -> dict[str, frozenset[int]]:
    """Name the parts of the model and the places, of `count`, that hold them: all pieces of all stages, one by one.

    A tied embedding is held by the first and the last.
    """
    body, head, last = families.backbone(model.hf), model.hf.get_output_embeddings(), count - 1
    embedding = model.hf.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    found: dict[str, frozenset[int]] = {}
    names = {id(module): name for name, module in model.named_modules()}
    for child in (*body.children(), *(child for child in model.hf.children() if child is not body)):
        name = names[id(child)]
        if child is embedding:
            found[name] = frozenset({0, last} if tied else {0})
        elif isinstance(child, nn.ModuleList):
            found |= {f"{name}.{i}": frozenset({i * count // len(child)}) for i in range(len(child))}
        elif any(True for _ in child.parameters()) or name.endswith("norm"):  # OLMo's has no weights
            found[name] = frozenset({last})
    return found
