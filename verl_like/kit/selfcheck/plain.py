"""The yardstick's forward and backward: the model as transformers itself runs it, one unpadded row after the other."""

from __future__ import annotations

import copy
import inspect
import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from verl_like.batch import Sequences
from verl_like.config import ModelConfig
from verl_like.kit.selfcheck.pictures import PlainPictures
from verl_like.kit.selfcheck.plain_adapters import PlainAdapters
from verl_like.kit.selfcheck.plain_loss import PlainPolicyLoss, PlainValueLoss
from verl_like.models import families
from verl_like.models.heads import VALUE_HEAD, attach_value_head
from verl_like.models.loading import has_weights, load_hf_config
from verl_like.parallel.host_memory import return_freed_memory

_PIECE = 2**17  # numbers: what is made of them stays in the processor's cache
_WAITING = 128  # tokens whose part of the head's gradient is added up at once
TEMPERATURE = 0.8  # not 1, so that a path that forgets it shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Loss and gradient of one mini-batch.

    scale: what a difference of losses is compared with, the sum of the rows' magnitudes; 0 where it is not known.
    """

    loss: float
    gradient: dict[str, Tensor]  # by Hugging Face name, on the CPU
    scale: float = 0.0


class PlainModel:
    """Full logits (or values) of one row at a time, with eager attention and no cache.

    reference_scale: with a reference for the exact KL, which has the same weights times this number.
    adapters: of LoRA, added into the weights; the reference keeps the base's. frozen_tower: images are seen, but what
    sees them is not trained.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        vocab_size: int,
        seed: int,
        device: str,
        critic: bool = False,
        reference_scale: float | None = None,
        temperature: float = TEMPERATURE,
        dtype: torch.dtype = torch.float32,
        frozen_tower: bool = True,
    ) -> None:
        self.vocab_size, self.device, self.critic = vocab_size, torch.device(device), critic
        self.temperature, self.dtype = temperature, dtype
        self.hf = _load(model, seed, critic=critic, frozen_tower=frozen_tower).to(self.device, dtype)
        self.pictures = PlainPictures(model, self.hf.config) if families.sees(self.hf.config) else None
        self.reference: Any = None
        if reference_scale is not None:
            self.reference = copy.deepcopy(self.hf)
            scale_weights(self.reference, reference_scale)
        self.adapters = PlainAdapters.of(self.hf, model) if model.lora_rank > 0 else None
        if self.adapters is not None:
            self.adapters.merge(self.hf)
            for name, weight in self.hf.named_parameters():
                weight.requires_grad_(name.removesuffix(".weight") in self.adapters.base or name.startswith("score."))
        self.late = _late(self.hf)

    def answers(self, rows: Sequences, row: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Compute some of log_probs, entropy, sum_pi_squared, full_kl, or values: [R] of the row's response.

        They have a graph; 0 where a token was not sampled, but for values.
        """
        prompt = rows.prompt_ids_BP[row, rows.prompt_ids_BP.shape[1] - int(rows.prompt_length_B[row]) :]
        response = rows.response_ids_BR[row, : int(rows.response_length_B[row])].long()
        tokens, before = torch.cat([prompt.long(), response])[None].to(self.device), slice(-1 - len(response), -1)
        if self.critic:
            hidden = self.hf.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, before]
            return {"values": (hidden @ self.hf.score.weight[0]).cpu()}
        seen: dict[str, Tensor] = {}
        if self.pictures is not None and rows.media is not None:
            seen = self.pictures.of(tokens, rows.media[row], self.dtype)
        sampled = rows.response_mask_BR[row, : len(response)].nonzero()[:, 0]
        places, targets = tokens.shape[1] - 1 - len(response) + sampled, response[sampled, None].to(self.device)
        log_probs, values = self.distribution(self.hf, tokens, places, **seen), dict[str, Tensor]()
        if "log_probs" in names:
            values["log_probs"] = log_probs.gather(1, targets)[:, 0]
        if "entropy" in names:
            values["entropy"] = -(log_probs.exp() * log_probs).sum(dim=-1)
        if "sum_pi_squared" in names:
            values["sum_pi_squared"] = (2 * log_probs).exp().sum(dim=-1)
        if "full_kl" in names:
            with torch.no_grad():
                other = self.distribution(self.reference, tokens, places, **seen)
            values["full_kl"] = (log_probs.exp() * (log_probs - other)).sum(dim=-1)
        empty = torch.zeros(len(response), dtype=self.dtype)
        return {name: empty.index_put((sampled,), value.cpu()) for name, value in values.items()}

    def distribution(self, hf: Any, tokens: Tensor, places: Tensor, **seen: Tensor) -> Tensor:
        """Log-probs of all ids that the tokenizer knows, behind the tokens in these places: [size, V].

        seen: of images. A model that can computes no others.
        """
        few = {"logits_to_keep": places} if "logits_to_keep" in inspect.signature(hf.forward).parameters else {}
        logits = hf(input_ids=tokens, use_cache=False, **few, **seen).logits[0]
        known = (logits if few else logits[places])[:, : self.vocab_size].to(self.dtype)
        return (known / self.temperature).log_softmax(dim=-1)

    @contextmanager
    def resting(self, folder: str) -> Iterator[None]:
        """Hold the weights in a file of `folder` inside, out of memory. Those that were loaded fit into float32."""
        like: Any = "cpu", self.dtype if self.adapters is not None else torch.float32
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            torch.save({name: weight.detach().to(*like) for name, weight in self.hf.named_parameters()}, file.name)
            for weight in self.hf.parameters():
                weight.data = weight.data.new_empty(0)
            return_freed_memory()
            yield
            stored = torch.load(file.name, mmap=True)
            for name, weight in self.hf.named_parameters():
                weight.data = stored.pop(name).to(self.device, self.dtype)

    def column(self, rows: Sequences, name: str) -> Tensor:
        """One answer for all rows, [B, R], 0 where there is no response."""
        return self.columns(rows, [name])[name]

    @torch.no_grad()
    def columns(self, rows: Sequences, names: Iterable[str]) -> dict[str, Tensor]:
        """Several answers for all rows, by name, in one pass."""
        found = {name: torch.zeros(rows.response_ids_BR.shape, dtype=self.dtype) for name in names}
        for row in range(len(rows)):
            answers = self.answers(rows, row, found)
            for name, column in found.items():
                column[row, : len(answers[name])] = answers[name]
        return found

    def measure(self, loss: PlainPolicyLoss) -> Measured:
        """Forward and backward of every row of the loss."""
        total = scale = 0.0
        wanted = {"entropy": loss.config.actor_rollout_ref.actor.entropy_coeff, "full_kl": self.reference}
        names = ["log_probs", *(name for name, reason in wanted.items() if reason)]
        for row in loss.rows:
            answers = self.answers(loss.material.rollouts, row.number, names)
            if isinstance(loss, PlainValueLoss):
                part = loss.value_loss(row, answers["values"])
            else:
                part = loss(row, answers["log_probs"], answers.get("entropy"), answers.get("full_kl"))
            part.backward()
            total, scale = total + part.item(), scale + abs(part.item())
        for head in self.late:
            head.add_up()
        gradient = {
            name: torch.zeros_like(weight).cpu() if weight.grad is None else weight.grad.cpu()
            for name, weight in self.hf.named_parameters()
            if weight.requires_grad
        }
        self.hf.zero_grad(set_to_none=True)
        if self.adapters is not None:
            head = {name: of for name, of in gradient.items() if name == VALUE_HEAD}
            gradient = self.adapters.gradient(gradient) | head
        return Measured(loss=total, gradient=gradient, scale=scale)


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors of one shape, some rows of each at a time, so that what is made of them has little room."""
    rows = [tensor[None] if tensor.dim() == 0 else tensor for tensor in tensors]
    yield from zip(*(each.split(max(1, _PIECE * len(each) // max(1, each.numel()))) for each in rows), strict=True)


@torch.no_grad()
def scale_weights(model: nn.Module, factor: float) -> None:
    """Multiply all weights by `factor`, which makes another policy. They may be sharded."""
    for weight in model.parameters():
        weight.mul_(factor)


def _load(model: ModelConfig, seed: int, *, critic: bool, frozen_tower: bool) -> Any:
    """The weights that the engine starts from: the folder's, or random ones from the same seed."""
    hf_config, path = load_hf_config(model), str(Path(model.path).expanduser())
    kind: Any = families.model_class(hf_config)
    settings = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": model.trust_remote_code}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if has_weights(path):
            hf: Any = kind.from_pretrained(path, config=hf_config, **settings)
        else:
            hf = kind.from_config(hf_config, **settings)
        if critic:
            attach_value_head(hf, _stored_head(Path(path)))
    if frozen_tower or not families.sees(hf_config):
        for part in families.parts_beside_text(hf).values():
            part.requires_grad_(False)
    for own in (hf.config, hf.config.get_text_config()):
        own._experts_implementation = "eager"  # one expert after the other; the grouped product knows no float64
    return hf.eval()


def _stored_head(folder: Path) -> Tensor | None:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            if VALUE_HEAD in stored.keys():  # noqa: SIM118 (not a dict)
                return stored.get_tensor(VALUE_HEAD)
    return None


class _Head(nn.Linear):
    """A head without bias that adds the gradient of its weight up over many tokens.

    Autograd alone makes a matrix as large as the vocabulary of every row, and adds it to the others.
    """

    waiting: list[tuple[Tensor, Tensor]]

    def forward(self, input: Tensor) -> Tensor:
        return _LateHead.apply(input, self.weight, self)

    def add_up(self) -> None:
        """Put into weight.grad what waits."""
        if self.waiting:
            given, gradient = map(torch.cat, zip(*self.waiting, strict=True))
            _gradient_of(self.weight).addmm_(gradient.T, given)
        self.waiting = []


class _LateHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, head: _Head) -> Tensor:
        ctx.given, ctx.head = given.detach(), head
        return given @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), head = gradients, ctx.head
        head.waiting.append((ctx.given.flatten(0, -2), gradient.flatten(0, -2)))
        if sum(len(given) for given, _ in head.waiting) >= _WAITING:
            head.add_up()
        return gradient @ head.weight, None, None


class _Table(nn.Embedding):
    """Embeddings whose gradient is added to the rows that were read, for the same reason."""

    def forward(self, input: Tensor) -> Tensor:
        return _LateTable.apply(input, self.weight, self.padding_idx)


class _LateTable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, unread: int | None) -> Tensor:
        ctx.ids, ctx.weight, ctx.unread = ids, weight, unread
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        read = ctx.ids != ctx.unread if ctx.unread is not None else torch.ones_like(ctx.ids, dtype=torch.bool)
        _gradient_of(ctx.weight).index_add_(0, ctx.ids[read], gradients[0][read])
        return None, None, None


def _gradient_of(weight: Tensor) -> Tensor:
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _late(hf: Any) -> list[_Head]:
    """Let head and embeddings of the plain kinds, where they are trained, add their gradients up; return the heads."""
    table, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    if type(table) is nn.Embedding and table.weight.requires_grad:
        table.__class__ = _Table
    if type(head) is not nn.Linear or not head.weight.requires_grad or head.bias is not None:
        return []
    head.__class__, head.waiting = _Head, []
    return [head]


def apart(reference: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference of two gradients by the size of the tensor's, or by a thousandth of the largest one's.

    Infinite where one has a weight that the other lacks. Some gradients are zero by symmetry (the bias of attention
    keys): what rounding leaves there is no yardstick.
    """
    if reference.keys() != other.keys():
        return math.inf
    sizes = {name: _largest(tensor) for name, tensor in reference.items()}
    floor, worst = 1e-3 * max(sizes.values()), 0.0
    for name, whole in reference.items():
        gaps = [_largest(part - found) for part, found in pieces(whole, other[name])]
        if not all(map(math.isfinite, gaps)):
            return math.inf
        worst = max(worst, max(gaps) / max(sizes[name], floor))
    return worst


def _largest(tensor: Tensor) -> float:
    """Largest magnitude; no number where the tensor has none."""
    return float(torch.stack(tensor.aminmax()).abs().max())
