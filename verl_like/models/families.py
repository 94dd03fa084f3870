"""Facts about model types: which run packed, which need padded rows, which are refused, and what is tested with each.

A model type that is not listed is accepted with a warning; then only the check of packing when an engine starts
(engine/packing_check.py) and the proof of each weight sync stand behind it. docs/models.md shows what is tested, and
tests run every claim made here.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

# What a row of the table may claim beside values and gradients
ULYSSES = "Ulysses"
LORA = "LoRA"
RANKS = "two ranks"  # gradients of two FSDP2 ranks equal those of one
HF = "hf rollout"  # weight sync with its proof, and generated tokens scored by the trainer
VLLM = "vLLM"  # the same with vLLM (its CPU build)
SGLANG = "SGLang"  # the same with SGLang (on a CPU)

IMAGES = "images, videos"  # padded and packed, shared prompts, trained and frozen tower

_COMMON = frozenset({LORA, RANKS, HF})
_WITH_ULYSSES = _COMMON | {ULYSSES}
_EVERYTHING = _WITH_ULYSSES | {VLLM}
_WITH_VLLM = _COMMON | {VLLM}
_BOTH_ENGINES = _EVERYTHING | {SGLANG}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Facts about one model type.

    keeps_segments: its layers pass no keywords on to their attention (attention.hand_on_segments).
    state: its layers that carry state from token to token (state_layers.py).
    attention: transformers' attention for padded rows; soft-capped scores and sinks need "eager".
    tested: what is tested beside values and gradients (of padded rows, and packed where it can be).
    """

    kind: str
    keeps_segments: bool = False
    state: str = ""
    attention: str = "sdpa"
    tested: frozenset[str] = _WITH_ULYSSES


def _dense(tested: frozenset[str] = _EVERYTHING) -> Family:
    return Family(kind="dense", tested=tested)


def _windows(tested: frozenset[str] = _EVERYTHING, attention: str = "sdpa") -> Family:
    return Family(kind="dense, sliding windows", tested=tested, attention=attention)


def _experts(tested: frozenset[str] = _EVERYTHING) -> Family:
    return Family(kind="mixture of experts", tested=tested)


def _recurrent(layers: str, kind: str = "hybrid", tested: frozenset[str] = _COMMON) -> Family:
    return Family(kind=kind, state=layers, tested=tested)


FAMILIES: dict[str, Family] = {
    "qwen2": _windows(_BOTH_ENGINES),
    "qwen3": _dense(_BOTH_ENGINES),
    "llama": _dense(_BOTH_ENGINES),
    "mistral": _windows(),
    "ministral": _windows(),
    "ministral3": _dense(_BOTH_ENGINES),
    "gemma": _dense(),
    "gemma2": _windows(attention="eager"),
    "gemma3_text": _windows(_BOTH_ENGINES),
    "vaultgemma": _windows(attention="eager"),
    "cohere": _dense(_BOTH_ENGINES),
    "cohere2": _windows(_WITH_ULYSSES),
    "olmo": _dense(),
    "olmo2": _dense(_BOTH_ENGINES),
    "olmo3": _windows(),
    "exaone4": _windows(),
    "smollm3": _dense(_BOTH_ENGINES),
    "phi": _dense(_WITH_ULYSSES),
    "phi3": _dense(_BOTH_ENGINES),
    "granite": _dense(_BOTH_ENGINES),
    "glm": _dense(),
    "glm4": _dense(_BOTH_ENGINES),
    "starcoder2": _dense(_BOTH_ENGINES),
    "arcee": _dense(_BOTH_ENGINES),
    "seed_oss": _dense(_BOTH_ENGINES),
    "hunyuan_v1_dense": _dense(),
    "ernie4_5": _dense(_BOTH_ENGINES),
    "gpt_neox": _dense(_WITH_ULYSSES),
    "stablelm": Family(kind="dense", keeps_segments=True, tested=_BOTH_ENGINES),
    "nemotron": Family(kind="dense", keeps_segments=True, tested=_EVERYTHING),
    "qwen2_moe": _experts(),
    "qwen3_moe": _experts(_BOTH_ENGINES),
    "mixtral": _experts(),
    "olmoe": _experts(),
    "granitemoe": _experts(),
    "flex_olmo": _experts(),
    "hunyuan_v1_moe": _experts(),
    "deepseek_v3": _experts(),
    "glm4_moe": _experts(_BOTH_ENGINES),
    "dots1": _experts(),
    "minimax_m2": _experts(_WITH_ULYSSES),
    "lfm2_moe": _recurrent("conv", "mixture of experts, hybrid", _WITH_VLLM),
    "gpt_oss": Family(kind="mixture of experts, sliding windows, sinks", attention="eager"),
    "qwen3_next": _recurrent("linear_attention", "mixture of experts, hybrid", _WITH_VLLM),
    "qwen3_5_text": _recurrent("linear_attention", tested=_WITH_VLLM),
    "qwen3_5_moe_text": _recurrent("linear_attention", "mixture of experts, hybrid"),
    "jamba": _recurrent("mamba", "mixture of experts, hybrid"),
    "bamba": _recurrent("mamba"),
    "falcon_h1": _recurrent("mamba", tested=_WITH_VLLM),
    "granitemoehybrid": _recurrent("mamba", "mixture of experts, hybrid", _WITH_VLLM),
    "lfm2": _recurrent("conv", tested=_WITH_VLLM),
}
_IMAGES = frozenset({IMAGES, RANKS, HF, VLLM, SGLANG})
VISION: dict[str, Family] = {
    "qwen2_vl": Family(kind="images, videos, text", tested=_IMAGES | {LORA}),
    "qwen2_5_vl": Family(kind="images, videos, text", tested=_IMAGES),
    "qwen3_vl": Family(kind="images, videos, text", tested=_IMAGES),
}

