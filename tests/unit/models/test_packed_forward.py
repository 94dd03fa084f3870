"""Packed = one sequence at a time = transformers' padded eager forward with full logits, in values and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.engine import tiny
from verl_like.batch import Experience
from verl_like.config.model import ModelConfig
from verl_like.models import loading, packing
from verl_like.models.heads import TokenModel
from verl_like.parallel.sharding import saved_buffers

STORIES = Path(__file__).parents[4] / "shared" / "data" / "stories260k" / "hf"
# alternating layers, tied embeddings that are scaled, another score scale than 1 / sqrt(head_dim)
GEMMA = {
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ARCHITECTURES = [
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 2}),
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {"sliding_window": 5}),
    ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    ("gemma2", {"sliding_window": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, **GEMMA}),
    ("gemma3", {"sliding_window": 5, **GEMMA}),
]
WANT = frozenset({"log_probs", "entropy", "sum_pi_squared"})


def build(path: str, *, packed: bool, kind: str = "policy", vocab_size: int | None = tiny.VOCAB) -> TokenModel:
    config = ModelConfig(path=path, use_remove_padding=packed, use_fused_kernels=packed)
    hf_config = loading.load_hf_config(config)
    model = loading.build_token_model(
        config,
        hf_config,
        kind=kind,  # type: ignore[arg-type]
        dtype=torch.float32,
        vocab_size=vocab_size,
        seed=5,
    )
    if not packed:
        model.hf.set_attn_implementation("eager")
    for _, bias in saved_buffers(model):
        bias.copy_(torch.linspace(-0.3, 0.3, len(bias)))  # an even load needs other routes than the scores'
    return model


def run(
    model: TokenModel, rows: Experience, *, packed: bool, policy: bool = True, share: bool = False
) -> dict[str, Tensor]:
    wanted, cpu = packing.response_positions(rows, sampled_only=policy), torch.device("cpu")
    x = packing.pack(rows, wanted, cpu, share_prompts=share) if packed else packing.pad(rows, wanted, cpu)
    return {name: x.unpack(values) for name, values in model(x, WANT, 0.8).items()}


def gradient_of(model: TokenModel, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    g = torch.Generator().manual_seed(1)
    sum((value * torch.randn(value.shape, generator=g)).sum() for value in outputs.values()).backward()  # type: ignore[union-attr]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name in a:
        scale = max(1.0, float(a[name].detach().abs().max()))
        gap = float((a[name] - b[name]).detach().abs().max()) / scale
        assert gap <= tolerance, f"{name}: {gap:.1e}"


@pytest.mark.parametrize(("architecture", "changes"), ARCHITECTURES)
def test_packed_equals_single_equals_padded(tmp_path: Path, architecture: str, changes: dict[str, object]) -> None:
    path = tiny.model_folder(tmp_path, architecture, **changes)
    compare_paths(path, tiny.experience(10, max_response=12))


@pytest.mark.parametrize(("architecture", "changes"), ARCHITECTURES)
def test_shared_prompts_change_nothing(tmp_path: Path, architecture: str, changes: dict[str, object]) -> None:
    """Groups of four, of which one row has a single response token; against padded rows, each with its own prompt."""
    path, rows = tiny.model_folder(tmp_path, architecture, **changes), tiny.experience(11, rows_per_prompt=4)
    length_B = rows.response_length_B.clone().index_fill_(0, torch.tensor([2, 5]), 1)
    names = [f"{name[:-2]}_BR" for name in rows.columns() if name.endswith("_T") and name != "prompt_ids_T"]
    columns = {name: getattr(rows, name) for name in names}
    rows = rows.replace(response_length_B=length_B, **columns)
    packed_model, padded_model = build(path, packed=True), build(path, packed=False)
    shared = run(packed_model, rows, packed=True, share=True)
    padded = run(padded_model, rows, packed=False)
    assert_close(shared, padded)
    assert_close(gradient_of(packed_model, shared), gradient_of(padded_model, padded))


def test_shared_prompts_of_a_value_model(tmp_path: Path) -> None:
    path, rows = tiny.model_folder(tmp_path), tiny.experience(7, rows_per_prompt=3)
    model = build(path, packed=True, kind="value")
    alone, shared = (run(model, rows, packed=True, policy=False, share=share) for share in (False, True))
    assert_close(shared, alone)
    assert_close(gradient_of(model, shared), gradient_of(model, run(model, rows, packed=True, policy=False)))


@pytest.mark.skipif(not STORIES.exists(), reason="needs the shared stories260k model")
def test_pretrained_model() -> None:
    """Random tokens are absurd to a trained model: its gradients are steep, and rounding differs a little more."""
    compare_paths(str(STORIES), tiny.experience(8, vocab=500), vocab_size=None, gradient_tolerance=5e-5)


def compare_paths(
    path: str, rows: Experience, vocab_size: int | None = tiny.VOCAB, gradient_tolerance: float = 1e-5
) -> None:
    packed_model = build(path, packed=True, vocab_size=vocab_size)
    padded_model = build(path, packed=False, vocab_size=vocab_size)
    packed, padded = run(packed_model, rows, packed=True), run(padded_model, rows, packed=False)
    for i, row in enumerate(rows.split([1] * len(rows))):
        single = run(packed_model, row, packed=True)
        assert_close(single, {name: value.split(rows.response_length_B.tolist())[i] for name, value in packed.items()})
    assert_close(packed, padded)
    assert_close(gradient_of(packed_model, packed), gradient_of(padded_model, padded), gradient_tolerance)


def test_value_model_predicts_before_the_token(tmp_path: Path) -> None:
    """A value does not see the token it stands beside: change the last token, and no value moves."""
    path, rows = tiny.model_folder(tmp_path), tiny.experience(3)
    packed_model = build(path, packed=True, kind="value")
    packed = run(packed_model, rows, packed=True, policy=False)
    assert_close(packed, run(build(path, packed=False, kind="value"), rows, packed=False, policy=False))
    ids = rows.response_ids_BR.clone()
    last = rows.response_length_B[:, None] - 1
    ids.scatter_(1, last, (ids.gather(1, last) + 1) % tiny.VOCAB)
    changed = run(packed_model, rows.replace(response_ids_BR=ids), packed=True, policy=False)
    assert torch.equal(packed["values"], changed["values"])


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    path, rows = tiny.model_folder(tmp_path), tiny.experience(4)
    plain, checkpointed = build(path, packed=True).train(), build(path, packed=True).train()
    checkpointed.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_close(
        gradient_of(plain, run(plain, rows, packed=True)),
        gradient_of(checkpointed, run(checkpointed, rows, packed=True)),
    )


def test_unknown_ids_of_a_padded_vocabulary_have_no_probability(tmp_path: Path) -> None:
    path, rows = tiny.model_folder(tmp_path), tiny.experience(4, vocab=50)
    whole = run(build(path, packed=True, vocab_size=None), rows, packed=True)["log_probs"]
    masked = run(build(path, packed=True, vocab_size=50), rows, packed=True)["log_probs"]
    mask = rows.response_mask_T
    assert bool((masked[mask] > whole[mask]).all())
