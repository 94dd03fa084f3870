"""Many adapters in vLLM at once: each request names one of those that are held, or none.

vLLM keeps the pairs of linear layers, and takes those of a step's requests into its slots. The pair of the output
head is added to the logits here: vLLM has no place for it where the head is the embedding's weight, and elsewhere a
large one in every slot.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from verl_like.plugins.vllm import compat, lora, versions
from verl_like.plugins.vllm.engine import VLLMRolloutEngine
from verl_like.rollout.base import EngineSpec
from verl_like.rollout.rollout_engine import GenerationRequest

_TARGETS = "lora_target_modules"  # argument of vLLM: other layers, embeddings above all, get no place for adapters
_MOST = 2**20  # that vLLM would hold: `keep` says which
_PARTS = (lora.A, lora.B)
Pair = tuple[Tensor, Tensor]  # A [rank, in], B [out, rank] with its scale


class AdaptersEngine(VLLMRolloutEngine):
    """Replica of a base that stays, and the adapters of its requests.

    spec: of the engine; its process is the whole replica. max_rank: (key, its value) of the largest rank. slots:
    adapters that act in one step; requests of others wait. layers: (in, out) of those that may be adapted, by Hugging
    Face name, without the head.

    adapters: vLLM's requests for those that are held, by name, the one that was asked for last at the end.
    adapter_of: names of adapters by request; one that is not there samples from the base.
    unadapted: those of the layers that vLLM cannot adapt.
    """

    def __init__(
        self, spec: EngineSpec, *, max_rank: tuple[str, int], slots: int, layers: Mapping[str, tuple[int, int]]
    ) -> None:
        from vllm.engine.arg_utils import EngineArgs

        device = spec.process.device
        versions.require_names(device, adapters=True, images=False)
        options = lora.engine_options(max_rank[1], slots, (max_rank[0], "lower it, or set rollout.name=hf"))
        options["max_cpu_loras"] = _MOST
        if _TARGETS in vars(EngineArgs)["__dataclass_fields__"]:
            options[_TARGETS] = sorted({name.rpartition(".")[2] for name in layers})
        if device.type == "cpu":
            options["enforce_eager"] = True  # rows of adapters are sorted in Python
        given = spec.rollout.engine_kwargs
        given = dataclasses.replace(given, vllm={**given.vllm, **options})
        super().__init__(dataclasses.replace(spec, rollout=dataclasses.replace(spec.rollout, engine_kwargs=given)))
        self.adapter_of: Mapping[str, str] = {}
        self._numbers, self.adapters = itertools.count(1), dict[str, Any]()
        self._heads: dict[int, Pair] = {}  # by vLLM's numbers
        lora.let_base_weights_in(self._llm)
        self._manager = lora.manager_of(self._llm)
        self._punica = next(iter(self._manager.punica_wrapper_mapping.values()))
        if device.type == "cpu":
            _BySlot(self._punica)
        self._compute_logits, self._model.compute_logits = self._model.compute_logits, self._logits
        nothing = {name: _tensors({name: (torch.zeros(1, i), torch.zeros(o, 1))}) for name, (i, o) in layers.items()}
        self.unadapted = frozenset(name for name, tensors in nothing.items() if not self._adapts(tensors))
        self._nothing = next((nothing[name] for name in layers if name not in self.unadapted), {})

    def _adapts(self, tensors: Mapping[str, Tensor]) -> bool:
        unused = lora.add(self._llm, tensors, 1)
        self._manager.remove_adapter(1)
        return not unused

    def hold(self, name: str, layers: Mapping[str, Pair], head: Pair | None) -> None:
        """Take an adapter in, unless one of this name is there. Raises ValueError for layers that vLLM cannot adapt."""
        if name in self.adapters:
            self.adapters[name] = self.adapters.pop(name)
            return
        if strange := sorted(self.unadapted & layers.keys()):
            raise ValueError(f"vLLM cannot adapt {strange[:4]}: sample from this adapter with rollout.name=hf")
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        tensors = _tensors(layers) or self._nothing  # vLLM looks for a folder of one that it does not have
        with self._exclusive():
            lora.add(self._llm, tensors, number)
        if head is not None:
            self._heads[number] = tuple(part.to(self.dtype) for part in head)
        self.adapters[name] = LoRARequest(name, number, name)

    def keep(self, most: int) -> None:
        """Let go of adapters that were taken in, or asked for again, before the last `most`."""
        for name in list(self.adapters)[: max(0, len(self.adapters) - most)]:
            number = self.adapters.pop(name).lora_int_id
            self._heads.pop(number, None)
            with self._exclusive():
                self._manager.remove_adapter(number)

    def forget_prefixes(self) -> None:
        """Empty the cache of prompts, so that what is computed next does not depend on what came before."""
        with self._exclusive():
            compat.drop_caches(self._llm)

    def _adapter_of(self, request: GenerationRequest) -> Any:
        name = self.adapter_of.get(request.request_id)
        return None if name is None else self.adapters[name]

    def _logits(self, hidden_RH: Tensor, *args: Any, **named: Any) -> Tensor | None:
        """Compute logits, and add those of the adapters' heads, each to the rows of its own."""
        logits_RV = self._compute_logits(hidden_RH, *args, **named)
        if logits_RV is None or not self._heads:
            return logits_RV
        slots, numbers = self._punica.sampler_indices.tolist(), self._manager.lora_index_to_id
        own = [None if slot < 0 else numbers[slot] for slot in slots]
        for number in {each for each in own if each in self._heads}:
            if len(own) != len(logits_RV):
                raise RuntimeError(f"{len(logits_RV)} rows of logits, where vLLM samples {len(own)}")
            rows = torch.tensor([i for i, each in enumerate(own) if each == number], device=logits_RV.device)
            a_rH, b_Vr = self._heads[number]
            change = (hidden_RH[rows] @ a_rH.t() @ b_Vr.t()).to(logits_RV.dtype)
            logits_RV[:, : b_Vr.shape[0]].index_add_(0, rows, change)
        return logits_RV


def _tensors(layers: Mapping[str, Pair]) -> dict[str, Tensor]:
    return {f"{name}{part}": tensor for name, pair in layers.items() for part, tensor in zip(_PARTS, pair, strict=True)}


class _BySlot:
    """Products of adapters on a CPU by the rows of each slot: vLLM copies A and B once for each token of a step.

    punica: vLLM's own, two of whose methods are replaced.
    """

    def __init__(self, punica: Any) -> None:
        self._punica, self._note = punica, punica.update_metadata
        self._rows: list[tuple[int, Tensor]] = []
        punica.update_metadata, punica.add_lora_linear = self._noted, self._add

    def _noted(self, *args: Any, **named: Any) -> None:
        self._note(*args, **named)
        slots_T = self._punica.token_lora_indices
        self._rows = [(slot, (slots_T == slot).nonzero()[:, 0]) for slot in slots_T.unique().tolist() if slot >= 0]

    def _add(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Iterable[Tensor],
        lora_b_stacked: Iterable[Tensor],
        scale: float,
        output_slices: Iterable[int],
        **unused: Any,
    ) -> None:
        """Add scale (x A^T) B^T to y, in place: each row with the adapter of its slot, each slice of y with its own."""
        start = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            part = y[:, start : start + width]
            start += width
            for slot, rows in self._rows:
                if len(rows) == len(x):
                    part.addmm_(x @ a[slot, 0].T, b[slot, 0].T, alpha=scale)
                else:
                    part.index_add_(0, rows, x[rows] @ a[slot, 0].T @ b[slot, 0].T, alpha=scale)
