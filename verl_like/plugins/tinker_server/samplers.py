"""Engines that sample, each row with the adapter of its own request: transformers, or vLLM."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from verl_like.config.serve import ServeConfig
from verl_like.plugins.tinker_server.adapters import Adapter, Places
from verl_like.plugins.vllm.adapters import AdaptersEngine
from verl_like.plugins.vllm.engine import VLLMRolloutEngine
from verl_like.rollout.base import EngineSpec
from verl_like.rollout.hf import HFRolloutEngine
from verl_like.rollout.hf_batch import Batch
from verl_like.rollout.rows import Row

MOST_SNAPSHOTS = 32  # adapters of sampling clients that stay in memory; others are read again
_SLOTS = 8  # adapters in one step of vLLM, each as large as the largest that a client may ask for
Adapters = Mapping[Path | None, Adapter | None]  # by the folder that they were read from; None: the base
Owners = Mapping[str, Path | None]  # of requests


class HFSampler(HFRolloutEngine):
    """Sampling engine of transformers, which says of each row of a step which adapter is its own."""

    unadapted = frozenset[str]()

    def __init__(self, spec: EngineSpec, *_: object) -> None:
        super().__init__(spec)
        self._adapted = Places(self._module, head=True)
        self._owners: Mapping[str, int] = MappingProxyType({})  # by request, where several adapters act

    @contextmanager
    def adapted(self, adapters: Adapters, owners: Owners) -> Iterator[None]:
        """Let these adapters act inside, each on the rows of its own requests."""
        numbers = {folder: i for i, folder in enumerate(adapters)}
        several = len(adapters) > 1
        self._owners = {request: numbers[folder] for request, folder in owners.items()} if several else {}
        with self._adapted.active(list(adapters.values())):
            yield

    def _forward(self, ids_bs: Tensor, positions_bs: Tensor, batch: Batch, *further: Any) -> Tensor:
        if self._owners:
            owners_b = torch.tensor([self._owners[row.request.request_id] for row in batch.rows])
            self._adapted.arrange(owners_b, self._device)
        return super()._forward(ids_bs, positions_bs, batch, *further)

    def _known(self, row: Row) -> Hashable:
        return super()._known(row), self._owners.get(row.request.request_id)


class VLLMSampler(AdaptersEngine):
    """Sampling engine of vLLM, which computes what is in no cache of another request's in exact isolation."""

    def __init__(self, spec: EngineSpec, serving: ServeConfig, trained: Places) -> None:
        heads = {*trained.kinds["train_unembed"]}
        layers = {name: (inner, out) for name, (out, inner) in trained.sizes.items() if name not in heads}
        self.isolated = serving.isolation == "exact"
        rank = ("serve.max_lora_rank={}", serving.max_lora_rank)
        super().__init__(spec, max_rank=rank, slots=1 if self.isolated else _SLOTS, layers=layers)
        self._heads_of = heads

    @contextmanager
    def adapted(self, adapters: Adapters, owners: Owners) -> Iterator[None]:
        """Let these adapters act inside, each on the rows of its own requests."""
        for folder, adapter in adapters.items():
            if adapter is not None:
                pairs = {name: (a, b * adapter.scale) for name, (a, b) in adapter.pairs.items()}
                head = next((pairs.pop(name) for name in self._heads_of & pairs.keys()), None)
                self.hold(str(folder), pairs, head)
        self.adapter_of = {request: str(folder) for request, folder in owners.items() if folder is not None}
        if self.isolated:
            self.forget_prefixes()
        try:
            yield
        finally:
            self.adapter_of = {}
            self.keep(MOST_SNAPSHOTS)


def _name(engine: type) -> str:
    return f"{engine.__module__}:{engine.__qualname__}"


SAMPLERS: dict[str | None, type[HFSampler | VLLMSampler]] = {
    _name(HFRolloutEngine): HFSampler,
    _name(VLLMRolloutEngine): VLLMSampler,
}  # by EngineKind.code
