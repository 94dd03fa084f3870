"""LoRA written down once more: W' = W + s B A with s = alpha / rank, for the layers that model.target_modules names.

An adapter begins with B = 0, and then no fault in the gradient of A can be seen: the check begins with noise in both.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from verl_like.config import ModelConfig, PPOConfig
from verl_like.config.roles import needs_critic
from verl_like.models import families
from verl_like.models.adapter_config import CONFIG, WEIGHTS
from verl_like.models.loading import load_hf_config
from verl_like.models.lora_experts import stacks_of

_PREFIX = "base_model.model."  # of names in a file of peft's
_CHANGE = 0.02  # size of the entries of s B A: of the order of a weight's
Model = TypeVar("Model", bound=ModelConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainAdapters:
    """A [rank, in], B [out, rank] and the frozen W [out, in] of each adapted layer, by its name."""

    scale: float
    a: dict[str, Tensor]
    b: dict[str, Tensor]
    base: dict[str, Tensor]

    @classmethod
    def of(cls, hf: nn.Module, model: ModelConfig) -> Self:
        """Read model.lora_adapter_path for the layers of `hf`. Raises ValueError where the file has not just these."""
        stored = load_file(Path(str(model.lora_adapter_path)) / WEIGHTS)
        weights = dict(hf.named_parameters())
        names = target_names(hf, model)
        found = {n: stored.get(f"{_PREFIX}{n}.lora_{part}.weight") for n in names for part in "AB"}
        if any(tensor is None for tensor in found.values()):
            raise ValueError(f"model.lora_adapter_path={model.lora_adapter_path} has no adapter for each of {names}")
        weight = next(iter(weights.values()))

        def part(letter: str) -> dict[str, Tensor]:
            return {n: stored[f"{_PREFIX}{n}.lora_{letter}.weight"].to(weight.device, weight.dtype) for n in names}

        base = {name: weights[f"{name}.weight"].detach().clone() for name in names}
        return cls(scale=model.lora_alpha / model.lora_rank, a=part("A"), b=part("B"), base=base)

    @torch.no_grad()
    def merge(self, hf: nn.Module) -> None:
        """Set the adapted weights of `hf`."""
        weights = dict(hf.named_parameters())
        for name, base in self.base.items():
            weights[f"{name}.weight"].copy_(base + self.scale * self.b[name] @ self.a[name])

    def trained(self) -> dict[str, Tensor]:
        """Every A and B by the name of its parameter."""
        return {
            f"{n}.lora_{letter}.weight": t for letter, part in (("A", self.a), ("B", self.b)) for n, t in part.items()
        }

    def gradient(self, of_weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of `trained` from those of the whole weights, by the chain rule."""
        found = {}
        for name in self.base:
            whole = of_weights[f"{name}.weight"]
            found[f"{name}.lora_A.weight"] = self.scale * self.b[name].to(whole.device).T @ whole
            found[f"{name}.lora_B.weight"] = self.scale * whole @ self.a[name].to(whole.device).T
        return found


def target_names(hf: Any, model: ModelConfig) -> list[str]:
    """Names of the linear layers that get an adapter, by peft's rules.

    all-linear is every one but the head's; a text is a pattern of the whole name; a list has ends of names.
    """
    heads = ("lm_head", "embed_out", "score")
    beside = {part for whole in families.parts_beside_text(hf).values() for part in whole.modules()}
    all_linear = [name for name, part in hf.named_modules() if isinstance(part, nn.Linear) and part not in beside]
    linear = [name for name in all_linear if name not in heads and not name.endswith("dt_proj")]  # Mamba reads this one
    out = model.exclude_modules
    return [n for n in linear if _named(n, model.target_modules) and not (out is not None and _named(n, out))]


def outline(model: ModelConfig) -> Any:
    """Build a model without numbers."""
    hf_config = load_hf_config(model)
    kind: Any = families.model_class(hf_config)
    with torch.device("meta"):
        return kind.from_config(hf_config, trust_remote_code=model.trust_remote_code)


def unchecked_adapters(model: ModelConfig) -> list[str]:
    """Say what of LoRA is left out of both checks, in a model that may have it: experts and routers."""
    has_them = model.lora_rank > 0 and bool(stacks_of(outline(model))[0])
    return ["not checked: LoRA on experts and routers, which stay as they are here"] if has_them else []


def _named(name: str, wanted: Any) -> bool:
    if wanted == "all-linear":
        return True
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == each or name.endswith(f".{each}") for each in wanted)


def with_noise(config: PPOConfig, folder: Path) -> PPOConfig:
    """Let LoRA that names no adapter begin with one of noise, which is written to `folder`."""
    policy, critic = config.actor_rollout_ref, config.critic
    policy = dataclasses.replace(policy, model=_begun(policy.model, folder / "actor"))
    if needs_critic(critic, config.algorithm):
        critic = dataclasses.replace(critic, model=_begun(critic.model, folder / "critic"))
    return dataclasses.replace(config, actor_rollout_ref=policy, critic=critic)


def _begun(model: Model, folder: Path) -> Model:
    if model.lora_rank == 0 or model.lora_adapter_path is not None:
        return model
    hf = outline(model)
    generator, rank = torch.Generator().manual_seed(2), model.lora_rank
    layers, tensors = dict(hf.named_modules()), {}
    names = target_names(hf, model)  # experts and routers are left out of this check
    for name in names:
        outputs, inputs = layers[name].weight.shape  # pyright: ignore[reportAttributeAccessIssue]
        wide = _CHANGE * math.sqrt(inputs / rank) / (model.lora_alpha / rank)
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * wide
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": model.lora_alpha, "target_modules": names}
    (folder / CONFIG).write_text(json.dumps(about))
    return dataclasses.replace(model, lora_adapter_path=str(folder), target_modules=names, exclude_modules=None)
