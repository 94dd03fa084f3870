"""One arithmetic for sampling and training: a token's numbers do not depend on what is computed beside it.

Ordinary kernels choose the order of their sums by the shape of a call, so that decoding one token with a cache and
passing whole packed rows through the model differ in their last bits, and with them the log-probs of sampler and
trainer. Here every sum has one order, whatever the call (`trainer.parity=exact`):

    linear      products over blocks of a fixed number of rows; a larger block where, for these sizes on this machine,
                it was seen to give the same bits
    attention   scores and weighted values over blocks of 64 keys, counted from the beginning of the sequence, with a
                fixed number of query rows; the maximum of all scores first (exact in any order), then the blocks' sums
                in ascending order. Hidden keys have weight 0.0, and adding 0.0 changes nothing
    SiLU        x / (1 + exp(-x)): torch's own takes another exponential for the last elements of a tensor

Norms, rotary embedding, softmax and exp work row by row or element by element, always alike (tests/unit/models/
test_exact.py holds torch to it), and stay as they are. Gradients are ordinary: of the same functions, in any order.

Letters: G rows x key-value heads, L tokens of a row, Q the last of them, that ask, r query heads that share a
key-value head, D head size, M rows of a product, K and N its inner and outer size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

KNOWN_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # config.model_type
_ROTARY_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies that do not follow the length of a call
_ROWS, _MANY_ROWS = 32, 512  # of one product
_TRIED = 2**24  # [results] of the larger product, at most: the comparison costs as much
_KEYS, _QUERY_ROWS = 64, 16  # of one block of attention; a token's r queries stay together
_MANY_QUERIES = 8  # [blocks] of queries in a large one
_SCORES = 2**24  # [numbers] of scores that are kept at a time
_ordinary: ContextVar[bool] = ContextVar("ordinary", default=False)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Place of rows in a padded batch with a cache: row b's tokens are the columns from start_b[b] on, all to the end.

    The first of the queries of a pass with s tokens a row stands s columns before the end.
    """

    start_b: Tensor


@contextmanager
def ordinary() -> Iterator[None]:
    """Let the functions of this module take torch's usual kernels inside, to see what exactness costs."""
    token = _ordinary.set(True)
    try:
        yield
    finally:
        _ordinary.reset(token)


def is_ordinary() -> bool:
    """Return True inside `ordinary`."""
    return _ordinary.get()


def check(config: PretrainedConfig, device: torch.device) -> None:
    """Check that a model's sums can be put into one order; raises ValueError, which names what cannot, otherwise."""
    problem, rotary = "", (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if device.type != "cpu":
        problem = f"its kernels are for CPUs, not for {device.type}"
    elif config.model_type not in KNOWN_TYPES:
        problem = f"model type {config.model_type!r} is none of {', '.join(KNOWN_TYPES)}"
    elif config.hidden_act != "silu":
        problem = f"the activation {config.hidden_act!r} is not silu"
    elif config.attention_dropout:
        problem = f"attention_dropout={config.attention_dropout} is drawn anew in each pass"
    elif rotary not in _ROTARY_TYPES:
        problem = f"the rotary embedding {rotary!r} follows the longest row of a call"
    if problem:
        raise ValueError(f"trainer.parity=exact: {problem}; set trainer.parity=off")


def put_in(hf: PreTrainedModel, attention_name: str) -> None:
    """Exchange the linear layers' and activations' forward of this model, and its attention, in place."""
    check(hf.config, hf.device if hf.device.type != "meta" else torch.device("cpu"))
    shared: Any = hf.config
    config: Any = copy.deepcopy(shared)  # another model may be built from the same one, and set it
    config._attn_implementation = attention_name
    for module in hf.modules():
        if type(module) is nn.Linear:
            module.forward = MethodType(_linear_forward, module)
        elif type(module).__name__ in ("SiLU", "SiLUActivation"):
            module.forward = silu
        if getattr(module, "config", None) is shared:
            module.config = config


def _linear_forward(self: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias: [..., K] -> [..., N], each row as it would be alone."""
    if _ordinary.get():
        return nn.functional.linear(x, weight_NK, bias_N)
    result = _Linear.apply(x.reshape(-1, x.shape[-1]), weight_NK)
    result = result if bias_N is None else result + bias_N
    return result.view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x_MK, weight_NK)
        return product(x_MK, weight_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_MK, weight_NK = ctx.saved_tensors
        wants = ctx.needs_input_grad
        return grad @ weight_NK if wants[0] else None, grad.t() @ x_MK if wants[1] else None


def product(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Compute x W^T, [M, N], in blocks of rows: the bits of a row are those that it has in any other call."""
    rows, (width, inner) = len(x_MK), weight_NK.shape
    result = x_MK.new_empty(rows + -rows % _ROWS, width)
    many = _rows_at_once(inner, width, x_MK.dtype, torch.get_num_threads()) if rows >= _MANY_ROWS else _ROWS
    start, weight_KN = 0, weight_NK.t()
    while start < rows:
        size = many if start + many <= rows else _ROWS
        part = x_MK[start : start + size]
        if len(part) < size:
            part = torch.cat([part, part.new_zeros(size - len(part), inner)])
        torch.mm(part, weight_KN, out=result[start : start + size])
        start += size
    return result[:rows]


@lru_cache(maxsize=1024)
def _rows_at_once(inner: int, width: int, dtype: torch.dtype, threads: int) -> int:
    """Choose the rows of a product: many, where they have the bits that they have in small blocks.

    Kernels choose the order of sums by sizes and threads, never by numbers, so that noise tells.
    """
    assert threads == torch.get_num_threads()
    if _MANY_ROWS * width > _TRIED:
        return _ROWS
    noise = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, inner, generator=noise).to(dtype) for n in (_MANY_ROWS, width))
    small = torch.cat([torch.mm(part, weight.t()) for part in x.split(_ROWS)])
    return _MANY_ROWS if torch.equal(torch.mm(x, weight.t()), small) else _ROWS


