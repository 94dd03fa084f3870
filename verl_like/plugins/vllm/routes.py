"""Routes of vLLM's routers by request: captured on a CPU, where vLLM returns none; elsewhere those that vLLM returns.

On a CPU the choices of a step's tokens are noted layer by layer, and sorted by request and place behind the step. A
prompt that begins in the cache was not computed for this request: its routes are kept by slot of the cache, where
whoever filled the slot left them. Source: vLLM 0.32, routed_experts_capturer.py, BlockTable, GPUModelRunner.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from verl_like.models.routes import unknown
from verl_like.plugins.vllm.versions import is_second_runner

OPTION = "enable_return_routed_experts"


class Captured:
    """Routes of requests that run on a CPU.

    llm: vLLM's engine, whose steps are watched. model: its model, whose routers are bound. dtype: of routes.

    Raises ValueError for a runner or routers that cannot be watched.
    """

    def __init__(self, llm: Any, model: nn.Module, dtype: torch.dtype) -> None:
        from vllm.model_executor.layers.fused_moe import routed_experts_capturer

        runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
        if is_second_runner(runner):
            raise ValueError(
                "rollout.enable_rollout_routing_replay=True: on a CPU routes are captured from vLLM's first model "
                "runner; unset VLLM_USE_V2_MODEL_RUNNER"
            )
        bind: Any = getattr(routed_experts_capturer, "bind_routed_experts_capturer", None)  # asked for at the start
        bind(model, self)
        self._runner, self._dtype, self._fill = runner, dtype, unknown(dtype)
        self._step: dict[int, Tensor] = {}  # experts [tokens, k] of each layer
        self._known: dict[str, list[NDArray[Any]]] = {}  # of each request, from its first token on
        self._of_slots: NDArray[Any] | None = None
        self._execute, runner.execute_model = runner.execute_model, self._executed

    def capture(self, layer: int, experts_Tk: Tensor) -> None:
        """Note the choices of one layer; vLLM's routers call it."""
        self._step[layer] = experts_Tk.to(self._dtype)

    def begin(self, name: str) -> None:
        """Note the routes of a request from now on. name: vLLM's own."""
        self._known[name] = []

    def take(self, name: str, output: Any) -> NDArray[Any] | None:
        """Return the routes of a request that ends: all tokens that were computed. output: vLLM's, if it has one."""
        parts = self._known.pop(name)
        return np.concatenate(parts) if parts else None

    def _executed(self, scheduled: Any, *arguments: Any, **named: Any) -> Any:
        self._step.clear()
        result = self._execute(scheduled, *arguments, **named)
        if self._step:
            self._sort(scheduled.num_scheduled_tokens)
        return result

    def _sort(self, counts: dict[str, int]) -> None:
        """Give the step's routes to its requests, which stand in the order of the runner's batch.

        All slots are filled first: a request may begin in blocks that one behind it in the batch fills in this step.
        """
        rows_TLk = torch.stack([self._step[layer] for layer in sorted(self._step)], 1).numpy()
        batch, begin, taken = self._runner.input_batch, 0, list[tuple[str, NDArray[Any], NDArray[np.int64], int]]()
        for index, name in enumerate(batch.req_ids):
            rows = rows_TLk[begin : begin + counts.get(name, 0)]
            begin, first = begin + len(rows), int(batch.num_computed_tokens_cpu[index])
            slots = self._slots(batch.block_table[0], index, first + len(rows))
            self._store(int(slots.max(initial=0)) + 1, rows)[slots[first:]] = rows
            taken.append((name, rows, slots, first))
        for name, rows, slots, first in taken:
            if (parts := self._known.get(name)) is not None:
                known, store = sum(map(len, parts)), self._store(0, rows)
                cached = np.where(slots[known:first, None, None] > 0, store[slots[known:first]], self._fill)
                parts += [cached.astype(rows.dtype), rows[max(0, known - first) :]]

    def _slots(self, table: Any, index: int, count: int) -> NDArray[np.int64]:
        """Slots of the cache where a request's first `count` tokens are; 0 for those in no block any more."""
        places = np.arange(count)
        blocks = table.block_table.np[index][places // table.block_size].astype(np.int64)
        return np.where(blocks > 0, blocks * table.block_size + places % table.block_size, 0)

    def _store(self, count: int, like: NDArray[Any]) -> NDArray[Any]:
        """Make room for so many slots: a hundredth or less of what the cache itself takes."""
        held = 0 if self._of_slots is None else len(self._of_slots)
        if held < count:
            more = np.full((max(count, 2 * held) - held, *like.shape[1:]), self._fill, like.dtype)
            self._of_slots = more if self._of_slots is None else np.concatenate([self._of_slots, more])
        assert self._of_slots is not None
        return self._of_slots


class Returned:
    """Routes as vLLM returns them with a request that ends, of all layers, dense ones included.

    model: vLLM's, which tells the layers with routers. dtype: of routes.
    """

    def __init__(self, llm: Any, model: nn.Module, dtype: torch.dtype) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        runners: list[Any] = [part for part in model.modules() if isinstance(part, MoERunner)]
        self._layers, self._dtype = sorted({part.layer_id for part in runners}), dtype

    def begin(self, name: str) -> None:
        """Do nothing: vLLM notes them."""

    def take(self, name: str, output: Any) -> NDArray[Any] | None:
        """Take a request's routes out of vLLM's output; None of one that was dropped, of which there is none."""
        routes = None if output is None else output.outputs[0].routed_experts
        return None if routes is None else torch.from_numpy(routes[:, self._layers]).to(self._dtype).numpy()
