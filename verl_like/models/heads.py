"""The module whose forward the engine calls: a Hugging Face model with per-token answers.

Policy and value model run their head inside this forward, because FSDP gathers the weights of the root module's own
parameters (embedding, final norm, head) only there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl_like.models.fused_linear import full_logits_log_prob, linear_log_prob
from verl_like.models.packing import ModelInput

HF_PREFIX = "hf."  # `TokenModel.hf` holds the Hugging Face model: the rest of a parameter's name is Hugging Face's


class TokenModel(nn.Module):
    """Base of both: the Hugging Face model under `hf`, and the hidden states of the wanted tokens."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    def hidden_states(self, inputs: ModelInput) -> Tensor:
        """[N, H] final hidden states of the wanted tokens; all other tokens are dropped here."""
        output = self.hf.base_model(input_ids=inputs.input_ids, use_cache=False, **inputs.model_kwargs())
        return output.last_hidden_state.flatten(0, 1)[inputs.select_N]


class PolicyModel(TokenModel):
    """Causal language model -> log-prob and entropy of the wanted tokens."""

    def __init__(self, hf: PreTrainedModel, *, vocab_size: int | None, fused: bool) -> None:
        super().__init__(hf)
        self.vocab_size = vocab_size  # ids from here on are unknown to the tokenizer: masked out of the softmax
        self.log_prob = linear_log_prob if fused else full_logits_log_prob

    def forward(self, inputs: ModelInput, want: frozenset[str], temperature: float) -> dict[str, Tensor]:
        """{"log_probs": [N], "entropy": [N]} float32, under logits / temperature."""
        log_prob, entropy = self.log_prob(
            self.hidden_states(inputs),
            self.hf.get_output_embeddings().weight,
            inputs.targets_N,
            temperature=temperature,
            vocab_size=self.vocab_size,
            with_entropy="entropy" in want,
        )
        return {"log_probs": log_prob} if entropy is None else {"log_probs": log_prob, "entropy": entropy}


class ValueModel(TokenModel):
    """Backbone and a linear head with one output: {"values": [N]} float32."""

    def forward(self, inputs: ModelInput, want: frozenset[str], temperature: float) -> dict[str, Tensor]:
        """`want` and `temperature` are those of `PolicyModel`; a value has no use for them."""
        hidden = self.hidden_states(inputs).float()
        return {"values": hidden @ self.hf.get_parameter(VALUE_HEAD).float()[0]}


VALUE_HEAD = "score.weight"


def attach_value_head(hf: PreTrainedModel, weight_1H: Tensor | None) -> None:
    """Exchange the language-model head for a value head named as in Hugging Face's token classification models.

    Without trained weights it starts from a normal distribution with the model's own `initializer_range`.
    """
    hidden_size = hf.config.get_text_config().hidden_size
    head = nn.Linear(hidden_size, 1, bias=False, device=hf.device, dtype=hf.dtype)
    if weight_1H is not None:
        head.weight = nn.Parameter(weight_1H.to(hf.dtype))
    elif hf.device.type != "meta":
        nn.init.normal_(head.weight, std=hf.config.initializer_range)
    for name, child in list(hf.named_children()):
        if child is hf.get_output_embeddings():
            delattr(hf, name)
    hf.score = head
    hf.config.num_labels = 1


def no_head_surprises(hf: PreTrainedModel) -> None:
    """Refuse models whose logits are more than a matrix product."""
    config, name = hf.config.get_text_config(), hf.config.model_type
    for key in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if key in config and getattr(config, key) not in (None, 1.0):
            raise ValueError(f"model type {name!r} with {key}={getattr(config, key)} is not available yet")
    head = hf.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(f"model type {name!r}: an output head that is not a plain linear layer is not available yet")


def dtype_of(name: str) -> torch.dtype:
    """ "float32" | "fp32" | "bfloat16" | "bf16" | "float16" | "fp16" -> torch dtype."""
    known = {
        "float32": torch.float32,
        "fp32": torch.float32,
        "bfloat16": torch.bfloat16,
        "bf16": torch.bfloat16,
        "float16": torch.float16,
        "fp16": torch.float16,
    }
    if name not in known:
        raise ValueError(f"unknown dtype {name!r}: use one of {', '.join(known)}")
    return known[name]