def silu(x: Tensor) -> Tensor:
    """Compute x / (1 + exp(-x)), in float32 at least."""
    return nn.functional.silu(x) if _ordinary.get() else _SiLU.apply(x)


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.ops.aten.silu_backward(grad, *ctx.saved_tensors)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, position_GQ: Tensor, usual: Attend | None = None
) -> Tensor:
    """Compute softmax(scale q k^T) v over the tokens that each token sees: [G, Q * r, D].

    Args:
        q: queries [G, Q * r, D]; a token's r queries stand together.
        k: keys [G, L, D], of the sequence's token l in place l.
        v: values [G, L, D].
        scale: factor of the scores.
        window: a token sees that many tokens, itself included; None: all before it.
        position_GQ: number of each query's token in its sequence, ascending, int64; [1, Q] where all are alike.
        usual: the same function of (q, k, v) in any order of sums, for the gradient; None: there is none.
    """
    if usual is None:
        return in_blocks(q, k, v, scale, window, position_GQ)
    return _Attention.apply(q, k, v, scale, window, position_GQ, usual)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, position_GQ: Tensor, usual: Attend
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.usual = usual
        return in_blocks(q, k, v, scale, window, position_GQ)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.usual(*inputs)
        return *torch.autograd.grad(output, inputs, grad), None, None, None, None


