"""A token's bits do not depend on what is computed beside it, and each operator of exact.py is needed for that."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from verl_like.batch import Sequences, pad_rows
from verl_like.models import attention, exact, packing
from verl_like.models.heads import PolicyModel

VOCAB, CPU = 61, torch.device("cpu")
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 172, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256},
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=40),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
}
Rows = Callable[[Tensor], Tensor]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def depends_on_company(function: Rows, x: Tensor) -> bool:
    """Whether some row of x, alone, beside a few or in another place, has other bits than among all of them."""
    whole, order = function(x), torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    parts = [torch.cat([function(part.contiguous()) for part in x.split(n)]) for n in (1, 2, 7, 33, 500)]
    return not all(torch.equal(part, whole) for part in [*parts, function(x[order])[torch.argsort(order)]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_linear_layers(dtype: torch.dtype) -> None:
    x, bias = noise(1100, 896, dtype=dtype), noise(151, dtype=dtype)
    weight = noise(151, 896, dtype=dtype, seed=1)
    assert not depends_on_company(lambda rows: exact.linear(rows, weight, bias), x)
    if dtype == torch.float32:  # oneDNN's kernels for bfloat16 are invariant by themselves on some CPUs
        with exact.ordinary():
            assert depends_on_company(lambda rows: exact.linear(rows, weight, bias), x)


def test_elements_of_silu() -> None:
    x = 3 * noise(64, 151)
    assert not depends_on_company(exact.silu, x) and depends_on_company(functional.silu, x)
    assert torch.allclose(exact.silu(x), functional.silu(x), rtol=1e-6, atol=1e-6)
    assert exact.silu(torch.tensor([-200.0, 200.0])).tolist() == [0.0, 200.0]


def test_what_torch_computes_row_by_row_as_it_is() -> None:
    """What exact.py leaves to torch; a version of torch in which this fails needs more there."""
    norm = Qwen2RMSNorm(151)
    for function in (norm, torch.exp, torch.cos, lambda x: torch.log_softmax(x, -1), lambda x: torch.logsumexp(x, -1)):
        assert not depends_on_company(function, 3 * noise(1100, 151))


@pytest.mark.parametrize(("repeats", "window"), [(1, None), (3, None), (2, 40)])
def test_a_query_alone_and_among_all(repeats: int, window: int | None) -> None:
    rows, length, dim = 3, 150, 16
    q, k, v = noise(rows, length * repeats, dim), noise(rows, length, dim, seed=1), noise(rows, length, dim, seed=2)
    position_1Q = torch.arange(length)[None]
    whole = exact.attention(q, k, v, 0.25, window, position_1Q).unflatten(1, (length, repeats))
    distance = position_1Q[0][:, None] - position_1Q[0]
    hidden = (distance < 0) | (distance >= (window or length))
    scores = torch.einsum("gqrd,gkd->gqrk", 0.25 * q.unflatten(1, (length, repeats)), k)
    plain = torch.einsum("gqrk,gkd->gqrd", scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1), v)
    assert torch.allclose(whole, plain, atol=2e-6)
    for i in (0, 1, 63, 64, 100, 149):
        query = q[:, i * repeats : (i + 1) * repeats]
        alone = exact.attention(query, k[:, : i + 1], v[:, : i + 1], 0.25, window, torch.full((rows, 1), i))
        assert torch.equal(alone, whole[:, i])


def test_gradients_are_those_of_the_usual_functions() -> None:
    x, weight = noise(70, 24).double().requires_grad_(), noise(9, 24, seed=1).double().requires_grad_()
    upstream = noise(70, 9, seed=2).double()
    found = torch.autograd.grad(exact.silu(exact.linear(x, weight)), (x, weight), upstream)
    usual = torch.autograd.grad(functional.silu(functional.linear(x, weight)), (x, weight), upstream)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, usual, strict=True))


def model_of(name: str, dtype: torch.dtype = torch.float32) -> PolicyModel:
    attention.register()
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(
        FAMILIES[name], dtype=dtype, attn_implementation=attention.ATTENTION_NAME
    ).eval()
    for parameter in hf.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model = PolicyModel(hf, vocab_size=VOCAB - 3, fused=True)
    model.make_exact()
    return model.requires_grad_(False)


def rows_of(lengths: list[tuple[int, int]]) -> Sequences:
    draw = random.Random(0)
    prompts, responses = (
        [[draw.randrange(VOCAB - 3) for _ in range(n)] for n in side] for side in zip(*lengths, strict=True)
    )
    response_ids_BR = pad_rows(responses, side="right", dtype=torch.int32)
    length_B = torch.tensor([len(r) for r in responses])
    return Sequences(
        prompt_ids_BP=pad_rows(prompts, side="left", dtype=torch.int32),
        prompt_length_B=torch.tensor([len(p) for p in prompts]),
        response_ids_BR=response_ids_BR,
        response_length_B=length_B,
        response_mask_BR=torch.arange(response_ids_BR.shape[1]) < length_B[:, None],
    )


def trained(model: PolicyModel, rows: Sequences) -> list[Tensor]:
    """The log-probs of each row's response, in one packed pass in which equal beginnings are computed once."""
    wanted_T = packing.response_positions(rows, sampled_only=False)
    inputs = packing.pack(rows, wanted_T, CPU, share_prompts=True)
    values_N = model(inputs, frozenset({"log_probs"}), 1.0)["log_probs"]
    return list(inputs.unpack(values_N).split(rows.response_length_B.tolist()))


