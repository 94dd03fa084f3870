"""Muon on shards: updates of matrices are orthogonalised whole, everything else takes AdamW's steps.

The average of a matrix's gradient is kept shard by shard. Its update U S V^T is replaced by about U V^T (five
Newton-Schulz steps in bfloat16), for which one rank needs all of it: ranks that share a copy of the model take as many
matrices at a time as they are, each gets the shards of one, computes it, and sends every rank its rows back. Beside its
states a rank so holds a few copies of one matrix in bfloat16. Stacks of experts are sharded by experts, so that each
rank has its matrices whole already, and sends nothing. What offload_policy keeps on the host is brought to the device
matrix by matrix.

Products in bfloat16 enlarge rounding: where gradients differ in float32's last digits, as those of one rank and of two,
weights soon differ by percents of their change. In float64, gradients and products, by less than 1e-10.

The step of an A x B matrix is lr x 0.2 x sqrt(max(A, B)), about as long as AdamW's, so that one learning rate and one
weight decay serve both kinds. Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024);
Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982), section 2.2. One rank takes the steps of
torch.optim.Muon with adjust_lr_fn="match_rms_adamw".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from verl_like.models.lora_experts import DOWN, GATE_UP, stacks_of
from verl_like.parallel.sharding import local_tensor

MOMENTUM = "momentum_buffer"
_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_STEPS, _SMALLEST_NORM = 5, 1e-7
PRECISION = torch.bfloat16  # of Newton-Schulz steps and of what travels


def matrices_of(hf: Any) -> list[nn.Parameter]:
    """List the weights that Muon steps: of linear layers and routers, and stacks of experts [experts, ...].

    Embeddings and heads (of a policy or a value model) are left to AdamW, as are norms, biases, convolutions and the
    states' own matrices of Mamba. What a checkpoint holds apart and the model as one (gate and up of an expert) is one.
    """
    experts, routers = stacks_of(hf)
    found = [part.weight for part in hf.modules() if isinstance(part, nn.Linear)]
    found += [part.weight for part in routers.values()]
    found += [part.get_parameter(name) for part in experts.values() for name in (GATE_UP, DOWN)]
    heads = hf.get_output_embeddings(), dict(hf.named_children()).get("score")
    embeddings = [part for part in hf.modules() if isinstance(part, nn.Embedding)]
    others = {id(p) for part in [*embeddings, *heads] if part is not None for p in part.parameters()}
    return [parameter for parameter in found if id(parameter) not in others]


class Muon(torch.optim.AdamW):
    """Muon for groups with a "momentum", AdamW for those where it is None; see the head of this file.

    Steps are collective: all ranks that share a copy of the model take them, with gradients for the same parameters.
    """

    def init_state(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> None:
        """Fill `state` with the states of a parameter before its first step, all zero."""
        stepped = (group["params"] for group in self.param_groups if group["momentum"] is not None)
        if any(parameter is matrix for matrices in stepped for matrix in matrices):
            state[MOMENTUM] = torch.zeros_like(parameter)
            return
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step with the gradients at hand (collective); `closure` is not supported."""
        assert closure is None
        every = self.param_groups
        for group in every:
            if group["momentum"] is not None:
                matrices = [parameter for parameter in group["params"] if parameter.grad is not None]
                for window in _windows(matrices):
                    self._step_matrices(window, group)
        self.param_groups = [group for group in every if group["momentum"] is None]
        try:
            super().step()
        finally:
            self.param_groups = every

    def _step_matrices(self, matrices: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Step as many matrices as ranks share them, or one stack."""
        updates, momentum = list[Tensor](), group["momentum"]
        for parameter in matrices:
            gradient = local_tensor(parameter.grad)
            state = self.state[parameter]
            if not state:
                self.init_state(parameter, state)
            average = local_tensor(state[MOMENTUM]).lerp_(gradient, 1 - momentum)
            updates.append(gradient.lerp(average, momentum).to(PRECISION))
        if matrices[0].ndim == 3:
            for matrix in updates[0]:
                matrix.copy_(orthogonalised(matrix.to(_device(matrices[0]))))
        else:
            updates = _orthogonalised_shards(matrices, updates)
        for parameter, update in zip(matrices, updates, strict=True):
            longest = 0.2 * max(parameter.shape[-2:]) ** 0.5
            weight = local_tensor(parameter.detach())
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update, alpha=-group["lr"] * longest)


def orthogonalised(matrix: Tensor) -> Tensor:
    """Bring all singular values of a bfloat16 matrix [m, n] near 1; zero stays zero."""
    a, b, c = _COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(_STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


def _windows(matrices: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Cut a group into what is stepped together: one matrix for each rank that shares them; each stack alone."""
    size = 1 if not matrices else _ranks(matrices[0])[1]
    flat = sorted((p for p in matrices if p.ndim == 2), key=lambda p: tuple(p.shape))  # equal work for all ranks
    windows = [flat[start : start + size] for start in range(0, len(flat), size)]
    return windows + [[parameter] for parameter in matrices if parameter.ndim == 3]


def _ranks(parameter: nn.Parameter) -> tuple[dist.ProcessGroup | None, int, int]:
    """Ranks that have the shards of a weight: (group, how many, this one's number). Copies of the model work apart."""
    if not isinstance(parameter, DTensor):
        return None, 1, 0
    mesh = parameter.device_mesh
    return mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)


def _device(parameter: nn.Parameter) -> torch.device:
    """Device on which a weight is computed with, wherever its shard is kept."""
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def _orthogonalised_shards(matrices: list[nn.Parameter], shards: list[Tensor]) -> list[Tensor]:
    """Orthogonalise matrices of which each rank has some rows; matrix i by rank i (collective)."""
    (group, size, rank), device, home = _ranks(matrices[0]), _device(matrices[0]), shards[0].device
    if size == 1:
        return [orthogonalised(shard.to(device)).to(home) for shard in shards]
    sent = [shard.numel() for shard in shards] + [0] * (size - len(shards))
    rows, columns = matrices[rank].shape if rank < len(matrices) else (0, 0)
    received = [Shard.local_shard_size_and_offset(rows, size, other)[0] * columns for other in range(size)]
    mine = torch.cat([shard.flatten() for shard in shards]).to(device)
    whole = _exchanged(mine, sent, received, group)
    if rows:
        whole = orthogonalised(whole.view(rows, columns)).flatten()
    back = _exchanged(whole, received, sent, group).to(home).split(sent[: len(shards)])
    return [part.view_as(shard) for part, shard in zip(back, shards, strict=True)]


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None) -> Tensor:
    out = x.new_empty(sum(received))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out
