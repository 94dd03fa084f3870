"""Routes: the experts that routers choose for each token, noted and replayed.

A replayed router computes everything as ever, and where it would take the k best experts it is given those noted
earlier: their scores are gathered from its live scores of all experts, so that it keeps its gradient whatever formula
follows (softmax before or behind, sigmoid with a bias, groups, norms, scales). So no formula is written here a second
time. Routes not known of a token (all its numbers are the `unknown` of their type) leave it to the live choice.

Letters: T tokens of a model's input, L layers with routers, E experts, k of them for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from verl_like.models.families import num_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ROUTES = "routes"  # output of a pass: of all tokens of its rows, prompts included
NO_ROUTERS = "it is for mixtures of experts whose routers tell their scores; leave it out"


def routers_of(hf: PreTrainedModel, key: str, fix: str) -> tuple[list[nn.Module], int]:
    """Find a model's routers, and the place of the logits in what they return; as transformers tells for its own loss.

    Raises ValueError, naming the key and the fix, for a model without, or with routers that do not also return the
    experts chosen.
    """
    recorder = next(
        (found["router_logits"] for part in hf.modules() if "router_logits" in (found := _recorded(part))), None
    )
    kind = None if recorder is None else recorder.target_class
    if recorder is None or kind is None or kind is nn.Linear:
        name = hf.config.model_type
        why = f"the routers of model type {name!r} do not tell their scores"
        raise ValueError(f"{key}: {why if num_experts(hf.config) else f'model type {name!r} has no routers'}: {fix}")
    return [part for part in hf.modules() if isinstance(part, kind)], recorder.index


def _recorded(part: nn.Module) -> dict[str, Any]:
    return getattr(part, "_can_record_outputs", None) or {}


def route_type(config: PretrainedConfig) -> torch.dtype:
    """Choose the smallest integer type that holds the numbers of a model's experts, and one more for `unknown`."""
    return torch.uint8 if num_experts(config) <= unknown(torch.uint8) else torch.int16


def unknown(dtype: torch.dtype | np.dtype[Any]) -> int:
    """Number of the expert of a token whose routes nobody noted: the largest of the type."""
    return int(torch.iinfo(dtype).max if isinstance(dtype, torch.dtype) else np.iinfo(dtype).max)


def continued(earlier: NDArray[Any] | None, later: NDArray[Any] | None) -> NDArray[Any] | None:
    """Join routes [n, L, k] of two passes over the same tokens, from the first on: the earlier ones count.

    They are those of the pass from which the next token was drawn; another pass may have had other weights. Where they
    are unknown, the later ones stand in.
    """
    if earlier is None or later is None or not len(earlier):
        return later if earlier is None or not len(earlier) else earlier
    both = min(len(earlier), len(later))
    lacks = earlier[:both] == unknown(earlier.dtype)
    head = np.where(lacks, later[:both], earlier[:both]) if lacks.any() else earlier[:both]
    return np.concatenate([head, (earlier if len(earlier) > both else later)[both:]])


def filled(routes: NDArray[Any] | None, length: int, like: NDArray[Any]) -> NDArray[Any]:
    """Bring routes to `length` tokens: those that are lacking are unknown. like: other routes of the model."""
    whole = np.full((length, *like.shape[1:]), unknown(like.dtype), like.dtype)
    if routes is not None:
        whole[: len(routes)] = routes[:length]
    return whole


class Routers:
    """Routers of one model, whose choices can be noted and replaced.

    replaces: False only compares what is to be replayed with what they choose.

    Raises ValueError as `routers_of`.
    """

    def __init__(self, hf: PreTrainedModel, key: str, *, replaces: bool = True) -> None:
        routers, _ = routers_of(hf, key, NO_ROUTERS)
        self.dtype, self._replaces, self._num_experts = route_type(hf.config), replaces, num_experts(hf.config)
        self._replayed: Tensor | None = None
        self._noted: list[Tensor] | None = None  # by layer: experts [T, k]
        self._counts = torch.zeros(2, dtype=torch.int64)  # choices that differ, and all that were compared
        for layer, router in enumerate(routers):
            router.forward = partial(self._forward, layer, router.forward)

    def replay(self, routes_TLk: Tensor | None) -> None:
        """Replay these routes in the passes that follow, recomputed ones included; None: none."""
        self._replayed = routes_TLk

    @contextmanager
    def noting(self) -> Iterator[list[Tensor]]:
        """Note the choices of the pass inside, layer by layer: experts [T, k]."""
        noted = self._noted = []
        try:
            yield noted
        finally:
            self._noted = None

    def differing(self) -> tuple[int, int]:
        """Count the choices of tokens and layers that were other experts than those replayed, and all; from 0 again.

        Counted are passes with a gradient, once: those of updates.
        """
        differing, compared = self._counts.tolist()
        self._counts.zero_()
        return differing, compared

    def _forward(self, layer: int, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        with _Chooser(partial(self._choose, layer), self._num_experts):
            return forward(*inputs, **named)

    def _choose(self, layer: int, scores_TE: Tensor, best: Any) -> Any:
        """Put the replayed experts in place of the best ones. best: (scores, experts) as torch.topk returns them."""
        live_Tk = best[1]
        if self._noted is not None:
            self._noted.append(live_Tk.detach())
        if self._replayed is None:
            return best
        if len(self._replayed) != len(live_Tk):
            raise ValueError(f"routes of {len(self._replayed)} tokens cannot be replayed on {len(live_Tk)}")
        routes_Tk = self._replayed[:, layer]
        unknown_Tk, chosen_Tk = routes_Tk == unknown(routes_Tk.dtype), routes_Tk.to(live_Tk.dtype)
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # not recomputed in a backward pass
            self._compare(live_Tk, chosen_Tk, unknown_Tk[:, 0])
        if not self._replaces:
            return best
        chosen_Tk = torch.where(unknown_Tk, live_Tk, chosen_Tk)
        return torch.return_types.topk((scores_TE.gather(1, chosen_Tk), chosen_Tk))

    @torch.no_grad()
    def _compare(self, live_Tk: Tensor, chosen_Tk: Tensor, unknown_T: Tensor) -> None:
        differs_T = (live_Tk.sort(-1).values != chosen_Tk.sort(-1).values).any(-1) & ~unknown_T
        self._counts = self._counts.to(live_Tk.device) + torch.stack([differs_T.sum(), (~unknown_T).sum()])


class _Chooser(TorchFunctionMode):
    """Hands the choice of the k best of all experts, made inside, to `choose`; not that of groups of experts."""

    def __init__(self, choose: Callable[[Tensor, Any], Any], num_experts: int) -> None:
        self._choose, self._num_experts = choose, num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk" or args[0].ndim != 2 or args[0].shape[-1] != self._num_experts:
            return found
        return self._choose(args[0], found)