@torch.no_grad()
def in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, position_GQ: Tensor) -> Tensor:
    """Compute `attention` without a gradient."""
    dtype, (num_rows, length, dim), asking = q.dtype, k.shape, position_GQ.shape[1]
    repeats = q.shape[1] // asking
    few = -(-_QUERY_ROWS // repeats)  # tokens of a block of queries
    many = _MANY_QUERIES * few if _blocks_agree(few * repeats, dim, torch.get_num_threads()) else few
    q, k, v = (t.to(torch.promote_types(dtype, torch.float32)) for t in (q, k, v))
    k = nn.functional.pad(k, (0, 0, 0, -length % _KEYS)).transpose(1, 2).contiguous()
    v = nn.functional.pad(v, (0, 1, 0, -length % _KEYS))
    v[..., -1] = 1.0  # the sum of the weights is one more value
    whole, outputs = asking // many * many, []
    at_once = max(many, _SCORES // (num_rows * repeats * k.shape[2]) // many * many)  # [tokens]
    for start in [*range(0, whole, at_once), whole]:
        end, tokens = (min(start + at_once, whole), many) if start < whole else (asking, few)
        if start < end:
            missing = -(end - start) % tokens
            asked = nn.functional.pad(q[:, start * repeats : end * repeats], (0, 0, 0, missing * repeats)) * scale
            at = position_GQ[:, start:end]
            at = torch.cat([at, at[:, -1:].expand(-1, missing)], 1).unflatten(1, (-1, tokens))
            found = _blocks(asked.unflatten(1, (-1, tokens * repeats)), k, v, at, repeats, window)
            outputs.append(found.flatten(1, 2)[:, : (end - start) * repeats])
    return torch.cat(outputs, 1).to(dtype)


@lru_cache(maxsize=64)
def _blocks_agree(rows: int, dim: int, threads: int) -> bool:
    """Look whether large blocks of queries have the bits of small ones, see `_rows_at_once`."""
    assert threads == torch.get_num_threads()
    noise = torch.Generator().manual_seed(0)
    for inner, width in ((dim, _KEYS), (_KEYS, dim + 1)):
        a, b = (torch.randn(3, *size, generator=noise) for size in ((_MANY_QUERIES * rows, inner), (inner, width)))
        small = torch.cat([torch.bmm(part, b) for part in a.split(rows, 1)], 1)
        if not torch.equal(torch.bmm(a, b), small):
            return False
    return True


def _blocks(q: Tensor, k: Tensor, v: Tensor, position: Tensor, repeats: int, window: int | None) -> Tensor:
    """Attention of blocks of queries [G, blocks, rows, D] at `position` [G or 1, blocks, tokens]; k is [G, D, L]."""
    last = position.amax((0, 2)).tolist()  # a block of keys is for the blocks of queries that reach it
    most = q.new_full(q.shape[:-1], -torch.inf)
    total = q.new_zeros(*q.shape[:-1], v.shape[-1])
    at = position.repeat_interleave(repeats, -1)[..., None]
    kept: list[tuple[int, int, Tensor]] = []
    for start in range(0, last[-1] + 1, _KEYS):
        first = next(i for i, reach in enumerate(last) if reach >= start)
        scores = _products(q[:, first:], k[..., start : start + _KEYS])
        distance = at[:, first:] - torch.arange(start, start + _KEYS, device=q.device)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores.masked_fill_(hidden, -torch.inf)
        most[:, first:] = torch.maximum(most[:, first:], scores.amax(-1))
        kept.append((start, first, scores))
    for start, first, scores in kept:
        weights = scores.sub_(most[:, first:, :, None]).exp_()
        total[:, first:] += _products(weights, v[:, start : start + _KEYS])
    return total[..., :-1] / total[..., -1:]


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Multiply blocks [G, blocks, rows, n] with their row's [G, n, m]."""
    count = a.shape[1]
    b = b if count == 1 else b.repeat_interleave(count, 0)
    return torch.bmm(a.flatten(0, 1), b).unflatten(0, (-1, count))


def padded_attention(
    query: Tensor, key: Tensor, value: Tensor, columns: Columns, scale: float | None, window: int | None
) -> Tensor:
    """Attention of a pass with a cache; [b, heads, s, D] with [b, key heads, S, D] -> [b, s, heads, D]."""
    (rows, heads, asking, dim), (_, shared, width, _) = query.shape, key.shape
    own_bS = (columns.start_b[:, None] + torch.arange(width, device=key.device)).clamp(max=width - 1)
    if int(columns.start_b.max()) > 0:  # a sequence begins in place 0
        key, value = (torch.take_along_dim(t, own_bS[:, None, :, None], 2) for t in (key, value))
    position_bs = torch.arange(width - asking, width, device=key.device) - columns.start_b[:, None]
    position_Gs = position_bs.clamp(min=0).repeat_interleave(shared, 0)  # padding sees something: nobody reads it
    q = query.unflatten(1, (shared, -1)).transpose(2, 3).reshape(rows * shared, -1, dim)
    factor = dim**-0.5 if scale is None else scale
    output = attention(q, key.flatten(0, 1), value.flatten(0, 1), factor, window, position_Gs)
    return output.view(rows, shared, asking, heads // shared, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
