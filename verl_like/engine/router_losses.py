"""Losses of routers beside the objective: load balance and z, whatever way a mini-batch is cut.

transformers' own balance loss is a product of two means over the tokens of one forward pass: it would be another loss
for every cut. Here the fraction of tokens that an expert gets is a constant, counted over the mini-batch and all ranks
in a pass of its own before the first backward; what has a gradient is then a sum over tokens. Or both means are those
of each sequence, as in DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20). A loss is the sum over layers.

Letters: T packed tokens, E experts, k of them for each token, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl_like.batch import Metric
from verl_like.config.actor import BalanceForm, RouterConfig
from verl_like.models.checkpoint_names import is_router_bias
from verl_like.models.packing import Segments
from verl_like.models.routes import NO_ROUTERS, routers_of
from verl_like.parallel.experts import count_each

_LOSSES = "actor.router", "set balance_loss_coef=0 and z_loss_coef=0"


class RouterLosses:
    """Losses of one model's routers, whose scores are noted by hooks while `noted` is open.

    hf: the model. router: actor.router. device: where its passes run.

    Raises ValueError, naming the keys, for a model whose routers' scores are not known.
    """

    def __init__(self, hf: PreTrainedModel, router: RouterConfig, device: torch.device) -> None:
        self._router, self._device = router, device
        self._noted: list[tuple[Tensor, Tensor]] = []  # of each layer: logits [T, E], chosen experts [T, k]
        self._noting = False
        modules, index = routers_of(hf, *_LOSSES)
        self._sigmoid = any(is_router_bias(name) for name, _ in hf.named_buffers())
        for module in modules:
            module.register_forward_hook(self._hook(index))
        self._fraction_LE: Tensor | None = None
        self._num_tokens = self._num_sequences = 1.0

    @property
    def needs_fractions(self) -> bool:
        """True where a pass over the mini-batch must come first: for `count`."""
        return self._router.balance_loss_coef > 0 and self._router.balance_loss_form == BalanceForm.batch

    def _hook(self, index: int) -> Any:
        def note(module: nn.Module, _: Any, output: tuple[Tensor, ...]) -> None:
            if self._noting and torch._C._current_graph_task_id() == -1:  # not recomputed in a backward pass
                self._noted.append((output[index], next(t for t in output if not t.is_floating_point())))

        return note

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the scores of the forward pass inside."""
        self._noted, self._noting = [], True
        try:
            yield
        finally:
            self._noting = False

    def begin(self, length_B: Tensor, counts_LE: list[Tensor]) -> None:
        """Add up what losses are divided by, over all ranks (collective).

        length_B: tokens of this rank's sequences. counts_LE: of each micro-batch, tokens by layer and expert (`count`).
        """
        sizes = torch.tensor([float(length_B.sum()), len(length_B)], dtype=torch.float64, device=self._device)
        dist.all_reduce(sizes)
        self._num_tokens, self._num_sequences = sizes.tolist()
        if self.needs_fractions:
            total_LE = torch.stack(counts_LE).sum(0)
            dist.all_reduce(total_LE)
            self._fraction_LE = total_LE / self._num_tokens

    def count(self) -> Tensor:
        """Count the tokens of each expert in the pass that was noted last: float64 [L, E]."""
        return torch.stack([_counts(logits, chosen, None).squeeze(0) for logits, chosen in self._noted])

    def of(self, segments: Segments) -> tuple[Tensor, dict[str, Metric]]:
        """Compute this micro-batch's part of the losses from the pass that was noted last, and their metrics."""
        balance, z = [], []
        for layer, (logits, chosen) in enumerate(self._noted):
            logits = logits.float()
            if self._router.balance_loss_coef > 0:
                balance.append(self._balance(layer, logits, chosen, segments))
            if self._router.z_loss_coef > 0:
                z.append(logits.logsumexp(-1).square().sum() / self._num_tokens)
        self._noted = []
        loss, metrics = torch.zeros((), device=self._device), {}
        for name, parts, weight in (
            ("router_balance_loss", balance, self._router.balance_loss_coef),
            ("router_z_loss", z, self._router.z_loss_coef),
        ):
            if parts:
                total = torch.stack(parts).sum()
                loss = loss + weight * total
                metrics[name] = Metric(value=float(total.detach()) / len(parts), reduction="sum")
        return loss, metrics

    def _balance(self, layer: int, logits: Tensor, chosen: Tensor, segments: Segments) -> Tensor:
        """1 where all experts get as much, E / k where k of them get all."""
        scores = logits.sigmoid() if self._sigmoid else logits.softmax(-1)
        share_TE = scores / scores.sum(-1, keepdim=True) if self._sigmoid else scores
        factor = logits.shape[-1] / chosen.shape[-1]
        if self._fraction_LE is not None:
            return factor * (share_TE.sum(0) * self._fraction_LE[layer].to(share_TE.dtype)).sum() / self._num_tokens
        length_S1 = torch.tensor(segments.lengths, device=logits.device)[:, None]
        sequence_T = torch.arange(len(segments.lengths), device=logits.device).repeat_interleave(length_S1[:, 0])
        fraction_SE = _counts(logits, chosen, sequence_T).to(share_TE.dtype) / length_S1
        mean_SE = share_TE.new_zeros(fraction_SE.shape).index_add(0, sequence_T, share_TE) / length_S1
        return factor * (fraction_SE * mean_SE).sum() / self._num_sequences


def _counts(logits: Tensor, chosen: Tensor, sequence_T: Tensor | None) -> Tensor:
    """Count the tokens of each expert, in each sequence or (None) in all of them: float64 [S or 1, E]."""
    experts = logits.shape[-1]
    first_T1 = torch.zeros_like(chosen[:, :1]) if sequence_T is None else sequence_T[:, None] * experts
    rows = 1 if sequence_T is None else int(sequence_T[-1]) + 1
    return count_each((first_T1 + chosen).flatten(), rows * experts).double().view(rows, experts)


def check_router(hf: PreTrainedModel, router: RouterConfig, routes_key: str = "") -> None:
    """Check that this model's routers can do what actor.router asks for; raises ValueError otherwise.

    routes_key: key for which their choices are replayed or compared, if there is one.
    """
    if routes_key:
        routers_of(hf, routes_key, NO_ROUTERS)
    if router.has_losses:
        routers_of(hf, *_LOSSES)
    if router.bias_update_rate > 0 and not any(is_router_bias(name) for name, _ in hf.named_buffers()):
        raise ValueError(
            f"actor.router.bias_update_rate={router.bias_update_rate}: no router of model type "
            f"{hf.config.model_type!r} has a bias: set it to 0"
        )
