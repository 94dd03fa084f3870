"""Adapters of one tenant's model, and the places where they act: every request brings its own to the same base.

An adapter is a pair of matrices for each adapted linear layer, y + (alpha / rank) B A x. It acts by a hook behind the
layer, so that models of any rank and any targets share one base, and none is copied to change tenants. The output head
is no layer in a training pass (models/heads.py): there its pair goes to `PolicyModel.low_rank`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from verl_like.models.adapter_config import CONFIG, WEIGHTS
from verl_like.models.lora import peft_name
from verl_like.models.lora_experts import stacks_of

OPTIMIZER, SPEC = "optimizer.safetensors", "spec.json"  # beside the two files of the peft library
_MLP = frozenset({"mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "shared_expert", "shared_experts"})
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # of torch's AdamW
_UNCALLED = "dt_proj"  # of Mamba: its mixer multiplies by the matrix itself


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Rank and targets that a client asks for. seed: of the first values."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class Places:
    """The linear layers of a base model by kind of target, with their sizes (out, in).

    Hooks behind them add whatever adapter is `active`. hf: the model, which keeps its layers as they are. head: False
    where the output head is not called as a layer.
    """

    def __init__(self, hf: PreTrainedModel, *, head: bool) -> None:
        self._active: Adapter | None = None
        self._is_moe = bool(stacks_of(hf)[0])
        output = hf.get_output_embeddings()
        tower = {part for name, part in hf.named_modules() if "visual" in name.split(".") or "vision" in name}
        self.kinds: dict[str, list[str]] = {"train_attn": [], "train_mlp": [], "train_unembed": []}
        self.sizes: dict[str, tuple[int, int]] = {}
        for name, layer in hf.named_modules():
            if not isinstance(layer, nn.Linear) or layer in tower or name.endswith(_UNCALLED):
                continue
            kind = "train_mlp" if _MLP & {*name.split(".")} else "train_attn"
            self.kinds["train_unembed" if layer is output else kind].append(name)
            self.sizes[name] = (layer.out_features, layer.in_features)
            if layer is not output or head:
                layer.register_forward_hook(self._hook(name))

    def targets(self, spec: AdapterSpec) -> list[str]:
        """Names of the layers that get adapters. Raises ValueError for what this model cannot have."""
        wanted = [kind for kind in self.kinds if getattr(spec, kind)]
        if spec.train_mlp and self._is_moe:
            raise ValueError(
                "train_mlp=True: the experts of this model are stacks, which get no adapters here; create the model "
                "with train_mlp=False"
            )
        for kind in wanted:
            if not self.kinds[kind]:
                raise ValueError(f"{kind}=True: this model has no such linear layer; create it with {kind}=False")
        names = [name for kind in wanted for name in self.kinds[kind]]
        if not names:
            raise ValueError("train_attn, train_mlp and train_unembed are all False: nothing would be trained")
        largest = max(min(self.sizes[name]) for name in names)
        if not 1 <= spec.rank <= largest:
            raise ValueError(f"rank={spec.rank}: layers of this model have ranks from 1 to {largest}")
        return names

    @contextmanager
    def active(self, adapter: Adapter | None) -> Iterator[None]:
        """Add this adapter inside; None: the base model."""
        self._active = adapter
        try:
            yield
        finally:
            self._active = None

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
        def add(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
            pair = None if self._active is None else self._active.pairs.get(name)
            if self._active is None or pair is None:
                return None
            a_rI, b_Or = (part.to(inputs[0].dtype) for part in pair)
            return output + functional.linear(functional.linear(inputs[0], a_rI), b_Or) * self._active.scale

        return add


class Adapter:
    """Pairs (A [rank, in], B [out, rank]) by layer, float32, with the state of their optimizer.

    gradients: sums over the passes since the last step, by parameter; None before the first.
    """

    def __init__(self, spec: AdapterSpec, alpha: float, pairs: dict[str, tuple[Tensor, Tensor]], trained: bool) -> None:
        self.spec, self.alpha, self.scale = spec, alpha, alpha / spec.rank
        self.pairs = {
            name: (a.requires_grad_(trained), b.requires_grad_(trained)) for name, (a, b) in sorted(pairs.items())
        }
        self.gradients: list[Tensor] | None = None
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.0, foreach=True) if trained else None

    @classmethod
    def new(cls, spec: AdapterSpec, alpha: float, places: Places, device: torch.device) -> Adapter:
        """First values as in peft: A uniform, B zero, so that training starts from the base model."""
        generator, pairs = torch.Generator().manual_seed(spec.seed), dict[str, tuple[Tensor, Tensor]]()
        for name in places.targets(spec):
            out, inner = places.sizes[name]
            a_rI = torch.empty(spec.rank, inner)
            nn.init.kaiming_uniform_(a_rI, a=math.sqrt(5), generator=generator)
            pairs[name] = (a_rI.to(device), torch.zeros(out, spec.rank, device=device))
        return cls(spec, alpha, pairs, trained=True)

    def parameters(self) -> list[Tensor]:
        return [part for pair in self.pairs.values() for part in pair]

    def _named(self) -> dict[str, Tensor]:
        """Parameters by the names of peft's files."""
        parts = zip(("lora_A", "lora_B"), zip(*self.pairs.values(), strict=True), strict=True)
        return {
            peft_name(f"{name}.{part}.weight"): tensor
            for part, tensors in parts
            for name, tensor in zip(self.pairs, tensors, strict=True)
        }

    def take_gradients(self) -> None:
        """Add the gradients of a whole pass to those before it."""
        new = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters()]
        self.gradients = new if self.gradients is None else torch._foreach_add(self.gradients, new)
        self.drop_pass()

    def drop_pass(self) -> None:
        """Forget the gradients of a pass that broke off."""
        for parameter in self.parameters():
            parameter.grad = None

    def step(self, params: dict[str, float]) -> dict[str, float]:
        """Take one step of AdamW with these numbers, clip first where grad_clip_norm is set, and begin a new sum."""
        assert self.optimizer is not None
        parameters = self.parameters()
        gradients = self.gradients or [torch.zeros_like(p) for p in parameters]
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        if not math.isfinite(norm):
            self.gradients = None
            raise ValueError(f"the gradient's norm is {norm}: no weight was changed, and the gradient was dropped")
        most = params["grad_clip_norm"]
        if 0 < most < norm:
            gradients = torch._foreach_mul(gradients, most / norm)
        for group in self.optimizer.param_groups:
            betas = (params["beta1"], params["beta2"])
            group |= {"lr": params["learning_rate"], "betas": betas, "eps": params["eps"]}
            group["weight_decay"] = params["weight_decay"]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.drop_pass()
        self.gradients = None
        return {"grad_norm:mean": norm}

    def save(self, folder: Path, base: str, *, optimizer: bool) -> None:
        """Write a folder as the peft library reads it, whole or not at all; with `optimizer` also the states."""
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        named = {name: tensor.detach().cpu().contiguous() for name, tensor in self._named().items()}
        save_file(named, partial / WEIGHTS, {"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.spec.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.pairs),
            "lora_dropout": 0.0,
            "bias": "none",
        }
        (partial / SPEC).write_text(json.dumps(asdict(self.spec)) + "\n", encoding="utf-8")
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if optimizer and self.optimizer is not None:
            names = {id(parameter): name for name, parameter in self._named().items()}
            states = {
                f"{names[id(parameter)]}.{moment}": state[moment].cpu().clone()
                for parameter, state in self.optimizer.state.items()
                for moment in _MOMENTS
            }
            save_file(states, partial / OPTIMIZER, {"format": "pt"})
        for file in partial.iterdir():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    @classmethod
    def load(cls, folder: Path, device: torch.device, *, optimizer: bool, trained: bool = True) -> Adapter:
        """Read what `save` wrote. Raises ValueError without optimizer states where they are asked for."""
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        spec = AdapterSpec(**json.loads((folder / SPEC).read_text(encoding="utf-8")))
        stored = load_file(folder / WEIGHTS)
        pairs = {
            name: tuple(stored[peft_name(f"{name}.lora_{part}.weight")].to(device) for part in "AB")
            for name in config["target_modules"]
        }
        adapter = cls(spec, config["lora_alpha"], pairs, trained)  # pyright: ignore[reportArgumentType]
        if optimizer:
            if not (folder / OPTIMIZER).exists():
                raise ValueError("this checkpoint holds no optimizer state; load it with optimizer=False")
            assert adapter.optimizer is not None
            states = load_file(folder / OPTIMIZER)
            for name, parameter in adapter._named().items():
                if f"{name}.step" in states:
                    found = {moment: states[f"{name}.{moment}"] for moment in _MOMENTS}
                    on_device = {moment: t if moment == "step" else t.to(device) for moment, t in found.items()}
                    adapter.optimizer.state[parameter] = on_device
        return adapter
