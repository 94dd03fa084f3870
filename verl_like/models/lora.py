"""LoRA (arXiv 2106.09685): frozen weights W, trained low-rank additions, W' = W + (alpha / rank) B A.

An adapted module is still a linear layer with its own name and weight; `lora_A` and `lora_B` sit inside it, so that the
parameter names are those of the peft library without its prefix. B starts at zero: training starts from the base model.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from verl_like.models.adapter_config import WEIGHTS
from verl_like.models.checkpoint_names import CheckpointNames
from verl_like.models.lora_experts import (
    DOWN,
    GATE_UP,
    ParameterAdapter,
    adapt_experts,
    adapt_router,
    adapter_name,
    base_name,
    change,
    stacks_of,
)
from verl_like.remote_storage import local_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from verl_like.config import ModelConfig

log = logging.getLogger(__name__)

_WEIGHT, _A, _B = "weight", "lora_A.weight", "lora_B.weight"
_VALUE_HEAD = "score"  # new in a value model: trained as a whole
_PEFT_PREFIX = "base_model.model."
_UNCALLED = "dt_proj"  # of Mamba: its mixer multiplies by the matrix itself, past whatever stands around the layer


class LoRALinear(nn.Linear):
    """Linear layer that shares its weight and bias with `base`, and has an adapter."""

    experts = 1

    def __init__(self, base: nn.Linear, rank: int, scale: float, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        options: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": dtype}
        self.lora_A = nn.Linear(self.in_features, rank, **options)
        self.lora_B = nn.Linear(rank, self.out_features, **options)
        self.scale, self.enabled = scale, True
        if base.weight.device.type != "meta":
            nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))  # as peft
            nn.init.zeros_(self.lora_B.weight)

    def forward(self, input: Tensor) -> Tensor:
        """Compute W x + b, plus the adapter's part while it is enabled."""
        output = functional.linear(input, self.weight, self.bias)
        return output + self.lora_B(self.lora_A(input)) * self.scale if self.enabled else output


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Adapters of one model.

    names: the adapted modules, by Hugging Face name; of stacked experts those that peft gives their wrappers.
    targets: the shortest list of names that means the linear layers to peft.
    parameters: the same of adapted experts and routers.
    transposed: stacks of experts are [experts, in, out].
    """

    names: tuple[str, ...]
    targets: tuple[str, ...]
    modules: tuple[LoRALinear | ParameterAdapter, ...]
    rank: int
    alpha: float
    parameters: tuple[str, ...] = ()
    transposed: bool = False

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the base model inside, without adapters."""
        for module in self.modules:
            module.enabled = False
        try:
            yield
        finally:
            for module in self.modules:
                module.enabled = True

    def merged(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of `stream`, every adapter added into its base weight, under the base model's names.

        Sums are float32. Raises RuntimeError when an adapter, or a base weight of one, did not come.
        """
        adapted, parts = set(self.names), {}
        for name, tensor in stream:
            module, part = _split(name)
            if module not in adapted or part is None:
                yield name, tensor
                continue
            parts.setdefault(module, {})[part] = tensor
            if len(parts[module]) == 3:
                yield base_name(module), self._sum(parts.pop(module))
                adapted.remove(module)
        if adapted:
            raise RuntimeError(f"{len(adapted)} LoRA adapters did not reach the merge, for instance {min(adapted)}")

    def shapes(self) -> dict[str, torch.Size]:
        """Names and shapes of all adapter tensors."""
        found: dict[str, torch.Size] = {}
        for name, module in zip(self.names, self.modules, strict=True):
            for part, layer in ((_A, module.lora_A), (_B, module.lora_B)):
                found[f"{name}.{part}"] = torch.Size((layer.out_features, layer.in_features))
        return found

    def scaled(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield adapter tensors with alpha / rank multiplied into B, so that B A is the change of a weight."""
        for name, tensor in stream:
            yield name, tensor * (self.alpha / self.rank) if name.endswith(_B) else tensor

    def _sum(self, parts: dict[str, Tensor]) -> Tensor:
        shape = parts[_WEIGHT].shape
        wide = change(parts[_B].float(), parts[_A].float(), shape, transposed=self.transposed)
        # In place, bit for bit the same: a stack of experts is gigabytes.
        return wide.mul_(self.alpha / self.rank).add_(parts[_WEIGHT]).to(parts[_WEIGHT].dtype)

    def peft_config(self, base: str, *, is_value_model: bool) -> dict[str, Any]:
        """Content of adapter_config.json, as the peft library reads it."""
        return {
            "peft_type": "LORA",
            "task_type": "TOKEN_CLS" if is_value_model else "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
            "target_modules": list(self.targets),
            "target_parameters": list(self.parameters) or None,
            "modules_to_save": [_VALUE_HEAD] if is_value_model else None,
        }


def adapters_apart(model: ModelConfig) -> bool:
    """True where the rollout engine keeps the adapters beside the base weights."""
    return model.lora_rank > 0 and not model.lora.merge


def attach(
    hf: PreTrainedModel, model: ModelConfig, *, dtype: torch.dtype, seed: int, left_out: nn.Module | None = None
) -> Adapters:
    """Put adapters into the target modules, in place, and freeze everything else but a value head.

    Args:
        hf: the model.
        model: model section of the configuration.
        dtype: precision of the adapters (and the value head); the base keeps its own.
        seed: of the adapters' first values.
        left_out: module that gets no adapters.

    Raises ValueError when nothing is targeted.
    """
    linear: dict[str, nn.Linear] = {n: part for n, part in hf.named_modules() if isinstance(part, nn.Linear)}
    experts, routers = stacks_of(hf)
    chosen = _targets(hf, linear, model, set(() if left_out is None else left_out.modules()))
    names = [name for name in chosen if name in linear]
    matrices = (p for name in chosen for p in hf.get_submodule(name).parameters(recurse=False) if p.ndim > 1)
    largest = max(min(matrix.shape[-2:]) for matrix in matrices)
    if model.lora_rank > largest:
        raise ValueError(f"model.lora_rank={model.lora_rank}: no layer that is adapted has a rank above {largest}")
    hf.requires_grad_(False)
    modules, how = [], (model.lora_rank, model.lora_alpha / model.lora_rank, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in names:
            parent, _, leaf = name.rpartition(".")
            adapter = LoRALinear(linear[name], *how)
            setattr(hf.get_submodule(parent), leaf, adapter)
            modules.append(adapter)
        for name in [name for name in chosen if name in experts]:
            names += [f"{name}.base_layer", name]
            modules += adapt_experts(experts[name], *how)
        for name in [name for name in chosen if name in routers]:
            names.append(name)
            modules.append(adapt_router(routers[name], *how))
    head = dict(hf.named_children()).get(_VALUE_HEAD)
    if head is not None:
        head.to(dtype).requires_grad_(True)
    return Adapters(
        names=tuple(names),
        targets=_shortest([name for name in chosen if name in linear], linear, 1),
        parameters=_shortest(
            [base_name(name) for name in names if name not in linear],
            [base_name(n) for name in experts for n in (f"{name}.base_layer", name)] + [f"{n}.weight" for n in routers],
            3,
        ),
        modules=tuple(modules),
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        transposed=any(part.is_transposed for part in experts.values()),
    )


def _shortest(names: list[str], among: Iterable[str], parts: int) -> tuple[str, ...]:
    """Give the last parts of the names, where these mean no others of `among`; else the whole names."""
    ends = {".".join(name.split(".")[-parts:]) for name in names}
    exact = {name for name in among if any(_matches(name, [end]) for end in ends)} == set(names)
    return tuple(sorted(ends)) if exact else tuple(names)


def load_adapter(hf: nn.Module, model: ModelConfig) -> None:
    """Load the tensors of model.lora_adapter_path into the adapters (and the value head) of `hf`.

    On the meta device names and shapes are compared alone. Raises ValueError where they differ.
    """
    named, file = f"model.lora_adapter_path={model.lora_adapter_path}", local_folder(str(model.lora_adapter_path))
    own = {peft_name(name): parameter for name, parameter in hf.named_parameters() if is_trained(name)}
    try:
        stored = load_file(Path(file) / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{named}: {WEIGHTS} cannot be read: {error}") from error
    there = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    wanted = {name: tuple(own[name].shape) for name in own if name in there or is_adapter(name)}  # a head may be new
    if wrong := sorted(name for name in there | wanted if there.get(name) != wanted.get(name)):
        shapes = " and ".join(str(shapes.get(wrong[0], "absent")) for shapes in (there, wanted))
        raise ValueError(
            f"{named} does not fit {model.path}: {wrong[0]} is {shapes}, in the file and in the model ({len(wrong)} "
            "tensors differ in all)"
        )
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].copy_(tensor)


def is_adapter(name: str) -> bool:
    """True for the parameter name of an adapter's A or B."""
    return name.endswith((f".{_A}", f".{_B}"))


def is_trained(name: str) -> bool:
    """True for the name of a parameter trained beside a frozen base: an adapter's, or the value head's."""
    return is_adapter(name) or name.endswith(f"{_VALUE_HEAD}.{_WEIGHT}")


def peft_name(name: str) -> str:
    """Name of an adapter's tensor in peft's adapter_model.safetensors."""
    return f"{_PEFT_PREFIX}{name}"


def _targets(
    hf: PreTrainedModel, linear: dict[str, nn.Module], model: ModelConfig, left_out: set[nn.Module]
) -> list[str]:
    others = {hf.get_output_embeddings(), dict(hf.named_children()).get(_VALUE_HEAD), *left_out}
    experts, routers = stacks_of(hf)
    body = [name for name, part in linear.items() if part not in others and not name.endswith(_UNCALLED)] + [*routers]
    meant = _experts_meant(hf, experts, model.target_modules)
    _check_frozen_matrices(hf, {*linear, *routers, *meant}, body, model.target_modules)
    _refuse_impossible(hf, {*body, *_names_of_experts(hf, meant)}, model.target_modules)
    chosen = [name for name in body if _matches(name, model.target_modules)] + meant
    excluded = model.exclude_modules
    for each in [[name] for name in excluded] if isinstance(excluded, list) else filter(None, [excluded]):
        if not any(_matches(name, each) for name, _ in hf.named_modules()):
            raise ValueError(f"model.exclude_modules={excluded!r}: {each} is no module of this model; {_instead(body)}")
    chosen = [name for name in chosen if model.exclude_modules is None or not _matches(name, model.exclude_modules)]
    if not chosen:
        raise ValueError(
            f"model.target_modules={model.target_modules!r} (model.exclude_modules={model.exclude_modules!r}) names no "
            f"linear layer of this model: {_instead(body)}"
        )
    return chosen


def adapts_experts(hf: PreTrainedModel, model: ModelConfig) -> bool:
    """True where stacks of experts get adapters."""
    meant = _experts_meant(hf, stacks_of(hf)[0], model.target_modules)
    return any(model.exclude_modules is None or not _matches(name, model.exclude_modules) for name in meant)


def _experts_meant(hf: PreTrainedModel, experts: dict[str, Any], wanted: Any) -> list[str]:
    """Choose the modules of experts of which all is named: themselves, both stacks, or every part of these in files."""
    chosen = []
    for name in experts:
        whole = _matches(name, wanted) or all(
            _matches(f"{name}.{stack}", wanted)
            or all(_matches(part, wanted) for part in _stored_parts(hf, f"{name}.{stack}"))
            for stack in (GATE_UP, DOWN)
        )
        chosen += [name] if whole else []
    return chosen


def _names_of_experts(hf: PreTrainedModel, experts: Iterable[str]) -> list[str]:
    """List all names under which modules of experts can be meant."""
    stacks = [f"{name}.{stack}" for name in experts for stack in (GATE_UP, DOWN)]
    return [*experts, *stacks, *(part for stack in stacks for part in _stored_parts(hf, stack))]


def _stored_parts(hf: PreTrainedModel, stack: str) -> list[str]:
    """Names of modules that files hold of the first expert of a stack."""
    views = CheckpointNames(hf).views(stack, hf.get_parameter(stack).detach()[:1])
    return [name.removesuffix(f".{_WEIGHT}") for name, _ in views]


def _check_frozen_matrices(hf: PreTrainedModel, adapted: set[str], body: list[str], wanted: Any) -> None:
    """Check targets against matrices that stay frozen: those of experts that are not stacked, or named in part.

    Raises ValueError where a target names nothing else; warns where it would have meant them too.
    """
    frozen = _matrices_without_layer(hf, adapted)
    if not frozen:
        return
    for target in [[name] for name in wanted] if isinstance(wanted, list) else [wanted]:
        meant = [name for name in frozen if _matches(name, target)]
        if not meant:
            continue
        if not any(_matches(name, target) for name in body):
            raise ValueError(
                f"model.target_modules={wanted!r}: {target[0] if isinstance(target, list) else target} names "
                f"{meant[0]}, which gets no adapter: experts are adapted whole, where transformers stacks them (name "
                "experts, or their gate, up and down projections); or train all weights (lora_rank=0)"
            )
        log.warning(
            "model.target_modules=%s: %s and %d more stay frozen: experts are adapted whole, where they are stacked",
            *(wanted, meant[0], len(meant) - 1),
        )


def _matrices_without_layer(hf: PreTrainedModel, adapted: set[str]) -> list[str]:
    """Find modules, by the names of checkpoints, whose matrices get no adapter and belong to no embedding or such."""
    owned = {*adapted, *(n for n, part in hf.named_modules() if isinstance(part, nn.Embedding | nn.Conv2d | nn.Conv3d))}
    stored = CheckpointNames(hf)
    loose = [(name, p) for name, p in hf.named_parameters() if p.ndim > 1 and name.rpartition(".")[0] not in owned]
    views = (view for name, parameter in loose for view, _ in stored.views(name, parameter.detach()))
    return [name.removesuffix(f".{_WEIGHT}") for name in views]


def _refuse_impossible(hf: PreTrainedModel, body: set[str], wanted: Any) -> None:
    """Check that each name of a list means a layer that can be adapted: peft would leave the others out silently."""
    if isinstance(wanted, str):
        return
    others = {name: type(part).__name__ for name, part in hf.named_modules() if name not in body}
    for end in wanted:
        if any(_matches(name, [end]) for name in body):
            continue
        kind = next((f", a {kind}" for name, kind in others.items() if _matches(name, [end])), "")
        why = (
            "gets no adapter: only linear layers before the head do, and none of a frozen tower"
            if kind
            else "is no module of this model"
        )
        if end.endswith(_UNCALLED):
            why = "gets no adapter: its layer reads the matrix and never calls it"
        raise ValueError(f"model.target_modules={list(wanted)!r}: {end}{kind} {why}; {_instead(body)}")


def _instead(body: Iterable[str]) -> str:
    return f"use all-linear, or some of {sorted({name.rpartition('.')[2] for name in body})}"


def _matches(name: str, wanted: Any) -> bool:
    """Match a module's name as peft: all-linear; a pattern for the whole name; or a list of names or ends of names."""
    if wanted == "all-linear":
        return True
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == end or name.endswith(f".{end}") for end in wanted)


def _split(name: str) -> tuple[str, str | None]:
    """Split the name of a tensor into that of its adapter and of the part it is; (name, None) for others."""
    for part in (_A, _B):
        if name.endswith(f".{part}"):
            return name.removesuffix(f".{part}"), part
    adapter = adapter_name(name)
    return (name, None) if adapter is None else (adapter, _WEIGHT)
