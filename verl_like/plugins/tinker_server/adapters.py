"""Adapters of one tenant's model, and the places where they act: every request brings its own to the same base.

An adapter is a pair of matrices for each adapted linear layer, y + (alpha / rank) B A x. It acts by a hook behind the
layer, so that models of any rank and any targets share one base, and none is copied to change tenants. The output head
is no layer in a training pass (models/heads.py): there its pair goes to `PolicyModel.low_rank`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from verl_like.models.adapter_config import CONFIG, WEIGHTS
from verl_like.models.lora import peft_name
from verl_like.models.lora_experts import stacks_of
from verl_like.plugins.tinker_server.bodies import AdapterSpec

OPTIMIZER, SPEC = "optimizer.safetensors", "spec.json"  # beside the two files of the peft library
_MLP = frozenset(
    {"mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "shared_expert", "shared_experts", "shared_mlp"}
    | {"mlp_block", "fc1", "fc2"}  # of recurrent_gemma; of families whose MLP has no module of its own (OPT)
)
_MOMENTS = ("exp_avg", "exp_avg_sq")  # of torch's AdamW
Runs = list[tuple[int, int, int]]  # number of an adapter, first row and the row behind the last
_UNCALLED = "dt_proj"  # of Mamba: its mixer multiplies by the matrix itself


class Places:
    """The linear layers of a base model by kind of target, with their sizes (out, in).

    Hooks behind them add whatever adapters are `active`. hf: the model, which keeps its layers as they are. head: False
    where the output head is not called as a layer.
    """

    def __init__(self, hf: PreTrainedModel, *, head: bool) -> None:
        self._active: Sequence[Adapter | None] = ()
        self._place_R = self._row_S = torch.zeros(0, dtype=torch.int64)  # slots: as many of each adapter
        self._in_place = False  # rows are those of the slots
        self._runs: Runs = []
        self._samples = head
        self._joined: dict[str, tuple[Tensor, Tensor]] = {}
        self._is_moe = bool(stacks_of(hf)[0])
        output = hf.get_output_embeddings()
        tower = {part for name, part in hf.named_modules() if "visual" in name.split(".") or "vision" in name}
        self.kinds: dict[str, list[str]] = {"train_attn": [], "train_mlp": [], "train_unembed": []}
        self.sizes: dict[str, tuple[int, int]] = {}
        for name, layer in hf.named_modules():
            if not isinstance(layer, nn.Linear) or layer in tower or name.endswith(_UNCALLED):
                continue
            kind = "train_mlp" if _MLP & {*name.split(".")} else "train_attn"
            self.kinds["train_unembed" if layer is output else kind].append(name)
            self.sizes[name] = (layer.out_features, layer.in_features)
            if layer is not output or head:
                layer.register_forward_hook(self._hook(name))

    def targets(self, spec: AdapterSpec) -> list[str]:
        """Names of the layers that get adapters. Raises ValueError for what this model cannot have."""
        wanted = [kind for kind in self.kinds if getattr(spec, kind)]
        if spec.train_mlp and self._is_moe:
            raise ValueError(
                "train_mlp=True: the experts of this model are stacks, which get no adapters here; create the model "
                "with train_mlp=False"
            )
        for kind in wanted:
            if not self.kinds[kind]:
                raise ValueError(f"{kind}=True: this model has no such linear layer; create it with {kind}=False")
        names = [name for kind in wanted for name in self.kinds[kind]]
        if not names:
            raise ValueError("train_attn, train_mlp and train_unembed are all False: nothing would be trained")
        largest = max(min(self.sizes[name]) for name in names)
        if not 1 <= spec.rank <= largest:
            raise ValueError(f"rank={spec.rank}: layers of this model have ranks from 1 to {largest}")
        return names

    @contextmanager
    def active(self, adapters: Sequence[Adapter | None]) -> Iterator[None]:
        """Add these adapters inside, each to its own rows (`arrange`) where they are several; None: the base model."""
        self._active = adapters
        try:
            yield
        finally:
            self._active, self._joined = (), {}

    def arrange(self, owner_R: Tensor, device: torch.device) -> None:
        """Say of each row of the next inputs whose it is of the active adapters, int64. Few, long runs are fast.

        Rows are the flattened tokens of a packed input, or the sequences of a padded one.
        """
        counts_O = torch.bincount(owner_R, minlength=len(self._active))
        order_R = torch.argsort(owner_R, stable=True)
        sorted_R, number_R = owner_R[order_R], torch.arange(len(owner_R))
        slot_R = sorted_R * int(counts_O.max()) + number_R - (counts_O.cumsum(0) - counts_O)[sorted_R]
        slots = torch.zeros(len(counts_O) * int(counts_O.max()), dtype=torch.int64)
        self._place_R = torch.empty_like(order_R).index_copy(0, order_R, slot_R).to(device)
        self._row_S = slots.index_copy(0, slot_R, order_R).to(device)
        self._in_place = len(slots) == len(owner_R) and bool((order_R == number_R).all())
        owners, counts = torch.unique_consecutive(owner_R, return_counts=True)
        ends = counts.cumsum(0)
        self._runs = [*zip(owners.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)]

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
        def add(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
            if not any(adapter is not None and name in adapter.pairs for adapter in self._active):
                return None
            if len(self._active) == 1:
                return output + _change(self._active[0], name, inputs[0], output)
            rows = inputs[0].reshape(-1, inputs[0].shape[-1])
            length = len(rows) // len(self._place_R)
            if self._samples and length == 1:  # little to compute: few calls count
                return output + self._joint_change(name, rows).view_as(output)
            found = {i: each for i, each in enumerate(self._active) if each is not None and name in each.pairs}
            number = {i: place for place, i in enumerate(found)}
            runs = [(number[i], start * length, end * length) for i, start, end in self._runs if i in found]
            scales = [each.scale for each in found.values()]
            pairs = [part for each in found.values() for part in each.pairs[name]]
            return _Changed.apply(output, inputs[0], runs, scales, *pairs)

        return add

    def _joint_change(self, name: str, rows: Tensor) -> Tensor:
        """Multiply the rows of each adapter by its matrices, all in two batched products."""
        if name not in self._joined:
            self._joined[name] = _stacked(self._active, name, rows.dtype)
        a_OIr, b_Orv = self._joined[name]
        own = rows if self._in_place else rows.index_select(0, self._row_S)
        changes = (own.view(len(a_OIr), -1, rows.shape[-1]) @ a_OIr @ b_Orv).flatten(0, 1)
        return changes if self._in_place else changes.index_select(0, self._place_R)


def _stacked(adapters: Sequence[Adapter | None], name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Stack the pairs of a layer, [adapter, in, r] and [adapter, r, out], zero behind an adapter's own rank."""
    a_rI, b_Or = next(each.pairs[name] for each in adapters if each is not None and name in each.pairs)
    none = a_rI[:0], b_Or.t()[:0]
    pairs = [
        none if each is None or name not in each.pairs else (each.pairs[name][0], each.pairs[name][1].t() * each.scale)
        for each in adapters
    ]
    a_OrI, b_Orv = (pad_sequence(parts, batch_first=True).to(dtype) for parts in zip(*pairs, strict=True))
    return a_OrI.mT.contiguous(), b_Orv


