"""Adapters beside each other on one base: each row gets its own; steps are torch's AdamW with a client's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pytest import MonkeyPatch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from verl_like.plugins.tinker_server.adapters import OPTIMIZER, Adapter, AdapterSpec, Places

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11}
DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def hf() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def noisy(spec: AdapterSpec, places: Places) -> Adapter:
    adapter = Adapter.new(spec, 32.0, places, DEVICE)
    with torch.no_grad():
        for weight in adapter.parameters():
            weight.normal_(std=0.2, generator=torch.Generator().manual_seed(spec.seed))
    return adapter


@pytest.mark.parametrize("owners", [[2, 0, 1, 0], [0, 1, 2]], ids=["mixed", "sorted"])
@pytest.mark.parametrize(("trained", "width"), [(False, 5), (True, 5), (False, 1)], ids=["read", "trained", "decoded"])
def test_rows_of_several_adapters_get_what_each_gets_alone(
    hf: LlamaForCausalLM, trained: bool, width: int, owners: list[int]
) -> None:
    """Three owners, also in an order that is not its own inverse; ranks and scales differ; weights change between."""
    places = Places(hf, head=True)
    adapters = [noisy(AdapterSpec(rank=rank, seed=rank), places) for rank in (2, 3, 4)]
    ids_RL = torch.arange(len(owners) * width).view(len(owners), width) % SIZES["vocab_size"]

    def logits() -> torch.Tensor:
        with places.active(adapters), torch.set_grad_enabled(trained):
            places.arrange(torch.tensor(owners), DEVICE)
            return hf(ids_RL).logits.detach()

    for _ in range(2):
        alone = []
        for row, owner in enumerate(owners):
            with places.active([adapters[owner]]), torch.no_grad():
                alone.append(hf(ids_RL[row : row + 1]).logits)
        torch.testing.assert_close(logits(), torch.cat(alone), rtol=0, atol=1e-5)
        with torch.no_grad():
            for weight in adapters[0].parameters():
                weight.mul_(1.5)


def test_an_mlp_without_a_module_of_its_own_is_no_attention() -> None:
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 8, "num_attention_heads": 2}
    places = Places(OPTForCausalLM(OPTConfig(vocab_size=11, num_hidden_layers=1, **sizes)), head=True)
    assert [name.rpartition(".")[2] for name in places.kinds["train_mlp"]] == ["fc1", "fc2"]
    assert all("self_attn" in name for name in places.kinds["train_attn"]) and len(places.kinds["train_attn"]) == 4


def test_a_step_is_adamw_over_the_sum_of_the_passes(hf: LlamaForCausalLM) -> None:
    numbers = {"learning_rate": 0.02, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.3}
    adapter = noisy(AdapterSpec(rank=2, seed=0), Places(hf, head=True))
    plain = [weight.detach().clone().requires_grad_() for weight in adapter.parameters()]
    options = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3}
    optimizer, noise = torch.optim.AdamW(plain, **options), torch.Generator().manual_seed(3)
    for clip in (0.0, 0.5):
        passes = [[torch.randn(weight.shape, generator=noise) for weight in plain] for _ in range(2)]
        for gradients in passes:
            for weight, gradient in zip(adapter.parameters(), gradients, strict=True):
                weight.grad = gradient.clone()
            adapter.take_gradients()
        for weight, *parts in zip(plain, *passes, strict=True):
            weight.grad = parts[0] + parts[1]
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in plain if weight.grad is not None])
        if clip:
            for weight in plain:
                assert weight.grad is not None
                weight.grad *= clip / norm
        optimizer.step()
        assert adapter.step(numbers | {"grad_clip_norm": clip})["grad_norm:mean"] == pytest.approx(float(norm))
        for weight, expected in zip(adapter.parameters(), plain, strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


def test_a_state_of_no_steps_that_holds_no_moments_is_read(hf: LlamaForCausalLM, tmp_path: Path) -> None:
    """Servers before this one wrote an empty file where there was no step yet."""
    places = Places(hf, head=True)
    adapter = noisy(AdapterSpec(rank=2, seed=1), places)
    adapter.save(tmp_path / "state", "base", optimizer=True)
    save_file({}, tmp_path / "state" / OPTIMIZER)
    again = Adapter.load(tmp_path / "state", DEVICE, optimizer=True)
    for mine, theirs in zip(again.parameters(), adapter.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert again.optimizer is not None
    for state in again.optimizer.state.values():
        assert float(state["exp_avg"].abs().sum()) == 0 == float(state["step"])


def test_a_save_that_breaks_off_leaves_nothing(hf: LlamaForCausalLM, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Neither a part of the new files, which would fill a disk that is full already, nor a loss of the old ones."""
    adapter = noisy(AdapterSpec(rank=2, seed=1), Places(hf, head=True))
    adapter.save(tmp_path / "1", "base", optimizer=True)
    before = {file.name: file.read_bytes() for file in (tmp_path / "1").iterdir()}

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("verl_like.plugins.tinker_server.adapters.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        adapter.save(tmp_path / "1", "base", optimizer=True)
    assert [each.name for each in tmp_path.iterdir()] == ["1"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "1").iterdir()} == before