# Models that hold a text model beside others (images), of which the text model alone is trained
_TEXT_ALONE = "text alone, of a model with images"
NESTED: dict[str, Family] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), Family(kind=_TEXT_ALONE, tested=_COMMON)),
    **dict.fromkeys(("qwen3_vl_moe", "gemma3", "mistral3"), Family(kind=_TEXT_ALONE)),
}

_NO_ATTENTION = "it has no attention, and no rollout engine here keeps its state"

REFUSED: dict[str, str] = {
    "phimoe": "its router draws experts at random while it is trained, so that log-probs are not those of the policy",
    "llama4_text": "transformers has no separate backbone for it, from which hidden states could be taken",
    "minimax": "its lightning attention keeps decay factors in buffers, which are not sent to the rollout engine",
    "apertus": "its activation keeps constants in buffers, which are not sent to the rollout engine",
    "recurrent_gemma": "its layers keep their state in the module, where a response that ends cannot leave the batch",
    "zamba2": "its hybrid layers nest and share blocks, which sharding cannot follow",
    "olmo_hybrid": "its checkpoints split convolutions in a way that the weight sync cannot send",
    "mamba": _NO_ATTENTION,
    "mamba2": _NO_ATTENTION,
    "falcon_mamba": _NO_ATTENTION,
    "rwkv": _NO_ATTENTION,
    "xlstm": _NO_ATTENTION,
}

DEQUANTISED = ("mxfp4", "fp8")  # weights in these come in bfloat16 when they are loaded (transformers' own rules)

_LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
_SOFTMAX = frozenset({"attention", "full_attention", "sliding_attention", "chunked_attention"})
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check(config: PretrainedConfig, *, packed: bool) -> None:
    """Check that a model of this config can be trained (packed, or on padded rows); needs no weights.

    Raises ValueError, naming the model type and the way out, where it cannot. Warns, once a process, about a type that
    is not in the table.
    """
    name, text = config.model_type, config.get_text_config().model_type
    _refuse_nested(config)
    for each in (name, text):
        if each in REFUSED:
            raise ValueError(f"model type {each!r} is not available: {REFUSED[each]}")
    _refuse_quantised(config)
    why = why_padded(config)
    if packed and why:
        raise ValueError(
            f"model type {name!r} cannot be run without padding: {why}. "
            "Set actor_rollout_ref.model.use_remove_padding=False (critic.model.* for the critic)"
        )
    if name not in FAMILIES | NESTED and not sees(config):
        _warn_untested(name)
    if reads_text_alone(config):
        tell_text_alone(name, text)


def frozen_tower(hf: PreTrainedModel, *, frozen: bool) -> nn.Module | None:
    """Freeze all that stands beside the text model (vision tower, projector) in place, and return it as one module.

    None where it is trained (actor.freeze_vision_tower=False of a model that sees), or there is none.
    """
    parts = parts_beside_text(hf)
    if not parts or (sees(hf.config) and not frozen):
        return None
    for parameter in hf.base_model.parameters(recurse=False):
        parameter.requires_grad_(False)
    return nn.ModuleList(parts.values()).requires_grad_(False)


def parts_beside_text(hf: PreTrainedModel) -> dict[str, nn.Module]:
    """Modules of the backbone that stand beside its text model, by name; none of a text model."""
    if hf.config.get_text_config() is hf.config:
        return {}
    return {name: part for name, part in hf.base_model.named_children() if part is not hf.get_decoder()}


def backbone(hf: PreTrainedModel) -> nn.Module:
    """The part that makes hidden states of tokens: of a nested model that does not see its text model, else all."""
    if not reads_text_alone(hf.config):
        return hf.base_model
    if hf.get_decoder() not in set(hf.base_model.children()):
        raise ValueError(f"model type {hf.config.model_type!r}: its text model is not a part of its backbone")
    return hf.get_decoder()


