"""Layers that carry state from token to token, on packed rows: equal to transformers row by row; planted leaks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.unit.engine import tiny
from tests.unit.engine.tiny import build_engine
from tests.unit.models import zoo
from tests.unit.models.rows import sequences
from tests.unit.models.test_packed_forward import build
from verl_like.batch import Experience, Sequences
from verl_like.config.model import ModelConfig
from verl_like.models import families, loading, packing, state_layers, tensor_plan
from verl_like.models.heads import TokenModel
from verl_like.models.packing import Segments
from verl_like.models.state_layers import Piece
from verl_like.parallel.dist import ProcessInfo

CPU = torch.device("cpu")
NAMES = [name for name, family in families.FAMILIES.items() if family.state]
# Longer than a chunk of the delta rule (64 tokens), some prompts shorter than a convolution's context, groups of three
GROUPS = tiny.experience(6, max_response=80, rows_per_prompt=3)


def with_forks(rows: Experience) -> Sequences:
    """These rows; and behind each group a row of it whose response goes on for another one, one cut off, and a prompt
    that begins with a response."""
    ids = [
        torch.cat(pair).tolist()
        for pair in zip(
            rows.prompt_ids_T.split(rows.prompt_length_B.tolist()),
            rows.response_ids_T.split(rows.response_length_B.tolist()),
            strict=True,
        )
    ]
    whole = [(row[:p], row[p:]) for row, p in zip(ids, rows.prompt_length_B.tolist(), strict=True)]
    for b in range(0, len(whole), 3):
        (prompt, response), (_, other) = whole[b], whole[b + 1]
        half = len(response) // 2
        whole += [(prompt, response + other[:9]), (prompt, [*response[:half], 9, 8]), ([*prompt, *response], other[:7])]
    return sequences(whole)


@contextmanager
def in_float64() -> Iterator[None]:
    """transformers' layers without their own float32 inside, which rounds otherwise where rows are cut otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def double(path: str) -> TokenModel:
    model = build(path, packed=True).double().train()
    model.hf.set_experts_implementation("eager")  # the others know no float64
    return model


def packed_log_probs(model: TokenModel, rows: Sequences, *, share: bool) -> Tensor:
    x = packing.pack(rows, packing.response_positions(rows, sampled_only=False), CPU, share_prompts=share)
    logits = model.hf.get_output_embeddings()(model.hidden_states(x)) * model.head().scale
    return x.unpack(logits.log_softmax(-1).gather(1, x.targets_N[:, None])[:, 0])


def log_probs_row_by_row(model: Any, rows: Sequences) -> Tensor:
    """transformers' whole model on one row after the other, nothing packed or padded."""
    found = []
    for row in rows.split([1] * len(rows)):
        ids = torch.cat([row.prompt_ids_T, row.response_ids_T]).long()[None]
        log_probs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        found.append(log_probs.gather(1, ids[0, 1:, None])[int(row.prompt_length_B[0]) - 1 :, 0])
    return torch.cat(found)


