"""Which kernel packed attention takes on a GPU, and what it is called with: the kernels themselves need one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from verl_like.models import attention
from verl_like.models.attention_groups import Scoring
from verl_like.models.packing import Segments
from verl_like.models.prefix_tree import path_layout, paths


@pytest.fixture(autouse=True)
def fresh_answers() -> Iterator[None]:
    cached = (attention.flash_attention_version, attention._varlen_asks_for_shared_keys)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.skipif(attention._has_flash_attention_2(), reason="FlashAttention is installed here")
@pytest.mark.parametrize(("file", "version"), [("flash_attn/__init__.py", 2), ("flash_attn/cute/__init__.py", None)])
def test_flash_attention_4_is_not_taken_for_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, version: int | None
) -> None:
    """Version 4 is installed as flash_attn.cute alone, without flash_attn_varlen_func."""
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert attention.flash_attention_version() == version


@pytest.mark.parametrize("told", [False, True])
def test_torchs_kernel_gets_key_heads_as_they_are(monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """Both forms of varlen_attn: of torch 2.11, and of 2.12 and later, which compare the numbers of heads."""
    calls: list[dict[str, Any]] = []

    def recorded(query: Tensor, **given: Any) -> Tensor:
        calls.append(given)
        return query

    def of_2_11(query, key, value, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
        heads = (key.shape[1], value.shape[1])
        return recorded(query, heads=heads, cu_q=cu_q, max_k=max_k, window=window_size)

    def of_2_12(query, key, value, *bounds, enable_gqa=False, window_size=(-1, -1), scale=None):
        return recorded(query, heads=(key.shape[1], value.shape[1]), gqa=enable_gqa, window=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", of_2_12 if told else of_2_11)
    segments = Segments([3, 4], torch.device("cpu"))
    q, k = torch.zeros(1, 6, 7, 8), torch.zeros(1, 2, 7, 8)
    attention._varlen(q, k, k, segments, Scoring(window=3))
    (call,) = calls
    assert call["heads"] == (2, 2) and call["window"] == (2, 0)
    assert call["gqa"] if told else (call["cu_q"].tolist(), call["max_k"]) == ([0, 3, 7], 4)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_torchs_operator_takes_what_it_is_given(
    monkeypatch: pytest.MonkeyPatch, shared: bool, window: int | None
) -> None:
    """This torch's own operator and its gradient, on tensors that have a shape and a precision, but no values."""
    monkeypatch.setattr(attention, "flash_attention_version", lambda: None)
    segments = Segments([3, 4], torch.device("cpu"))
    if shared:  # both rows answer a prompt of two tokens
        path_S = paths(torch.tensor([3, 4]), torch.tensor([0, 2]), [0, 0])
        layout = path_layout(path_S, [0, 2])
        segments = Segments([3, 4], torch.device("cpu"), own_lengths=[3, 2], layout=layout)
    tokens = sum(segments.own_lengths)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(1, heads, tokens, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (6, 2, 2))
        output = attention._varlen(q, k, v, segments, Scoring(scaling=0.5, window=window))
        output.sum().backward()
    assert output.shape == (tokens, 6, 8) and output.dtype == torch.bfloat16
    assert [t.grad.shape for t in (q, k, v)] == [t.shape for t in (q, k, v)]  # type: ignore[union-attr]
