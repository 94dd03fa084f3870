"""Plan of the layers that tensor parallelism splits, after transformers' own for the model (`base_model_tp_plan`).

Embedding, norms, routers, experts and output head are in no group's plan here: they work on slices of the tokens
(parallel/tensor.py), and FSDP shards embedding, experts and head over all ranks, those of the group included. Experts
are handed out whole (parallel/experts.py); which models can have that is asked here too.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from torch import nn
from transformers import PretrainedConfig

from verl_like.models import families, loading, lora, packing
from verl_like.models.heads import TokenModel
from verl_like.models.lora_experts import stacks_of
from verl_like.parallel.tensor import Style, TensorPlan

if TYPE_CHECKING:
    from verl_like.config import FSDPConfig, ModelConfig
    from verl_like.models.packing import ModelInput
    from verl_like.parallel.ulysses import SequenceRanks

KEY, EXPERT_KEY = "fsdp_config.tensor_parallel_size", "fsdp_config.expert_parallel_size"
_STYLES: dict[str, Style] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_gathered",
    "rowwise_split_input": "row_from_whole",
    "colwise_rep": "column_gathered",  # earlier names
    "rowwise_rep": "row_from_whole",
}
# Norms of single heads: gradients of everything that is not split are summed over the group anyhow. The embedding
# (transformers adds it to the plan of a model with tied weights): each rank looks its own tokens up.
_WHOLE = frozenset({"replicated_with_grad_allreduce", "embedding_rowwise"})
_ATTENTION = re.compile(r"attn|attention")
_EXPERTS = re.compile(r"\.experts(\.|$)")  # whole, on slices of the tokens: their matrices are narrow as they are


def check_engine(model: ModelConfig, config: PretrainedConfig, fsdp: FSDPConfig, *, ulysses: int) -> None:
    """Check that one engine's options go together with tensor parallelism, before any weight is loaded.

    Raises ValueError where they do not.
    """
    size = fsdp.tensor_parallel_size
    if size == 1:
        return
    context = ("fsdp_config.context_parallel_size", fsdp.context_parallel_size)
    for name, other in (("ulysses_sequence_parallel_size", ulysses), context):
        if other > 1:
            raise ValueError(
                f"{KEY}={size} with {name}={other}: both give neighbouring ranks slices of "
                "the tokens, and a model can have one of them; set the other to 1"
            )
    check_model(model, config, size)


def check_model(model: ModelConfig, config: PretrainedConfig, size: int, key: str = KEY) -> None:
    """Check that the model can be split among `size` ranks; needs no weights.

    Names and shapes come from a model on the meta device. Raises ValueError, naming `key` and the numbers, where the
    model cannot be split.
    """
    if size == 1:
        return
    families.refuse_vision(config, f"{key}={size}", "set it to 1")
    families.refuse_state(config, f"{key}={size}", "set it to 1")
    if not loading.uses_packing(model):
        raise ValueError(f"{key}={size} needs packed sequences: set model.use_remove_padding=True")
    _check_heads(config, _styles(config, size, key), size, key)
    plan = tensor_plan(loading.build_meta_model(model, config, kind="policy"), config, size, key)
    assert plan is not None
    for linear, style in plan.linears.items():
        what, number = ("inputs", linear.in_features) if style.startswith("row") else ("outputs", linear.out_features)
        if number % size:
            raise ValueError(
                f"{key}={size} does not divide the {number} {what} of a {config.model_type!r} model's linear layer "
                f"({linear.in_features} -> {linear.out_features}): use a size that does, or 1"
            )


def tensor_plan(model: TokenModel, config: PretrainedConfig, size: int, key: str = KEY) -> TensorPlan | None:
    """Choose the linear layers to split, and the modules around them; None for a size of 1.

    Raises ValueError for a model that has no plan, or one of another kind.
    """
    if size == 1:
        return None
    styles = _styles(config, size, key)
    patterns: list[tuple[re.Pattern[str], Style]] = [
        (re.compile(re.escape(name).replace(r"\*", r"\d+")), style) for name, style in styles.items()
    ]
    linears: dict[nn.Linear, Style] = {}
    gathered: set[nn.Module] = set()
    base = families.backbone(model.hf)
    for name, module in base.named_modules():
        if any(w.ndim == 2 for w in module.parameters(recurse=False)) and type(module).__name__.endswith("Norm"):
            raise ValueError(
                f"{key}={size}: {name} of a {config.model_type!r} model has a weight for each head (use_qk_norm), "
                "which is not available split; set it to 1, or use ulysses_sequence_parallel_size"
            )
        found: list[Style] = [style for pattern, style in patterns if pattern.fullmatch(name)]
        if not found:
            continue
        if not isinstance(module, nn.Linear):
            raise ValueError(f"{key}={size}: {name} of a {config.model_type!r} model is no linear layer; set it to 1")
        clamped = getattr(config, "clip_qkv", None) is not None and found[0] == "column_gathered"  # OLMoE, in place
        linears[module] = "column_copied" if clamped else found[0]
        gathered.add(base.get_submodule(name.rpartition(".")[0]))
    if not linears:
        raise ValueError(
            f"{key}={size}: a {config.model_type!r} model has none of the layers that its plan names "
            f"({', '.join(styles)}); set it to 1"
        )
    return TensorPlan(size=size, linears=linears, gathered=frozenset(gathered))


def check_experts(
    model: ModelConfig, config: PretrainedConfig, size: int, key: str = EXPERT_KEY, *, trained: bool
) -> None:
    """Check that a model's experts can be spread over `size` processes.

    Names and shapes come from a model on the meta device. Raises ValueError, naming `key` and the numbers, where they
    cannot.
    """
    if size == 1:
        return
    count = families.num_experts(config)
    if not count:
        raise ValueError(f"{key}={size}: a {config.model_type!r} model has no experts; set it to 1")
    if count % size:
        sizes = [n for n in range(1, count + 1) if count % n == 0]
        raise ValueError(f"{key}={size} does not divide the model's {count} experts: use one of {sizes}")
    hf = loading.build_meta_model(model, config, kind="policy").hf
    stacks = stacks_of(hf)[0]
    if not stacks or any(part.gate_up_proj.shape[0] != count for part in stacks.values()):
        raise ValueError(
            f"{key}={size}: transformers does not stack the experts of a {config.model_type!r} model in a form that "
            "can be handed out; set it to 1: FSDP shards them"
        )
    if trained and model.lora_rank > 0 and lora.adapts_experts(hf, model):
        raise ValueError(
            f"{key}={size} with model.lora_rank={model.lora_rank}: adapters of experts are not handed out; leave them "
            "out (model.exclude_modules=[experts]), or set the size to 1"
        )


def take_slice(whole: ModelInput, group: SequenceRanks) -> ModelInput:
    """Cut this rank's slice out of a packed input, for a split model.

    Attention there sees all tokens, with their positions.
    """
    part = packing.take_slice(whole, group)
    assert part.segments is not None
    part.segments.heads = None
    filling = group.size * part.input_ids.shape[1] - whole.position_ids.shape[1]
    return dataclasses.replace(part, position_ids=nn.functional.pad(whole.position_ids, (0, filling)))


def _styles(config: PretrainedConfig, size: int, key: str) -> dict[str, Style]:
    """Map the pattern of a name below the backbone to the style of its split."""
    whole: dict[str, str] = config.get_text_config().base_model_tp_plan or {}
    plan = {name: style for name, style in whole.items() if not _EXPERTS.search(name)}
    if not plan:
        raise ValueError(
            f"{key}={size}: transformers has no tensor-parallel plan for {config.model_type!r}; set it to 1"
        )
    unknown = {name: style for name, style in plan.items() if style not in _STYLES and style not in _WHOLE}
    if unknown:
        listed = ", ".join(f"{name}: {style}" for name, style in unknown.items())
        raise ValueError(
            f"{key}={size}: transformers' plan for {config.model_type!r} has styles that are not available here "
            f"({listed}); set it to 1"
        )
    if not any(_ATTENTION.search(name) for name in plan):
        raise ValueError(
            f"{key}={size}: transformers' plan for {config.model_type!r} leaves attention whole, which is not "
            "available here; set it to 1, or use ulysses_sequence_parallel_size"
        )
    return {name: _STYLES[style] for name, style in plan.items() if style in _STYLES}


def _check_heads(config: PretrainedConfig, styles: dict[str, Style], size: int, key: str) -> None:
    """Check that each rank gets whole heads, where heads are what the plan splits; raises ValueError otherwise."""
    text = config.get_text_config()
    if not any(_ATTENTION.search(name) and style == "column" for name, style in styles.items()):
        return
    key_heads = text.num_key_value_heads if "num_key_value_heads" in text else text.num_attention_heads
    for what, number in (("attention", text.num_attention_heads), ("key-value", key_heads)):
        if number % size:
            sizes = [n for n in range(1, number + 1) if number % n == 0]
            raise ValueError(f"{key}={size} does not divide the model's {number} {what} heads: use one of {sizes}")
