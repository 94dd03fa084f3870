"""What leaves a training engine: full tensors under Hugging Face names, in the form that the receiver takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from verl_like.engine.train_engine import WeightForm
from verl_like.models.checkpoint_names import CheckpointNames
from verl_like.models.heads import HF_PREFIX
from verl_like.models.lora import Adapters
from verl_like.parallel.sharding import Sharding


class WeightExport:
    """The weights of one sharded model (`stream`), and their names and shapes without asking the shards (`names`).

    Shards are cast before they are gathered; tied weights come once. Without adapters there is one form, "merged".
    build_meta: the model as its config says, on the meta device; called once, when names are first needed.
    """

    def __init__(
        self,
        sharding: Sharding,
        adapters: Adapters | None,
        stored: CheckpointNames,
        build_meta: Callable[[], nn.Module],
    ) -> None:
        self._sharding, self._adapters, self._stored = sharding, adapters, stored
        self._build_meta = build_meta
        self._base_names: dict[str, torch.Size] | None = None  # the config does not change, and every sync asks

    def stream(self, dtype: torch.dtype, form: WeightForm) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine.export_weights (collective). Adapters are gathered in float32, and cast at the end."""
        if form == "merged":
            whole = self._full(dtype)
            yield from self._as_stored(whole if self._adapters is None else self._adapters.merged(whole))
            return
        adapters = self._of_adapters(form)
        shapes = adapters.shapes()
        if form == "apart":
            yield from self._as_stored(self._full(dtype, lambda name: name not in shapes))
        for name, tensor in adapters.scaled(self._full(torch.float32, lambda name: name in shapes)):
            yield name, tensor.to(dtype)

    def names(self, form: WeightForm) -> dict[str, torch.Size]:
        """See TrainEngine.weight_names."""
        if form == "adapters":
            return self._of_adapters(form).shapes()
        if self._base_names is None:
            named = ((name.removeprefix(HF_PREFIX), p) for name, p in self._build_meta().named_parameters())
            self._base_names = {name: tensor.shape for name, tensor in self._as_stored(named)}
        return dict(self._base_names) if form == "merged" else self._base_names | self._of_adapters(form).shapes()

    def _as_stored(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            yield from self._stored.views(name, tensor)

    def _of_adapters(self, form: WeightForm) -> Adapters:
        if self._adapters is None:
            raise ValueError(
                f"weights in the form {form!r} need LoRA adapters (model.lora_rank), which this engine has not"
            )
        return self._adapters

    def _full(
        self, dtype: torch.dtype, wanted: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._sharding.full_weights(dtype, lambda name: wanted(name.removeprefix(HF_PREFIX))):
            yield name.removeprefix(HF_PREFIX), tensor