def gradients(model: torch.nn.Module, log_probs_T: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weight_T = torch.randn(log_probs_T.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (log_probs_T * weight_T).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    ours = {name.removeprefix("hf."): gradient for name, gradient in ours.items()}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        gap = float((ours[name] - gradient).abs().max()) / (float(gradient.abs().max()) + 1e-12)
        assert gap < 1e-10, f"{name}: {gap:.1e}"


@pytest.mark.parametrize("name", NAMES)
def test_packed_rows_equal_transformers_row_by_row(tmp_path: Path, name: str) -> None:
    """Log-probs and the gradient of every weight; rows apart, and as a tree in layers that are recomputed."""
    rows = with_forks(GROUPS)
    model = double(zoo.folder(tmp_path, name, **zoo.telling(name)))
    zoo.scatter(model.hf)
    reference: Any = AutoModelForCausalLM.from_config(copy.deepcopy(model.hf.config), attn_implementation="eager")
    reference.double().load_state_dict(model.hf.state_dict())
    with in_float64():
        expected = log_probs_row_by_row(reference, rows)
        expected_gradients = gradients(reference, expected)
        assert len(expected_gradients) == len(list(reference.parameters()))
        for share in (False, True):
            if share:
                model.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            found = packed_log_probs(model, rows, share=share)
            assert float((found - expected).detach().abs().max()) < 1e-10
            packed_log_probs(model, GROUPS.select([2, 5]), share=False)  # others' bounds, before the backward pass
            assert_equal_gradients(gradients(model, found), expected_gradients)


@pytest.mark.parametrize(("name", "scans"), [("qwen3_next", 1), ("jamba", 3)])
def test_a_shared_prompt_is_scanned_once_where_a_scan_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, scans: int
) -> None:
    """Mamba 1 cannot, as docs/models.md says. Slots are counted, of rows of one length: no padding."""
    slots: list[int] = []
    run = state_layers.ScanPlan.run

    def counted(plan: Any, scan: Any, *packed: Tensor) -> Tensor:
        slots.append(sum(call.count * call.width for call in plan.calls))
        return run(plan, scan, *packed)

    monkeypatch.setattr(state_layers.ScanPlan, "run", counted)
    rows = sequences([([5, 6, 7, 8], [first, 4, 4, 4, 4, 4]) for first in (1, 2, 3)])
    packed_log_probs(double(zoo.folder(tmp_path, name)), rows, share=True)
    assert slots == [scans * 4 + 3 * 5]


def test_pieces_are_prompts_and_what_comes_after() -> None:
    """By hand: rows 0 and 2 share three tokens of row 0; row 1 is alone; row 3 is no more than the prompt of row 4.

    Row 6 goes on from row 5 after five tokens, row 7 and 8 from row 6 after eight: one set begins with those eight, and
    row 5, whose five are scanned once more, is alone.
    """
    lengths, own_lengths = [5, 4, 6, 2, 3, 7, 9, 9, 9], [5, 4, 3, 2, 1, 7, 4, 1, 1]
    segments = Segments(lengths, CPU, own_lengths=own_lengths, holders=[0, 1, 0, 3, 3, 5, 5, 6, 6])
    assert state_layers.pieces_of(segments) == [
        Piece(start=0, length=3),
        Piece(start=3, length=2, parent=0),
        Piece(start=5, length=4),
        Piece(start=12, length=3, parent=0),
        Piece(start=15, length=2),
        Piece(start=19, length=1, parent=4),
        Piece(start=20, length=7),
        Piece(start=27, length=8),
        *(Piece(start=start, length=1, parent=7) for start in (35, 44, 53)),
    ]


def naive_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, bounds: list[int]
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token and piece by piece (Yang et al., arXiv 2412.06464, equation 10)."""
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    outputs, last = [], []
    for n in range(len(bounds) - 1):
        state = q.new_zeros(*v.shape[2:3], q.shape[-1], v.shape[-1]) if initial_state is None else initial_state[n]
        for t in range(bounds[n], bounds[n + 1]):
            state = state * g[0, t].exp()[:, None, None]
            error = v[0, t] - torch.einsum("hkv,hk->hv", state, k[0, t])
            state = state + torch.einsum("hk,hv->hkv", k[0, t], error * beta[0, t][:, None])
            outputs.append(torch.einsum("hkv,hk->hv", state, q[0, t]) * q.shape[-1] ** -0.5)
        last.append(state)
    return torch.stack(outputs)[None], torch.stack(last)


def test_bounds_reach_the_kernel_of_flash_linear_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package, found by transformers itself: it gets packed pieces, their bounds, their states."""
    calls: list[tuple[list[int], bool]] = []

    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        assert cu_seqlens is not None and use_qk_l2norm_in_kernel and q.shape[0] == 1
        calls.append((cu_seqlens.diff().tolist(), output_final_state))
        output, last = naive_delta_rule(q, k, v, g, beta, initial_state, cu_seqlens.tolist())
        return output, last if output_final_state else None

    fla: Any = ModuleType("fla")
    fla.ops = SimpleNamespace(gated_delta_rule=SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule))
    path, rows = zoo.folder(tmp_path, "qwen3_next"), tiny.experience(5, rows_per_prompt=3)
    usual = double(path)
    monkeypatch.setitem(sys.modules, "fla", fla)
    torch_function = modeling_qwen3_next.torch_chunk_gated_delta_rule.__wrapped__
    found = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")(torch_function)
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", found)
    with_kernel = double(path)
    with in_float64():
        expected, ours = (packed_log_probs(model, rows, share=True) for model in (usual, with_kernel))
        assert float((ours - expected).detach().abs().max()) < 1e-10
        theirs = {name.removeprefix("hf."): g for name, g in gradients(usual, expected).items()}
        assert_equal_gradients(gradients(with_kernel, ours), theirs)
    (first, gives), (then, ends) = calls
    assert gives and not ends and len(first) == 2  # the prompts of two groups, then what each row has of its own
    assert sorted(first) == sorted(set(rows.prompt_length_B.tolist()))
    assert sum(then) == int((rows.response_length_B - 1).sum())


def one_piece(segments: Segments) -> Segments:
    return Segments([sum(segments.own_lengths)], CPU)


def no_parents(segments: Segments) -> Segments:
    return Segments(segments.own_lengths, CPU)


@pytest.mark.parametrize("planted", [one_piece, no_parents])
@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_a_missing_boundary_is_caught_at_the_start(
    process: ProcessInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, planted: Any
) -> None:
    """Planted: rows run into each other; or a row begins without the state of its prompt."""
    path = zoo.folder(tmp_path, name)
    build_engine(process, path)
    monkeypatch.setattr(
        state_layers, "_kept", lambda segments, key, build, device: build(planted(segments), device, *key[1:])
    )
    with pytest.raises(ValueError, match=f"'{name}' cannot be run without padding: .* state leaks"):
        build_engine(process, path)


def test_bounds_that_do_not_reach_one_layer_are_caught_at_the_start(
    process: ProcessInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zoo.folder(tmp_path, "bamba")
    monkeypatch.setattr(state_layers.PackedFunctions, "take_segments", lambda *_: None)
    with pytest.raises(ValueError, match="'bamba' cannot be run without padding"):
        build_engine(process, path)


def test_slices_of_rows_are_refused_by_name(tmp_path: Path) -> None:
    config = ModelConfig(path=zoo.folder(tmp_path, "falcon_h1"))
    hf_config = loading.load_hf_config(config)
    with pytest.raises(ValueError, match=r"ulysses_sequence_parallel_size=2: the mamba layers of a 'falcon_h1' model"):
        loading.check_ulysses(config, hf_config, 2)
    with pytest.raises(ValueError, match=r"context_parallel_size=2: the mamba layers .*whole sequences: set it to 1"):
        loading.check_context(config, hf_config, 2, "fsdp_config.context_parallel_size")
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2: the mamba layers .*set it to 1"):
        tensor_plan.check_model(config, hf_config, 2)


def test_layers_of_another_transformers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_layers, "FUNCTIONS", {})
    with pytest.raises(ValueError, match="its conv layers by functions that are not known here"):
        build(zoo.folder(tmp_path, "lfm2"), packed=True)
