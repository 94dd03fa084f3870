"""The yardstick's forward and backward: the model as transformers itself runs it, one unpadded row after the other."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from verl_like.batch import Sequences
from verl_like.config import ModelConfig
from verl_like.kit.selfcheck.pictures import PlainPictures
from verl_like.kit.selfcheck.plain_adapters import PlainAdapters
from verl_like.kit.selfcheck.plain_loss import PlainPolicyLoss, PlainValueLoss
from verl_like.models import families
from verl_like.models.heads import VALUE_HEAD, attach_value_head
from verl_like.models.loading import has_weights, load_hf_config

_PIECE = 2**22  # numbers
TEMPERATURE = 0.8  # not 1, so that a path that forgets it shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Loss and gradient of one mini-batch.

    scale: what a difference of losses is compared with, the sum of the rows' magnitudes; 0 where it is not known.
    """

    loss: float
    gradient: dict[str, Tensor]  # by Hugging Face name, on the CPU
    scale: float = 0.0


class PlainModel:
    """Full logits (or values) of one row at a time, with eager attention and no cache.

    reference_scale: with a reference for the exact KL, which has the same weights times this number.
    adapters: of LoRA, added into the weights; the reference keeps the base's. frozen_tower: images are seen, but what
    sees them is not trained.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        vocab_size: int,
        seed: int,
        device: str,
        critic: bool = False,
        reference_scale: float | None = None,
        temperature: float = TEMPERATURE,
        dtype: torch.dtype = torch.float32,
        frozen_tower: bool = True,
    ) -> None:
        self.vocab_size, self.device, self.critic = vocab_size, torch.device(device), critic
        self.temperature, self.dtype = temperature, dtype
        self.hf = _load(model, seed, critic=critic, frozen_tower=frozen_tower).to(self.device, dtype)
        self.pictures = PlainPictures(model, self.hf.config) if families.sees(self.hf.config) else None
        self.reference: Any = None
        if reference_scale is not None:
            self.reference = copy.deepcopy(self.hf)
            scale_weights(self.reference, reference_scale)
        self.adapters = PlainAdapters.of(self.hf, model) if model.lora_rank > 0 else None
        if self.adapters is not None:
            self.adapters.merge(self.hf)

    def answers(self, rows: Sequences, row: int) -> dict[str, Tensor]:
        """Compute log_probs, entropy, sum_pi_squared, full_kl, or values: [R] of the row's response, with a graph."""
        prompt = rows.prompt_ids_BP[row, rows.prompt_ids_BP.shape[1] - int(rows.prompt_length_B[row]) :]
        response = rows.response_ids_BR[row, : int(rows.response_length_B[row])].long()
        tokens, before = torch.cat([prompt.long(), response])[None].to(self.device), slice(len(prompt) - 1, -1)
        if self.critic:
            hidden = self.hf.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, before]
            return {"values": (hidden @ self.hf.score.weight[0]).cpu()}
        seen: dict[str, Tensor] = {}
        if self.pictures is not None and rows.media is not None:
            seen = self.pictures.of(tokens, rows.media[row], self.dtype)
        log_probs = self.distribution(self.hf, tokens, **seen)[before]
        chosen = log_probs.gather(1, response[:, None].to(self.device))[:, 0]
        found = {"log_probs": chosen.cpu(), "entropy": -(log_probs.exp() * log_probs).sum(dim=-1).cpu()}
        found["sum_pi_squared"] = (2 * log_probs).exp().sum(dim=-1).cpu()
        if self.reference is None:
            return found
        with torch.no_grad():
            other = self.distribution(self.reference, tokens, **seen)[before]
        return found | {"full_kl": (log_probs.exp() * (log_probs - other)).sum(dim=-1).cpu()}

    def distribution(self, hf: Any, tokens: Tensor, **seen: Tensor) -> Tensor:
        """Log-probs of all ids that the tokenizer knows, after each token: [L, V]. seen: of images."""
        logits = hf(input_ids=tokens, use_cache=False, **seen).logits[0, :, : self.vocab_size].to(self.dtype)
        return (logits / self.temperature).log_softmax(dim=-1)

    def column(self, rows: Sequences, name: str) -> Tensor:
        """One answer for all rows, [B, R], 0 where there is no response."""
        return self.columns(rows, [name])[name]

    @torch.no_grad()
    def columns(self, rows: Sequences, names: Iterable[str]) -> dict[str, Tensor]:
        """Several answers for all rows, by name, in one pass."""
        found = {name: torch.zeros(rows.response_ids_BR.shape, dtype=self.dtype) for name in names}
        for row in range(len(rows)):
            answers = self.answers(rows, row)
            for name, column in found.items():
                column[row, : len(answers[name])] = answers[name]
        return found

    def measure(self, loss: PlainPolicyLoss) -> Measured:
        """Forward and backward of every row of the loss."""
        total = scale = 0.0
        for row in loss.rows:
            answers = self.answers(loss.material.rollouts, row.number)
            if isinstance(loss, PlainValueLoss):
                part = loss.value_loss(row, answers["values"])
            else:
                part = loss(row, answers["log_probs"], answers["entropy"], answers.get("full_kl"))
            part.backward()
            total, scale = total + part.item(), scale + abs(part.item())
        gradient = {
            name: torch.zeros_like(weight).cpu() if weight.grad is None else weight.grad.cpu()
            for name, weight in self.hf.named_parameters()
            if weight.requires_grad
        }
        self.hf.zero_grad(set_to_none=True)
        if self.adapters is not None:
            head = {name: of for name, of in gradient.items() if name == VALUE_HEAD}
            gradient = self.adapters.gradient(gradient) | head
        return Measured(loss=total, gradient=gradient, scale=scale)


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors of one shape, some rows of each at a time, so that what is made of them has little room."""
    rows = [tensor[None] if tensor.dim() == 0 else tensor for tensor in tensors]
    yield from zip(*(each.split(max(1, _PIECE * len(each) // max(1, each.numel()))) for each in rows), strict=True)


@torch.no_grad()
def scale_weights(model: nn.Module, factor: float) -> None:
    """Multiply all weights by `factor`, which makes another policy. They may be sharded."""
    for weight in model.parameters():
        weight.mul_(factor)


def _load(model: ModelConfig, seed: int, *, critic: bool, frozen_tower: bool) -> Any:
    """The weights that the engine starts from: the folder's, or random ones from the same seed."""
    hf_config, path = load_hf_config(model), str(Path(model.path).expanduser())
    kind: Any = families.model_class(hf_config)
    settings = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": model.trust_remote_code}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if has_weights(path):
            hf: Any = kind.from_pretrained(path, config=hf_config, **settings)
        else:
            hf = kind.from_config(hf_config, **settings)
        if critic:
            attach_value_head(hf, _stored_head(Path(path)))
    if frozen_tower or not families.sees(hf_config):
        for part in families.parts_beside_text(hf).values():
            part.requires_grad_(False)
    for own in (hf.config, hf.config.get_text_config()):
        own._experts_implementation = "eager"  # one expert after the other; the grouped product knows no float64
    return hf.eval()


def _stored_head(folder: Path) -> Tensor | None:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            if VALUE_HEAD in stored.keys():  # noqa: SIM118 (not a dict)
                return stored.get_tensor(VALUE_HEAD)
    return None


def apart(reference: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference of two gradients by the size of the tensor's, or by a thousandth of the largest one's.

    Infinite where one has a weight that the other lacks. Some gradients are zero by symmetry (the bias of attention
    keys): what rounding leaves there is no yardstick.
    """
    if reference.keys() != other.keys() or not all(bool(tensor.isfinite().all()) for tensor in other.values()):
        return math.inf
    floor = 1e-3 * max(float(tensor.abs().max()) for tensor in reference.values())
    return max(
        float((reference[name] - other[name]).abs().max()) / max(float(reference[name].abs().max()), floor)
        for name in reference
    )
