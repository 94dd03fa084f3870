"""Modules whose forward the engine calls: a Hugging Face model with per-token answers.

Policy and value model run their head inside this forward, because FSDP gathers the weights of the root module's own
parameters (embedding, final norm, head) only there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from verl_like.models import exact, families, vision
from verl_like.models.attention import EXACT_NAME
from verl_like.models.fused_linear import Backend, Head, References, full_logits_reductions, fused_reductions
from verl_like.models.fused_linear import top_log_probs as find_top_log_probs
from verl_like.models.packing import ModelInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HIDDEN = "hidden_states"
TOP_LOG_PROBS, TOP_IDS = "top_log_probs", "top_ids"  # wanted together
_ENTROPY_ROWS = 2048  # verl's
# What backbones do between embedding and first layer, and the value with which it does nothing (Granite, StarCoder2)
_OF_EMBEDDINGS: dict[str, float] = {"embedding_multiplier": 1.0, "embedding_dropout": 0.0}
_DROPOUTS = ("embed_dropout", "emb_dropout")  # modules that do so (Phi, GPT-NeoX)
HF_PREFIX = "hf."  # `TokenModel.hf` holds the Hugging Face model: the rest of a parameter's name is Hugging Face's


class TokenModel(nn.Module):
    """Base of policy and value model: the Hugging Face model under `hf`, and the hidden states of the wanted tokens."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.hands_on = False  # a stage of a pipeline before the last: answers with the hidden states of all tokens

    def head_names(self) -> tuple[str, str]:
        """Names of the output head's weight and bias among the parameters; a tied weight has the embedding's name."""
        head = self.hf.get_output_embeddings()
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        found = ("", "") if head is None else (names[id(head.weight)], names.get(id(head.bias), ""))
        return found

    def hidden_states(self, inputs: ModelInput, received: Tensor | None = None) -> Tensor:
        """Compute the final hidden states [N, H] of the wanted tokens; all other tokens are dropped here.

        received: hidden states of all tokens, in the shape of `inputs.input_ids`, from the stage before.
        """
        kwargs = inputs.model_kwargs() | {"use_cache": False}
        if received is not None:
            with _handed_on(families.backbone(self.hf)) as body:
                output = body(inputs_embeds=received, **kwargs)
        elif inputs.images is None:
            output = families.backbone(self.hf)(input_ids=inputs.input_ids, **kwargs)
        else:
            output = vision.run(self.hf, inputs.input_ids, images=inputs.images, **kwargs)
        hidden = output.last_hidden_state
        return hidden if self.hands_on else hidden.flatten(0, 1)[inputs.select_N]


