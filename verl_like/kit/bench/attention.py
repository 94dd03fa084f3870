"""Attention alone, forward and backward: packed sequences against padded rows with a mask, for one layer of a shape.

    verl-like bench attention --model cpu --workload cpu --tokens 2048 --threads 1
    verl-like bench attention --model 1.5b --workload w2 --tokens 16384        # CUDA

Floor: the products of causal attention over the pairs that are visible, forward once and backward twice that.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from verl_like.kit.bench.inputs import model_config
from verl_like.kit.bench.ranks import elapsed
from verl_like.kit.bench.report import Report, Row, check_comparable, finish
from verl_like.kit.bench.shapes import MODELS, WORKLOADS, ModelShape, Workload
from verl_like.models.attention import flash_attention_version, packed_attention
from verl_like.models.cost import BACKWARD, ModelCost
from verl_like.models.heads import dtype_of
from verl_like.models.packing import Segments
from verl_like.parallel.device_peak import device_peak


def main(arguments: argparse.Namespace) -> Report:
    """Measure both ways in turns, print the table."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype_name = arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    shape = MODELS[arguments.model]
    lengths = lengths_within(WORKLOADS[arguments.workload], arguments.tokens)
    work = {"model": asdict(shape), "lengths": lengths, "dtype": dtype_name, "threads": arguments.threads}
    check_comparable("attention", work, arguments.compare)
    ways = {"packed": packed(shape, lengths, device, dtype_of(dtype_name))}
    ways["padded"] = padded(shape, lengths, device, dtype_of(dtype_name))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    rates = []
    for _ in range(arguments.rounds + 1):
        rates.append(device_peak(device, dtype_of(dtype_name)).flops)
        for name, work_once in ways.items():
            seconds[name].append(elapsed(work_once, device)[0])
    rate = statistics.median(rates[1:])
    flops = (1 + BACKWARD) * layer_flops(shape, lengths)
    rows = [
        Row(
            name=name,
            seconds=statistics.median(taken[1:]),
            floor_seconds=flops / rate,
            figures={"tokens/s": sum(lengths) / statistics.median(taken[1:])},
        )
        for name, taken in seconds.items()
    ]
    version = flash_attention_version() if device.type == "cuda" else None
    notes = [
        f"{sum(lengths):,} tokens in {len(lengths)} sequences of at most {max(lengths)} (padded: "
        f"{len(lengths) * max(lengths):,}); {shape.num_heads} heads, {shape.num_kv_heads} of keys, of "
        f"{shape.hidden_size // shape.num_heads}; {dtype_name}; one layer; FlashAttention: {version or 'none'}. Floor: "
        f"products over visible pairs at {rate / 1e9:,.0f} GFLOP/s, backward twice the forward."
    ]
    report = Report(bench="attention", work=work, rows=rows, notes=notes)
    return finish(report, arguments.json, arguments.compare)


def lengths_within(workload: Workload, num_tokens: int) -> list[int]:
    """The first sequences of the workload that fit into one micro-batch of so many tokens; at least one."""
    lengths = [workload.prompt_length + n for n in workload.response_lengths(seed=1)]
    count = sum(total <= num_tokens for total in accumulate(lengths))
    return lengths[: max(count, 1)]


def layer_flops(shape: ModelShape, lengths: list[int]) -> float:
    """Operations of the forward pass of one layer's attention."""
    cost = ModelCost.of(model_config(shape, max(lengths)))
    return sum(cost.attention_flops(length) for length in lengths) / len(cost.windows)


def packed(shape: ModelShape, lengths: list[int], device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """Prepare our attention function, as the model calls it, on packed sequences."""
    segments = Segments(sorted(lengths), device)
    inputs = _inputs(shape, (1, sum(lengths)), device, dtype)
    module = torch.nn.Identity()
    return partial(_run, inputs, lambda q, k, v: packed_attention(module, q, k, v, None, segments=segments)[0])


def padded(shape: ModelShape, lengths: list[int], device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """Prepare torch's attention over rows of the longest length, with the mask that padding needs."""
    width = max(lengths)
    position = torch.arange(width, device=device)
    real_bL = position[None, :] < torch.tensor(lengths, device=device)[:, None]
    mask = (position[None, :] <= position[:, None]) & real_bL[:, None, None, :]
    inputs = _inputs(shape, (len(lengths), width), device, dtype)
    attend = partial(scaled_dot_product_attention, attn_mask=mask, enable_gqa=shape.num_heads != shape.num_kv_heads)
    return partial(_run, inputs, attend)


def _inputs(shape: ModelShape, rows: tuple[int, int], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    size, width = shape.hidden_size // shape.num_heads, rows[1]
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    tensors = [torch.randn(rows[0], width, h, size, device=device, dtype=dtype).transpose(1, 2) for h in heads]
    return [tensor.requires_grad_() for tensor in tensors]


def _run(inputs: list[Tensor], attend: Callable[..., Tensor]) -> None:
    output = attend(*inputs)
    torch.autograd.grad(output, inputs, torch.ones_like(output))