class _Changed(torch.autograd.Function):
    """Output of a layer with the changes of several adapters, each on runs of rows of its own.

    Products read and write the runs where they are: plain operations would copy each of them several times.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, output: Tensor, inputs: Tensor, runs: Runs, scales: list[float], *pairs: Tensor
    ) -> Tensor:
        rows, changed = inputs.reshape(-1, inputs.shape[-1]), output.clone(memory_format=torch.contiguous_format)
        parts, lows = changed.view(-1, output.shape[-1]), list[Tensor]()
        for i, start, end in runs:
            a_rI, b_Or = (part.to(rows.dtype) for part in pairs[2 * i : 2 * i + 2])
            lows.append(rows[start:end] @ a_rI.t())
            parts[start:end] += (lows[-1] @ b_Or.t()).mul_(scales[i])  # rounded as by _change
        ctx.runs, ctx.scales = runs, scales
        ctx.save_for_backward(inputs, *pairs, *lows)
        return changed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, *rest = ctx.saved_tensors
        pairs, lows = rest[: 2 * len(ctx.scales)], rest[2 * len(ctx.scales) :]
        rows, parts = inputs.reshape(-1, inputs.shape[-1]), grad.reshape(-1, grad.shape[-1])
        grads: list[Tensor | None] = [None] * len(pairs)
        grad_RI = torch.zeros_like(rows) if ctx.needs_input_grad[1] else None
        for (i, start, end), low in zip(ctx.runs, lows, strict=True):
            a_rI, b_Or = (part.to(rows.dtype) for part in pairs[2 * i : 2 * i + 2])
            grad_low = parts[start:end] @ b_Or * ctx.scales[i]
            new = grad_low.t() @ rows[start:end], parts[start:end].t() @ (low * ctx.scales[i])
            for place, part in zip((2 * i, 2 * i + 1), new, strict=True):
                old = grads[place]
                grads[place] = part if old is None else old.add_(part)
            if grad_RI is not None:
                torch.mm(grad_low, a_rI, out=grad_RI[start:end])
        return grad, None if grad_RI is None else grad_RI.view_as(inputs), None, None, *grads


def _change(adapter: Adapter | None, name: str, inputs: Tensor, output: Tensor) -> Tensor:
    """Compute what an adapter adds to the output of a layer; numbers of other rows have no part in it, not even NaN."""
    if adapter is None or name not in adapter.pairs:
        return output.new_zeros(*inputs.shape[:-1], output.shape[-1])
    a_rI, b_Or = (part.to(inputs.dtype) for part in adapter.pairs[name])
    return functional.linear(functional.linear(inputs, a_rI), b_Or) * adapter.scale


class Adapter:
    """Pairs (A [rank, in], B [out, rank]) by layer, float32, with the state of their optimizer.

    flat: one tensor that all of them are views of, in the order of `parameters`; the optimizer sees it alone.
    gradient: of flat, a sum over the passes since the last step; None before the first.
    """

    def __init__(self, spec: AdapterSpec, alpha: float, pairs: dict[str, tuple[Tensor, Tensor]], trained: bool) -> None:
        self.spec, self.alpha, self.scale = spec, alpha, alpha / spec.rank
        parts = [part for _, pair in sorted(pairs.items()) for part in pair]
        self.flat = torch.cat([part.flatten() for part in parts])
        pieces = zip(self.flat.split([part.numel() for part in parts]), parts, strict=True)
        views = (piece.view_as(part).requires_grad_(trained) for piece, part in pieces)
        self.pairs = {name: (next(views), next(views)) for name in sorted(pairs)}
        self.gradient: Tensor | None = None
        self._written: Path | None = None  # folder that has these weights
        self.optimizer = None
        if trained:
            self.optimizer = torch.optim.AdamW([self.flat], lr=0.0)
            moments = {name: torch.zeros_like(self.flat) for name in _MOMENTS}
            self.optimizer.state[self.flat] = {"step": torch.tensor(0.0), **moments}  # as its first step would make it

    @classmethod
    def new(cls, spec: AdapterSpec, alpha: float, places: Places, device: torch.device) -> Adapter:
        """First values as in peft: A uniform, B zero, so that training starts from the base model."""
        assert spec.seed is not None  # the service has chosen one
        generator, pairs = torch.Generator().manual_seed(spec.seed), dict[str, tuple[Tensor, Tensor]]()
        for name in places.targets(spec):
            out, inner = places.sizes[name]
            a_rI = torch.empty(spec.rank, inner)
            nn.init.kaiming_uniform_(a_rI, a=math.sqrt(5), generator=generator)
            pairs[name] = (a_rI.to(device), torch.zeros(out, spec.rank, device=device))
        return cls(spec, alpha, pairs, trained=True)

    def parameters(self) -> list[Tensor]:
        return [part for pair in self.pairs.values() for part in pair]

    def _named(self) -> dict[str, Tensor]:
        """Parameters by the names of peft's files."""
        named = [(name, part, p) for name, pair in self.pairs.items() for part, p in zip("AB", pair, strict=True)]
        return {peft_name(f"{name}.lora_{part}.weight"): parameter for name, part, parameter in named}

    def take_gradients(self) -> None:
        """Add the gradients of a whole pass to those before it."""
        new = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.parameters()])
        self.gradient = new if self.gradient is None else self.gradient.add_(new)
        self.drop_pass()

    def is_finite(self) -> bool:
        """Return True where the gradients of this pass are numbers; of an adapter that is not trained, its weights."""
        parts = [p if self.optimizer is None else p.grad for p in self.parameters()]
        norms = torch._foreach_norm([part for part in parts if part is not None])
        return not norms or bool(torch.stack([*norms]).isfinite().all())  # one answer to wait for

    def drop_pass(self) -> None:
        """Forget the gradients of a pass that broke off."""
        for parameter in self.parameters():
            parameter.grad = None

    def step(self, params: dict[str, float]) -> dict[str, float]:
        """Take one step of AdamW with these numbers, clip first where grad_clip_norm is set, and begin a new sum."""
        assert self.optimizer is not None
        gradient, self.gradient = self.gradient, None
        gradient = torch.zeros_like(self.flat) if gradient is None else gradient
        norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            raise ValueError(f"the gradient's norm is {norm}: no weight was changed, and the gradient was dropped")
        most = params["grad_clip_norm"]
        if 0 < most < norm:
            gradient.mul_(most / norm)
        betas = (params["beta1"], params["beta2"])
        numbers = {"lr": params["learning_rate"], "betas": betas, "eps": params["eps"]}
        self.optimizer.param_groups[0] |= numbers | {"weight_decay": params["weight_decay"]}
        self._written, self.flat.grad = None, gradient
        self.optimizer.step()
        self.flat.grad = None
        return {"grad_norm:mean": norm}

    def save(self, folder: Path, base: str, *, optimizer: bool) -> None:
        """Write a folder as the peft library reads it, whole or not at all; with `optimizer` also the states."""
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, partial, ignore_errors=True)  # of what broke off: on a full disk, say
            self._write_files(partial, base, optimizer)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        self._written = folder

    def _write_files(self, partial: Path, base: str, optimizer: bool) -> None:
        if not self._link(partial):
            named = {name: tensor.detach().cpu().contiguous() for name, tensor in self._named().items()}
            save_file(named, partial / WEIGHTS, {"format": "pt"})
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "lora_dropout": 0.0}
        config |= {"r": self.spec.rank, "lora_alpha": self.alpha, "target_modules": list(self.pairs), "bias": "none"}
        (partial / SPEC).write_text(self.spec.model_dump_json() + "\n", encoding="utf-8")
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if optimizer and self.optimizer is not None:
            states = {name: state.cpu() for name, state in self.optimizer.state[self.flat].items()}
            save_file(states, partial / OPTIMIZER, {"format": "pt"})
        for file in partial.iterdir():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())

    def _link(self, partial: Path) -> bool:
        """Take the file of these same weights from where they were written before; False where there is none."""
        try:
            if self._written is not None:
                os.link(self._written / WEIGHTS, partial / WEIGHTS)
        except OSError:  # it is gone, or the file system has no links
            return False
        return self._written is not None

    @classmethod
    def load(cls, folder: Path, device: torch.device, *, optimizer: bool, trained: bool = True) -> Adapter:
        """Read what `save` wrote. Raises ValueError without optimizer states where they are asked for."""
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        spec = AdapterSpec.model_validate_json((folder / SPEC).read_bytes())
        stored = load_file(folder / WEIGHTS)
        pairs = {
            name: tuple(stored[peft_name(f"{name}.lora_{part}.weight")].to(device) for part in "AB")
            for name in config["target_modules"]
        }
        adapter = cls(spec, config["lora_alpha"], pairs, trained)  # pyright: ignore[reportArgumentType]
        if optimizer:
            if not (folder / OPTIMIZER).exists():
                raise ValueError("this checkpoint holds no optimizer state; load it with optimizer=False")
            assert adapter.optimizer is not None
            states, own = load_file(folder / OPTIMIZER), adapter.optimizer.state[adapter.flat]
            if states and states.keys() != own.keys():
                raise ValueError("this optimizer state was written by an earlier server; load it with optimizer=False")
            for name, state in states.items():  # a server before this one wrote none of an adapter without a step
                own[name].copy_(state)
        return adapter
