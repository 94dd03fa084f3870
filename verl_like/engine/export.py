"""Export of weights from a training engine: full tensors under Hugging Face names, in the form for the receiver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from verl_like.engine.train_engine import WeightForm
from verl_like.models.checkpoint_names import CheckpointNames, sent_as
from verl_like.models.heads import HF_PREFIX
from verl_like.models.lora import Adapters
from verl_like.models.lora_experts import base_name
from verl_like.parallel.checksum import Slice, as_matrix, checksum, checksum_of, values_of
from verl_like.parallel.fsdp import Sharding
from verl_like.parallel.sharding import saved_buffers


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
        self._rows: dict[str, list[tuple[str, int, int]]] = {}  # parameter: (stored name, first row, rows)
        self._base_names: dict[str, torch.Size] | None = None  # the config does not change, and every sync asks

    def stream(self, dtype: torch.dtype, form: WeightForm) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) in a form; see FSDPEngine.export_weights (collective).

        Adapters are gathered in float32, and cast at the end.
        """
        if form == "merged" and self._adapters is None:
            yield from self._in_parts(dtype)
            return
        if form == "merged":
            yield from self._as_stored(self._of_adapters(form).merged(self._full(dtype)))
            return
        adapters = self._of_adapters(form)
        shapes = adapters.shapes()
        if form == "apart":
            yield from self._as_stored(self._full(dtype, lambda name: name not in shapes))
        for name, tensor in adapters.scaled(self._full(torch.float32, lambda name: name in shapes)):
            yield name, tensor.to(dtype)

    def names(self, form: WeightForm) -> dict[str, torch.Size]:
        """Names and shapes of the tensors that `stream` must yield; see FSDPEngine.weight_names."""
        if form == "adapters":
            return self._of_adapters(form).shapes()
        if self._base_names is None:
            whole = self._build_meta()
            named = ((n.removeprefix(HF_PREFIX), t) for n, t in (*whole.named_parameters(), *saved_buffers(whole)))
            self._base_names = {name: tensor.shape for name, tensor in self._as_stored(named)}
        return dict(self._base_names) if form == "merged" else self._base_names | self._of_adapters(form).shapes()

    def checksums(self, dtype: torch.dtype, form: WeightForm) -> dict[str, int]:
        """Compute the checksums of the tensors that `stream` must yield; see FSDPEngine.weight_checksums (collective).

        Nothing here comes from `stream`: each rank casts and adds up its own shards, at places told by the sharding's
        layout.

        A merged adapter is the exception, since a sum of B A over a slice may differ in its last bit: the three
        matrices are checked against their shards when gathered here, and merged once more.
        """
        shapes = {} if self._adapters is None else self._adapters.shapes()
        scaled = shapes if form != "merged" else {}
        sums: dict[str, list[Tensor]] = {}
        for parameter, shape, part in self._sharding.local_slices():
            name = parameter.removeprefix(HF_PREFIX)
            if form == "adapters" and name not in shapes:
                continue
            if name in scaled:
                ((_, values),) = self._of_adapters(form).scaled([(name, part.values.float())])
            else:
                values = part.values
            cast = replace(part, values=values.to(sent_as(name, dtype)))
            for stored, piece in [(name, cast)] if name in shapes else self._cut(name, shape, cast):
                sums.setdefault(stored, []).append(checksum_of(piece))
        names = [*self.names(form), *(shapes if form == "merged" else {})]
        found = dict(zip(names, self._summed([sums.get(name, []) for name in names]), strict=True))
        return found if form != "merged" or self._adapters is None else self._merged(dtype, found)

    def _summed(self, parts: list[list[Tensor]]) -> list[int]:
        """Add up each list of checksums over all shards: one number for each list."""
        device = next((p.device for some in parts for p in some), torch.device("cpu"))
        zero = torch.zeros((), dtype=torch.int64, device=device)
        totals = torch.stack([torch.stack([zero, *some]).sum() for some in parts])
        return self._sharding.sum_over_shards(totals).tolist()

    def _merged(self, dtype: torch.dtype, found: dict[str, int]) -> dict[str, int]:
        """Return `found` with the checksums of adapted weights in place of those of base weights and adapters."""
        adapters = self._of_adapters("merged")
        adapted, shapes = {base_name(name) for name in adapters.names}, adapters.shapes()
        gathered: dict[str, Tensor] = {}

        def watched() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._full(dtype, lambda name: name in adapted or name in shapes):
                for stored, part in [(name, tensor)] if name in shapes else self._stored.views(name, tensor):
                    gathered[stored] = checksum(part)
                yield name, tensor

        merged = {name: checksum(tensor) for name, tensor in self._as_stored(adapters.merged(watched()))}
        wrong = [n for n, total in zip(gathered, values_of(list(gathered.values())), strict=True) if total != found[n]]
        if wrong:
            raise RuntimeError(f"{len(wrong)} tensors to be merged differ from the trainer's shards: {wrong[:8]}")
        sums = dict(zip(merged, values_of(list(merged.values())), strict=True))
        return {name: sums.get(name, total) for name, total in found.items() if name not in shapes}

    def _cut(self, name: str, shape: torch.Size, part: Slice) -> Iterator[tuple[str, Slice]]:
        """Cut a slice of a parameter into slices of the tensors stored of it, each a range of the parameter's rows."""
        if name not in self._rows:
            whole = torch.empty(shape, device="meta")
            views = [(stored, as_matrix(view)) for stored, view in self._stored.views(name, whole)]
            self._rows[name] = [(n, v.storage_offset() // v.shape[1], v.shape[0]) for n, v in views if v.numel()]
        if self._stored.is_turned(name):
            yield from ((self._rows[name][0][0], piece) for piece in _turned(shape, part))
            return
        for stored, first, count in self._rows[name]:
            start, end = max(part.row, first), min(part.row + part.values.shape[0], first + count)
            if start < end:
                yield stored, Slice(part.values[start - part.row : end - part.row], start - first, part.column)

    def _in_parts(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield what `_as_stored` does of all weights; spread experts by owner, where each is stored by itself."""

        def by_expert(name: str) -> bool:
            return self._stored.is_by_expert(name.removeprefix(HF_PREFIX))

        for name, first, tensor in self._sharding.weights_in_parts(dtype, lambda _: True, by_expert):
            yield from self._stored.views(name.removeprefix(HF_PREFIX), tensor, first)
            del tensor  # before the next is gathered

    def _as_stored(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            yield from self._stored.views(name, tensor)
            del tensor  # before the next is gathered

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
            del tensor


def _turned(shape: torch.Size, part: Slice) -> Iterator[Slice]:
    """Cut a slice of a stack [experts, n, m] into slices of [experts, m, n], one of each expert that it touches."""
    _, height, width = shape
    end = part.row + part.values.shape[0]
    for expert in range(part.row // height, -(-end // height)):
        first, last = max(part.row, expert * height), min(end, (expert + 1) * height)
        turned = part.values[first - part.row : last - part.row].T
        yield Slice(turned, expert * width + part.column, first - expert * height)