@contextmanager
def _handed_on(body: nn.Module) -> Iterator[nn.Module]:
    """Let a backbone take what it is given as it is: the first stage has scaled the embeddings, and dropped of them."""
    places = [(body, name, value) for name, value in _OF_EMBEDDINGS.items() if hasattr(body, name)]
    places += [(getattr(body, name), "p", 0.0) for name in _DROPOUTS if hasattr(body, name)]
    own = [getattr(owner, name) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield body
    finally:
        for (owner, name, _), value in zip(places, own, strict=True):
            setattr(owner, name, value)


class PolicyModel(TokenModel):
    """Causal language model that answers with log-prob, entropy and other reductions of the wanted tokens."""

    def __init__(self, hf: PreTrainedModel, *, vocab_size: int | None, fused: bool, backend: Backend = "torch") -> None:
        super().__init__(hf)
        self.vocab_size = vocab_size  # ids from here on are unknown to the tokenizer: masked out of the softmax
        self.reduce = partial(fused_reductions, backend=backend) if fused else full_logits_reductions
        self.exact = False
        self.logit_scale, self.softcap = logit_rule(hf)
        self.top_k = 0  # ids of each token in TOP_LOG_PROBS
        self.low_rank: tuple[Tensor, Tensor, float] | None = None  # A [r, H], B [V, r], scale: a change of the head
        self.tempered: tuple[frozenset[str], float] | None = None  # names with a temperature of their own, and that

    def save_entropy_memory(self, *, chunked: bool, recomputed: bool) -> None:
        """Set verl's entropy_from_logits_with_chunking and entropy_checkpointing, for full logits.

        The fused function does both anyhow.
        """
        if self.reduce is full_logits_reductions:
            rows = _ENTROPY_ROWS if chunked else None
            self.reduce = partial(full_logits_reductions, entropy_rows=rows, recompute_entropy=recomputed)

    def head(self) -> Head:
        """Output head; inside the root module's forward its weight is the gathered one."""
        output = self.hf.get_output_embeddings()
        return Head(
            weight_VH=output.weight,
            bias_V=output.bias,
            vocab_size=self.vocab_size,
            scale=self.logit_scale,
            softcap=self.softcap,
            exact=self.exact and not exact.is_ordinary(),
        )

    def make_exact(self) -> None:
        """Give every sum one order, whatever is computed beside a token. Raises ValueError where a model has none."""
        exact.put_in(self.hf, EXACT_NAME)
        self.exact, self.reduce = True, fused_reductions

    def forward(
        self,
        inputs: ModelInput,
        want: frozenset[str],
        temperature: float,
        references: References = (),
        chosen_NK: Tensor | None = None,
        received: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Compute {name of `want`: [N]} in float32, under logits / temperature; names are those of `fused_linear`.

        Wanted alone, `HIDDEN` gives the final hidden states [N, H]: a reference's part of `full_kl`. TOP_LOG_PROBS and
        TOP_IDS are the `top_k` likeliest ids of each token, without a gradient. A stage that hands on gives `HIDDEN`,
        whatever is wanted.
        """
        hidden = self.hidden_states(inputs, received)
        if want == {HIDDEN} or self.hands_on:
            return {HIDDEN: hidden}
        head, found = self.head(), dict[str, Tensor]()
        if self.low_rank is not None:
            hidden, head = head.widened(hidden, *self.low_rank)
        if TOP_IDS in want:
            top = find_top_log_probs(hidden, head, self.top_k, temperature=temperature)
            found[TOP_LOG_PROBS], found[TOP_IDS] = top
            want = want - {TOP_LOG_PROBS, TOP_IDS}
        names, own = (frozenset[str](), temperature) if self.tempered is None else self.tempered
        apart = want & names if own != temperature else frozenset[str]()
        for part, divisor in ((want - apart, temperature), (apart, own)):  # a second softmax only where it differs
            if part:
                other = {"references": references, "chosen_NK": chosen_NK}
                found |= self.reduce(hidden, head, inputs.targets_N, part, temperature=divisor, **other)
        return found


class ValueModel(TokenModel):
    """Backbone and a linear head with one output: {"values": [N]} float32."""

    def forward(
        self, inputs: ModelInput, want: frozenset[str], temperature: float, received: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Compute the values. `want` and `temperature` are there as in `PolicyModel`; a value has no use for them."""
        hidden = self.hidden_states(inputs, received)
        if self.hands_on:
            return {HIDDEN: hidden}
        return {"values": hidden.float() @ self.hf.score.weight.float()[0]}


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
        nn.init.normal_(head.weight, std=hf.config.get_text_config().initializer_range)
    for name, child in list(hf.named_children()):
        if child is hf.get_output_embeddings():
            delattr(hf, name)
    hf.score = head
    hf.config.num_labels = 1


def logit_rule(hf: PreTrainedModel) -> tuple[float, float | None]:
    """Read (scale, softcap) that the model applies to its logits; refuses heads that are no linear layer.

    Granite divides by logits_scaling, Cohere multiplies by logit_scale, Falcon-H1 by lm_head_multiplier, Gemma 2
    soft-caps.
    """
    config, name = hf.config.get_text_config(), hf.config.model_type
    if not isinstance(hf.get_output_embeddings(), nn.Linear):
        raise ValueError(f"model type {name!r}: an output head that is not a linear layer is not available")
    factors = [getattr(config, key) for key in ("logit_scale", "lm_head_multiplier") if key in config]
    scale = math.prod(factor or 1.0 for factor in factors)
    if "logits_scaling" in config:
        scale /= config.logits_scaling or 1.0
    softcap = config.final_logit_softcapping if "final_logit_softcapping" in config else None
    return float(scale), None if softcap is None else float(softcap)


def dtype_of(name: str) -> torch.dtype:
    """Convert "float32", "fp32", "bfloat16", "bf16", "float16" or "fp16" to the torch dtype."""
    known = {
        **dict.fromkeys(("float32", "fp32"), torch.float32),
        **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
        **dict.fromkeys(("float16", "fp16"), torch.float16),
    }
    if name not in known:
        raise ValueError(f"unknown dtype {name!r}: use one of {', '.join(known)}")
    return known[name]