def sampled(model: PolicyModel, rows: Sequences) -> list[Tensor]:
    """The same by prompts padded on the left, and then token by token with a cache: what the hf engine computes."""
    responses = rows.response_ids_T.split(rows.response_length_B.tolist())
    prompts = pad_rows(rows.prompt_lists(), side="left", dtype=torch.int64)
    length_B, cache, found = rows.prompt_length_B, DynamicCache(), []
    ids_bs, width = prompts, prompts.shape[1]
    position_bs = (torch.arange(width) - (width - length_B[:, None])).clamp(min=0)
    for i in range(max(map(len, responses))):
        seen = exact.Columns(width + i - length_B)
        output = model.hf(
            input_ids=ids_bs, position_ids=position_bs, past_key_values=cache, segments=seen, use_cache=True
        )
        found.append(output.logits[:, -1, : VOCAB - 3].float().log_softmax(-1))
        ids_bs = torch.tensor([[int(r[min(i, len(r) - 1)])] for r in responses])
        position_bs, length_B = length_B[:, None], length_B + 1
    log_p_BRV = torch.stack(found, 1)
    return [log_p_BRV[b, : len(r)].gather(1, r.long()[:, None])[:, 0] for b, r in enumerate(responses)]


ROWS = [(70, 9), (3, 70), (17, 30), (64, 1), (1, 12)]


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in FAMILIES), ("qwen2", torch.bfloat16)])
def test_trainer_and_sampler_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    model, rows = model_of(name, dtype), rows_of(ROWS)
    rows = rows.select([0, 0, 1, 2, 3, 4])  # two begin alike
    together, decoded = trained(model, rows), sampled(model, rows)
    alone = [trained(model, rows.select([b]))[0] for b in range(len(rows))]
    for way in (decoded, alone):
        assert all(torch.equal(a, b) for a, b in zip(together, way, strict=True))


def test_another_model_of_the_same_config_changes_nothing() -> None:
    """Ranks without files build their model from one config object, and later another one on the meta device."""
    model, rows = model_of("qwen2"), rows_of(ROWS)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(FAMILIES["qwen2"], attn_implementation=attention.ATTENTION_NAME)
    assert all(torch.equal(a, b) for a, b in zip(trained(model, rows), sampled(model, rows), strict=True))


def plain_linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, position: Tensor) -> Tensor:
    seen = (position[..., None] >= torch.arange(k.shape[1])).repeat_interleave(q.shape[1] // position.shape[1], 1)
    mask = seen.expand(len(k), -1, -1)[:, None]
    return functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], mask, scale=scale)[:, 0]


@pytest.mark.parametrize(
    ("operator", "usual"),
    [("product", plain_linear), ("silu", functional.silu), ("in_blocks", sdpa)],
)
def test_no_operator_may_be_the_usual_one(operator: str, usual: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, operator, usual)
    model, rows = model_of("qwen2"), rows_of(ROWS)
    pairs = zip(trained(model, rows), sampled(model, rows), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma2"}, "model type 'gemma2' is none of llama"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rotary embedding 'dynamic'"),
    ],
)
def test_other_models_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    from types import SimpleNamespace

    config: Any = SimpleNamespace(**FAMILIES["qwen2"].to_dict() | change)
    with pytest.raises(ValueError, match=rf"trainer\.parity=exact: .*{named}.*set trainer\.parity=off"):
        exact.check(config, CPU)
    with pytest.raises(ValueError, match="not for cuda"):
        exact.check(FAMILIES["qwen2"], torch.device("cuda"))