def reads_text_alone(config: PretrainedConfig) -> bool:
    """True for the config of a model that holds a text model beside others, of which the text model alone is used."""
    return config.get_text_config() is not config and not sees(config)


def sees(config: PretrainedConfig) -> bool:
    """True for the config of a vision-language model, as far as these are available."""
    return config.model_type in VISION


def refuse_vision(config: PretrainedConfig, what: str, fix: str) -> None:
    """Raise ValueError for a vision-language model, naming `what` cannot be done with it, and the `fix`."""
    if sees(config):
        raise ValueError(f"{what} is not available for vision-language models ({config.model_type}): {fix}")


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """transformers' Auto class of models with this config."""
    import transformers

    nested = sees(config) or reads_text_alone(config)
    found: Any = transformers.AutoModelForImageTextToText if nested else transformers.AutoModelForCausalLM
    return found


def why_padded(config: PretrainedConfig) -> str:
    """Name what in a model of an unknown type forbids packing, as far as its config tells; empty where nothing does."""
    return _state_in(config.get_text_config()) if _family(config) is None else ""


def _family(config: PretrainedConfig) -> Family | None:
    """Row of a model, of a nested one that of its text model."""
    return FAMILIES.get(config.model_type, FAMILIES.get(config.get_text_config().model_type))


def state_of(config: PretrainedConfig) -> str:
    """Name the layers of a listed model that carry state from token to token; empty where none does."""
    family = _family(config)
    return "" if family is None else family.state


def keeps_segments(config: PretrainedConfig) -> bool:
    """True for a listed model whose layers pass no keywords on to their attention."""
    return (family := _family(config)) is not None and family.keeps_segments


def refuse_state(config: PretrainedConfig, what: str, fix: str) -> None:
    """Raise ValueError for a model whose layers carry state, naming `what` cannot be done with it, and the `fix`."""
    if state_of(config):
        kind = f"{state_of(config)} layers of a {config.model_type!r} model"
        raise ValueError(f"{what}: the {kind} carry state from token to token, and need whole sequences: {fix}")


def stores_as_named(config: PretrainedConfig) -> bool:
    """True where the model's files hold tensors under its own names and shapes.

    transformers puts experts together, so theirs differ.
    """
    return config.model_type in FAMILIES and not num_experts(config) and not state_of(config)


def padded_attention(config: PretrainedConfig) -> str:
    """Choose transformers' attention for padded rows. Its SDPA leaves soft-capping out without a word."""
    text = config.get_text_config()
    capped = "attn_logit_softcapping" in text and text.attn_logit_softcapping is not None
    family = _family(config)
    return "eager" if capped else "sdpa" if family is None else family.attention


def num_experts(config: PretrainedConfig) -> int:
    """Count the routed experts of one layer; 0 for a dense model."""
    text = config.get_text_config()
    return next((int(getattr(text, key)) for key in _EXPERT_COUNTS if getattr(text, key, None)), 0)


def _state_in(config: PretrainedConfig) -> str:
    """Name what in the layers of an unknown type forbids packing, as far as its config tells."""
    kinds = {
        kind for key in _LAYER_KINDS if isinstance(getattr(config, key, None), list) for kind in getattr(config, key)
    }
    other = sorted(str(kind) for kind in kinds - _SOFTMAX if isinstance(kind, str))
    return f"its {', '.join(other)} layers carry state from token to token" if other else ""


def _refuse_nested(config: PretrainedConfig) -> None:
    if not reads_text_alone(config):
        return
    import transformers

    text = config.get_text_config()
    with_images = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if with_images and not hasattr(config, "audio_config") and not text.is_encoder_decoder:
        return
    raise ValueError(
        f"model type {config.model_type!r} holds its text model ({text.model_type!r}) beside others that are no "
        "images (audio, an encoder), and such models are not available: save the text model alone, and set model.path "
        "to it"
    )


def _refuse_quantised(config: PretrainedConfig) -> None:
    settings = getattr(config, "quantization_config", None)
    if settings:
        method = settings.get("quant_method") if isinstance(settings, dict) else type(settings).__name__
        if method not in DEQUANTISED:
            raise ValueError(
                f"the weights of this {config.model_type!r} model are quantised (quantization_config: {method}), and "
                f"such weights cannot be trained: use the bfloat16 version of the model, or one in "
                f"{' or '.join(DEQUANTISED)}"
            )


@functools.cache
def tell_text_alone(name: str, text: str) -> None:
    """Log, once a process, that a nested model's text model is all that is trained."""
    log.info(
        "model type %r: its text model (%r) alone is trained. What stands beside it (vision tower, projector) is never "
        "run, stays frozen, and is sent and exported as it is",
        name,
        text,
    )


@functools.cache
def _warn_untested(name: str) -> None:
    log.warning(
        "model type %r is not among those tested (docs/models.md): the check of packing at the start and the proof of "
        "each weight sync are all that stands behind it; `verl-like selfcheck` compares gradients on your own model",
        name,
    )
