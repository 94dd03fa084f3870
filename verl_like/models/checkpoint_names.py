"""Names and shapes that checkpoints and other engines use, where the module holds the same numbers differently.

transformers keeps all experts of a layer in one parameter, `experts.gate_up_proj` [experts, 2 x width, hidden]; files
on the hub, vLLM's loader and older transformers want `experts.7.gate_proj.weight` [width, hidden]. Mixtral's parts have
other names in files as well; Qwen3-VL-MoE's hold the whole stack, its matrices transposed. The rules are transformers'
own (the ones `save_pretrained` applies), so that a model type which transformers can save is named here as it is there;
every tensor given out is a view, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    ConversionOps,
    PrefixChange,
    SplitModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")
"""Buffers that correct which experts a router chooses (arXiv 2408.15664): state of the model, without a gradient."""

_EACH_EXPERT = "*"  # in a name: the number of the expert


def is_router_bias(name: str) -> bool:
    """True for the name, here or in checkpoints, of the bias that corrects a router."""
    return name.rpartition(".")[2] in ROUTER_BIASES


def sent_as(name: str, dtype: torch.dtype) -> torch.dtype:
    """Precision in which the weight `name` travels: `dtype`, but float32 of a router's bias.

    A bias is compared with scores of which the next differs in the fourth digit: rounded, it chooses other experts.
    """
    return torch.float32 if is_router_bias(name) else dtype


class CheckpointNames:
    """Translation of the parameters of one kind of model into the names and shapes of checkpoints."""

    def __init__(self, hf: PreTrainedModel) -> None:
        self._model_type = hf.config.model_type
        rules = get_model_conversion_mapping(hf, add_legacy=False)
        backwards = [rule.reverse_transform() for rule in reversed(rules) if not isinstance(rule, PrefixChange)]
        self._renamings = [rule for rule in backwards if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in backwards if isinstance(rule, WeightConverter)]
        self._known: dict[str, tuple[str, ...]] = {}
        self._turned: set[str] = set()

    def views(self, name: str, tensor: Tensor, first: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield (stored name, view) of everything that the parameter `name` holds.

        first: of a part of a stack that `is_by_expert`, the number of its first expert.

        Writing into a view writes into `tensor`.

        Raises ValueError for a layout that is not a stack of experts.
        """
        stored = self._stored(name)
        if name in self._turned:
            yield stored[0], tensor.transpose(1, 2)
            return
        if stored[0].count(_EACH_EXPERT) == 0:
            yield stored[0], tensor
            return
        for expert, matrix in enumerate(tensor.unbind(0), first):
            for pattern, part in zip(stored, matrix.chunk(len(stored)), strict=True):
                yield pattern.replace(_EACH_EXPERT, str(expert)), part

    def is_by_expert(self, name: str) -> bool:
        """True for a stack of experts of which each is stored by itself."""
        return _EACH_EXPERT in self._stored(name)[0]

    def _stored(self, name: str) -> tuple[str, ...]:
        if name not in self._known:
            self._known[name] = self._stored_names(name)
        return self._known[name]

    def is_turned(self, name: str) -> bool:
        """True for a stack of experts [experts, n, m] stored as [experts, m, n]; known when `views` has named it."""
        return name in self._turned

    def _stored_names(self, name: str) -> tuple[str, ...]:
        """Names under which a parameter is stored: one, or a pattern for each part of a stack of experts.

        Patterns come in the order of the parts' rows.
        """
        patterns = (name,)
        for rule in self._converters:
            first, matched = rule.rename_source_key(name)
            if matched is not None:
                if [type(operation) for operation in rule.operations] == [Transpose]:
                    self._turned.add(name)
                    patterns = (first,)
                    break
                self._require_stack(name, rule.operations)
                targets = rule.target_patterns
                patterns = tuple(first.replace(targets[0], target) for target in targets)
                break
        for rule in self._renamings:
            patterns = tuple(rule.rename_source_key(pattern)[0] for pattern in patterns)
        return patterns

    def _require_stack(self, name: str, operations: list[ConversionOps]) -> None:
        """Check that a parameter is a stack that views can take apart; raises ValueError otherwise.

        Two forms can be: [experts, ...], and [experts, parts one below the other, ...].
        """
        kinds = [(type(operation), getattr(operation, "dim", None)) for operation in operations]
        if kinds not in ([(SplitModulelist, 0)], [(Chunk, 1), (SplitModulelist, 0)]):
            raise ValueError(
                f"model type {self._model_type!r}: checkpoints hold {name} in another layout "
                f"({', '.join(kind.__name__ for kind, _ in kinds)}), which the weight sync cannot send"
            )
